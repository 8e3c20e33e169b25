"""Coded fine plane: a bf16 fine plane near its entropy, decoded in parallel from any 4096th weight on.

The 4-bit code and the scale's mantissa of a block tell in which cell of bf16 values a weight lies. Within its cell a
weight is an offset of its magnitude's bit pattern from an anchor, the decoded level, or half the smallest level for
level 0. An offset is a *symbol* of 6 bits, in planes of 4 and 2 bits at fixed places, and up to 7 *extra* bits (as
Deflate's lengths are), in one stream in row-major order. How many follows from the symbol and the cell, so a prefix sum
over 4096 weights finds every weight's extra bits; no weight waits for another one to be decoded.

Cells (`cells`, int32 [scale mantissas, 16], chosen by the encoder from a sample): first offset << 16 | kind << 10 |
extra bits << 8 | short symbols.

| kind | offset |
| --- | --- |
| 0, a range | truncated binary: symbols below `short` have `extra bits`, others one more |
| 1, down to zero | octaves of 128 values below the first offset: a symbol with o leading ones has 2 + o extra bits |
| 2, both signs | the same under a symbol's lowest 5 bits, with one extra bit more; the highest one turns the sign |

Symbol 63 is an escape, and the weight's bits are in the list `escapes`; in kinds 1 and 2 the one below it is zero.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.formats.block_formats import BlockFormat, decode_tile, unpack_codes
from vbrt.formats.format import padded

__all__ = ["CODED", "anchors", "cell_of", "code_fine", "coded_fields", "decode_coded", "lengths"]

#: the field that only coded fine planes have
CODED = "cells"
SPAN = 4096
ESCAPE = 63
STREAM_SLACK = 16  # bytes behind the stream that a reader may load
_OCTAVES = 5
_BINS, _LOWEST = 1024, -768  # offsets that the encoder's histogram tells apart
_SAMPLE = 1 << 20  # weights in the histogram
_TRIMS = (63, 12, 10, 8, 6)  # candidates: a cell may leave out 2^-trim of its weights at each end
_MAGNITUDE = 0x7FFF


def anchors(fmt: BlockFormat, coarse: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return levels fp32 [16] with an anchor for each level 0, values of scale bytes fp32 [256], the unit [1]."""
    levels, values, unit = fmt.tables(coarse)
    least = levels.abs().masked_fill(levels == 0, float("inf")).amin() / 2
    return torch.where(levels == 0, least.copysign(levels), levels), values, unit


def cell_of(coarse: dict[str, Tensor], fmt: BlockFormat, rows: slice) -> Tensor:
    """Index of each weight's cell, int64 [R, Kp]: mantissa of its scale * 16 + code."""
    codes = coarse["codes"][rows]
    code_RK = unpack_codes(codes, codes.shape[1] * 2)
    mantissa_RB = coarse["scales"][rows].view(torch.uint8) % fmt.scale_mantissas
    return (code_RK.view(*mantissa_RB.shape, -1) + mantissa_RB.unsqueeze(-1) * 16).flatten(1).long()


def _anchor_bits(coarse: dict[str, Tensor], fmt: BlockFormat, rows: slice) -> Tensor:
    """bf16 bit patterns of anchors, int32 [R, Kp], the sign in all upper bits."""
    levels, values, unit = anchors(fmt, coarse)
    codes = coarse["codes"][rows]
    code_RK = unpack_codes(codes, codes.shape[1] * 2).to(torch.int32)
    scale_RB = values.index_select(0, coarse["scales"][rows].view(torch.uint8).reshape(-1).to(torch.int32)) * unit
    level_RK = levels.index_select(0, code_RK.view(-1)).view(*coarse["scales"][rows].shape, -1)
    near_RK = level_RK * scale_RB.view(*coarse["scales"][rows].shape, 1)
    return near_RK.bfloat16().flatten(1).view(torch.int16).to(torch.int32)


def _tiles(n: int, kp: int, device: torch.device) -> list[slice]:
    step = max(1, decode_tile(device) // 2 // kp)
    return [slice(first, min(first + step, n)) for first in range(0, n, step)]


# --- cells


def offsets_in_cells(w_NK: Tensor, coarse: dict[str, Tensor], fmt: BlockFormat) -> tuple[Tensor, Tensor]:
    """Cell and offset of each weight, int64 [N, K]; the offset's bit 16 says that its sign is not its anchor's."""
    k = w_NK.shape[1]
    near = _anchor_bits(coarse, fmt, slice(None))[:, :k]
    bits = w_NK.contiguous().view(torch.int16).to(torch.int32)
    offset = (bits & _MAGNITUDE) - (near & _MAGNITUDE) + (1 << 15)
    return cell_of(coarse, fmt, slice(None))[:, :k], (offset + (((bits ^ near) < 0).to(torch.int32) << 16)).long()


def choose_cells(w_NK: Tensor, coarse: dict[str, Tensor], fmt: BlockFormat) -> Tensor:
    """Return the cells, int32 [mantissas, 16], that take the fewest bits on a sample of rows."""
    n, k = w_NK.shape
    step = min(n, max(1, n * k // _SAMPLE))
    picked = {name: t[::step].contiguous() if t.dim() == 2 else t for name, t in coarse.items()}
    bits_RK = w_NK[::step].contiguous().view(torch.int16).to(torch.int32)
    near_RK = _anchor_bits(picked, fmt, slice(None))[:, :k]
    cell_RK = cell_of(picked, fmt, slice(None))[:, :k]
    count = fmt.scale_mantissas * 16
    offset_RK = (bits_RK & _MAGNITUDE) - (near_RK & _MAGNITUDE)
    bin_RK = (offset_RK - _LOWEST).clamp_(0, _BINS - 1) + cell_RK * _BINS
    turned_RK = (bits_RK ^ near_RK) < 0
    some_RK = (bits_RK & _MAGNITUDE) != 0  # zeros have symbols of their own
    histogram = torch.bincount(bin_RK[some_RK], minlength=count * _BINS).view(count, _BINS)
    turned = torch.bincount(cell_RK[turned_RK & some_RK], minlength=count)
    return cells_of(histogram, turned).view(-1, 16)


def cells_of(histogram: Tensor, turned: Tensor) -> Tensor:
    """Return cells int32 [C] for counts of offsets int64 [C, bins] and of weights of the anchor's other sign [C]."""
    before = F.pad(histogram.cumsum(1), (1, 0))
    total = before[:, -1:]

    def below(edge: Tensor) -> Tensor:
        return before.gather(1, edge.clamp(0, _BINS))

    trims = torch.tensor(_TRIMS, dtype=torch.int64, device=histogram.device)
    left_out = total >> trims
    first = torch.searchsorted(before[:, 1:].contiguous(), left_out, right=True).clamp_(max=_BINS - 1)
    last = torch.searchsorted(before[:, 1:].contiguous(), total - left_out).clamp_(max=_BINS - 1)
    last = torch.maximum(first, last)

    n = last - first + 1
    extra = (n > 126).long() + (n > 252) + (n > 504)
    short = (126 - ((n + (1 << extra) - 1) >> extra)).clamp_(0, 63)
    middle, end = first + (short << extra), first + ((126 - short) << extra)
    inside = below(end) - below(first)
    cost = inside * (extra + 1) - (below(middle) - below(first)) + (total - inside) * 16
    ranges = _cells(first + _LOWEST, torch.zeros_like(first), extra, short)

    counts = [below(last + 1 - 128 * o) - below(last + 1 - 128 * (o + 1)) for o in range(_OCTAVES)]
    octaves = sum(c * (2 + o) for o, c in enumerate(counts)) + (total - sum(counts)) * 16
    both = (turned * 8 > total[:, 0]).unsqueeze(1)
    octaves = torch.where(both, octaves + sum(counts), octaves)
    cost = torch.where(both, 1 << 60, cost)
    down = _cells(last + _LOWEST, 1 + both.long(), torch.zeros_like(last), torch.zeros_like(last))

    every, costs = torch.cat((ranges, down), 1), torch.cat((cost, octaves), 1)
    chosen = every.gather(1, _first_least(costs).unsqueeze(1)).squeeze(1)
    return torch.where(total[:, 0] == 0, ESCAPE, chosen).to(torch.int32)


def _first_least(costs: Tensor) -> Tensor:
    """The first of the least costs in each row: argmin says which one on no device."""
    place = torch.arange(costs.shape[1], dtype=torch.int64, device=costs.device)
    return torch.where(costs == costs.amin(1, keepdim=True), place, costs.shape[1]).amin(1)


def _cells(first: Tensor, kind: Tensor, extra: Tensor, short: Tensor) -> Tensor:
    return (first << 16) | (kind << 10) | (extra << 8) | short


class Cell(NamedTuple):
    """Cells of weights, int32 each."""

    first: Tensor
    kind: Tensor
    extra: Tensor
    short: Tensor

    @classmethod
    def of(cls, entry: Tensor) -> "Cell":
        """Take entries of `cells` apart."""
        return cls(entry >> 16, (entry >> 10) & 3, (entry >> 8) & 3, entry & 255)


def _octave(symbol: Tensor, kind: Tensor) -> Tensor:
    """Leading ones of a symbol of kind 1 or 2, 0 to 4."""
    of_six = torch.where(kind == 2, symbol << 1, symbol) & 63
    return sum((of_six >= 64 - (64 >> o)).to(torch.int32) for o in range(1, _OCTAVES))


def _is_zero(symbol: Tensor, kind: Tensor) -> Tensor:
    return ((kind == 1) & (symbol == 62)) | ((kind == 2) & (symbol == 31))


def lengths(symbol: Tensor, cell: Cell) -> Tensor:
    """Return the number of extra bits of each weight, int32."""
    plain = cell.extra + (symbol >= cell.short)
    octaves = cell.kind + 1 + _octave(symbol, cell.kind)
    none = (symbol == ESCAPE) | _is_zero(symbol, cell.kind)
    return torch.where(none, 0, torch.where(cell.kind == 0, plain, octaves)).to(torch.int32)


def _offsets(symbol: Tensor, extra: Tensor, length: Tensor, cell: Cell) -> Tensor:
    """Offset of a magnitude from its anchor's, for symbols that are neither escapes nor zeros."""
    plain = (symbol << length) + extra - torch.where(symbol >= cell.short, cell.short << cell.extra, 0)
    octave, own = _octave(symbol, cell.kind), torch.where(cell.kind == 2, symbol & 31, symbol)
    down = (own << length) + extra + 256 + 128 * octave - (256 << octave)
    return cell.first + torch.where(cell.kind == 0, plain, -down)


def _symbols(bits: Tensor, near: Tensor, cell: Cell) -> tuple[Tensor, Tensor, Tensor]:
    """(symbol, extra bits, whether it is an escape) of weights."""
    offset = (bits & _MAGNITUDE) - (near & _MAGNITUDE)
    turned = (bits ^ near) < 0
    range_ = cell.kind == 0

    r = offset - cell.first
    long = r >= cell.short << cell.extra
    r_long = r + torch.where(long, cell.short << cell.extra, 0)
    length = cell.extra + long
    plain, plain_extra = r_long >> length, r_long & ((1 << length) - 1)
    plain_out = (r < 0) | (plain >= ESCAPE) | turned

    d = -r
    octave = (d >> 7).clamp(0, _OCTAVES - 1)
    d_in = d - 256 - 128 * octave + (256 << octave)
    length = 1 + cell.kind + octave
    down, down_extra = d_in >> length, d_in & ((1 << length) - 1)
    down_out = (d < 0) | (d >= 128 * _OCTAVES) | (turned & (cell.kind == 1))
    zero = (bits & _MAGNITUDE) == 0
    zero = zero & ~(turned & ~range_)  # of the anchor's sign
    down = torch.where(cell.kind == 2, down | (turned << 5), down)
    down = torch.where(zero, torch.where(cell.kind == 2, 31, 62), down)
    down_extra = torch.where(zero, 0, down_extra)

    escaped = torch.where(range_, plain_out, down_out & ~zero)
    symbol = torch.where(escaped, ESCAPE, torch.where(range_, plain, down))
    return symbol, torch.where(escaped, 0, torch.where(range_, plain_extra, down_extra)), escaped


# --- planes


def coded_fields(shape: tuple[int, int], fmt: BlockFormat) -> dict[str, tuple[str, tuple[int | None, ...]]]:
    """Name -> dtype and shape of `code_fine`'s tensors; None for the lengths of the stream and the list."""
    (n, k), kp = shape, padded(shape[1], fmt.block)
    return {
        "fours": ("uint8", (n, kp // 2)),
        "pairs": ("uint8", (n, kp // 4)),
        "extra": ("uint8", (None,)),
        "escapes": ("int16", (None,)),
        "starts": ("int32", (-(-n * k // SPAN), 2)),
        CODED: ("int32", (fmt.scale_mantissas, 16)),
    }


@torch.no_grad()
def code_fine(w_NK: Tensor, coarse: dict[str, Tensor], fmt: BlockFormat) -> dict[str, Tensor]:
    """The coded fine plane of a finite bf16 weight [N, K]; fields: `coded_fields`. `starts`: extra bits and escapes
    before each span of 4096 weights."""
    (n, k), device = w_NK.shape, w_NK.device
    kp = padded(k, fmt.block)
    cells = choose_cells(w_NK, coarse, fmt)
    fours = torch.empty(n, kp // 2, dtype=torch.uint8, device=device)
    pairs = torch.empty(n, kp // 4, dtype=torch.uint8, device=device)
    counts = torch.zeros(2, padded(n * k, SPAN), dtype=torch.uint8, device=device)
    parts, escapes, tail, first = [], [], torch.zeros(1, dtype=torch.int32, device=device), 0
    bit = 0
    for rows in _tiles(n, kp, device):
        near = _anchor_bits(coarse, fmt, rows)[:, :k]
        cell = Cell.of(cells.view(-1)[cell_of(coarse, fmt, rows)[:, :k]])
        bits = w_NK[rows].contiguous().view(torch.int16)
        symbol, extra, escaped = _symbols(bits.to(torch.int32), near, cell)
        length = lengths(symbol, cell)
        symbol = F.pad(symbol, (0, kp - k)).to(torch.uint8)
        fours[rows] = (symbol[:, 0::2] >> 2) | ((symbol[:, 1::2] >> 2) << 4)
        two = symbol & 3
        pairs[rows] = two[:, 0::4] | two[:, 1::4] << 2 | two[:, 2::4] << 4 | two[:, 3::4] << 6
        last = first + length.numel()
        counts[0, first:last], counts[1, first:last] = length.view(-1), escaped.view(-1)
        escapes.append(bits[escaped])
        # the stream: bytes that two tiles share are added up
        end = bit % 8 + length.view(-1).cumsum(0)
        at = end - length.view(-1)
        size = (int(end[-1]) + 7) // 8 if len(end) else 0
        stream = torch.zeros(size + 2, dtype=torch.int32, device=device)
        word = extra.view(-1) << (at & 7).to(torch.int32)
        stream.index_add_(0, at >> 3, word & 255)
        stream.index_add_(0, (at >> 3) + 1, word >> 8)
        stream[:1] += tail
        bit += int(end[-1]) - bit % 8
        whole = bit // 8 - sum(len(part) for part in parts)
        parts.append(stream[:whole].to(torch.uint8))
        tail, first = stream[whole : whole + 1], last
    parts += [tail.to(torch.uint8), torch.zeros(STREAM_SLACK, dtype=torch.uint8, device=device)]
    sums = counts.view(2, -1, SPAN).sum(-1, dtype=torch.int64)
    starts = (sums.cumsum(1) - sums).to(torch.int32).t().contiguous()
    return {"fours": fours, "pairs": pairs, "extra": torch.cat(parts), "escapes": torch.cat(escapes),
            "starts": starts, CODED: cells}  # fmt: skip


@torch.no_grad()
def decode_coded(coarse: dict[str, Tensor], fine: dict[str, Tensor], fmt: BlockFormat, shape: tuple[int, int]) -> Tensor:
    """The original weight, bf16 [N, K], bit for bit."""
    n, k = shape
    out = torch.empty(n, k, dtype=torch.int16, device=fine["fours"].device)
    stream = fine["extra"].to(torch.int32)
    bit = escape = 0
    for rows in _tiles(n, padded(k, fmt.block), out.device):
        symbol = symbols_of(fine["fours"][rows], fine["pairs"][rows], k)
        cell = Cell.of(fine[CODED].view(-1)[cell_of(coarse, fmt, rows)[:, :k]])
        length = lengths(symbol, cell)
        end = bit + length.view(-1).cumsum(0)
        at = (end - length.view(-1)).view_as(length)
        extra = ((stream[at >> 3] | stream[(at >> 3) + 1] << 8) >> (at & 7).to(torch.int32)) & ((1 << length) - 1)
        near = _anchor_bits(coarse, fmt, rows)[:, :k]
        words = merged_words(near, symbol, extra, length, cell)
        escaped = symbol == ESCAPE
        count = int(escaped.sum())
        words[escaped] = fine["escapes"][escape : escape + count]
        out[rows] = words
        bit, escape = int(end[-1]), escape + count
    return out.view(torch.bfloat16)


def symbols_of(fours: Tensor, pairs: Tensor, k: int) -> Tensor:
    """Symbols, int32 [R, K]."""
    high = unpack_codes(fours, k).to(torch.int32)
    low = torch.stack([(pairs >> shift) & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)[:, :k]
    return high << 2 | low


def merged_words(near: Tensor, symbol: Tensor, extra: Tensor, length: Tensor, cell: Cell) -> Tensor:
    """Bit patterns of weights that are no escapes, int16."""
    word = (near & _MAGNITUDE) + _offsets(symbol, extra, length, cell)
    word = torch.where(_is_zero(symbol, cell.kind), 0, word)
    turned = (cell.kind == 2) & (symbol >= 32)
    return (word | ((near < 0) ^ turned).to(torch.int32) << 15).to(torch.int16)
