"""Triton kernels that merge coded fine planes (`formats/fine_coding.py`). Importing this needs Triton; plain operations
only, so that its interpreter runs them.

A thread has whole groups of 8 weights: their codes and symbols are one word, one word and a half, and their extra bits,
56 at most, lie in a window of 64 bits. A decoded level is not needed; a cell of the table has the bit pattern.
"""

import triton
import triton.language as tl

from vbrt.kernels.cuda.fine.merge_triton import load_inside
from vbrt.kernels.cuda.plain.linear_triton import pointer_of

__all__ = ["coded_experts_kernel", "coded_kernel"]


@triton.jit
def coded_kernel(
    code_ptr,
    scale_ptr,
    tensor_scale_ptr,
    four_ptr,
    pair_ptr,
    extra_ptr,
    escape_ptr,
    start_ptr,
    cell_ptr,
    out_ptr,
    total,
    columns,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    MANTISSAS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    TOP_FIELD: tl.constexpr,
    SIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
    READ: tl.constexpr,
):
    """bf16 bit patterns, int16, of SPAN consecutive weights of `total`, which is a multiple of 16; grid
    (ceil(total / SPAN),).

    code_ptr, four_ptr int32: words of 8 codes, and of the upper 4 bits of 8 symbols; pair_ptr int16: the lower 2 bits;
    extra_ptr int32: the stream; start_ptr int32 [grid, 2]; cell_ptr int32 [MANTISSAS, 16]. TILE_WORDS: 0, or words per
    tile of E2M1 codes if code_ptr and scale_ptr both point to tiles of rows of `columns` weights. TOP_FIELD: 0, or what
    the largest E8M0 byte is in tiles. SIGNED: cells may have both signs. WHOLE: `total` is a multiple of SPAN. READ:
    extra bits by weight (0), or by 8 weights in 64 bits (1) or in 32, where they fit (2).
    """
    _merge_span(
        code_ptr, scale_ptr, tensor_scale_ptr, four_ptr, pair_ptr, extra_ptr, escape_ptr, start_ptr, cell_ptr, out_ptr,
        tl.program_id(0), total, columns, SPAN, BLOCK, MANTISSAS, TILE_WORDS, TOP_FIELD, SIGNED, WHOLE, READ,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "fields"])
def coded_experts_kernel(
    place_ptr, expert_ptr, out_ptr, total, columns, first, fields,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, MANTISSAS: tl.constexpr, SIGNED: tl.constexpr, WHOLE: tl.constexpr,
    READ: tl.constexpr,
):  # fmt: skip
    """`coded_kernel` of one matrix of each expert in expert_ptr int64 [P], into out_ptr [P, total]; zeros for -1.

    place_ptr int64 [E, fields]: from column `first` on the addresses of the expert's planes, as `merge.CODED_FIELDS`.
    Planes are in the format's order. Grid (ceil(total / SPAN), P).
    """
    expert = tl.load(expert_ptr + tl.program_id(1))
    own_ptr = out_ptr + tl.program_id(1).to(tl.int64) * total
    if expert < 0:
        at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
        tl.store(own_ptr + at, tl.zeros((SPAN,), tl.int16), mask=at < total)
    else:
        row_ptr = place_ptr + expert * fields + first
        cell_ptr = pointer_of(tl.load(row_ptr + 7), "int32")
        _merge_span(
            pointer_of(tl.load(row_ptr), "int32"), pointer_of(tl.load(row_ptr + 1), "uint8"), cell_ptr,
            pointer_of(tl.load(row_ptr + 2), "int32"), pointer_of(tl.load(row_ptr + 3), "int16"),
            pointer_of(tl.load(row_ptr + 4), "int32"), pointer_of(tl.load(row_ptr + 5), "int16"),
            pointer_of(tl.load(row_ptr + 6), "int32"), cell_ptr, own_ptr, tl.program_id(0), total, columns,
            SPAN, BLOCK, MANTISSAS, 0, 0, SIGNED, WHOLE, READ,
        )  # fmt: skip


@triton.jit
def _merge_span(
    code_ptr, scale_ptr, tensor_scale_ptr, four_ptr, pair_ptr, extra_ptr, escape_ptr, start_ptr, cell_ptr, out_ptr,
    span, total, columns, SPAN: tl.constexpr, BLOCK: tl.constexpr, MANTISSAS: tl.constexpr, TILE_WORDS: tl.constexpr,
    TOP_FIELD: tl.constexpr, SIGNED: tl.constexpr, WHOLE: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """One span of `coded_kernel`."""
    EIGHTS: tl.constexpr = SPAN // 8
    base = span.to(tl.int64) * SPAN
    eight = tl.arange(0, EIGHTS)
    left = tl.minimum(total - base, SPAN).to(tl.int32)
    here = eight * 8 < left
    first = base // 8 + eight
    four = load_inside(four_ptr + first, here, WHOLE)
    pair = load_inside(pair_ptr + first, here, WHOLE).to(tl.int32)
    if TILE_WORDS == 0:
        word = load_inside(code_ptr + first, here, WHOLE)
        scale_at = (base + eight * 8) // BLOCK
        index = (word[:, None] >> (tl.arange(0, 8) * 4)[None, :]) & 15
    else:
        index, sign, scale_at = _tile_codes(
            code_ptr, base.to(total.dtype), eight * 8, here, columns, BLOCK, TILE_WORDS, WHOLE
        )
    scale = load_inside(scale_ptr + scale_at, here, WHOLE).to(tl.int32)
    entry = tl.load(cell_ptr + (((scale & (MANTISSAS - 1)) * 16)[:, None] + index))
    exponent = scale // MANTISSAS
    if TOP_FIELD != 0:
        exponent += (tl.load(tensor_scale_ptr).to(tl.int32, bitcast=True) >> 23) - TOP_FIELD

    place = tl.arange(0, 8)[None, :]
    symbol = (((four[:, None] >> (place * 4)) & 15) << 2) | ((pair[:, None] >> (place * 2)) & 3)
    more, step = (entry >> 9) & 3, entry & 511
    shifted = symbol << more
    octave = 132 - (symbol.to(tl.float32).to(tl.int32, bitcast=True) >> 23)  # 5 - floor(log2)
    o = tl.where((entry & (1 << 11)) != 0, octave, (shifted < step).to(tl.int32))
    escaped = symbol == 0
    length = more + o
    if SIGNED:
        signed = (entry >> 12) & 1
        length += signed
    length = tl.where(escaped, 0, length)
    if not WHOLE:
        escaped, length = escaped & here[:, None], tl.where(here[:, None], length, 0)

    # prefix sums of extra bits and of escapes in one scan
    count = length + (escaped.to(tl.int32) << 16)
    row = tl.sum(count, 1)
    before = tl.cumsum(row, 0) - row
    within = tl.cumsum(count, 1) - count
    start = tl.load(start_ptr + span * 2)
    at = (start & 31) + (before & 0xFFFF)
    word_ptr = extra_ptr + (start >> 5)
    if READ == 0:
        extra = _by_weight(word_ptr, at[:, None] + (within & 0xFFFF), length)
    else:
        extra = _by_eight(word_ptr, at, within & 0xFFFF)
    extra &= (1 << length) - 1
    escape_ptr += tl.load(start_ptr + span * 2 + 1)
    escape = tl.load(escape_ptr + ((before[:, None] + within) >> 16), mask=escaped, other=0).to(tl.int32)

    if SIGNED:
        offset = ((symbol << length) | extra) >> signed
    else:
        offset = (shifted << o) + extra
    result = (entry >> 16) + (exponent * 128)[:, None] + offset - step * o
    if SIGNED:
        result ^= (signed & extra & 1) << 15
    if TILE_WORDS != 0:
        result ^= sign
    result = tl.where(escaped, escape, result).to(tl.int16)
    out_at = base + (eight * 8)[:, None] + place
    if WHOLE:
        tl.store(out_ptr + out_at, result)
    else:
        tl.store(out_ptr + out_at, result, mask=here[:, None])


@triton.jit
def _by_weight(word_ptr, at, length):
    """The 32 bits of a stream from each bit `at` on; at least `length` of them are right."""
    shift = at & 31
    low = tl.load(word_ptr + (at >> 5), mask=length > 0, other=0).to(tl.uint32, bitcast=True)
    high = tl.load(word_ptr + (at >> 5) + 1, mask=shift + length > 32, other=0).to(tl.uint32, bitcast=True)
    return ((low >> shift.to(tl.uint32)) | ((high << 1) << (31 - shift).to(tl.uint32))).to(tl.int32, bitcast=True)


@triton.jit
def _by_eight(word_ptr, at, within):
    """The bits of a stream from each bit at[group] + within[group, 8] on, as many as lie in 64 bits from at[group]."""
    ptr = word_ptr + (at >> 5)
    shift = (at & 31).to(tl.uint64)
    low = tl.load(ptr).to(tl.uint32, bitcast=True).to(tl.uint64)
    middle = tl.load(ptr + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(ptr + 2).to(tl.uint32, bitcast=True).to(tl.uint64)
    window = ((low | (middle << 32)) >> shift) | ((high << 1) << (63 - shift))
    return (window[:, None] >> within.to(tl.uint64)).to(tl.int32)


@triton.jit
def _tile_codes(
    word_ptr, base, group, here, columns, BLOCK: tl.constexpr, TILE_WORDS: tl.constexpr, WHOLE: tl.constexpr
):
    """(magnitudes, and signs in bit 15, int32 [groups, 8], of the 8 consecutive weights from each of base + group on;
    offsets of their scale bytes); see `e2m1/tiles.py` for the order of words and bits."""
    first_row = base // columns  # divisions of 64 bits are slow: one for all, and none where `base` has 32
    behind = (base - first_row * columns).to(tl.int32) + group
    row, column = first_row.to(tl.int32) + behind // columns, behind % columns
    tile = ((row // 16).to(tl.int64) * ((columns + 127) // 128) + column // 128) * TILE_WORDS
    half, lane_row, lane = row % 16 // 8, row % 8, column % 128 // 32
    # 4 columns a word; the second half of the lanes has the pairs of words swapped
    place = column % 32 // 16 * 128 + lane_row * 16 + lane * 4 + (column % 16 // 4 ^ lane // 2 * 2)
    first = load_inside(word_ptr + tile + place, here, WHOLE).to(tl.uint32, bitcast=True)
    second = load_inside(word_ptr + tile + place + 1, here, WHOLE).to(tl.uint32, bitcast=True)
    low = half == 0
    pairs = tl.join(
        tl.join(tl.where(low, first << 2, first << 6), tl.where(low, second << 2, second << 6)),
        tl.join(
            tl.where(low, (first << 12) | (first >> 20), first ^ (first >> 8)),
            tl.where(low, (second << 12) | (second >> 20), second ^ (second >> 8)),
        ),
    )
    bits = tl.reshape(tl.join(pairs, pairs >> 16), (group.shape[0], 8)).to(tl.int32, bitcast=True)
    BLOCKS: tl.constexpr = 32 // BLOCK  # per lane, for each of its two rows
    scale_at = tile * 4 + 1024 + (((lane_row * 4 + lane) * 2 + half) * BLOCKS + column % 32 // BLOCK)
    return (bits >> 6) & 7, bits & 0x8000, scale_at
