"""FlashAttention: projections around scaled dot product attention that never materializes an N × N matrix.

torch's `scaled_dot_product_attention` silently falls back to its math path, which materializes all N² scores, whenever
no fused kernel supports the call. Here one of three backends is selected by device, dtype, shape and mask, never the
math path:

    sdpa          one call of a fused kernel
    sdpa-blocks   a fused kernel per block of queries: masks, and causal attention of fewer queries than keys
    blocks        plain torch per block of queries, where no fused kernel applies: warned about once, with the reason

A block holds up to 64 MiB of scores (blocks) or of the kernel's copy of the mask (sdpa-blocks). Blocks are recomputed
in the backward pass (torch.utils.checkpoint), so one block is live at a time. That costs a second forward of the
attention, and makes masks, dropout on a CPU and gradients of an additive mask O(N) beyond the mask itself. If the
mask's copy fits into one block, it is saved instead, without recomputation.

A fully masked query gives zeros, and zero gradients. Its row is unmasked and the result discarded, because kernels
treat such rows differently by device and version.

The road not taken: FlexAttention. A BlockMask for a mask tensor is built from a dense one, and on a CPU it has no
backward pass; bottom-right causal attention, which it would do well, needs torch.compile.

Legend: B batch, S positions, Sq queries, Sk keys, H heads, Hk key/value heads, D head dimension, C queries per block.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from vbrt.config.argument_checks import check_instance, check_number, check_whole
from vbrt.errors import ArgumentError
from vbrt.host import accelerator
from vbrt.host.logger import warn

__all__ = ["AttentionChoice", "FlashAttention", "attention"]

_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
_BLOCK_SCORES = 1 << 24  # 64 MiB of fp32 scores or mask per block
_AUTOCASTING = ("cpu", accelerator.TYPE)
_FEWEST, _MOST = 16, 512  # queries per block: fewer starve a matmul, more gain nothing


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """Backend selected for an attention call, with the reason; `block`: queries computed at once."""

    backend: Literal["sdpa", "sdpa-blocks", "blocks"]
    reason: str
    block: int


@dataclass(frozen=True, slots=True)
class _Case:
    """Inputs of the selection."""

    device: str
    dtype: torch.dtype
    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    masks: int  # matrices [Sq, Sk] of the mask; 0 without one
    mask_trains: bool
    dropout: float
    causal: bool


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, dropout: float = 0.0, causal: bool = False
) -> Tensor:
    """softmax(q kᵀ / √D + mask) v in O(Sq + Sk) memory: [B, H, Sq, D] from q, and k, v [B, Hk, Sk, D], H = n · Hk.

    mask: bool (True: attend) or floating (additive), of shape [Sq, Sk] or [B, H, Sq, Sk], where any dimension may be 1.
    causal: bottom-right aligned: query i attends to the keys up to i + Sk - Sq, as in decoding with a cache; combined
    with a mask if both are given. dropout: of the attention weights. Softmax statistics are fp32, or float64 for
    float64.

    Raises:
        ArgumentError: a mask of another shape or dtype.
    """
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    _check_mask(mask, shape)
    dtype = _computed_in(q)
    choice = _choose(_case_of(q.device.type, dtype, shape, q.shape[3], mask, dropout, causal))
    if choice.backend == "blocks" and not torch.compiler.is_compiling():
        # one text per reason, so that Python's filter shows it once
        warn(f"attention: {choice.reason}; computed in plain torch, by blocks of queries", stacklevel=2)
    mask = mask if mask is None or mask.ndim == 4 else mask[None, None]
    if q.numel() == 0 or k.shape[2] == 0:
        return q.to(dtype).masked_fill(torch.ones_like(q, dtype=torch.bool), 0)  # zero gradients instead of none
    with _without_autocast(q.device.type):  # which would cast masks and scores too
        return _tail(q.to(dtype), k.to(dtype), v.to(dtype), mask, dropout, causal, choice)


def _tail(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, choice: AttentionChoice
) -> Tensor:
    """Skip the first queries of a causal attention with more queries than keys: they are fully masked."""
    blind = q.shape[2] - k.shape[2] if causal else 0
    if blind > 0:
        q = q[:, :, blind:]
        mask = mask if mask is None or mask.shape[2] == 1 else mask[:, :, blind:]
    if choice.backend == "sdpa":
        y = _fused(q, k, v, None, dropout, causal=causal and q.shape[2] > 1)
    else:
        y = torch.cat(list(_in_blocks(q, k, v, mask, dropout, causal, choice)), dim=2)
    return F.pad(y, (0, 0, blind, 0)) if blind > 0 else y


# -- backend selection ------------------------------------------------------------------------------------------------


def _case_of(
    device: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    head_dim: int,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
) -> _Case:
    trains = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    masks = 0 if mask is None else math.prod(mask.shape[:-2])
    return _Case(device, dtype, *shape, head_dim, masks, trains, dropout, causal)


def _computed_in(x: Tensor) -> torch.dtype:
    """Compute dtype: x's own, or autocast's."""
    device = x.device.type
    if x.dtype is torch.float64 or device not in _AUTOCASTING or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def _without_autocast(device: str) -> contextlib.AbstractContextManager:
    return torch.autocast(device, enabled=False) if device in _AUTOCASTING else contextlib.nullcontext()


def _choose(case: _Case) -> AttentionChoice:
    """Select the backend for a case; a pure function."""
    refusal = _no_fused_kernel(case)
    if refusal:
        return AttentionChoice("blocks", refusal, min(_MOST, _rows(case.batch * case.heads * case.keys)))
    block = min(case.queries, _rows(max(1, case.masks) * case.keys))  # kernels hold the mask's copy, but no scores
    if case.masks:
        return AttentionChoice("sdpa-blocks", "a mask, of which a fused kernel makes a floating copy", block)
    if case.causal and 1 < case.queries < case.keys:
        why = "causal with fewer queries than keys, aligned bottom-right, needs a mask per block"
        return AttentionChoice("sdpa-blocks", why, block)
    what = "causal" if case.causal else "no mask"
    return AttentionChoice("sdpa", f"{what}, {str(case.dtype).removeprefix('torch.')} on {case.device}", case.queries)


def _rows(length: int) -> int:
    """Queries per block, with `length` numbers for each."""
    return max(_FEWEST, _BLOCK_SCORES // max(1, length))


def _no_fused_kernel(case: _Case) -> str | None:
    """Return why no fused torch kernel supports a case; None if one does."""
    if case.mask_trains:
        return "an additive mask that requires grad has no fused kernel"
    if case.device == "cpu":
        return "dropout has no fused kernel on a CPU" if case.dropout else None
    if case.device != accelerator.CUDA:
        return f"no fused kernel is known for device {case.device!r}"
    if case.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"{case.dtype} has no fused kernel on a GPU"
    align = 4 if case.dtype is torch.float32 else 8  # 16-byte rows
    return f"a head dimension of {case.head_dim} is not a multiple of {align}" if case.head_dim % align else None


# -- backends ---------------------------------------------------------------------------------------------------------


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, *, causal: bool) -> Tensor:
    """One fused kernel, or an error: the math path is disabled."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and accelerator.is_device(q):  # not every fused kernel supports GQA
        k, v, grouped = *_each_head(q, k, v), False
    with sdpa_kernel(_FUSED):
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, enable_gqa=grouped)


def _in_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, choice: AttentionChoice
) -> Iterator[Tensor]:
    """Yield the attention of each block of queries, [B, H, C, D]."""
    compute = _fused_block if choice.backend == "sdpa-blocks" else _plain_block
    if choice.backend == "blocks":
        k, v = _each_head(q, k, v)
    queries, keys = q.shape[2], k.shape[2]
    for first in range(0, queries, choice.block):
        last = min(first + choice.block, queries)
        seen = last + keys - queries if causal else keys
        part = None if mask is None else _block_of(mask, first, last, seen)
        # the causal mask is built inside, so that recomputation rebuilds it
        allowed = functools.partial(_block_mask, device=q.device, offset=first + keys - queries if causal else None)
        args = (q[:, :, first:last], k[:, :, :seen], v[:, :, :seen], part)
        run = functools.partial(compute, allowed=allowed, dropout=dropout)
        alone = choice.backend == "sdpa-blocks" and choice.block >= queries  # saves a copy of the mask, of limited size
        yield run(*args) if alone else _recomputed(run, *args, random=dropout > 0)


def _block_of(mask: Tensor, first: int, last: int, seen: int) -> Tensor:
    rows = mask if mask.shape[2] == 1 else mask[:, :, first:last]
    return rows if rows.shape[3] == 1 else rows[..., :seen]


def _recomputed(compute: Callable[..., Tensor], *args: Tensor | None, random: bool) -> Tensor:
    """compute(*args), saving only args for the backward pass."""
    if torch.is_grad_enabled() and any(arg is not None and arg.requires_grad for arg in args):
        return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=random)
    return compute(*args)


def _block_mask(
    mask: Tensor | None, queries: int, keys: int, *, device: torch.device, offset: int | None
) -> tuple[Tensor, Tensor]:
    """Return (mask with the causal one applied, fully masked rows [..., C, 1]); those rows are unmasked in the mask."""
    causal = None
    if offset is not None:
        rows = torch.arange(offset, offset + queries, dtype=torch.int64, device=device)
        causal = torch.arange(keys, dtype=torch.int64, device=device) <= rows[:, None]
    if mask is None or mask.dtype is torch.bool:
        allowed = causal if mask is None else mask if causal is None else mask & causal
        dead = ~allowed.any(-1, keepdim=True)
        return allowed | dead, dead
    added = mask if causal is None else mask.masked_fill(~causal, -torch.inf)
    dead = added.detach().amax(-1, keepdim=True) == -torch.inf
    return added.masked_fill(dead, 0), dead


def _fused_block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, allowed: Callable, dropout: float) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    mask, dead = allowed(mask, queries, keys)
    if mask.is_floating_point():
        mask = _as_added(mask, q)
    mask = mask.expand(*mask.shape[:-2], queries, keys)
    return _fused(q, k, v, mask.contiguous(), dropout, causal=False).masked_fill(dead, 0)


def _as_added(mask: Tensor, q: Tensor) -> Tensor:
    """Additive mask in the dtype that the device's kernels take; large finite values remain finite."""
    dtype = torch.float32 if q.device.type == "cpu" and q.dtype.itemsize == 2 else q.dtype
    if torch.finfo(dtype).max < torch.finfo(mask.dtype).max:
        mask = torch.where(mask == -torch.inf, mask, mask.clamp(min=torch.finfo(dtype).min))
    return mask.to(dtype)


def _plain_block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, allowed: Callable, dropout: float) -> Tensor:
    """Reference: scores and softmax in fp32, or in float64."""
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    scores = q.to(wide) @ k.to(wide).mT * q.shape[-1] ** -0.5
    dead = None
    if mask is not None or allowed.keywords["offset"] is not None:
        mask, dead = allowed(mask, q.shape[2], k.shape[2])
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
    y = (F.dropout(scores.softmax(-1), dropout) @ v.to(wide)).to(q.dtype)
    return y if dead is None else y.masked_fill(dead, 0)


def _each_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    return (k, v) if group == 1 else (k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))


# -- module -----------------------------------------------------------------------------------------------------------


def _check_mask(mask: Tensor | None, shape: tuple[int, int, int, int]) -> None:
    if mask is None:
        return
    check_instance(mask, Tensor, "attention: the mask", "a Tensor, or None")
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise ArgumentError(f"attention: the mask is {mask.dtype}; expected bool (True: attend) or floating (added)")
    fits = mask.ndim in (2, 4) and all(
        have in (1, want) for have, want in zip(mask.shape, shape[4 - mask.ndim :], strict=True)
    )
    if not fits:
        raise ArgumentError(
            f"attention: the mask has shape {tuple(mask.shape)}; expected [Sq, Sk] = {shape[2:]} or [B, H, Sq, Sk] = "
            f"{shape}, where any dimension may be 1 (padding [B, Sk] goes in as mask[:, None, None, :])"
        )


class FlashAttention(nn.Module):
    """Multi-head attention with grouped-query heads, O(N) in memory.

    The projections `q_proj`, `k_proj`, `v_proj`, `o_proj` are nn.Linear (or `linear`, with the same signature) without
    bias, so that `vbrt.wrap` can swap them and fully masked queries give zeros.

    Args:
        d_model: width of input, context and output.
        n_heads: query heads, of d_model / n_heads columns each.
        n_kv_heads: key/value heads; None: n_heads.
        dropout: of the attention weights, in training.
        causal: bottom-right, see `attention`.

    Raises:
        ArgumentError: sizes that do not divide, or a dropout outside [0, 1).
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        *,
        linear: Callable[..., nn.Module] = nn.Linear,
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        for name, size in (("d_model", d_model), ("n_heads", n_heads), ("n_kv_heads", n_kv_heads)):
            check_whole(size, f"FlashAttention: {name}")
        check_number(dropout, "FlashAttention: dropout")
        if n_heads < 1 or d_model < 1 or d_model % n_heads:
            raise ArgumentError(f"FlashAttention: n_heads = {n_heads}; expected a divisor of d_model = {d_model}")
        if n_kv_heads < 1 or n_heads % n_kv_heads:
            raise ArgumentError(f"FlashAttention: n_kv_heads = {n_kv_heads}; expected a divisor of n_heads = {n_heads}")
        if not 0 <= dropout < 1:
            raise ArgumentError(f"FlashAttention: dropout = {dropout}; expected 0 <= dropout < 1")
        self.d_model, self.n_heads, self.n_kv_heads = d_model, n_heads, n_kv_heads
        self.head_dim, self.dropout, self.causal = d_model // n_heads, dropout, causal
        kv = n_kv_heads * self.head_dim
        self.q_proj, self.k_proj = linear(d_model, d_model, bias=False), linear(d_model, kv, bias=False)
        self.v_proj, self.o_proj = linear(d_model, kv, bias=False), linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """x [B, Sq, d_model] and context [B, Sk, d_model] (None: x) -> [B, Sq, d_model]; masks as in `attention`.

        Raises:
            ArgumentError: an input, context or mask of another shape, a mask of another dtype.
        """
        self._check(x, context)
        context = x if context is None else context
        _check_mask(mask, (x.shape[0], self.n_heads, x.shape[1], context.shape[1]))
        q, k, v = self._heads(self.q_proj(x)), self._heads(self.k_proj(context)), self._heads(self.v_proj(context))
        y = attention(q, k, v, mask, dropout=self.dropout if self.training else 0.0, causal=self.causal)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def explain(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> AttentionChoice:
        """Return the backend that a forward with these arguments would select now, and why; computes nothing.

        Raises:
            ArgumentError: as in forward.
        """
        self._check(x, context)
        context = x if context is None else context
        shape = (x.shape[0], self.n_heads, x.shape[1], context.shape[1])
        _check_mask(mask, shape)
        dropout = self.dropout if self.training else 0.0
        return _choose(_case_of(x.device.type, _computed_in(x), shape, self.head_dim, mask, dropout, self.causal))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _check(self, x: Tensor, context: Tensor | None) -> None:
        for name, given in (("x", x), ("context", context)):
            check_instance(given, Tensor if name == "x" else Tensor | None, f"FlashAttention: {name}", "a Tensor")
            if given is not None and (given.ndim != 3 or given.shape[2] != self.d_model):
                raise ArgumentError(
                    f"FlashAttention: {name} has shape {tuple(given.shape)}; expected (B, S, {self.d_model})"
                )
        if context is not None and context.shape[0] != x.shape[0]:
            raise ArgumentError(f"FlashAttention: context has a batch of {context.shape[0]}; expected {x.shape[0]}")

    def extra_repr(self) -> str:
        """Sizes that the projections do not show."""
        return f"n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}, dropout={self.dropout}, causal={self.causal}"
