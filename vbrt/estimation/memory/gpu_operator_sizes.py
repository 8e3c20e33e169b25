"""What operators allocate on a GPU, on fake tensors, where those of a machine without one allocate something else.

Attention: torch's fused kernels keep no scores, the definition keeps all; fake tensors would take the CPU's kernels, or
fall back to the definition where those refuse. Autocast: softmax and norms compute in fp32 on a GPU. Layers that train
in 4 bits keep no rounded weight. Sizes of fused attention are those of FlashAttention-2 as torch calls it
(aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp): results and one fp32 a row; backward an fp32 copy of
the queries' gradient, and where heads share keys, gradients of keys and values for every head.
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

_ROWS = 128  # of a block; sizes are rounded up to it


class _Fused(torch.autograd.Function):
    """softmax(q kᵀ) v as far as memory sees it; q [B, H, S, D], k and v [B, Hk, T, D]; `meter` counts its products."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, meter: Meter, causal: bool) -> Tensor:
        ctx.meter, ctx.flops = meter, 4 * q.numel() * k.shape[-2] // (2 if causal else 1)
        meter.add_flops(q.dtype, ctx.flops, "attention")
        heads, rows = q.shape[-3:-1]  # results lie as [B, S, H, D] do: side by side for the projection that follows
        out = q.new_empty((*q.shape[:-3], rows, heads, v.shape[-1])).transpose(-3, -2)
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, _ = ctx.saved_tensors
        ctx.meter.add_flops(q.dtype, 5 * ctx.flops // 2, "attention")  # five products, two of them once more
        grad = grad.contiguous()
        rows = -(-q.shape[-2] // _ROWS) * _ROWS
        _sums = q.new_empty((*q.shape[:-2], rows, q.shape[-1]), dtype=torch.float32)
        _row = q.new_empty((*q.shape[:-2], rows), dtype=torch.float32)
        dq = torch.empty_like(q)
        shared = q.ndim == 4 and q.shape[1] != k.shape[1]
        _every = [x.new_empty((x.shape[0], q.shape[1], *x.shape[2:])) for x in (k, v) if shared]
        return dq, torch.empty_like(k), torch.empty_like(v), None, None


class _Rounded(torch.autograd.Function):
    """x [..., K] times a weight [N, K] that is rounded anew in each pass: what layers in training keep and make."""

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
    """Attention with a bias: torch has no fused kernel for one that is learned, and computes by the definition."""
    if q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    if torch.is_grad_enabled():
        weights = (q @ k.mT + bias).softmax(-1).to(v.dtype)
        return F.dropout(weights, dropout) @ v if dropout else weights @ v
    return _by_definition(q, k, v, bias)


def _by_definition(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention as torch's definition computes it without gradients: 16 bits in fp32, queries once more as they are
    scaled, a bias of any dtype added in place (aten's _scaled_dot_product_attention_math); rows that are masked as a
    whole are found in a mask of all scores (_safe_softmax)."""
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
        mask = kwargs.get("attn_mask", args[0] if args else None)
        if kernel == "flash" and mask is not None and mask.is_floating_point():  # a bias, as T5 has it
            dropout = kwargs.get("dropout_p", args[1] if len(args) > 1 else 0.0)
            return _biased(query, key, value, mask, dropout)
        if kernel == "flash" and query.ndim >= 3:
            return _Fused.apply(query, key, value, meter, kwargs.get("is_causal", False))
        with sdpa_kernel(SDPBackend.MATH):
            return plain(query, key, value, *args, **kwargs)

    return sized


def _in_fp32(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that computes in fp32 under autocast, as torch's list for GPUs has it."""

    def sized(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(input, FakeTensor) and torch.is_autocast_enabled("cpu"):
            input = input.float()
        return plain(input, *args, **kwargs)

    return sized


#: functions that autocast runs in fp32 on a GPU and leaves in 16 bits on a CPU, and that models are made of
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
    """What transformers would look up in values: sequences are not packed, and masks hide nothing; else it makes more
    masks."""
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
    """While entered, operators on fake tensors allocate what they allocate on a GPU.

    The functions themselves are replaced, not a mode of torch's functions entered: such modes are off in a backward
    pass, where checkpointed blocks run again. Real tensors, of other threads, get torch's own functions.

    Args:
        kernel: of attention: "flash" or "math".
        rounded: ids of weights that train in 4 bits.
        meter: counts the products of fused attention, which no operator shows.
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
