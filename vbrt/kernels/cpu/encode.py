"""Block format encoder on a CPU: `encode.c` searches block scales and rounds, bit-exact with the reference.

The library is loaded or built only once enough weights have been encoded to be worth it; before that, or without a
compiler, the reference encodes. `codec` returns a format whose passes over a weight run in C.
"""

import ctypes
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from vbrt.config.format_records import LEVEL_SCALES, formats_of
from vbrt.formats.block_formats import BlockFormat, Range
from vbrt.formats.format import EncodedGroup, Format
from vbrt.formats.quantile import Quantile, magnitude_quantiles
from vbrt.formats.rounding import Rounding, TableRounding
from vbrt.formats.sixteen_levels import Levels
from vbrt.kernels.cpu.build import NUMBERS, libraries, library, refusal

__all__ = ["FORMATS", "codec", "encode_many", "encoded", "encoded_levels", "serves"]

FORMATS = formats_of("e2m1", "table", "levels", "int8")
#: scale types of encode.c, by name in the record
_SCALES = {"e4m3": 0, "e8m0": 1, "ue4m4": 2} | {name: NUMBERS[getattr(torch, name)] for name in LEVEL_SCALES}
_WORTH_BUILDING = 1 << 21  # weights that the reference encodes in the time of a build
_seen = 0  # weights seen so far
_PATTERNS = 1 << 15


class Encoding(ctypes.Structure):
    """`Encoding` of encode.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "values", "squares", "cells", "bounds", "order")),
        *((name, ctypes.c_void_p) for name in ("codes", "scales")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "per_row", "rows_each")),
        *(
            (name, ctypes.c_int32)
            for name in ("type", "block", "first", "candidates", "low", "high", "shift", "scale_type", "bits")
        ),
        *((name, ctypes.c_float) for name in ("per_unit", "least", "top")),
    )


def encode_many(
    format: Format, w_ENK: Tensor, amax_E: Sequence[float] | None = None, squares: Tensor | None = None
) -> Iterator[EncodedGroup]:
    """See `Format.encode_many`: bit-exact, in C if that is worth it."""
    return codec(format).encode_many(w_ENK, amax_E, squares)


def codec(format: Format) -> Format:
    """Return a bit-exact format that encodes in C if that is worth it; cached per format."""
    return format if isinstance(format, _InC) or format.name not in FORMATS else _codec(format)


@functools.cache
def _codec(format: Format) -> Format:
    own = next(made for kind, made in _KINDS.items() if isinstance(format, kind))
    return type(type(format).__name__, (own, type(format)), {})(format.record)


def serves(weight: Tensor) -> bool:
    """True if C can encode a weight: the library is loaded, or worth loading by the number of weights seen."""
    if type(weight) not in (Tensor, torch.nn.Parameter) or not weight.is_cpu or weight.dtype not in NUMBERS:
        return False
    return _worth(weight.numel()) and refusal(weight.device, "encode") is None


def _worth(weights: int) -> bool:
    global _seen
    _seen += weights
    return _seen >= _WORTH_BUILDING or "encode" in libraries()


class _InC:
    """Mixin that overrides a format's passes over a weight."""


class _BlocksInC(_InC):
    def _encode(
        self, w_NK: Tensor, known: Range, squares: Tensor | None = None, *, coded: bool = True, **extra: Tensor
    ) -> dict[str, Tensor]:
        if not serves(w_NK):
            return super()._encode(w_NK, known, squares, coded=coded, **extra)
        return encoded(self, w_NK, known, squares, coded=coded, **extra)


class _QuantileInC(_BlocksInC):
    def _quantiles(self, w_NK: Tensor, probabilities: Sequence[float]) -> Tensor:
        return magnitude_quantiles(w_NK, probabilities, _count_patterns if serves(w_NK) else None)

    def _beyond(self, w_NK: Tensor, tensors: dict[str, Tensor], reach: Tensor) -> int:
        return _count_beyond(self, w_NK, tensors, reach) if serves(w_NK) else super()._beyond(w_NK, tensors, reach)


class _LevelsInC(_InC):
    def _encode_weight(self, w_NK: Tensor, levels: Tensor, squares: Tensor | None) -> tuple[Tensor, Tensor]:
        encode = encoded_levels if serves(w_NK) else Levels._encode_weight
        return encode(self, w_NK, levels, squares)


_KINDS = {Quantile: _QuantileInC, BlockFormat: _BlocksInC, Levels: _LevelsInC}


def encoded(
    format: BlockFormat,
    w_NK: Tensor,
    known: Range,
    squares: Tensor | None = None,
    *,
    coded: bool = True,
    **extra: Tensor,
) -> dict[str, Tensor]:
    """Encode a weight of known range to a coarse plane in CPU memory; see `BlockFormat._encode`.

    Raises KernelError: no library.
    """
    codes, scales = _outputs(format, w_NK, torch.uint8)
    (low, high), (shift, least) = format.byte_bounds(known), format.stored(known)
    _run(
        "vbrt_encode", format, w_NK, squares, (codes if coded else None, scales),
        (format.byte_values(w_NK.device), format._rounding(_no_tile(format), **extra)),
        first=format.offsets.start, candidates=len(format.offsets), low=low, high=high, shift=shift,
        per_unit=1 / known.unit, least=least, top=format.top,
    )  # fmt: skip
    tensors = {"scales": scales.view(getattr(torch, format.scale_dtype)), **extra}
    tensors |= format.range_fields(known, w_NK.device)
    return {"codes": codes, **tensors} if coded else tensors


def encoded_levels(format: Levels, w_NK: Tensor, levels: Tensor, squares: Tensor | None) -> tuple[Tensor, Tensor]:
    """Encode a weight to 16 levels: (codes, scales); see `Levels.encode`. Raises KernelError: no library."""
    found, candidates = _outputs(format, w_NK, format.scale_dtype), levels[levels != 0]
    _run(
        "vbrt_encode_levels", format, w_NK, None if squares is None else squares[None], found,
        (candidates, format.rounding(_no_tile(format), levels)),
        candidates=len(candidates), per_unit=1, least=format.reach(levels, w_NK.dtype), top=levels.abs().max(),
    )  # fmt: skip
    return found


def _outputs(format: Format, w_NK: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    (n, k), block = w_NK.shape, format.block
    per_row = -(-k // block)
    dtype = getattr(torch, format.code_dtype)
    codes = torch.empty(n, per_row * block * format.record.bits // 8, dtype=dtype, device="cpu")
    return codes, torch.empty(n, per_row, dtype=scale_dtype, device="cpu")


def _no_tile(format: Format) -> Tensor:
    return torch.empty(format.block, 0, dtype=torch.float32, device="cpu")


def _run(
    entry: str,
    format: Format,
    w_NK: Tensor,
    squares: Tensor | None,
    found: tuple[Tensor | None, Tensor],
    tables: tuple[Tensor, Rounding],
    **numbers: Any,
) -> None:
    """Run the C encoder. squares as in `Step`; tables: (scale values, rounding)."""
    w_NK, (values, rounding) = w_NK.detach().contiguous(), tables
    squares = None if squares is None else squares.float().contiguous()
    read = (w_NK, values, squares, *(rounding.tables() if isinstance(rounding, TableRounding) else [None] * 3))
    n, k = w_NK.shape
    task = Encoding(
        *(None if tensor is None else tensor.data_ptr() for tensor in (*read, *found)),
        *(n, k, found[1].shape[1], n if squares is None else n // len(squares)),
        type=NUMBERS[w_NK.dtype], block=format.block, scale_type=_SCALES[format.record.scales],
        bits=format.record.bits,
        **{name: float(value) if name in ("per_unit", "least", "top") else value for name, value in numbers.items()},
    )  # fmt: skip
    getattr(library("encode"), entry)(ctypes.byref(task), torch.get_num_threads())


# -- passes of the codebook fit ---------------------------------------------------------------------------------------


def _count_patterns(w_NK: Tensor) -> Tensor:
    """Histogram of 16-bit magnitude patterns: int64 [32768]."""
    w_NK, threads = w_NK.detach().contiguous(), torch.get_num_threads()
    counts = torch.zeros(threads, _PATTERNS, dtype=torch.int64, device="cpu")
    library("encode").vbrt_count_patterns(w_NK.data_ptr(), w_NK.numel(), counts.data_ptr(), threads)
    return counts.sum(0)


def _count_beyond(format: BlockFormat, w_NK: Tensor, tensors: dict[str, Tensor], reach: Tensor) -> int:
    """See `Quantile._beyond`."""
    w_NK, scales = w_NK.detach().contiguous(), tensors["scales"].contiguous()
    values, (n, k) = format.byte_values(w_NK.device), w_NK.shape
    task = Encoding(
        weight=w_NK.data_ptr(), values=values.data_ptr(), rows=n, columns=k, per_row=scales.shape[1],
        type=NUMBERS[w_NK.dtype], block=format.block,
    )  # fmt: skip
    limits = float(tensors["tensor_scale"]), float(reach)
    count = library("encode").vbrt_count_beyond
    return count(ctypes.byref(task), scales.data_ptr(), *limits, torch.get_num_threads())
