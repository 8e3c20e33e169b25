"""The GPU side of `fp4`: tiles and activations as torch's FP4 matmul takes them. Importing this needs Triton.

Codes lie two a byte, the even column in the low half. Block scales are E4M3, in blocks of 128 rows by 4 scales (64
columns), 512 bytes each: the scale of row r and columns 16 c .. 16 c + 15 is byte 16 (r % 32) + 4 (r / 32) + c of its
block, so that a row's four scales are one word. What pads rows to 128 and scales to 4 is zero.

Plain integer and fp32 operations only, so that Triton's interpreter runs both kernels, and any GPU.
"""

import triton
import triton.language as tl

__all__ = ["pack_kernel", "quantize_kernel"]


@triton.jit(do_not_specialize=["N", "columns"])
def pack_kernel(
    tile_ptr,
    scale_ptr,
    code_ptr,
    block_ptr,
    unit_ptr,
    N,
    chunks,
    columns,
    E8M0_SCALES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A weight in tile order to codes int32 [N, 4 * chunks] and block scales int32 [row blocks, scale blocks, 128].

    Grid (8 * ceil(N / 128) * ceil(columns / COLUMNS),): 16 rows by COLUMNS tiles a program. 32 * chunks is K rounded up
    to 32; the padding of K is zeros in the tiles. E8M0_SCALES: scale bytes become powers of two in E4M3, each for two
    blocks, and the fp32 scale becomes *unit_ptr. E4M3 bytes stay as they are and unit_ptr is left alone.
    """
    WORDS: tl.constexpr = 272 if E8M0_SCALES else 288
    groups = (columns + COLUMNS - 1) // COLUMNS
    row_tile = tl.program_id(0) // groups
    first = tl.program_id(0) % groups * COLUMNS
    known = tl.where(row_tile * 16 < N, columns, 0)  # behind the weight are rows of scales only
    g = tl.arange(0, 8)[:, None]  # of rows g and g + 8, see tiles

    at = tl.arange(0, 16 * COLUMNS)[None, :]  # a word of codes: columns 32 t + 8 q .. + 7 of a tile
    column, t, q = first + at // 16, at // 4 % 4, at % 4
    there = column < known
    word_ptr = tile_ptr + (row_tile * columns + column) * WORDS + (q // 2 * 128 + g * 16 + t * 4 + (q % 2 ^ t // 2) * 2)
    upper_0, lower_0 = _codes(tl.load(word_ptr, mask=there, other=0))
    upper_1, lower_1 = _codes(tl.load(word_ptr + 1, mask=there, other=0))
    width = chunks * 4
    row = row_tile * 16 + g
    inside = first * 16 + at < width
    code_ptr += row.to(tl.int64) * width + (first * 16 + at)
    tl.store(code_ptr, upper_0 | (upper_1 << 16), mask=inside & (row < N))
    tl.store(code_ptr + width * 8, lower_0 | (lower_1 << 16), mask=inside & (row + 8 < N))

    pair = tl.arange(0, 2 * COLUMNS)[None, :]  # four scales, those of lanes t = 2 pair and 2 pair + 1
    column = first + pair // 2
    there = column < known
    byte_ptr = tile_ptr + (row_tile * columns + column) * WORDS + 256
    if E8M0_SCALES:
        word = tl.load(byte_ptr + (g * 2 + pair % 2), mask=there, other=0)
        upper = _power(word & 0xFF) * 0x0101 | _power(word >> 16 & 0xFF) * 0x0101 << 16
        lower = _power(word >> 8 & 0xFF) * 0x0101 | _power(word >> 24 & 0xFF) * 0x0101 << 16
    else:
        word_0 = tl.load(byte_ptr + (g * 4 + pair % 2 * 2), mask=there, other=0)
        word_1 = tl.load(byte_ptr + (g * 4 + pair % 2 * 2 + 1), mask=there, other=0)
        upper = word_0 & 0xFFFF | word_1 << 16
        lower = word_0 >> 16 & 0xFFFF | word_1 >> 16 << 16
    blocks = (chunks + 1) // 2
    inside = first * 2 + pair < blocks
    block_ptr += (row_tile // 8 * blocks + (first * 2 + pair)) * 128 + (row % 32 * 4 + row % 128 // 32)
    tl.store(block_ptr, upper, mask=inside)
    tl.store(block_ptr + 32, lower, mask=inside)  # 8 rows on
    if E8M0_SCALES and tl.program_id(0) == 0:
        tl.store(unit_ptr, tl.load(scale_ptr) * 0.00390625)  # 2^-8: the largest block scale is 2^8


@triton.jit
def _codes(word):
    """The four bytes of a tile's word: those of row g, and those of row g + 8, two each in the low half."""
    pair_0, pair_1 = word << 2, word << 6  # as in tiles, unmasked
    pair_2, pair_3 = word << 12 | word >> 20 & 0xFFF, word ^ word >> 8 & 0xFFFFFF
    return _byte(pair_0) | _byte(pair_2) << 8, _byte(pair_1) | _byte(pair_3) << 8


@triton.jit
def _byte(pair):
    """Two codes from bits 15, 8..6 of either half."""
    return pair >> 6 & 0x07 | pair >> 12 & 0x08 | pair >> 18 & 0x70 | pair >> 24 & 0x80


@triton.jit
def _power(byte):
    """E4M3 of 2^(byte - 231): the largest byte of a weight's tiles, 239, is 2^8; below 2^-9 it is zero."""
    return tl.where(byte > 224, (byte - 224) * 8, 8 >> tl.minimum(tl.maximum(225 - byte, 0), 4))


@triton.jit(do_not_specialize=["M"])
def quantize_kernel(x_ptr, largest_ptr, code_ptr, block_ptr, unit_ptr, M, K, x_stride, chunks):
    """Activations [M, K] to codes uint8 [M, 16 * chunks], block scales as above, and *unit_ptr, a power of two.

    x is about level * block scale * unit, block scales being 1 / 6 of the largest magnitude. Grid
    (ceil(M / 128) * ceil(chunks / 2),): 128 rows by 64 columns a program. *largest_ptr: max |x|, fp32.
    """
    blocks = (chunks + 1) // 2
    row_block = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    r = tl.arange(0, 128)
    row = row_block.to(tl.int64) * 128 + r
    column = block * 64 + tl.arange(0, 64)
    inside = (row < M)[:, None] & (column < K)[None, :]
    x = tl.load(x_ptr + (row[:, None] * x_stride + column[None, :]), mask=inside, other=0.0).to(tl.float32)
    x = tl.reshape(x, (128, 4, 16))

    # 2^-10 of the largest magnitude's power of two: block scales reach 341 of E4M3's 448
    exponent = tl.load(largest_ptr).to(tl.int32, bitcast=True) & 0x7F800000
    unit = tl.maximum(exponent, 27 << 23).to(tl.float32, bitcast=True) * 0.0009765625
    if tl.program_id(0) == 0:
        tl.store(unit_ptr, unit)
    inverse = tl.div_rn(1.0, unit)
    byte = _e4m3(tl.max(tl.abs(x), 2) * (inverse * 0.16666667))
    normal = ((byte << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    scale = tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, normal)
    code = _e2m1(x, tl.div_rn(inverse, scale)[:, :, None])

    even, odd = tl.split(tl.reshape(code, (128, 32, 2)))
    at = block * 32 + tl.arange(0, 32)[None, :]
    width = chunks * 16
    inside = (row < M)[:, None] & (at < width)
    tl.store(code_ptr + (row[:, None] * width + at), (even | odd << 4).to(tl.uint8), mask=inside)
    c = tl.arange(0, 4)[None, :]
    byte = tl.where((row < M)[:, None] & (block * 4 + c < chunks * 2), byte << 8 * c, 0)
    block_ptr += (row_block * blocks + block) * 128
    tl.store(block_ptr + (r % 32 * 4 + r // 32), tl.sum(byte, 1))


@triton.jit
def _e4m3(value):
    """Non-negative fp32 to the nearest E4M3 byte, ties to even, but never to zero: so scales can divide."""
    word = value.to(tl.int32, bitcast=True)
    normal = (word + 0x7FFFF + (word >> 20 & 1) >> 20) - (120 << 3)
    small = (value + 24576.0).to(tl.int32, bitcast=True) - 0x46C00000  # a float there counts steps of 2^-9
    return tl.minimum(tl.maximum(tl.where(value < 0.015625, small, normal), 1), 0x7E)


@triton.jit
def _e2m1(x, factor):
    """x * factor to the nearest of E2M1's codes, ties to even, 6 at most."""
    value = tl.abs(x) * factor
    word = value.to(tl.int32, bitcast=True)
    normal = ((word + 0x1FFFFF + (word >> 22 & 1)) >> 22) - (126 << 1)
    small = (value + 6291456.0).to(tl.int32, bitcast=True) - 0x4AC00000  # a float there counts steps of 1/2
    code = tl.minimum(tl.where(value < 1.0, small, normal), 7)
    return code | x.to(tl.int32, bitcast=True) >> 28 & 8
