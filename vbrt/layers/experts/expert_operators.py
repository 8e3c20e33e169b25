"""Operators of compiled, traced and exported graphs for routed experts, which name a handle by its token."""

from typing import Any

import torch
from torch import Tensor

from vbrt.errors import WrapError
from vbrt.kernels.observers import unwatched
from vbrt.layers.experts.expert_gradients import forward_experts
from vbrt.layers.experts.run_experts import run_experts
from vbrt.layers.experts.touched_experts import Routed
from vbrt.layers.weights.linear_product import refuse_coarse
from vbrt.layers.weights.weight_operators import TAGS, handle_of, library

__all__ = ["layer_of"]


def layer_of(token: Tensor) -> Any:
    """Return the live layer of a graph's token, encoded if it was not."""
    layer = next(iter(handle_of(token).layers), None)
    if layer is None:
        raise WrapError("a compiled graph names a layer of experts that has left the tiers; compile again")
    layer.materialize_()
    return layer


library.define("experts(Tensor x, Tensor ids, Tensor weights, Tensor token) -> Tensor", tags=TAGS)
library.define(
    "experts_backward(Tensor dy, Tensor x, Tensor ids, Tensor weights, Tensor token) -> (Tensor, Tensor)", tags=TAGS
)
library.define(
    "expert_weight(Tensor token, str name, SymInt[] shape, ScalarType dtype, str device) -> Tensor",
    alias_analysis="CONSERVATIVE",
    tags=TAGS,
)


@torch.library.impl(library, "experts", "CompositeExplicitAutograd")
def _experts_op(x: Tensor, ids: Tensor, weights: Tensor, token: Tensor) -> Tensor:
    """The output [T, H] of the layer that `token` names."""
    layer = layer_of(token)
    layer.handle.forwards += 1
    with torch.no_grad():
        return run_experts(layer, Routed(x, ids, weights))


@torch.library.register_fake("vbrt::experts", lib=library)
def _(x: Tensor, ids: Tensor, weights: Tensor, token: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.impl(library, "experts_backward", "CompositeExplicitAutograd")
def _experts_backward_op(dy: Tensor, x: Tensor, ids: Tensor, weights: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """dX [T, H] and the gradient [T, k] of the routing weights."""
    layer = layer_of(token)
    layer.handle.still(token.tolist()[1])
    with torch.enable_grad():
        x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
        y = forward_experts(layer, x, ids, weights)
    return torch.autograd.grad(y, (x, weights), dy)


@torch.library.register_fake("vbrt::experts_backward", lib=library)
def _(dy: Tensor, x: Tensor, ids: Tensor, weights: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weights)


def _keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, ids, weights, token = ctx.saved_tensors
    dx, dw = torch.ops.vbrt.experts_backward(dy, x, ids, weights, token)
    return dx, None, dw, None


torch.library.register_autograd("vbrt::experts", _backward, setup_context=_keep, lib=library)


@torch.library.impl(library, "expert_weight", "CompositeExplicitAutograd")
def _expert_weight_op(token: Tensor, name: str, shape: list[int], dtype: torch.dtype, device: str) -> Tensor:
    """A parameter, decoded, as the module keeps it."""
    handle = layer_of(token).handle
    refuse_coarse(handle, "a graph that reads decoded experts, as tracers and modes record it,")
    with unwatched():
        return handle.weight(name)


@torch.library.register_fake("vbrt::expert_weight", lib=library)
def _(token: Tensor, name: str, shape: list[int], dtype: torch.dtype, device: str) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
