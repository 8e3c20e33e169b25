"""GPU allocation sizes for operators on fake tensors, where CPU fallbacks allocate differently.

Attention: torch's fused kernels keep no scores, the math definition keeps all; fake tensors would take the CPU's
kernels, or fall back to the definition where those refuse. Autocast: softmax and norms compute in fp32 on a GPU,
attention in 16 bits. Layers that train in 4 bits keep no rounded weight. Sizes of fused attention are those of
FlashAttention-2 as torch calls it (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp): outputs and one
fp32 per row; in the backward an fp32 copy of the queries' gradient, and where heads share keys, gradients of keys and
values for every head.
"""

import contextlib
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vbrt.estimation.memory.live_bytes import Meter
from vbrt.libraries.probe import loaded
from vbrt.libraries.torch_api import FakeTensor

__all__ = ["gpu_sizes"]

_ROWS = 128  # rows per block; sizes are rounded up to it


class _Fused(torch.autograd.Function):
    """Allocations of softmax(q kᵀ) v; q [B, H, S, D], k and v [B, Hk, T, D]; `meter` counts its FLOPs.

    torch adds a boolean mask as a bias in the queries' dtype, which the backward reads.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, meter: Meter, causal: bool) -> Tensor:
        ctx.meter, ctx.flops = meter, 4 * q.numel() * k.shape[-2] // (2 if causal else 1)
        meter.add_flops(q.dtype, ctx.flops, "attention")
        bias = None if mask is None else torch.empty_like(mask, dtype=q.dtype)
        heads, rows = q.shape[-3:-1]  # laid out as [B, S, H, D], contiguous for the output projection
        out = q.new_empty((*q.shape[:-3], rows, heads, v.shape[-1])).transpose(-3, -2)
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        ctx.meter.add_flops(q.dtype, 5 * ctx.flops // 2, "attention")  # 5 matmuls, the forward has 2
        grad = grad.contiguous()
        rows = -(-q.shape[-2] // _ROWS) * _ROWS
        _sums = q.new_empty((*q.shape[:-2], rows, q.shape[-1]), dtype=torch.float32)
        _row = q.new_empty((*q.shape[:-2], rows), dtype=torch.float32)
        dq = torch.empty_like(q)
        shared = q.ndim == 4 and q.shape[1] != k.shape[1]
        _every = [x.new_empty((x.shape[0], q.shape[1], *x.shape[2:])) for x in (k, v) if shared]
        return dq, torch.empty_like(k), torch.empty_like(v), None, None, None


class _Rounded(torch.autograd.Function):
    """Allocations of x [..., K] times a weight [N, K] rounded anew in each pass, as in 4-bit training."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rounded = weight.to(x.dtype, copy=True)
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ rounded.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        dx = dy @ ctx.weight.to(dy.dtype, copy=True)
        dw = dy.flatten(0, -2).t() @ x.flatten(0, -2)
        return dx, dw.to(ctx.weight.dtype)


def _rounded_linear(linear: Callable[..., Tensor], weights: Container[int]) -> Callable[..., Tensor]:
    def sized(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if id(weight) not in weights:
            return linear(input, weight, bias)
        if torch.is_autocast_enabled("cpu"):
            input = input.to(torch.get_autocast_dtype("cpu"))
        product = _Rounded.apply(input, weight)
        return product if bias is None else product + bias.to(product.dtype)

    return sized


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """Attention with a bias: torch has no fused kernel for a learned bias and falls back to the math definition."""
    if q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    if torch.is_grad_enabled():
        weights = (q @ k.mT + bias).softmax(-1).to(v.dtype)
        return F.dropout(weights, dropout) @ v if dropout else weights @ v
    return _by_definition(q, k, v, bias)


def _by_definition(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention by torch's math definition without gradients: 16-bit inputs in fp32, scaled copies of the queries, a
    bias of any dtype added in place (aten's _scaled_dot_product_attention_math); fully masked rows are found through a
    mask of all scores (_safe_softmax)."""
    wide_q, wide_k, wide_v = (x.float() for x in (q, k, v))
    scaled = wide_q * 1.0
    scores = (scaled @ (wide_k.mT * 1.0)).add_(bias)
    weights = scores.softmax(-1)
    masked_rows = scores.eq(float("-inf")).all(-1, keepdim=True)
    del scores
    return (weights.masked_fill_(masked_rows, 0.0) @ wide_v).to(v.dtype)


def _sized_attention(plain: Callable[..., Tensor], kernel: str, meter: Meter) -> Callable[..., Tensor]:
    def sized(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(query, FakeTensor):
            return plain(query, key, value, *args, **kwargs)
        if torch.is_autocast_enabled("cpu"):  # rotary embeddings have made queries and keys fp32
            query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
        mask = kwargs.get("attn_mask", args[0] if args else None)
        if kernel == "flash" and mask is not None and mask.is_floating_point():  # a bias, as T5 has it
            dropout = kwargs.get("dropout_p", args[1] if len(args) > 1 else 0.0)
            return _biased(query, key, value, mask, dropout)
        if kernel == "flash" and query.ndim >= 3:
            return _Fused.apply(query, key, value, mask, meter, kwargs.get("is_causal", False))
        with sdpa_kernel(SDPBackend.MATH):
            return plain(query, key, value, *args, **kwargs)

    return sized


def _in_fp32(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that computes in fp32 under autocast, as in torch's GPU list."""

    def sized(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(input, FakeTensor) and torch.is_autocast_enabled("cpu"):
            input = input.float()
        return plain(input, *args, **kwargs)

    return sized


#: functions used by models that autocast runs in fp32 on a GPU, and in 16 bits on a CPU
_FP32 = tuple(
    (owner, name)
    for owner, names in (
        (torch, ("softmax", "log_softmax", "pow", "rsqrt", "exp", "log", "sum", "cumsum", "logsumexp")),
        (torch.Tensor, ("softmax", "log_softmax", "pow", "__pow__", "rsqrt", "exp", "log", "sum", "cumsum")),
        (F, ("softmax", "log_softmax", "softplus", "layer_norm", "group_norm", "mse_loss")),
    )
    for name in names
)


def _of_transformers() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return replacements for transformers' data-dependent checks: sequences are not packed, and masks hide nothing;
    otherwise it makes further masks."""
    masks = loaded("transformers", "masking_utils")
    packed, skips = (
        getattr(masks, name, None) for name in ("find_packed_sequence_indices", "_ignore_causal_mask_sdpa")
    )
    changes = []
    if packed is not None:
        no_values = lambda ids, *args: None if isinstance(ids, FakeTensor) else packed(ids, *args)  # noqa: E731
        changes.append((masks, "find_packed_sequence_indices", no_values))
    if skips is not None:

        def hides_nothing(padding_mask: Any = None, *args: Any, **kwargs: Any) -> bool:
            return skips(None if isinstance(padding_mask, FakeTensor) else padding_mask, *args, **kwargs)

        changes.append((masks, "_ignore_causal_mask_sdpa", hides_nothing))
    return changes


@contextlib.contextmanager
def gpu_sizes(kernel: str, rounded: Container[int], meter: Meter) -> Iterator[None]:
    """Context in which operators on fake tensors allocate as on a GPU.

    The functions are patched instead of using a TorchFunctionMode: such modes are off in the backward pass, where
    checkpointed blocks run again. Real tensors, of other threads, get torch's own functions.

    Args:
        kernel: attention kernel: "flash" or "math".
        rounded: ids of weights that train in 4 bits.
        meter: counts the FLOPs of fused attention, which is not dispatched as an operator here.
    """
    changes = [(F, "scaled_dot_product_attention", _sized_attention(F.scaled_dot_product_attention, kernel, meter))]
    changes += [(F, "linear", _rounded_linear(F.linear, rounded))] if rounded else []
    changes += [(owner, name, _in_fp32(getattr(owner, name))) for owner, name in _FP32]
    changes += _of_transformers()
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, function in changes:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
