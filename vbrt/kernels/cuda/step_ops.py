"""Launch code of the step ops on a GPU; the specification is `vbrt.kernels.step`."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.launcher import Launcher
from vbrt.kernels.step_rules import NormRule, Part, RouteRule

__all__ = ["MOST_EXPERTS", "MOST_QUERIES", "NEEDS", "NORM_ROW", "Store", "attend", "norm_rows", "rotate", "route"]

NEEDS = devices.PTX
NORM_ROW = 16384  # maximum columns of a norm, kept in registers
MOST_EXPERTS = 1024
MOST_QUERIES = 16  # maximum queries that share keys: rows of one mma instruction
_KEYS = 32  # keys per iteration, at most
_MOST_FP32_COLUMNS = 128  # of fp32 products with as many keys
_PROGRAMS = 2  # attention programs per multiprocessor, if there are enough keys
_BLOCKS = 4  # key blocks per program, unless there are more than MOST_SPANS of them
_MOST_SPANS = 64
_STEADY_BLOCKS = 2  # key blocks per program in batch-invariant attention


class _Kernels(NamedTuple):
    norm: Launcher
    rotate: Launcher
    route: Launcher
    attend: Launcher
    gather: Launcher


@functools.cache
def _kernels(dependent: bool) -> _Kernels:
    from vbrt.kernels.cuda import step_triton as device

    kernels = (
        device.norm_kernel,
        device.rotate_kernel,
        device.route_kernel,
        device.attend_kernel,
        device.gather_kernel,
    )
    return _Kernels(*(Launcher(kernel, dependent=dependent) for kernel in kernels))


class Store(NamedTuple):
    """Cache destination of rotated keys and of values: value [B, H, S, D]; caches [B, H, L, D]; slots int64 [S]."""

    value: Tensor
    keys: Tensor
    values: Tensor
    at_S: Tensor


def _power(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def _dense_rows(x: Tensor) -> Tensor:
    """[M, K] with contiguous rows."""
    x_MK = x.reshape(-1, x.shape[-1])
    return x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()


def norm_rows(x: Tensor, other: Tensor | None, rule: NormRule) -> tuple[Tensor, Tensor]:
    """(x + other, or x; its norm), contiguous."""
    x_MK, device = _dense_rows(x), x.device.index
    rows, k = x_MK.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if other is None else torch.empty_like(y)
    other_MK = x_MK if other is None else _dense_rows(other)
    block, dependent = _power(k), devices.launches_dependents(device)
    numbers = (float(rule.eps), float(rule.shift), k, x_MK.stride(0), other_MK.stride(0))
    _kernels(dependent).norm(
        device,
        (rows, 1),
        (x_MK, other_MK, x_MK if rule.gain is None else rule.gain, total, y),
        numbers,
        warps=max(1, min(16, block // 256)),
        specialized=(x.dtype, *numbers),
        BLOCK=block,
        ADD=other is not None,
        GAIN=rule.gain is not None,
        ROUNDS=rule.rounds,
        DEPENDENT=dependent,
    )
    return total, y


def rotate(parts: Sequence[Part], cos: Tensor, sin: Tensor, store: Store | None = None) -> list[Tensor]:
    """The rotated parts, one or two; with `store` only the queries: keys and values go to their caches."""
    query, key = parts[0], parts[-1]
    batch, heads, tokens, d = query.x.shape
    outs = [_like_projection(part.x) for part in (parts[:1] if store else parts)]
    q_out, k_out = outs[0], (store.keys if store else outs[-1])
    k_heads = key.x.shape[1] if len(parts) > 1 else 0
    value, v_out = (store.value, store.values) if store else (query.x, q_out)
    norms = [part.norm for part in (query, key)]
    first, device = norms[0], query.x.device.index
    dependent = devices.launches_dependents(device)
    strides = [n for t in (query.x, key.x, value) for n in t.stride()[:3]]
    strides += [cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1)]
    strides += [n for t in (q_out, k_out, v_out) for n in t.stride()[:3]]
    eps = [float(norm.eps) if norm else 0.0 for norm in norms]
    turned = cos.shape[-1]
    numbers = (*eps, float(first.shift) if first else 0.0, heads, k_heads, tokens, turned, d - turned, *strides)
    gains = [norm.gain if norm else cos for norm in norms]
    _kernels(dependent).rotate(
        device,
        (heads + k_heads * (2 if store else 1), batch * tokens),
        (query.x, key.x, value, cos, sin, *gains, store.at_S if store else cos, q_out, k_out, v_out),
        numbers,
        warps=1,
        specialized=(query.x.dtype, cos.dtype, *numbers),
        BLOCK=_power(turned // 2),
        REST=_power(d - turned) if d > turned else 0,
        NORM=first is not None,
        ROUNDS=first is not None and first.rounds,
        STORE=store is not None,
        DEPENDENT=dependent,
    )
    return outs


def _like_projection(x: Tensor) -> Tensor:
    """Allocate [B, H, S, D], stored as [B, S, H, D]."""
    b, h, s, d = x.shape
    return torch.empty(b, s, h, d, dtype=x.dtype, device=x.device).transpose(1, 2)


def route(logits: Tensor, rule: RouteRule) -> tuple[Tensor, Tensor]:
    """(weights, ids) [T, k]."""
    (tokens, experts), device = logits.shape, logits.device.index
    weights = torch.empty(tokens, rule.k, dtype=rule.dtype, device=logits.device)
    ids = torch.empty(tokens, rule.k, dtype=torch.int64, device=logits.device)
    dependent, block = devices.launches_dependents(device), _power(experts)
    numbers = (experts, logits.stride(0))
    _kernels(dependent).route(
        device,
        (tokens, 1),
        (logits, weights, ids),
        numbers,
        warps=max(1, min(4, block // 128)),
        specialized=(logits.dtype, rule.dtype, *numbers),
        K=rule.k,
        BLOCK=block,
        PLACES=_power(rule.k),
        FIRST=rule.first,
        RENORMALIZED=rule.renormalized,
        DEPENDENT=dependent,
    )
    return weights, ids


def _span(length: int, pairs: int, processors: int) -> int:
    """Keys per program: few enough to occupy all multiprocessors, and to skip masked ones in parallel."""
    blocks = -(-length // _KEYS)
    programs = max(1, _PROGRAMS * processors // pairs)
    few = min(_BLOCKS, -(-blocks // programs))
    return max(few, -(-blocks // _MOST_SPANS)) * _KEYS


def _steady_span(length: int) -> int:
    """Keys per program, as a function of the length alone."""
    return max(_STEADY_BLOCKS, -(-length // (_KEYS * _MOST_SPANS))) * _KEYS


def _keys(columns: int, *, in_fp32: bool) -> int:
    """Keys per iteration; a divisor of `_KEYS`, by which spans are counted.

    Products in fp32 use no mma: threads hold their operands in registers, and wide rows would spill.
    """
    return _KEYS // 2 if in_fp32 and columns > _MOST_FP32_COLUMNS else _KEYS


class _Shared(NamedTuple):
    """Assignment of queries [B, H, S, D] to programs.

    Attributes:
        rows: queries per program, which share keys: the H / G heads of one token, or all tokens of one head.
        apart: tokens with separate programs.
    """

    rows: int
    apart: int

    @classmethod
    def of(cls, q: Tensor, groups: int, mask: Tensor | None, *, steady: bool) -> "_Shared":
        """Tokens with different masks are computed separately, and so are all GQA tokens if `steady`."""
        heads, queries = q.shape[1] // groups, q.shape[2]
        masks = 1 if mask is None else mask.shape[2]
        fits = masks == 1 and heads * queries <= MOST_QUERIES and 1 in (heads, queries)
        return cls(heads * queries, 1) if fits or not steady else cls(heads, queries)

    def strides(self, x: Tensor, groups: int) -> tuple[int, int, int, int]:
        """Strides of x between sequences, groups, rows and tokens."""
        heads = x.shape[1] // groups
        row = x.stride(2) if self.apart == 1 < x.shape[2] else x.stride(1)
        return x.stride(0), x.stride(1) * heads, row, x.stride(2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, steady: bool = False) -> Tensor:
    """[B, H, S, D]; see `vbrt.kernels.step.attended`."""
    batch, heads, queries, d = q.shape
    groups, length = k.shape[1], k.shape[2]
    shared = _Shared.of(q, groups, mask, steady=steady)
    pairs, device = batch * groups * shared.apart, q.device.index
    dependent = devices.launches_dependents(device)
    span = _steady_span(length) if steady else _span(length, pairs, devices.gpu(device).processors)
    spans, columns = -(-length // span), max(16, _power(d))
    # without bf16 mma Triton multiplies 16-bit operands one by one too, but in three times the registers of fp32
    widen = not devices.serves(device, devices.BF16)
    parts = torch.empty(pairs, spans, shared.rows, d, dtype=torch.float32, device=q.device)
    stats = torch.empty(pairs, spans, 2, shared.rows, dtype=torch.float32, device=q.device)
    mask_b, mask_s = (0, 0) if mask is None else (mask.stride(at) * (mask.shape[at] > 1) for at in (0, 2))
    *q_strides, q_s = shared.strides(q, groups)
    numbers = (float(scale), groups, shared.rows, length, d, *q_strides, *k.stride()[:3], *v.stride()[:3], mask_b, span)
    kernels = _kernels(dependent)
    kernels.attend(
        device,
        (spans, pairs),
        (q, k, v, q if mask is None else mask.view(torch.uint8), parts, stats),
        (*numbers, shared.apart, q_s, mask_s),
        warps=4,
        specialized=(q.dtype, *numbers),
        ROWS=MOST_QUERIES,
        KEYS=_keys(columns, in_fp32=widen or q.dtype is torch.float32),
        COLUMNS=columns,
        MASKED=mask is not None,
        WIDEN=widen,
        DEPENDENT=dependent,
    )
    y = torch.empty(batch, heads, queries, d, dtype=q.dtype, device=q.device)
    *y_strides, y_s = shared.strides(y, groups)
    numbers = (groups, shared.rows, d, spans, *y_strides)
    kernels.gather(
        device,
        (shared.rows, pairs),
        (parts, stats, y),
        (*numbers, shared.apart, y_s),
        warps=4,
        specialized=(q.dtype, *numbers),
        SPANS=_power(spans),
        COLUMNS=columns,
        DEPENDENT=dependent,
    )
    return y
