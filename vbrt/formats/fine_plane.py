"""Fine plane: the residual that restores the original bf16 or fp16 weight from a coarse plane, bit for bit.

Bit patterns are mapped to integers in order of value (`ordinal`), and fine = ordinal(w) - ordinal(decode(coarse))
modulo 2^16. A code away from zero is within a factor of two of its weight, which is 128 ordinals in bf16 and 1024 in
fp16, so a difference takes 8 bits in bf16 and 12 in fp16; one value of that range is an escape: 16 bits in the list
`escapes`. A code whose cell includes zero (`wide_codes`, known from the coarse plane) needs all 16 bits: the upper ones
go to the list `side`. Both lists are in row-major order of their weights; `starts` lets a kernel begin anywhere.

For Gaussian weights under nvfp4: 8.63 bits per weight in bf16, 12.63 in fp16. A plane of bf16 may be coded instead
(`fine_coding`): 6.66 bits.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.errors import FormatError
from vbrt.formats.block_formats import BlockFormat, code_mask_quads, decode_tile, lookup, pack_codes, unpack_codes
from vbrt.formats.fine_coding import CODED, SPAN, check_coded, coded_fields, decode_coded
from vbrt.formats.format import Format, check_weight, padded, tiles
from vbrt.formats.page import PageLayout, build_layout

__all__ = [
    "SPAN",
    "WIDTH",
    "check_fine",
    "estimate_fine_bytes",
    "fine_fields",
    "fine_layout",
    "may_code",
    "merge_fine",
    "split_fine",
]

#: in-place bits per weight: an octave each way
WIDTH = {torch.bfloat16: 8, torch.float16: 12}


def ordinal(bits: Tensor) -> Tensor:
    """Map int16 bit patterns to int16 in order of value, -0.0 just below 0.0; an involution."""
    return bits ^ ((bits >> 15) & 0x7FFF)


def _check(dtype: torch.dtype, fmt: Format) -> BlockFormat:
    if dtype not in WIDTH:
        raise FormatError(
            f"fine plane: weight is {dtype}; expected bfloat16 or float16. For float32 use fine = 'none' with "
            "this format, format = 'dense' for exact bytes, or convert the model to bfloat16 first"
        )
    if not isinstance(fmt, BlockFormat) or fmt.record.bits != 4:
        why = "is already exact" if fmt.record.lossless else "has no 4-bit codes in blocks to refine"
        raise FormatError(f"fine plane: format {fmt.name!r} {why}; use it with fine = 'none'")
    return fmt


def _wide_at(codes_RQ: Tensor, k: int, fmt: BlockFormat) -> Tensor:
    """Flat positions, ascending, of wide codes in the first k columns of packed rows [R, >= k/2]."""
    if not fmt.wide_codes:
        return torch.empty(0, dtype=torch.int64, device=codes_RQ.device)
    return wide_codes_in(codes_RQ, k, fmt).reshape(-1).nonzero().squeeze(1)


def wide_codes_in(codes_RQ: Tensor, k: int, fmt: BlockFormat) -> Tensor:
    """Return whether each of the first k codes of packed rows is wide: bool [R, k]."""
    mask = lookup(code_mask_quads(fmt.wide_codes, codes_RQ.device), codes_RQ).view(torch.bool)
    return mask.view(codes_RQ.shape[0], -1)[:, :k]


def _coarse_tiles(coarse: dict[str, Tensor], shape: tuple[int, int]) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows, columns, packed codes) in row-major order of weights, for any tile size."""
    for rows, columns in tiles(shape, 4, decode_tile(coarse["codes"].device)):
        yield rows, columns, coarse["codes"][rows, columns.start // 2 : padded(columns.stop, 4) // 2]


@torch.no_grad()
def split_fine(w_NK: Tensor, coarse: dict[str, Tensor], fmt: Format) -> dict[str, Tensor]:
    """The fine plane of a finite bf16/fp16 weight: low uint8 [N, K], nibbles uint8 [N, ceil(K/2)] (fp16 only),
    side int8 [S], escapes int16 [E], starts int32 [ceil(N * K / SPAN), 2].

    Raises FormatError for another dtype, for format "dense", and for NaN/Inf (saying how many).
    """
    fmt = _check(w_NK.dtype, fmt)
    check_weight(w_NK, "fine plane")
    width = WIDTH[w_NK.dtype]
    n, k = w_NK.shape
    dec_NK = fmt.decode(coarse, (n, k), w_NK.dtype)
    fine = {"low": torch.empty(n, k, dtype=torch.uint8, device=w_NK.device)}
    if width == 12:
        fine["nibbles"] = torch.empty(n, (k + 1) // 2, dtype=torch.uint8, device=w_NK.device)
    side, escapes = [], []
    lists = torch.zeros(2, padded(n * k, SPAN), dtype=torch.bool, device=w_NK.device)  # membership, row-major
    first = 0
    for rows, columns, codes in _coarse_tiles(coarse, (n, k)):
        bits, near = (t[rows, columns].contiguous().view(torch.int16) for t in (w_NK, dec_NK))
        delta = ordinal(bits) - ordinal(near)
        flat = delta.view(-1)
        wide_at = _wide_at(codes, delta.shape[1], fmt)
        wide = flat[wide_at]
        flat[wide_at] = 0
        lists[0, first + wide_at] = True
        escape_at = ((flat >= 1 << (width - 1)) | (flat <= -1 << (width - 1))).nonzero().squeeze(1)
        side.append((wide >> width).to(torch.int8))
        escapes.append(flat[escape_at])
        lists[1, first + escape_at] = True
        first += flat.numel()
        flat[escape_at] = -1 << (width - 1)
        flat[wide_at] = wide
        fine["low"][rows, columns] = (delta & 255).to(torch.uint8)
        if width == 12:
            nibble_RK = (delta >> 8 & 15).to(torch.uint8)
            fine["nibbles"][rows, columns.start // 2 : (columns.stop + 1) // 2] = pack_codes(nibble_RK)
    return {**fine, "side": torch.cat(side), "escapes": torch.cat(escapes), "starts": _starts(lists)}


def _starts(lists: Tensor) -> Tensor:
    """int32 [ceil(N * K / SPAN), 2] from bool [2, N * K padded to whole spans]: entries before each span."""
    return F.pad(_counts(lists)[:, :-1], (1, 0)).cumsum(1).to(torch.int32).t().contiguous()


def _counts(lists: Tensor) -> Tensor:
    """int64 [2, spans]: entries per span. Eight bools per word: a byte of a sum of 128 words never overflows."""
    words = lists.view(torch.int64).view(2, -1, SPAN // 1024, 128).sum(-1)
    return words.view(torch.uint8).view(2, lists.shape[1] // SPAN, -1).sum(-1)


@torch.no_grad()
def merge_fine(
    coarse: dict[str, Tensor], fine: dict[str, Tensor], fmt: Format, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """The original weight [N, K], bit for bit. Synchronizes on a GPU (nonzero locates the lists' entries)."""
    fmt = _check(dtype, fmt)
    if CODED in fine:
        return decode_coded(coarse, fine, fmt, shape)
    width = WIDTH[dtype]
    out = fmt.decode(coarse, shape, dtype)
    side, escapes = fine["side"], fine["escapes"]
    for rows, columns, codes in _coarse_tiles(coarse, shape):
        delta = fine["low"][rows, columns].to(torch.int16)
        if width == 12:
            nibbles = fine["nibbles"][rows, columns.start // 2 : (columns.stop + 1) // 2]
            delta |= unpack_codes(nibbles, delta.shape[1]).to(torch.int16) << 8
        flat = delta.view(-1)
        wide_at = _wide_at(codes, delta.shape[1], fmt)
        wide = flat[wide_at] | (side[: len(wide_at)].to(torch.int16) << width)
        side = side[len(wide_at) :]
        flat[wide_at] = 0
        flat.bitwise_left_shift_(16 - width).bitwise_right_shift_(16 - width)  # sign extension
        if len(escapes):
            escape_at = (flat == -1 << (width - 1)).nonzero().squeeze(1)
            flat[escape_at] = escapes[: len(escape_at)]
            escapes = escapes[len(escape_at) :]
        flat[wide_at] = wide
        bits = out[rows, columns].view(torch.int16)
        bits.copy_(ordinal(delta.add_(ordinal(bits))))
    return out


def fine_fields(
    shape: tuple[int, int], dtype: torch.dtype, coded_in: Format | None = None
) -> dict[str, tuple[str, tuple[int | None, ...]]]:
    """Name -> dtype and shape of `split_fine`'s tensors, or, for a format, of `code_fine`'s; None: any length."""
    if coded_in is not None:
        return coded_fields(shape, _check(dtype, coded_in))
    n, k = shape
    nibbles = {"nibbles": ("uint8", (n, (k + 1) // 2))} if WIDTH[dtype] == 12 else {}
    return {
        "low": ("uint8", (n, k)),
        **nibbles,
        "side": ("int8", (None,)),
        "escapes": ("int16", (None,)),
        "starts": ("int32", (-(-n * k // SPAN), 2)),
    }


@torch.no_grad()
def check_fine(
    coarse: dict[str, Tensor], fine: dict[str, Tensor], fmt: Format, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Validate planes from untrusted sources: kernels index by `starts` without bounds checks.

    Takes planes of `fine_fields`, on a CPU. Raises FormatError if lists or `starts` do not match the codes.
    """
    fmt = _check(dtype, fmt)
    if CODED in fine:
        check_coded(coarse, fine, fmt, shape)
        return
    total = shape[0] * shape[1]
    lists = torch.zeros(2, padded(total, SPAN), dtype=torch.bool, device=fine["low"].device)
    first = 0
    for _, columns, codes in _coarse_tiles(coarse, shape):
        wide = wide_codes_in(codes, columns.stop - columns.start, fmt)
        lists[0, first : first + wide.numel()].view_as(wide).copy_(wide)
        first += wide.numel()
    escaped = fine["low"] == 1 << (WIDTH[dtype] - 1) & 255
    if WIDTH[dtype] == 12:
        escaped &= unpack_codes(fine["nibbles"], shape[1]) == 8
    torch.gt(escaped.view(-1), lists[0, :total], out=lists[1, :total])
    side, escapes = _counts(lists).sum(1).tolist()
    if (len(fine["side"]), len(fine["escapes"])) != (side, escapes) or not torch.equal(fine["starts"], _starts(lists)):
        raise FormatError(
            f"fine plane: lists of {len(fine['side'])} and {len(fine['escapes'])} entries, or `starts`, "
            f"that do not go with its coarse plane, which has {side} wide codes and {escapes} escapes"
        )


def fine_layout(fine: dict[str, Tensor], format: str = "") -> PageLayout:
    """Page layout of a fine plane; the lists' lengths are known only after the split."""
    fields = [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in fine.items()]
    return build_layout(format, "fine", fields)


def estimate_fine_bytes(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, *, coded: bool = False) -> int:
    """Estimate for planning, before page padding: 8.875 bits per weight in bf16, 12.875 in fp16; 7 if coded, and the
    table of cells.

    Measured on Gaussian weights in bf16: nvfp4 8.63, nf4 8.70, quantile 8.73, mxfp4 8.77; in fp16: 12.63, 12.69,
    12.35, 12.77. Coded: nvfp4 6.66, nf4 6.81, quantile 6.82, mxfp4 6.68.
    """
    n, k = shape
    if coded and may_code(dtype):
        return n * k * 7 // 8 + 1024
    return n * k * (8 * WIDTH[dtype] + 7) // 64


def may_code(dtype: torch.dtype) -> bool:
    """True if fine planes of weights of this dtype can be coded."""
    return dtype is torch.bfloat16
