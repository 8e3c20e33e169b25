"""Custom operators of layers in training, for compiled graphs: weights are named by their token.

Registered when `vbrt.training` is imported.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.errors import WrapError
from vbrt.kernels.frozen_product import sum_rows
from vbrt.training.qat.qat_layers import weight_gradient
from vbrt.training.qat.qat_weight import TrainedWeight, live_weight

__all__ = ["weight_of"]


def weight_of(token: Tensor) -> TrainedWeight:
    """Return the live weight of a compiled graph's token."""
    handle = live_weight(token.item())
    if handle is None:
        raise WrapError(
            f"a compiled graph names a layer in training (id {token.item()}) that no longer exists; compile again"
        )
    return handle


# depends on counters that a CUDA graph replay would not see
_TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("vbrt::trained_linear", mutates_args=(), tags=_TAGS)
def _trained_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, token: Tensor, dtype: torch.dtype, training: bool, transposed: bool
) -> Tensor:
    """x [..., K] -> [..., N] with the rounded weight."""
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x, weight_of(token).rounded(weight, dtype, training=training), bias)


@_trained_op.register_fake
def _(x, weight, bias, token, dtype, training, transposed):
    return x.new_empty((*x.shape[:-1], weight.shape[1 if transposed else 0]))


@torch.library.custom_op("vbrt::trained_weight", mutates_args=(), tags=_TAGS)
def _trained_weight_op(weight: Tensor, token: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    """The rounded weight [N, K] for a backward pass."""
    return weight_of(token).rounded_as_before(weight, dtype)


@_trained_weight_op.register_fake
def _(weight, token, dtype, transposed):
    return weight.new_empty(weight.shape[::-1] if transposed else weight.shape, dtype=dtype)


def _keep_inputs(ctx, inputs, output) -> None:
    x, weight, bias, token, *_, ctx.transposed = inputs
    ctx.save_for_backward(x, weight, token)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _compiled_backward(ctx, dy: Tensor):
    x, weight, token = ctx.saved_tensors
    dx = dw = dbias = None
    if ctx.needs_input_grad[0]:
        dx = dy.matmul(torch.ops.vbrt.trained_weight(weight, token, dy.dtype, ctx.transposed))
    if ctx.needs_input_grad[1]:
        dw = weight_gradient(dy, x, transposed=ctx.transposed).to(weight.dtype)
    if ctx.needs_input_grad[2]:
        dbias = sum_rows(dy).to(ctx.bias_dtype)
    return dx, dw, dbias, *[None] * 4


_trained_op.register_autograd(_compiled_backward, setup_context=_keep_inputs)
