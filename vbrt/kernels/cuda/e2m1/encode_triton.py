"""Triton kernels of the E2M1 encoder. Importing needs Triton; plain operations only, for its interpreter."""

import triton
import triton.language as tl

__all__ = ["encode_kernel", "pack_kernel"]


@triton.jit
def _block_sum(q, ROWS: tl.constexpr, LEVELS: tl.constexpr):
    """Sum [ROWS, 2^LEVELS] to [ROWS] by pairwise halving, in the order of `rounding.block_sum`."""
    for level in tl.static_range(LEVELS):
        first, second = tl.split(tl.permute(tl.reshape(q, (ROWS, 2, 1 << (LEVELS - 1 - level))), (0, 2, 1)))
        q = first + second
    return tl.reshape(q, (ROWS,))


@triton.jit
def _nearest_e4m3(value):
    """Nearest E4M3 byte of a value in [0, 448], ties to even."""
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (value * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xFF  # in units of 2^-9; 2^23 rounds to integers
    return tl.where(value < 0.015625, small, normal)


@triton.jit
def encode_kernel(
    w_ptr,
    value_ptr,
    code_ptr,
    byte_ptr,
    K,
    blocks,
    total,
    per_unit,
    low,
    high,
    shift,
    least,
    square_ptr,
    rows_each,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    FIRST: tl.constexpr,
    CANDIDATES: tl.constexpr,
    E4M3: tl.constexpr,
    WEIGHED: tl.constexpr,
):
    """Codes uint8 [total, BLOCK / 2] and scale bytes uint8 [total] of the blocks of w [N, K], BLOCK = 2^LEVELS columns
    each; grid (ceil(total / ROWS),).
    A row has `blocks` blocks; columns beyond K are zero. Encodes weight * per_unit, a power of two. A byte from low to
    high has the value value_ptr[byte]; the candidates are FIRST and following, relative to the byte nearest to the
    largest magnitude over 6. Stores the byte plus shift, or zero if that magnitude is at most `least`.
    WEIGHTED: a row's squared errors are weighted by square_ptr[row // rows_each, K].
    The arithmetic is that of `BlockFormat._search` with `E2M1Rounding`, operation by operation.
    """
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = block < total
    column = (block % blocks)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = (block // blocks)[:, None] * K + column
    x = tl.load(w_ptr + at, mask=there[:, None] & (column < K), other=0.0).to(tl.float32) * per_unit
    a = tl.abs(x)
    m = a
    if WEIGHED:
        own = (block // blocks // rows_each)[:, None] * K + column
        m = tl.load(square_ptr + own, mask=there[:, None] & (column < K), other=0.0)
    amax = tl.max(a, 1)
    over_top = tl.div_rn(amax, tl.full((ROWS,), 6.0, tl.float32))
    if E4M3:
        near = _nearest_e4m3(tl.minimum(over_top, 448.0))
    else:
        near = (over_top.to(tl.int32, bitcast=True) + 0x004AFB0D) >> 23
    one = tl.full((ROWS,), 1.0, tl.float32)
    best = tl.full((ROWS,), 0x7FFFFFFF, tl.int32)
    chosen = tl.zeros((ROWS,), tl.int32)
    for candidate in tl.static_range(CANDIDATES):
        byte = tl.minimum(tl.maximum(near + (FIRST + candidate), low), high)
        scale = tl.load(value_ptr + byte)
        y = a * (tl.div_rn(one, scale) * 4194304.0)[:, None]  # 2^22
        t = tl.maximum(y, 4194304.0)
        small = y * (1.0 / 4194304.0)
        q = tl.minimum((t + small) - t, 6.0) - small
        q = q * q
        if WEIGHED:
            q = q * m
        error = _block_sum(q, ROWS, LEVELS) * scale * scale
        rank = (error.to(tl.int32, bitcast=True) & -16) | candidate
        chosen = tl.where(rank < best, byte, chosen)
        best = tl.minimum(best, rank)
    scale = tl.load(value_ptr + chosen)
    y = tl.div_rn(a, tl.broadcast_to(scale[:, None], (ROWS, BLOCK)))
    v = tl.minimum(tl.minimum(y * 2.0, y + 2.0), y * 0.5 + 4.0)
    code = ((v + 8388608.0).to(tl.int32, bitcast=True) & 0xFF).to(tl.int32)  # rounds to integers, ties to even
    code = tl.minimum(code, 7) + ((x.to(tl.int32, bitcast=True) >> 28) & 8)
    even, odd = tl.split(tl.reshape(code, (ROWS, BLOCK // 2, 2)))
    half = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    tl.store(code_ptr + half, (even | (odd << 4)).to(tl.uint8), mask=there[:, None])
    stored = tl.where(amax > least, chosen + shift, 0)
    tl.store(byte_ptr + block, stored.to(tl.uint8), mask=there)


@triton.jit
def _pair(byte):
    """Two codes as the halves of a pair: sign in bit 15, magnitude in bits 8..6."""
    low = ((byte & 8) << 12) | ((byte & 7) << 6)
    high = ((byte & 0x80) << 8) | ((byte & 0x70) << 2)
    return low | (high << 16)


@triton.jit
def pack_kernel(
    code_ptr,
    byte_ptr,
    top_ptr,
    tile_ptr,
    N,
    code_bytes,
    blocks,
    columns,
    WORDS: tl.constexpr,
    PER_TILE: tl.constexpr,
    RAISED: tl.constexpr,
):
    """Pack a tile of WORDS words, codes then scale bytes, as in `tiles.pack_tiles`; grid (I, U).

    code_ptr: uint8 [N, code_bytes]; byte_ptr: uint8 [N, blocks]; PER_TILE blocks per row of a tile. RAISED: scale bytes
    are stored relative to top_ptr[0], plus RAISED. Tiles are zero beyond N and K.
    """
    i, u = tl.program_id(0), tl.program_id(1)
    out_ptr = tile_ptr + (i.to(tl.int64) * columns + u) * WORDS
    w = tl.arange(0, 256)
    g, t1, t0, p0, jj = (w >> 4) & 7, (w >> 3) & 1, (w >> 2) & 1, (w >> 1) & 1, w & 1
    quarter = 2 * (w >> 7) + (p0 ^ t1)
    pair_0 = w
    pair_1 = w
    pair_2 = w
    pair_3 = w
    for place in tl.static_range(4):
        c, h = place >> 1, place & 1
        row = 16 * i + 8 * h + g
        at = 64 * u + 16 * (2 * t1 + t0) + 4 * quarter + 2 * jj + c
        inside = (row < N) & (at < code_bytes)
        pair = _pair(tl.load(code_ptr + row.to(tl.int64) * code_bytes + at, mask=inside, other=0).to(tl.int32))
        if place == 0:
            pair_0 = pair
        elif place == 1:
            pair_1 = pair
        elif place == 2:
            pair_2 = pair
        else:
            pair_3 = pair
    # words are combined by xor, unsigned: a signed right shift would replicate the sign
    word = (pair_0.to(tl.uint32, bitcast=True) >> 2) | (pair_1.to(tl.uint32, bitcast=True) >> 6)
    turned = pair_2.to(tl.uint32, bitcast=True)
    word = word | (turned >> 12) | (turned << 20)
    last = pair_3.to(tl.uint32, bitcast=True)
    word = word | (last & 0x81000000)  # bits 31 and 24: no bits above affect them
    word = word | ((((last >> 23) ^ (word >> 31)) & 1) << 23) | ((((last >> 22) ^ (word >> 22)) & 1) << 30)
    word = word | ((((last >> 15) ^ (word >> 23)) & 1) << 15) | ((((last >> 8) ^ (word >> 16)) & 1) << 8)
    word = word | ((((last >> 7) ^ (word >> 15)) & 1) << 7) | ((((last >> 6) ^ (word >> 6)) & 1) << 14)
    tl.store(out_ptr + w, word.to(tl.int32, bitcast=True))

    PART: tl.constexpr = PER_TILE // 4
    z = tl.arange(0, 16 * PER_TILE)
    row = 16 * i + 8 * ((z // PART) & 1) + z // (8 * PART)
    at = u * PER_TILE + ((z // (2 * PART)) & 3) * PART + z % PART
    inside = (row < N) & (at < blocks)
    byte = tl.load(byte_ptr + row.to(tl.int64) * blocks + at, mask=inside, other=0).to(tl.int32)
    if RAISED:
        byte = tl.where(inside, byte - tl.load(top_ptr).to(tl.int32) + RAISED, 0)
    tl.store((out_ptr + 256).to(tl.pointer_type(tl.uint8)) + z, byte.to(tl.uint8))
