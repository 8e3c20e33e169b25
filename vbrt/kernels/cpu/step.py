"""Prepared step ops in C: the ops between layers of a decode step, on static tensors.

    prepared = prepare(normed, (x, rule), forms, empty)     # None if C does not support these tensors
    prepared.run()                                          # writes `prepared.results`, always the same tensors

Each computes a function of `vbrt/kernels/step.py` and rounds where it rounds; sums have another order, and exponentials
are accurate to a few ulp. Arguments are set up once, so a call costs the host one C call.
"""

import ctypes
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vbrt.kernels import step
from vbrt.kernels.cpu.build import NUMBERS, library
from vbrt.kernels.cpu.prepared import Call, Empty, Prepared, c_call
from vbrt.kernels.cpu.small_batch_linear import prepare_products, products

__all__ = ["COLUMNS", "GATES", "QUERIES", "prepare", "program"]

#: limits on head dimension and on queries that share keys: COLUMNS and QUERIES of step.c
COLUMNS, QUERIES = 256, 16
_EXPERTS, _CHOSEN = 1024, 32  # EXPERTS and CHOSEN of step.c
#: activation numbers of step.c
GATES = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}

# -- structures of step.c ---------------------------------------------------------------------------------------------


class _Rule(ctypes.Structure):
    _fields_ = (
        ("gain", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("shift", ctypes.c_float),
        ("rounds", ctypes.c_int32),
        ("pad", ctypes.c_int32),
    )

    @classmethod
    def of(cls, rule: step.NormRule) -> "_Rule":
        return cls(None if rule.gain is None else rule.gain.data_ptr(), rule.eps, rule.shift, rule.rounds)


class _Norm(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "other", "total", "y")),
        ("rule", _Rule),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        *((name, ctypes.c_int32) for name in ("type", "pad")),
    )


class _Part(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "y", "at")),
        ("heads", ctypes.c_int64),
        *((name, ctypes.c_int64 * 3) for name in ("x_step", "y_step")),
        ("rule", _Rule),
        *((name, ctypes.c_int32) for name in ("normed", "copied")),
    )


class _Rotation(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parts", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("count", "batch", "tokens", "columns", "turned")),
        ("step", ctypes.c_int64 * 2),
        *((name, ctypes.c_int32) for name in ("type", "pad")),
    )


class _Gate(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate", "up", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "gate_pitch", "up_pitch")),
        *((name, ctypes.c_int32) for name in ("type", "function")),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "y", "mask")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "groups", "tokens", "keys", "columns", "mask_step")),
        *((name, ctypes.c_int64 * 3) for name in ("q_step", "k_step", "v_step")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("type", "threads", "pad")),
    )


class _Projection(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "w", "y")),
        *((name, ctypes.c_int64) for name in ("tokens", "rows", "columns")),
        *((name, ctypes.c_int32) for name in ("type", "pad")),
    )


class _Route(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "weights", "ids")),
        *((name, ctypes.c_int64) for name in ("tokens", "experts", "pitch", "chosen")),
        *((name, ctypes.c_int32) for name in ("type", "weights_type", "first", "renormalized")),
    )


def _called(name: str, structure: ctypes.Structure, results: Sequence[Tensor], held: tuple) -> Prepared:
    function = getattr(library("step"), name)
    call = functools.partial(function, ctypes.addressof(structure))
    return Prepared(call, tuple(results), (structure, *held), c_call(function, structure))


def program(calls: Sequence[Prepared]) -> Callable[[], None]:
    """Return one C call that makes several, in order; all must have a `call`. It raises MemoryError if one fails."""
    array, run = (Call * len(calls))(*[prepared.call for prepared in calls]), library("step").vbrt_step_run
    made = functools.partial(run, array, len(calls))

    def run_all() -> None:
        done = made()
        if done < len(calls):
            raise MemoryError(calls[done].failure)

    return run_all


# -- preparation ------------------------------------------------------------------------------------------------------


def prepare(function: Callable[..., Any], args: tuple, forms: Any, empty: Empty) -> Prepared | None:
    """Return a call of a function of `kernels.step`, or of `products`, as a C call; None for unsupported tensors.

    Args:
        args: of the function; tensors keep their addresses and forms.
        forms: the Form of its result, or of each.
        empty: allocates results.
    """
    maker = _MAKERS.get(function)
    return None if maker is None else maker(args, forms, empty)


def _served(*tensors: Tensor | None) -> bool:
    """True for CPU tensors of one dtype that C supports."""
    given = [tensor for tensor in tensors if tensor is not None]
    return all(t.is_cpu and t.dtype is given[0].dtype for t in given) and given[0].dtype in NUMBERS


def _normed(args: tuple, form: Any, empty: Empty) -> Prepared | None:
    x, rule = args
    if not _served(x, rule.gain) or not x.is_contiguous():
        return None
    y = empty(form)
    return _norm(x, None, rule, (y,)) if y.is_contiguous() else None


def _summed(args: tuple, forms: Any, empty: Empty) -> Prepared | None:
    x, other, rule = args
    if not _served(x, other, rule.gain) or not (x.is_contiguous() and other.is_contiguous()):
        return None
    results = tuple(map(empty, forms))
    return _norm(x, other, rule, results) if all(y.is_contiguous() for y in results) else None


def _norm(x: Tensor, other: Tensor | None, rule: step.NormRule, results: tuple[Tensor, ...]) -> Prepared:
    more = (None, None) if other is None else (other.data_ptr(), results[0].data_ptr())
    k = x.shape[-1]
    given = (*more, results[-1].data_ptr(), _Rule.of(rule), x.numel() // k, k, NUMBERS[x.dtype])
    return _called("vbrt_step_norm", _Norm(x.data_ptr(), *given), results, (x, other, rule))


def _rotated(args: tuple, forms: Any, empty: Empty) -> Prepared | None:
    parts, cos, sin = args
    if not _can_rotate(parts, cos, sin):
        return None
    results = [empty(form) for form in forms]
    if any(y.stride(-1) != 1 for y in results):
        return None
    made = [_part(part, y) for part, y in zip(parts, results, strict=True)]
    return _rotation(made, args, results)


def _rotated_into(args: tuple, forms: Any, empty: Empty) -> Prepared | None:
    parts, cos, sin, value, keys, values, at_S = args
    caches = (keys, values)
    if not _can_rotate(parts, cos, sin) or not _served(parts[0].x, value, *caches) or value.stride(-1) != 1:
        return None
    if any(cache.stride(-1) != 1 for cache in caches) or not at_S.is_contiguous() or at_S.dtype is not torch.int64:
        return None
    query = empty(forms[0])
    if query.stride(-1) != 1:
        return None
    copied = _part(step.Part(value), values, at_S, copied=True)
    return _rotation([_part(parts[0], query), _part(parts[1], keys, at_S), copied], args, (query, *caches))


def _can_rotate(parts: Sequence[step.Part], cos: Tensor, sin: Tensor) -> bool:
    tensors = [part.x for part in parts] + [part.norm.gain for part in parts if part.norm is not None]
    dense = all(t.stride(-1) == 1 for t in (cos, sin, *(part.x for part in parts)))
    return _served(cos, sin, *tensors) and dense and cos.stride() == sin.stride() and parts[0].x.shape[-1] <= COLUMNS


def _part(part: step.Part, y: Tensor, at_S: Tensor | None = None, *, copied: bool = False) -> _Part:
    (_, heads, _, _), steps = part.x.shape, ((ctypes.c_int64 * 3)(*t.stride()[:3]) for t in (part.x, y))
    rule = _Rule() if part.norm is None else _Rule.of(part.norm)
    places = None if at_S is None else at_S.data_ptr()
    return _Part(part.x.data_ptr(), y.data_ptr(), places, heads, *steps, rule, part.norm is not None, copied)


def _rotation(made: list[_Part], args: tuple, results: Sequence[Tensor]) -> Prepared:
    parts, cos, sin, *_ = args
    array, (batch, _, tokens, columns) = (_Part * len(made))(*made), parts[0].x.shape
    turns = (ctypes.c_int64 * 2)(cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1))
    size = len(made), batch, tokens, columns, cos.shape[-1]
    rotation = _Rotation(ctypes.addressof(array), cos.data_ptr(), sin.data_ptr(), *size, turns, NUMBERS[cos.dtype])
    return _called("vbrt_step_rotate", rotation, results, (array, args))


def _gated(args: tuple, form: Any, empty: Empty) -> Prepared | None:
    gate, up, function = args
    rows = [_rows(tensor) for tensor in (gate, up)]
    if not _served(gate, up) or function not in GATES or None in rows:
        return None
    y = empty(form)
    if not y.is_contiguous():
        return None
    k = gate.shape[-1]
    size = gate.numel() // k, k, *rows, NUMBERS[gate.dtype], GATES[function]
    gating = _Gate(gate.data_ptr(), up.data_ptr(), y.data_ptr(), *size)
    return _called("vbrt_step_gate", gating, (y,), (gate, up))


def _rows(tensor: Tensor) -> int | None:
    """Row pitch in elements; None if it is not uniform."""
    if tensor.stride(-1) != 1 or not tensor.numel():
        return None
    sizes = [(n, step) for n, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1]
    if any(step != inner * n for (_, step), (n, inner) in itertools.pairwise(sizes)):
        return None
    return sizes[-1][1] if sizes else tensor.shape[-1]


def _attended(args: tuple, form: Any, empty: Empty) -> Prepared | None:
    (q, k, v, mask, scale), steady = args[:5], args[5:]
    batch, heads, tokens, columns = q.shape
    shared = heads // k.shape[1] * tokens
    if any(steady) or not _served(q, k, v) or columns > COLUMNS or shared > QUERIES or not math.isfinite(scale):
        return None
    if any(t.stride(-1) != 1 for t in (q, k, v)) or not (mask is None or mask.stride(-1) == 1):
        return None
    y = empty(form)
    if not y.is_contiguous():
        return None
    step_of_mask = 0 if mask is None or mask.shape[0] == 1 else mask.stride(0)
    steps = ((ctypes.c_int64 * 3)(*t.stride()[:3]) for t in (q, k, v))
    pointers = (*(t.data_ptr() for t in (q, k, v, y)), None if mask is None else mask.data_ptr())
    size = batch, heads, k.shape[1], tokens, k.shape[2], columns, step_of_mask
    attention = _Attention(*pointers, *size, *steps, scale, NUMBERS[q.dtype], torch.get_num_threads())
    return _called("vbrt_step_attend", attention, (y,), (q, k, v, mask))


def _projected(args: tuple, form: Any, empty: Empty) -> Prepared | None:
    x, w = args
    if not _served(x, w) or not (x.is_contiguous() and w.is_contiguous()):
        return None
    y = empty(form)
    if not y.is_contiguous():
        return None
    projection = _Projection(*(t.data_ptr() for t in (x, w, y)), len(x), *w.shape, NUMBERS[x.dtype])
    return _called("vbrt_step_project", projection, (y,), (x, w))


def _routed(args: tuple, forms: Any, empty: Empty) -> Prepared | None:
    logits, rule = args
    if not _served(logits) or logits.dim() != 2 or logits.stride(1) != 1 or rule.dtype not in NUMBERS:
        return None
    if not 0 < rule.k <= min(_CHOSEN, logits.shape[1]) or logits.shape[1] > _EXPERTS:
        return None
    weights, ids = map(empty, forms)
    if not (weights.is_contiguous() and ids.is_contiguous() and ids.dtype is torch.int64):
        return None
    pointers = (t.data_ptr() for t in (logits, weights, ids))
    types = NUMBERS[logits.dtype], NUMBERS[rule.dtype]
    route = _Route(*pointers, *logits.shape, logits.stride(0), rule.k, *types, rule.first, rule.renormalized)
    return _called("vbrt_step_route", route, (weights, ids), (logits,))


_MAKERS: dict[Callable[..., Any], Callable[[tuple, Any, Empty], Prepared | None]] = {
    step.normed: _normed,
    step.summed: _summed,
    step.rotated: _rotated,
    step.rotated_into: _rotated_into,
    step.gated: _gated,
    step.attended: _attended,
    step.projected: _projected,
    step.routed: _routed,
    products: prepare_products,
}
