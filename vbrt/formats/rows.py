"""Decodes some rows of a weight from its planes, for lookups in a table: pure tensor functions.

The cost, in weights that are read and decoded for each row asked for, K a row's length: `dense` and the 4-bit planes
K; tiles, which hold 16 rows, 16 K; a fine plane K and the weights between the row and the beginning of its span of
4096 in the lists (`starts` knows where a span's entries begin), in whole rows: none where K is a multiple of 4096, K
for 2048, 6 K for 768.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from vbrt.formats.base import Format
from vbrt.formats.blocks import unpack_codes
from vbrt.formats.fine import SPAN, WIDTH, ordinal, wide_codes_in
from vbrt.formats.page import PageLayout

__all__ = ["Rows", "coarse_rows", "exact_rows", "row_chunks"]

_CHUNK_WEIGHTS = 1 << 22  # decoded at a time: bounds the temporaries


@dataclass(frozen=True, slots=True)
class Rows:
    """A plane, some of whose fields' rows can be had.

    Attributes:
        layout: of the plane's page.
        take: (field, indices int64 [n]) -> the field's entries [n, ...] at those indices along its first dimension.
    """

    layout: PageLayout
    take: Callable[[str, Tensor], Tensor]

    def whole(self, field: str, length: int, device: torch.device) -> Tensor:
        """Return all entries of a field."""
        return self.take(field, torch.arange(length, dtype=torch.int64, device=device))


def row_chunks(index_T: Tensor, weights_a_row: int) -> Iterator[Tensor]:
    """Yield parts of the indices, few enough that their rows' temporaries stay small."""
    return iter(index_T.split(max(1, _CHUNK_WEIGHTS // max(1, weights_a_row))))


def coarse_rows(plane: Rows, index_T: Tensor) -> dict[str, Tensor]:
    """Return the fields of a plane with only the entries `index_T` of those that have one for each row (or tile row);
    fields of one dimension, such as a tensor scale or a codebook, are whole."""
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
    """Return rows [T, K] of the original weight (N, K), bit for bit, from its coarse and its fine plane."""
    k = shape[1]
    lead = -(-(SPAN - gcd(k, SPAN)) // k)  # rows before each that its span may begin in
    chunks = row_chunks(index_T, (lead + 1) * k)
    return torch.cat([_exact_rows(coarse, fine, fmt, (lead, k), dtype, chunk) for chunk in chunks])


def _exact_rows(
    coarse: Rows, fine: Rows, fmt: Format, window: tuple[int, int], dtype: torch.dtype, index_T: Tensor
) -> Tensor:
    lead, k = window
    count, device = len(index_T), index_T.device
    rows_TL = (index_T.unsqueeze(1) + torch.arange(-lead, 1, dtype=torch.int64, device=device)).clamp(min=0)
    codes = coarse_rows(coarse, rows_TL.view(-1))
    wide_TW = wide_codes_in(codes["codes"], k, fmt).reshape(count, -1)
    delta_TW = _deltas(fine, rows_TL.view(-1), k, WIDTH[dtype]).view(count, -1)
    escaped_TW = (delta_TW == -1 << (WIDTH[dtype] - 1)) & ~wide_TW
    first_T = index_T * k
    span_T = first_T // SPAN
    before_T = lead * k - (first_T - span_T * SPAN)  # where the span begins in the window
    inside_TW = torch.arange(wide_TW.shape[1], dtype=torch.int64, device=device) >= before_T.unsqueeze(1)
    starts_T2 = fine.take("starts", span_T).long()
    side_TK = _entries(fine, "side", wide_TW & inside_TW, starts_T2[:, 0], k)
    escapes_TK = _entries(fine, "escapes", escaped_TW & inside_TW, starts_T2[:, 1], k)
    delta_TK, wide_TK, escaped_TK = (t[:, lead * k :] for t in (delta_TW, wide_TW, escaped_TW))
    low = (1 << WIDTH[dtype]) - 1
    delta_TK = torch.where(wide_TK, (delta_TK & low) | (side_TK.to(torch.int16) << WIDTH[dtype]), delta_TK)
    delta_TK = torch.where(escaped_TK, escapes_TK.to(torch.int16), delta_TK)
    own = {name: t.view(count, lead + 1, -1)[:, lead] if t.dim() > 1 else t for name, t in codes.items()}
    out = fmt.decode({name: t.contiguous() for name, t in own.items()}, (count, k), dtype)
    return ordinal(delta_TK + ordinal(out.view(torch.int16))).view(dtype)


def _deltas(fine: Rows, rows: Tensor, k: int, width: int) -> Tensor:
    """int16 [R, K]: the bits that each weight keeps in place, with their sign."""
    delta_RK = fine.take("low", rows).to(torch.int16)
    if width == 12:
        delta_RK = delta_RK | (unpack_codes(fine.take("nibbles", rows), k).to(torch.int16) << 8)
    return (delta_RK << (16 - width)) >> (16 - width)


def _entries(fine: Rows, field: str, has_TW: Tensor, start_T: Tensor, k: int) -> Tensor:
    """[T, K]: the list's entry for each weight of the window's last row that has one; anything for the others."""
    entry_TK = (start_T.unsqueeze(1) + has_TW.cumsum(1) - 1)[:, -k:]
    length = next(f.shape[0] for f in fine.layout.fields if f.name == field)
    if not length:
        return torch.zeros_like(entry_TK)
    entry_TK = torch.where(has_TW[:, -k:], entry_TK, 0)
    return fine.take(field, entry_TK.reshape(-1)).view_as(entry_TK)
