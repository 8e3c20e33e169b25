"""Encoding to block formats on a CPU: `encode.c` searches block scales and rounds, with the bits of the reference.

The library is built at the first weight that is worth it; where it cannot be, and for small weights, the reference
encodes.
"""

import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vbrt.config.formats import FORMATS as RECORDS
from vbrt.config.formats import formats_of
from vbrt.formats.base import EncodedGroup, Format
from vbrt.formats.blocks import BlockFormat, Range
from vbrt.formats.rounding import TableRounding
from vbrt.kernels.cpu.build import NUMBERS, library, refusal

__all__ = ["FORMATS", "encode_many", "encoded"]

#: but for those whose levels are fitted to each weight, which takes longer than the search
FORMATS = tuple(name for name in formats_of("e2m1", "table") if not RECORDS[name].fitted)
#: of encode.c, by the name in the record
_SCALES = {"e4m3": 0, "e8m0": 1, "ue4m4": 2}
_WORTH_BUILDING = 1 << 21  # weights: as long as the reference takes as the compiler does


class Encoding(ctypes.Structure):
    """`Encoding` of encode.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "values", "squares", "cells", "bounds", "order")),
        *((name, ctypes.c_void_p) for name in ("codes", "bytes")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "per_row", "rows_each")),
        *(
            (name, ctypes.c_int32)
            for name in ("type", "block", "first", "candidates", "low", "high", "shift", "scales")
        ),
        *((name, ctypes.c_float) for name in ("per_unit", "least", "top")),
    )


def encode_many(
    format: Format, w_ENK: Tensor, amax_E: Sequence[float] | None = None, squares: Tensor | None = None
) -> Iterator[EncodedGroup]:
    """See `Format.encode_many`: the same bits, by C where that is worth it."""
    plain = type(w_ENK) in (Tensor, torch.nn.Parameter) and w_ENK.is_cpu and w_ENK.dtype in NUMBERS
    if not plain or w_ENK.numel() < _WORTH_BUILDING or refusal(w_ENK.device, "encode"):
        return format.encode_many(w_ENK, amax_E, squares)
    return format.encode_many(w_ENK, amax_E, squares, step=encoded)


def encoded(format: BlockFormat, w_NK: Tensor, known: Range, squares: Tensor | None = None) -> dict[str, Tensor]:
    """The coarse plane of a weight of a known range, in CPU memory; squares as `Step` has them.

    Raises KernelError: the library cannot be built.
    """
    w_NK, values = w_NK.detach().contiguous(), format.byte_values(w_NK.device)
    (n, k), block = w_NK.shape, format.block
    per_row = -(-k // block)
    codes = torch.empty(n, per_row * block // 2, dtype=torch.uint8, device="cpu")
    scales = torch.empty(n, per_row, dtype=torch.uint8, device="cpu")
    squares = None if squares is None else squares.float().contiguous()
    (low, high), (shift, least) = format.byte_bounds(known), format.stored(known)
    rounding = format._rounding(torch.empty(block, 0, dtype=torch.float32, device="cpu"))
    tables = rounding.tables() if isinstance(rounding, TableRounding) else ()
    task = Encoding(
        w_NK.data_ptr(),
        values.data_ptr(),
        None if squares is None else squares.data_ptr(),
        *([table.data_ptr() for table in tables] or [None] * 3),
        codes.data_ptr(),
        scales.data_ptr(),
        *(n, k, per_row, n if squares is None else n // len(squares)),
        *(NUMBERS[w_NK.dtype], block, format.offsets.start, len(format.offsets), low, high, shift),
        _SCALES[format.record.scales],
        *(1 / known.unit, least, format.top),
    )
    library("encode").vbrt_encode(ctypes.byref(task), torch.get_num_threads())
    scales = scales.view(getattr(torch, format.scale_dtype))
    return {"codes": codes, "scales": scales, **format.range_fields(known, w_NK.device)}
