"""Fine planes on a CPU: `split.h` and `code.h`, bit-exact with `formats.split_fine` and `formats.code_fine`."""

import ctypes

import torch
from torch import Tensor

from vbrt.formats.block_formats import BlockFormat
from vbrt.formats.fine_coding import CODED, choose_cells, code_fine, stream_bytes
from vbrt.formats.fine_plane import SPAN, WIDTH, split_fine
from vbrt.formats.format import Format, check_weight, padded
from vbrt.kernels.cpu import encode
from vbrt.kernels.cpu.build import library

__all__ = ["code", "code_in_c", "split", "split_in_c"]

_STEP = 1 << 22  # weights per thread and call, with room for lists of three bytes each
_SLACK = 64  # split.h's


class Splitting(ctypes.Structure):
    """`Splitting` of split.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "codes", "bytes", "levels", "values")),
        *((name, ctypes.c_void_p) for name in ("low", "nibbles", "side", "escapes", "counts")),
        *((name, ctypes.c_int64) for name in ("columns", "per_row")),
        ("wide", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("block", "width")),
        ("unit", ctypes.c_float),
    )


class Coding(ctypes.Structure):
    """`Coding` of code.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "codes", "bytes", "cells")),
        *((name, ctypes.c_void_p) for name in ("fours", "pairs", "extra", "escapes", "counts")),
        *((name, ctypes.c_int64) for name in ("columns", "per_row", "mantissas")),
        ("block", ctypes.c_int32),
    )


def split(w_NK: Tensor, coarse: dict[str, Tensor], format: Format) -> dict[str, Tensor]:
    """See `formats.split_fine`: bit-exact, in C if that is worth it."""
    refined = isinstance(format, BlockFormat) and format.record.bits == 4 and w_NK.dtype in WIDTH
    if not refined or not encode.serves(w_NK) or not all(type(t) is Tensor and t.is_cpu for t in coarse.values()):
        return split_fine(w_NK, coarse, format)
    check_weight(w_NK, "fine plane")
    return split_in_c(w_NK, coarse, format)


@torch.no_grad()
def split_in_c(w_NK: Tensor, coarse: dict[str, Tensor], format: BlockFormat) -> dict[str, Tensor]:
    """Split the fine plane of a finite bf16 or fp16 weight in CPU memory. Raises KernelError: no library."""
    w_NK, (n, k), width = w_NK.detach().contiguous(), w_NK.shape, WIDTH[w_NK.dtype]
    codes, scales = coarse["codes"].contiguous(), coarse["scales"].contiguous()
    levels, values, unit = format.tables(coarse)
    fine = {"low": torch.empty(n, k, dtype=torch.uint8, device="cpu")}
    if width == 12:
        fine["nibbles"] = torch.empty(n, (k + 1) // 2, dtype=torch.uint8, device="cpu")
    counts = torch.zeros(-(-n * k // SPAN), 2, dtype=torch.int32, device="cpu")
    threads = min(n, torch.get_num_threads())
    rows = min(n, max(1, threads * _STEP // k))
    room = rows * k + threads * _SLACK
    side, escapes = (torch.empty(room, dtype=dtype, device="cpu") for dtype in (torch.int8, torch.int16))
    written = fine["low"], fine.get("nibbles", fine["low"]), side, escapes, counts
    task = Splitting(
        *(tensor.data_ptr() for tensor in (w_NK, codes, scales, levels, values, *written)), k, scales.shape[1],
        sum(1 << code for code in format.wide_codes), format.block, width, float(unit),
    )  # fmt: skip
    lists: tuple[list[Tensor], list[Tensor]] = [], []
    for first in range(0, n, rows):
        found = torch.empty(threads, 4, dtype=torch.int64, device="cpu")
        last = min(n, first + rows)
        library("encode").vbrt_split_fine(ctypes.byref(task), first, last, found.data_ptr(), threads)
        for side_at, sides, escape_at, escaped in found.tolist():
            lists[0].append(side[side_at : side_at + sides].clone())
            lists[1].append(escapes[escape_at : escape_at + escaped].clone())
    starts = (counts.cumsum(0) - counts).to(torch.int32)
    return {**fine, "side": torch.cat(lists[0]), "escapes": torch.cat(lists[1]), "starts": starts}


def code(w_NK: Tensor, coarse: dict[str, Tensor], format: BlockFormat) -> dict[str, Tensor]:
    """See `formats.code_fine`: bit-exact, in C if that is worth it."""
    if not encode.serves(w_NK) or not all(type(t) is Tensor and t.is_cpu for t in coarse.values()):
        return code_fine(w_NK, coarse, format)
    return code_in_c(w_NK, coarse, format)


@torch.no_grad()
def code_in_c(w_NK: Tensor, coarse: dict[str, Tensor], format: BlockFormat) -> dict[str, Tensor]:
    """Code the fine plane of a finite bf16 weight in CPU memory. Raises KernelError: no library."""
    w_NK, (n, k), kp = w_NK.detach().contiguous(), w_NK.shape, padded(w_NK.shape[1], format.block)
    coarse = {name: tensor.contiguous() for name, tensor in coarse.items()}
    cells = choose_cells(w_NK, coarse, format)
    fours, pairs = (torch.empty(n, kp // per, dtype=torch.uint8, device="cpu") for per in (2, 4))
    counts = torch.zeros(-(-n * k // SPAN), 2, dtype=torch.int32, device="cpu")
    threads = min(n, torch.get_num_threads())
    rows = min(n, max(1, threads * _STEP // k))
    room = rows * k + threads * _SLACK
    extra, escapes = (torch.empty(room, dtype=dtype, device="cpu") for dtype in (torch.uint8, torch.int16))
    written = fours, pairs, extra, escapes, counts
    task = Coding(
        *(tensor.data_ptr() for tensor in (w_NK, coarse["codes"], coarse["scales"], cells, *written)),
        k, kp // format.block, format.scale_mantissas, format.block,
    )  # fmt: skip
    parts: list[tuple[Tensor, int]] = []
    lists: list[Tensor] = []
    for first in range(0, n, rows):
        found = torch.empty(threads, 4, dtype=torch.int64, device="cpu")
        last = min(n, first + rows)
        library("encode").vbrt_code_fine(ctypes.byref(task), first, last, found.data_ptr(), threads)
        for byte, bits, entry, entries in found.tolist():
            parts.append((extra[byte : byte + bits // 8 + 8].clone(), bits))
            lists.append(escapes[entry : entry + entries].clone())
    stream, bit = torch.zeros(stream_bytes(sum(bits for _, bits in parts)), dtype=torch.uint8, device="cpu"), 0
    for part, bits in parts:
        library("encode").vbrt_append_bits(part.data_ptr(), bits, stream.data_ptr(), bit)
        bit += bits
    starts = (counts.cumsum(0) - counts).to(torch.int32)
    symbols = {"fours": fours, "pairs": pairs, "extra": stream}
    return {**symbols, "escapes": torch.cat(lists), "starts": starts, CODED: cells}
