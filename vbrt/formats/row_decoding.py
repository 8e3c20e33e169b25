"""Row decoding: some rows of a weight from its planes, for embedding lookups: pure tensor functions.

Cost per row, in weights read and decoded, with row length K: `dense` and 4-bit planes K; tiles, which hold 16 rows,
16 K; a fine plane K plus the weights from the start of its 4096-weight span in the lists (`starts` locates a span's
entries) to the row, in whole rows: none if K is a multiple of 4096, K for 2048, 6 K for 768.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from vbrt.formats.block_formats import unpack_codes
from vbrt.formats.fine_coding import CODED, opened
from vbrt.formats.fine_plane import SPAN, WIDTH, ordinal, wide_codes_in
from vbrt.formats.format import Format
from vbrt.formats.page import PageLayout

__all__ = ["Rows", "by_chunks", "coarse_rows", "exact_rows"]

_CHUNK_WEIGHTS = 1 << 22  # weights decoded at a time; bounds the temporaries


@dataclass(frozen=True, slots=True)
class Rows:
    """A plane with random access to the rows of its fields.

    Attributes:
        layout: of the plane's page.
        take: (field, indices int64 [n]) -> the field's entries [n, ...] at those indices of the first dimension.
    """

    layout: PageLayout
    take: Callable[[str, Tensor], Tensor]

    def whole(self, field: str, length: int, device: torch.device) -> Tensor:
        """Return all entries of a field."""
        return self.take(field, torch.arange(length, dtype=torch.int64, device=device))


def by_chunks(decode: Callable[[Tensor], Tensor], index_T: Tensor, weights_a_row: int) -> Tensor:
    """Return decode(index_T), computed in chunks to bound temporaries."""
    size = max(1, _CHUNK_WEIGHTS // max(1, weights_a_row))
    if len(index_T) <= size:
        return decode(index_T)
    return torch.cat([decode(chunk_T) for chunk_T in index_T.split(size)])


def coarse_rows(plane: Rows, index_T: Tensor) -> dict[str, Tensor]:
    """Return a plane's fields, restricted to entries `index_T` where a field has one per row (or tile row);
    one-dimensional fields, such as a tensor scale or a codebook, are complete."""
    return {
        field.name: plane.take(field.name, index_T)
        if len(field.shape) > 1
        else plane.whole(field.name, field.shape[0], index_T.device)
        for field in plane.layout.fields
    }


@torch.no_grad()
def exact_rows(
    coarse: Rows, fine: Rows, fmt: Format, shape: tuple[int, int], dtype: torch.dtype, index_T: Tensor
) -> Tensor:
    """Return rows [T, K] of the original weight (N, K), bit for bit, from its coarse and fine planes."""
    k = shape[1]
    lead = -(-(SPAN - gcd(k, SPAN)) // k)  # preceding rows in which its span may begin

    def decode(chunk_T: Tensor) -> Tensor:
        return _exact_rows(coarse, fine, fmt, (lead, k), dtype, chunk_T)

    return by_chunks(decode, index_T, (lead + 1) * k)


def _exact_rows(
    coarse: Rows, fine: Rows, fmt: Format, window: tuple[int, int], dtype: torch.dtype, index_T: Tensor
) -> Tensor:
    """Rows [T, K], each from a window of W weights: `lead` preceding rows and itself."""
    lead, k = window
    count, width = len(index_T), WIDTH[dtype]
    if any(field.name == CODED for field in fine.layout.fields):
        return _coded_rows(coarse, fine, fmt, window, index_T)
    rows_TL = (index_T.unsqueeze(1) + torch.arange(-lead, 1, dtype=torch.int64, device=index_T.device)).clamp(min=0)
    codes = coarse_rows(coarse, rows_TL.view(-1))
    wide_TW = wide_codes_in(codes["codes"], k, fmt).reshape(count, -1)
    own = {name: t.view(count, lead + 1, -1)[:, lead] if t.dim() > 1 else t for name, t in codes.items()}
    out_TK = fmt.decode({name: t.contiguous() for name, t in own.items()}, (count, k), dtype)
    starts_T2, inside_TW = _span_of(fine, index_T, window)
    delta_TK = _deltas(fine, index_T, k, width)
    if _length(fine, "side"):
        side_TK = _entries(fine, "side", wide_TW & inside_TW, starts_T2[:, 0], k).to(torch.int16)
        low_TK = (delta_TK & ((1 << width) - 1)) | (side_TK << width)
        delta_TK = torch.where(wide_TW[:, -k:], low_TK, delta_TK)
    if _length(fine, "escapes"):
        in_place_TW = _deltas(fine, rows_TL.view(-1), k, width).view(count, -1)
        escaped_TW = (in_place_TW == -1 << (width - 1)) & ~wide_TW
        escape_TK = _entries(fine, "escapes", escaped_TW & inside_TW, starts_T2[:, 1], k)
        delta_TK = torch.where(escaped_TW[:, -k:], escape_TK, delta_TK)
    return ordinal(delta_TK + ordinal(out_TK.view(torch.int16))).view(dtype)


def _coded_rows(coarse: Rows, fine: Rows, fmt: Format, window: tuple[int, int], index_T: Tensor) -> Tensor:
    """`_exact_rows` from a coded fine plane."""
    lead, k = window
    count = len(index_T)
    rows_TL = (index_T.unsqueeze(1) + torch.arange(-lead, 1, dtype=torch.int64, device=index_T.device)).clamp(min=0)
    rows = rows_TL.view(-1)
    cells = fine.take(CODED, torch.arange(fmt.scale_mantissas, dtype=torch.int64, device=index_T.device))
    symbols = {name: fine.take(name, rows) for name in ("fours", "pairs")} | {CODED: cells}
    part = opened(coarse_rows(coarse, rows), symbols, fmt, k)
    starts_T2, inside_TW = _span_of(fine, index_T, window)
    length_TW = part.length.view(count, -1) * inside_TW
    end_TW = length_TW.cumsum(1) + starts_T2[:, :1]
    at_TK, length_TK = (end_TW - length_TW)[:, -k:], length_TW[:, -k:]
    byte = (at_TK >> 3).reshape(-1)
    low, high = (fine.take("extra", byte + next).to(torch.int32).view_as(at_TK) for next in (0, 1))
    extra_TK = ((low | high << 8) >> (at_TK & 7).to(torch.int32)) & ((1 << length_TK) - 1)
    extra = extra_TK.new_zeros(count, (lead + 1) * k)
    extra[:, -k:] = extra_TK
    words_TK = part.merged(extra.view(-1, k)).view(count, -1)[:, -k:]
    if _length(fine, "escapes"):
        escaped_TW = (part.symbol == 0).view(count, -1)
        escape_TK = _entries(fine, "escapes", escaped_TW & inside_TW, starts_T2[:, 1], k)
        words_TK = torch.where(escaped_TW[:, -k:], escape_TK, words_TK)
    return words_TK.contiguous().view(torch.bfloat16)


def _span_of(fine: Rows, index_T: Tensor, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(list entries before the span of a row's start [T, 2], whether each weight of the window is in or after that span
    [T, W])."""
    lead, k = window
    span_T = index_T * k // SPAN
    before_T = lead * k - (index_T * k - span_T * SPAN)
    place_W = torch.arange((lead + 1) * k, dtype=torch.int64, device=index_T.device)
    return fine.take("starts", span_T).long(), place_W >= before_T.unsqueeze(1)


def _deltas(fine: Rows, rows: Tensor, k: int, width: int) -> Tensor:
    """In-place bits of each weight, sign-extended, int16 [R, K]."""
    delta_RK = fine.take("low", rows).to(torch.int16)
    if width == 12:
        delta_RK = delta_RK | (unpack_codes(fine.take("nibbles", rows), k).to(torch.int16) << 8)
    return (delta_RK << (16 - width)) >> (16 - width)


def _length(plane: Rows, field: str) -> int:
    return next(f.shape[0] for f in plane.layout.fields if f.name == field)


def _entries(fine: Rows, field: str, has_TW: Tensor, start_T: Tensor, k: int) -> Tensor:
    """List entries for weights of the window's last row that have one; arbitrary for the others, [T, K]."""
    own_TK = has_TW[:, -k:]
    start_T = start_T + has_TW[:, :-k].sum(1)
    take = _take_counted if has_TW.is_cpu else _take_for_all
    return take(fine, field, own_TK, start_T)


def _take_for_all(fine: Rows, field: str, has_TK: Tensor, start_T: Tensor) -> Tensor:
    """Gather an entry for every weight, whether it has one or not: avoids a synchronization to count them."""
    entry_TK = torch.where(has_TK, start_T.unsqueeze(1) + has_TK.cumsum(1) - 1, 0)
    return fine.take(field, entry_TK.view(-1)).view_as(entry_TK)


def _take_counted(fine: Rows, field: str, has_TK: Tensor, start_T: Tensor) -> Tensor:
    count_T = has_TK.sum(1)
    first_T = count_T.cumsum(0) - count_T
    rank_E = torch.arange(int(count_T.sum()), dtype=torch.int64, device=has_TK.device)
    entry_E = fine.take(field, rank_E + (start_T - first_T).repeat_interleave(count_T))
    return torch.zeros(has_TK.shape, dtype=entry_E.dtype, device=has_TK.device).masked_scatter_(has_TK, entry_E)
