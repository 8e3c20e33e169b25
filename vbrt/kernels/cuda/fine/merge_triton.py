"""Triton kernels of `merge`. Importing this needs Triton; plain operations only, so that its interpreter runs them."""

import triton
import triton.language as tl

from vbrt.kernels.cuda.plain.linear_triton import pointer_of

__all__ = ["load_inside", "merge_experts_kernel", "merge_kernel"]


@triton.jit
def merge_kernel(
    code_ptr,
    scale_ptr,
    tensor_scale_ptr,
    level_ptr,
    value_ptr,
    low_ptr,
    nibble_ptr,
    side_ptr,
    escape_ptr,
    start_ptr,
    out_ptr,
    total,
    columns,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE_CODES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    E2M1: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """int16 bit patterns of SPAN consecutive weights of `total`; grid (ceil(total / SPAN),).

    A block's scale is value_ptr[byte] * tensor scale; bit c of WIDE_CODES marks code c as wide. WIDTH 8 is bf16, 12 is
    fp16. start_ptr int32 [grid, 2]: entries of the two lists before each span. TILE_WORDS: 0, or words per tile if
    code_ptr (int32) and scale_ptr (uint8) both point to tiles of rows of `columns` weights. E2M1: codes are such
    numbers; else level_ptr has each code's. WHOLE: `total` is a multiple of SPAN.
    """
    _merge_span(
        code_ptr, scale_ptr, tensor_scale_ptr, level_ptr, value_ptr, low_ptr, nibble_ptr, side_ptr, escape_ptr,
        start_ptr, out_ptr, tl.program_id(0), total, columns, SPAN, BLOCK, WIDE_CODES, WIDTH, TILE_WORDS,
        E2M1, WHOLE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "fields"])
def merge_experts_kernel(
    place_ptr, expert_ptr, out_ptr, total, columns, first, fields,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, WIDE_CODES: tl.constexpr, WIDTH: tl.constexpr, E2M1: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """`merge_kernel` of one matrix of each expert in expert_ptr int64 [P], into out_ptr [P, total]; zeros for -1.

    place_ptr int64 [E, fields]: from column `first` on the addresses of the expert's planes, as `merge.FIELDS`. Planes
    are in the format's order. Grid (ceil(total / SPAN), P).
    """
    expert = tl.load(expert_ptr + tl.program_id(1))
    own_ptr = out_ptr + tl.program_id(1).to(tl.int64) * total
    if expert < 0:
        at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
        tl.store(own_ptr + at, tl.zeros((SPAN,), tl.int16), mask=at < total)
    else:
        row_ptr = place_ptr + expert * fields + first
        _merge_span(
            pointer_of(tl.load(row_ptr), "uint8"), pointer_of(tl.load(row_ptr + 1), "uint8"),
            pointer_of(tl.load(row_ptr + 2), "float32"), pointer_of(tl.load(row_ptr + 3), "float32"),
            pointer_of(tl.load(row_ptr + 4), "float32"), pointer_of(tl.load(row_ptr + 5), "uint8"),
            pointer_of(tl.load(row_ptr + 6), "uint8"), pointer_of(tl.load(row_ptr + 7), "int8"),
            pointer_of(tl.load(row_ptr + 8), "int16"), pointer_of(tl.load(row_ptr + 9), "int32"),
            own_ptr, tl.program_id(0), total, columns, SPAN, BLOCK, WIDE_CODES, WIDTH, 0, E2M1, WHOLE,
        )  # fmt: skip


@triton.jit
def _merge_span(
    code_ptr, scale_ptr, tensor_scale_ptr, level_ptr, value_ptr, low_ptr, nibble_ptr, side_ptr, escape_ptr, start_ptr,
    out_ptr, span, total, columns,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, WIDE_CODES: tl.constexpr, WIDTH: tl.constexpr, TILE_WORDS: tl.constexpr,
    E2M1: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One span of `merge_kernel`."""
    GROUPS: tl.constexpr = SPAN // 16
    base = span.to(tl.int64) * SPAN
    group = tl.arange(0, GROUPS) * 16  # from here on within the span
    at = group[:, None] + tl.arange(0, 16)[None, :]
    pair = group[:, None] // 2 + tl.arange(0, 8)[None, :]
    left = tl.minimum(total - base, SPAN).to(tl.int32)
    inside, here = at < left, group < left
    if TILE_WORDS == 0:
        byte = load_inside(code_ptr + base // 2 + pair, here[:, None], WHOLE)
        code = tl.reshape(tl.join(byte & 15, byte >> 4), (GROUPS, 16)).to(tl.int32)
        scale_at = (base + group) // BLOCK
    else:
        code, scale_at = _tile_codes(code_ptr, base + group, here, columns, BLOCK, TILE_WORDS, WHOLE)
    scale_byte = load_inside(scale_ptr + scale_at, here, WHOLE).to(tl.int32)
    scale = tl.load(value_ptr + scale_byte) * tl.load(tensor_scale_ptr)
    level = _e2m1(code) if E2M1 else tl.load(level_ptr + code)
    near = _bits(level * scale[:, None], WIDTH)

    delta = load_inside(low_ptr + base + at, inside, WHOLE).to(tl.int32)
    if WIDTH == 12:
        half = load_inside(nibble_ptr + base // 2 + pair, here[:, None], WHOLE)
        delta += tl.reshape(tl.join(half & 15, half >> 4), (GROUPS, 16)).to(tl.int32) << 8
    SIGN: tl.constexpr = 1 << (WIDTH - 1)
    wide = (code & 7) == 0 if E2M1 else ((WIDE_CODES >> code) & 1) != 0
    escaped = (delta == SIGN) & (wide == 0)
    if not WHOLE:
        wide, escaped = wide & inside, escaped & inside
    # prefix counts of both lists in one scan
    count = wide.to(tl.int32) + (escaped.to(tl.int32) << 16)
    row = tl.sum(count, 1)
    before = tl.cumsum(count, 1) - count + (tl.cumsum(row, 0) - row)[:, None]
    side_ptr += tl.load(start_ptr + span * 2)
    escape_ptr += tl.load(start_ptr + span * 2 + 1)
    side = tl.load(side_ptr + (before & 0xFFFF), mask=wide, other=0).to(tl.int32)
    escape = tl.load(escape_ptr + (before >> 16), mask=escaped, other=0).to(tl.int32)
    signed = tl.where(escaped, escape, (delta ^ SIGN) - SIGN)
    word = _ordinal(near) + tl.where(wide, delta | (side << WIDTH), signed)
    word = _ordinal((word << 16) >> 16).to(tl.int16)
    if WHOLE:
        tl.store(out_ptr + base + at, word)
    else:
        tl.store(out_ptr + base + at, word, mask=inside)


@triton.jit
def load_inside(pointer, inside, WHOLE: tl.constexpr):
    """What lies at pointers; 0 where they are not inside."""
    if WHOLE:
        value = tl.load(pointer)
    else:
        value = tl.load(pointer, mask=inside, other=0)
    return value


@triton.jit
def _tile_codes(word_ptr, group, inside, columns, BLOCK: tl.constexpr, TILE_WORDS: tl.constexpr, WHOLE: tl.constexpr):
    """Codes int32 [groups, 16] of the 16 consecutive weights from each of `group` on, and offsets of their scale bytes;
    see `e2m1/tiles.py` for the order of words and bits."""
    row = group // columns
    column = (group % columns).to(tl.int32)
    tile = ((row // 16) * ((columns + 127) // 128) + column // 128) * TILE_WORDS
    half, lane_row = (row % 16 // 8).to(tl.int32), (row % 8).to(tl.int32)
    lane = column % 128 // 32
    word_at = tile + (column % 32 // 16 * 128 + lane_row * 16 + lane * 4)
    place = tl.arange(0, 4)[None, :]  # 4 columns each; the second half of the lanes has the pairs of words swapped
    at = word_at[:, None] + (place ^ (lane // 2 * 2)[:, None])
    word = load_inside(word_ptr + at, inside[:, None], WHOLE).to(tl.uint32, bitcast=True)
    low = half[:, None] == 0
    first = tl.where(low, word << 2, word << 6)
    second = tl.where(low, (word << 12) | (word >> 20), word ^ (word >> 8))
    even = tl.join(_code(first), _code(second))
    odd = tl.join(_code(first >> 16), _code(second >> 16))
    code = tl.reshape(tl.join(even, odd), (group.shape[0], 16))
    BLOCKS: tl.constexpr = 32 // BLOCK  # per lane, for each of its two rows
    scale_at = tile * 4 + 1024 + (((lane_row * 4 + lane) * 2 + half) * BLOCKS + column % 32 // BLOCK)
    return code, scale_at


@triton.jit
def _code(pair):
    """Code with sign in bit 15 and magnitude in bits 8 to 6."""
    return (((pair >> 12) & 8) | ((pair >> 6) & 7)).to(tl.int32)


@triton.jit
def _e2m1(code):
    """Value of a code, fp32: its bits at the end of an exponent that is less by 126, so that 0.5 is a subnormal."""
    small = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    return (small.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _bits(value, WIDTH: tl.constexpr):
    """Bit pattern of fp32 values rounded to bf16 or fp16, with its sign in the upper half."""
    if WIDTH == 12:
        return value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    word = value.to(tl.int32, bitcast=True)
    return (word + 0x7FFF + ((word >> 16) & 1)) >> 16  # to nearest, ties to even; finite values only


@triton.jit
def _ordinal(word):
    """See `formats.fine_plane.ordinal`; word has its sign in all upper bits."""
    return word ^ ((word >> 15) & 0x7FFF)
