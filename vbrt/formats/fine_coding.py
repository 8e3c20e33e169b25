"""Coded fine plane: a bf16 fine plane near its entropy, decoded in parallel from any 4096th weight on.

The 4-bit code and the scale byte of a block tell in which cell of bf16 values a weight lies. The *cell* (mantissa of
the scale, code) has an anchor, a bf16 bit pattern that the scale's exponent moves by 128 an octave, so that no level
is decoded to find it. The weight is an offset from its anchor: a *symbol* of 6 bits, in planes of 4 and 2 bits at fixed
places, and up to 7 *extra* bits (as Deflate's lengths are made), in one stream in row-major order. How many follows
from symbol and cell, so a prefix sum over 4096 weights finds every weight's extra bits; no weight waits for another.

An entry of `cells` (int32 [mantissas, 16], chosen by the encoder from a sample) is

    anchor << 16 | signed << 12 | octaves << 11 | more << 9 | step          step = short << more, below 512

and a symbol s with extra bits x means, modulo 2^16,

    bits(w) = anchor + 128 * exponent + (s << length | x) - step * o        length = more + o

with o = 1 for s < short, else 0: truncated binary for a range of up to 126 << more values. In cells that reach down to
zero (`octaves`; more = 2, short = 32) o = 5 - floor(log2 s), and the offset is a little floating-point number: octave o
below the first, and 7 bits within it. `signed` cells have both signs: one extra bit more, the last one, turns it.
Symbol 0 is an escape, and the weight's bits are in the list `escapes`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.errors import FormatError
from vbrt.formats.block_formats import BlockFormat, decode_tile, unpack_codes
from vbrt.formats.format import padded

__all__ = [
    "CODED",
    "MOST_STREAM_BYTES",
    "SPAN",
    "check_coded",
    "choose_cells",
    "code_fine",
    "coded_fields",
    "decode_coded",
    "offsets_in_cells",
    "opened",
    "stream_bytes",
]

#: the field that only coded fine planes have
CODED = "cells"
#: weights, in row-major order, per entry of `starts`
SPAN = 4096
#: `starts` counts bits in int32
MOST_STREAM_BYTES = (1 << 28) - 1
_STREAM_UNIT = 16  # bytes: the stream is a multiple, and that many longer than its bits, since readers load words
_OCTAVE = 128  # bf16 values
_OCTAVES = 6  # that symbols tell apart; 5 in signed cells, so that eight weights have 56 extra bits at most
_ALL = slice(None)
_BINS, _LOWEST = 1024, -768  # offsets that the encoder's histogram tells apart
_TILE_ON_GPU = 1 << 21  # weights coded at a time; the int32 temporaries of some 25 operations take 200 MiB
_SAMPLE = 1 << 18  # weights in the histogram
_TRIMS = (63, 12, 10, 8, 6)  # candidates: a cell may leave out 2^-trim of its weights at each end


# --- cells


def _in_cells(coarse: Mapping[str, Tensor], fmt: BlockFormat, rows: slice) -> tuple[Tensor, Tensor]:
    """(index of each weight's cell, exponent of its scale * 128), int32 [R, Kp]."""
    codes, byte_RB = coarse["codes"][rows], coarse["scales"][rows].view(torch.uint8).to(torch.int32)
    code_RBb = unpack_codes(codes, codes.shape[1] * 2).view(*byte_RB.shape, -1)
    cell_RBb = code_RBb + (byte_RB % fmt.scale_mantissas * 16).unsqueeze(-1)
    shift_RB = byte_RB // fmt.scale_mantissas * _OCTAVE
    return cell_RBb.flatten(1), shift_RB.unsqueeze(-1).expand(cell_RBb.shape).flatten(1)


def _patterns(w_NK: Tensor) -> Tensor:
    return w_NK.contiguous().view(torch.int16).to(torch.int32)


def _wrapped(pattern: Tensor) -> Tensor:
    """int32 of the lower 16 bits, sign-extended."""
    return pattern.to(torch.int16).to(torch.int32)


def _middles(coarse: dict[str, Tensor], fmt: BlockFormat) -> Tensor:
    """Bit patterns of decoded levels at exponent 0, int32 [mantissas * 16]; for level 0 of half the smallest magnitude.
    Does not synchronize."""
    levels, values, unit = fmt.tables(coarse)
    least = levels.abs().masked_fill(levels == 0, float("inf")).amin() / 2
    levels = torch.where(levels == 0, least.copysign(levels), levels)
    mantissas = torch.arange(fmt.scale_mantissas, dtype=torch.int64, device=levels.device)
    # where results are normal: an octave below the largest scale
    exponent = (coarse["scales"].view(torch.uint8).amax().long() // fmt.scale_mantissas - 1).clamp(min=1)
    scale_M = values[(exponent * fmt.scale_mantissas + mantissas).clamp(max=255)] * unit
    pattern = _patterns((scale_M.unsqueeze(1) * levels).bfloat16())
    return (pattern - _OCTAVE * exponent.to(torch.int32)).view(-1)


def offsets_in_cells(w_NK: Tensor, coarse: dict[str, Tensor], fmt: BlockFormat) -> tuple[Tensor, Tensor]:
    """Cell of each weight, int32 [N, K], and its bit pattern's offset from the cell's decoded level, modulo 2^16."""
    cell, shift = (t[:, : w_NK.shape[1]] for t in _in_cells(coarse, fmt, slice(None)))
    return cell, _wrapped(_patterns(w_NK) - _middles(coarse, fmt)[cell] - shift)


def choose_cells(w_NK: Tensor, coarse: dict[str, Tensor], fmt: BlockFormat) -> Tensor:
    """Return the cells, int32 [mantissas, 16], that take the fewest bits on a sample of rows."""
    n, k = w_NK.shape
    step = min(n, max(1, n * k // _SAMPLE))
    sample = {name: t[::step] if t.dim() == 2 else t for name, t in coarse.items()}
    middles = _middles(coarse, fmt)
    cell, shift = (t[:, :k] for t in _in_cells(sample, fmt, slice(None)))
    offset = _patterns(w_NK[::step]) - middles[cell] - shift
    turned = ((offset + (1 << 14)) >> 15) & 1  # the other sign
    place = (_wrapped(offset - (turned << 15)) - _LOWEST).clamp_(0, _BINS - 1)
    histogram = torch.bincount((cell * _BINS + place).view(-1), minlength=len(middles) * _BINS).view(-1, _BINS)
    others = torch.bincount(cell[turned == 1], minlength=len(middles))
    if fmt.record.kernels == "e2m1":  # codes 8 to 15 are codes 0 to 7 with a sign: so are cells
        histogram, others = (t.view(-1, 2, 8, *t.shape[1:]).sum(1, keepdim=True) for t in (histogram, others))
        histogram, others = (t.expand(-1, 2, *t.shape[2:]).flatten(0, 2) for t in (histogram, others))
    return _least_bits(histogram, others, middles).view(-1, 16)


def _least_bits(histogram: Tensor, turned: Tensor, middles: Tensor) -> Tensor:
    """Return cells int32 [C] for counts of offsets int64 [C, bins], and of the weights of them with the other sign."""
    before = F.pad(histogram.cumsum(1), (1, 0))
    total, ends = before[:, -1:], before[:, 1:].contiguous()

    def below(edge: Tensor) -> Tensor:
        return before.gather(1, edge.clamp(0, _BINS))

    left_out = total >> torch.tensor(_TRIMS, dtype=torch.int64, device=histogram.device)
    first = torch.searchsorted(ends, left_out, right=True).clamp_(max=_BINS - 1)
    last = torch.maximum(first, torch.searchsorted(ends, total - left_out).clamp_(max=_BINS - 1))

    # a range from `first` on: symbols 1 to short - 1 with one bit more, then short to 63
    count = last - first + 1
    more = (count > 125).long() + (count > 250) + (count > 500)
    short = (((count + (1 << more) - 1) >> more) - 62).clamp_(1, 63)
    step = short << more
    middle, end = first + ((short - 1) << (more + 1)), first + ((62 + short) << more)
    inside = below(end) - below(first)
    range_cost = inside * more + below(middle) - below(first) + (total - inside) * 16
    ranges = _packed(middles, first + _LOWEST + step - (2 << more), step, more)

    # octaves down from `last`
    signed = (turned * 8 > total[:, 0]).unsqueeze(1)
    counts = [below(last + 1 - _OCTAVE * o) - below(last + 1 - _OCTAVE * (o + 1)) for o in range(_OCTAVES)]
    counts[-1] = counts[-1].masked_fill(signed, 0)
    found = sum(counts)
    octave_cost = sum(c * (2 + o) for o, c in enumerate(counts)) + (total - found) * 16 + found * signed
    octaves = _packed(middles, last + _LOWEST - 255, torch.full_like(last, 128), 2 + 4 + 8 * signed.long())

    entries = torch.cat((ranges, octaves), 1)
    costs = torch.cat((range_cost.masked_fill(signed, 1 << 60), octave_cost), 1)
    return entries.gather(1, _first_least(costs).unsqueeze(1)).squeeze(1)


def _first_least(costs: Tensor) -> Tensor:
    """The first of the least costs in each row: argmin says which one on no device."""
    place = torch.arange(costs.shape[1], dtype=torch.int64, device=costs.device)
    return torch.where(costs == costs.amin(1, keepdim=True), place, costs.shape[1]).amin(1)


def _packed(middles: Tensor, first: Tensor, step: Tensor, kind: Tensor) -> Tensor:
    anchor = _wrapped(middles.unsqueeze(1) + first)
    return (anchor << 16) | (kind << 9).to(torch.int32) | step.to(torch.int32)


class _Cells(NamedTuple):
    """Cells of weights, int32 each."""

    anchor: Tensor
    signed: Tensor
    octaves: Tensor
    more: Tensor
    step: Tensor

    @classmethod
    def of(cls, entry: Tensor, shift: Tensor) -> "_Cells":
        return cls((entry >> 16) + shift, (entry >> 12) & 1, (entry >> 11) & 1, (entry >> 9) & 3, entry & 511)


def _octave(symbol: Tensor) -> Tensor:
    return sum((symbol < 32 >> o).to(torch.int32) for o in range(_OCTAVES - 1))


def _steps(symbol: Tensor, cells: _Cells) -> tuple[Tensor, Tensor]:
    """(o, extra bits) of each symbol, int32."""
    o = torch.where(cells.octaves == 1, _octave(symbol), (symbol << cells.more) < cells.step).to(torch.int32)
    return o, torch.where(symbol == 0, 0, cells.more + o + cells.signed)


def _symbols(pattern: Tensor, cells: _Cells) -> tuple[Tensor, Tensor, Tensor]:
    """(symbol, extra bits, how many) of weights, int32."""
    offset = _wrapped(pattern - cells.anchor)
    turned = cells.signed * (((offset + (1 << 14)) >> 15) & 1)
    offset = _wrapped(offset - (turned << 15))
    o_range = (offset < cells.step).to(torch.int32)
    o_octave = (255 - offset).clamp(min=0) >> 7
    o = torch.where(cells.octaves == 1, o_octave, o_range)
    places = offset + cells.step * o
    length = cells.more + o.clamp(max=_OCTAVES)
    symbol = places >> length
    fits = (symbol > 0) & (symbol < 64) & (o < _OCTAVES - cells.signed)
    symbol, length = torch.where(fits, symbol, 0), torch.where(fits, length, 0)
    extra, signed = places & ((1 << length) - 1), cells.signed * fits
    return symbol, torch.where(signed == 1, extra << 1 | turned, extra), length + signed


def _weights(symbol: Tensor, extra: Tensor, o: Tensor, length: Tensor, cells: _Cells) -> Tensor:
    """Bit patterns, int16, of weights that are no escapes."""
    places = ((symbol << length) | extra) >> cells.signed
    word = cells.anchor + places - cells.step * o
    return (word ^ ((cells.signed & extra & 1) << 15)).to(torch.int16)


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


def stream_bytes(bits: int) -> int:
    """Bytes of a stream of so many bits."""
    return padded(bits // 8 + 1, _STREAM_UNIT) + _STREAM_UNIT


def _tiles(n: int, kp: int, device: torch.device) -> list[slice]:
    weights = decode_tile(device) // 2 if device.type == "cpu" else _TILE_ON_GPU
    step = max(1, weights // kp)
    return [slice(first, min(first + step, n)) for first in range(0, n, step)]


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
    parts, escapes, tail = [], [], torch.zeros(1, dtype=torch.int32, device=device)
    first = bit = whole = 0
    for rows in _tiles(n, kp, device):
        cell, shift = (t[:, :k] for t in _in_cells(coarse, fmt, rows))
        pattern = _patterns(w_NK[rows])
        symbol, extra, length = _symbols(pattern, _Cells.of(cells.view(-1)[cell], shift))
        escaped = symbol == 0
        escapes.append(pattern[escaped].to(torch.int16))
        last = first + length.numel()
        counts[0, first:last], counts[1, first:last] = length.view(-1), escaped.view(-1)
        fours[rows], pairs[rows] = _packed_symbols(F.pad(symbol, (0, kp - k)).to(torch.uint8))
        end = bit % 8 + length.view(-1).cumsum(0)
        at = end - length.view(-1)
        bit += int(end[-1]) - bit % 8
        stream = torch.zeros(int(end[-1]) // 8 + 2, dtype=torch.int32, device=device)
        word = extra.view(-1) << (at & 7).to(torch.int32)
        stream.index_add_(0, at >> 3, word & 255)  # bits do not overlap: sums are unions
        stream.index_add_(0, (at >> 3) + 1, word >> 8)
        stream[:1] += tail  # the byte that two tiles share
        parts.append(stream[: bit // 8 - whole].to(torch.uint8))
        tail, first, whole = stream[bit // 8 - whole :][:1], last, bit // 8
    parts += [tail.to(torch.uint8), torch.zeros(stream_bytes(bit) - whole - 1, dtype=torch.uint8, device=device)]
    starts, _ = _starts(counts)
    return {"fours": fours, "pairs": pairs, "extra": torch.cat(parts), "escapes": torch.cat(escapes),
            "starts": starts, CODED: cells}  # fmt: skip


def _packed_symbols(symbol: Tensor) -> tuple[Tensor, Tensor]:
    high, low = symbol >> 2, symbol & 3
    return high[:, 0::2] | high[:, 1::2] << 4, low[:, 0::4] | low[:, 1::4] << 2 | low[:, 2::4] << 4 | low[:, 3::4] << 6


def _symbols_in(fours: Tensor, pairs: Tensor, k: int) -> Tensor:
    """Symbols, int32 [R, K]."""
    low = torch.stack([(pairs >> shift) & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)[:, :k]
    return unpack_codes(fours, k).to(torch.int32) << 2 | low


@torch.no_grad()
def decode_coded(
    coarse: dict[str, Tensor], fine: dict[str, Tensor], fmt: BlockFormat, shape: tuple[int, int]
) -> Tensor:
    """The original weight, bf16 [N, K], bit for bit. Synchronizes on a GPU."""
    n, k = shape
    out = torch.empty(n, k, dtype=torch.int16, device=fine["fours"].device)
    bit = escape = 0
    for rows in _tiles(n, padded(k, fmt.block), out.device):
        part = opened(coarse, fine, fmt, k, rows)
        end = part.length.view(-1).cumsum(0)
        extra = _bits_at(fine["extra"], bit + (end - part.length.view(-1)).view_as(part.length), part.length)
        words, escaped = part.merged(extra), part.symbol == 0
        count = int(escaped.sum())
        words[escaped] = fine["escapes"][escape : escape + count]
        out[rows] = words
        bit, escape = bit + int(end[-1]), escape + count
    return out.view(torch.bfloat16)


class Opened(NamedTuple):
    """Symbols [R, K] of some rows: all but the extra bits, `length` of them each, and the escapes, which are 0."""

    symbol: Tensor
    o: Tensor
    length: Tensor
    cells: _Cells

    def merged(self, extra: Tensor) -> Tensor:
        """Bit patterns of the weights, int16; anything for escapes."""
        return _weights(self.symbol, extra, self.o, self.length, self.cells)


def opened(
    coarse: Mapping[str, Tensor], fine: Mapping[str, Tensor], fmt: BlockFormat, k: int, rows: slice = _ALL
) -> Opened:
    """Return the symbols of rows of a weight with k columns."""
    symbol = _symbols_in(fine["fours"][rows], fine["pairs"][rows], k)
    cell, shift = (t[:, :k] for t in _in_cells(coarse, fmt, rows))
    cells = _Cells.of(fine[CODED].view(-1)[cell], shift)
    return Opened(symbol, *_steps(symbol, cells), cells)


@torch.no_grad()
def check_coded(coarse: dict[str, Tensor], fine: dict[str, Tensor], fmt: BlockFormat, shape: tuple[int, int]) -> None:
    """Validate planes from untrusted sources: kernels index by `starts` without bounds checks.

    Raises FormatError if the stream, the list or `starts` do not match the symbols.
    """
    n, k = shape
    counts = torch.zeros(2, padded(n * k, SPAN), dtype=torch.uint8, device=fine["fours"].device)
    first = 0
    for rows in _tiles(n, padded(k, fmt.block), counts.device):
        part = opened(coarse, fine, fmt, k, rows)
        last = first + part.length.numel()
        counts[0, first:last], counts[1, first:last] = part.length.view(-1), (part.symbol == 0).view(-1)
        first = last
    starts, (bits, escapes) = _starts(counts)
    same = torch.equal(fine["starts"], starts) and int(counts[0].max()) < 8
    if not same or (len(fine["extra"]), len(fine["escapes"])) != (stream_bytes(bits), escapes):
        raise FormatError(
            f"fine plane: a stream of {len(fine['extra'])} bytes and {len(fine['escapes'])} escapes, or `starts`, "
            f"that do not go with its symbols, which have {bits} extra bits and {escapes} escapes"
        )


def _starts(counts: Tensor) -> tuple[Tensor, list[int]]:
    """(`starts`, totals) from extra bits and escapes of each weight, uint8 [2, whole spans]."""
    sums = counts.view(2, -1, SPAN).sum(-1, dtype=torch.int64)
    return (sums.cumsum(1) - sums).to(torch.int32).t().contiguous(), sums.sum(1).tolist()


def _bits_at(stream: Tensor, at: Tensor, length: Tensor) -> Tensor:
    """`length` bits of a stream from bit `at` on, int32."""
    byte = at >> 3
    word = stream[byte].to(torch.int32) | stream[byte + 1].to(torch.int32) << 8
    return (word >> (at & 7).to(torch.int32)) & ((1 << length) - 1)
