"""Triton kernels around the products of trellis codes: rotated inputs, decoded weights. Importing needs Triton."""

import triton
import triton.language as tl

from vbrt.kernels.cuda.plain.linear_triton import pointer_of

__all__ = ["decode_experts_kernel", "decode_kernel", "rotate_kernel", "rotate_pairs_kernel"]


@triton.jit
def _scale_of(byte):
    """Value of a scale byte, fp32: 4 bits of exponent, 4 of mantissa; byte 0 is 0."""
    return tl.where(byte == 0, 0, (byte.to(tl.int32) + (120 << 4)) << 19).to(tl.float32, bitcast=True)


# -- inputs -----------------------------------------------------------------------------------------------------------


@triton.jit
def _rotated(row_ptr, column_ptr, matrix_ptr, inside, block, K, BLOCK: tl.constexpr, SUMMANDS: tl.constexpr):
    """fp32 [rows, BLOCK] of inputs from row_ptr [rows, 1] on, in the order of `linear.rotation`.

    An input times its column's scale is a sum of SUMMANDS numbers of bf16, the first of them rounded.
    """
    place = tl.arange(0, BLOCK)[None, :]
    column = block * BLOCK + place
    x = tl.load(row_ptr + column, mask=inside & (column < K), other=0.0).to(tl.float32)
    rest = x * _scale_of(tl.load(column_ptr + column))
    matrix = tl.load(matrix_ptr + (tl.arange(0, BLOCK)[:, None] * BLOCK + place))
    sums = tl.zeros((x.shape[0], BLOCK), tl.float32)
    for _ in tl.static_range(SUMMANDS):
        part = rest.to(tl.bfloat16)
        sums = tl.dot(part, matrix, sums)
        rest -= part.to(tl.float32)
    return sums


@triton.jit(do_not_specialize=["M", "groups"])
def rotate_kernel(
    x_ptr, column_ptr, matrix_ptr, y_ptr, M, K, groups, x_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """y bf16 [M, 64 groups]: bf16 inputs x [M, K] in units of the columns' scales, rotated by matrix [BLOCK, BLOCK].

    Grid (ceil(M / ROWS), 64 groups / BLOCK).
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    block = tl.program_id(1)
    sums = _rotated(x_ptr + row.to(tl.int64) * x_stride, column_ptr, matrix_ptr, row < M, block, K, BLOCK, 2)
    place = row.to(tl.int64) * (groups * 64) + block * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(y_ptr + place, sums.to(tl.bfloat16), mask=row < M)


@triton.jit(do_not_specialize=["P", "E", "groups", "pairs_per_row", "column_at"])
def rotate_pairs_kernel(
    x_ptr, id_ptr, order_ptr, bound_ptr, expert_ptr, first_ptr, address_ptr, matrix_ptr, y_ptr,
    P, E, K, groups, pairs_per_row, x_stride, column_at,
    GROUPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SUMMANDS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """y bf16 [TERMS, P, 64 groups]: rotated inputs of each pair, by its expert's columns, from row pair //
    pairs_per_row of x; rounded to the sum of TERMS numbers. Nothing for sentinels.

    Grid (blocks of pairs, 64 groups / BLOCK), blocks as `linear_gluon.experts_kernel` has them. column_at: bytes from
    a page's address on.
    """
    first = tl.program_id(0)
    if GROUPED:
        expert = tl.load(expert_ptr + first)
    else:
        expert = tl.load(id_ptr + first).to(tl.int32)
    if (expert >= 0) & (expert < E):
        count = 1
        if GROUPED:
            behind = tl.load(bound_ptr + expert + 1)
            first = tl.load(first_ptr + first)
            count = tl.minimum(behind - first, ROWS)
        slot = tl.arange(0, ROWS)[:, None]
        pair = first + slot
        if GROUPED:
            pair = tl.load(order_ptr + pair, mask=slot < count, other=0)
        block = tl.program_id(1)
        column_ptr = pointer_of(tl.load(address_ptr + expert) + column_at, "uint8")
        row_ptr = x_ptr + (pair // pairs_per_row).to(tl.int64) * x_stride
        rest = _rotated(row_ptr, column_ptr, matrix_ptr, slot < count, block, K, BLOCK, SUMMANDS)
        for term in tl.static_range(TERMS):
            part = rest.to(tl.bfloat16)
            place = (pair + tl.full((1, 1), term, tl.int64) * P) * (groups * 64)
            tl.store(y_ptr + (place + block * BLOCK + tl.arange(0, BLOCK)[None, :]), part, mask=slot < count)
            rest -= part.to(tl.float32)


# -- weights ----------------------------------------------------------------------------------------------------------


@triton.jit
def _values_of(word):
    """Two values of bf16 of a word of hashed bits, as they are added."""
    return (word & 0x81F081F0) ^ 0x3F803F80


@triton.jit
def _decode(
    code_ptr, scale_ptr, column_ptr, unit_ptr, back_ptr, w_ptr, N, K, groups, tile_row, block, limit,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store 16 rows of a block; see `decode_kernel`."""
    row = tl.arange(0, 16)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    group = block * BLOCK // 64 + column // 64
    base = code_ptr + (tile_row.to(tl.int64) * groups + group) * 96
    tile = column % 64 // 16
    lane = 4 * (row % 8) + column % 8 // 2
    low = tl.load(base + lane).to(tl.uint32, bitcast=True) >> 8 * tile & 0xFF
    before = tl.load(base + (lane + 31) % 32).to(tl.uint32, bitcast=True) >> 8 * tile & 0xFF
    top = tl.load(base + 32 * (1 + tile // 2) + lane).to(tl.uint32, bitcast=True) >> 16 * (tile % 2) & 0xFFFF
    window = before << 24 | top << 8 | low
    state = window >> 18 - 6 * (2 * (column % 16 // 8) + row // 8) & 0x3FFF
    hashed = state * 0x9E3779B1 + 64248484
    half = 16 * (column % 2)
    first = (_values_of(hashed) >> half << 16).to(tl.float32, bitcast=True)
    second = (_values_of(hashed << 5) >> half << 16).to(tl.float32, bitcast=True)
    back = tl.load(back_ptr + tl.arange(0, BLOCK)[:, None] * BLOCK + column)
    sums = tl.dot((first + second).to(tl.bfloat16), back) * (8 / BLOCK)
    row += tile_row * 16
    byte = tl.load(scale_ptr + row.to(tl.int64) * (groups * 64 // BLOCK) + block, mask=row < N, other=0)
    column += block * BLOCK
    w = sums * (_scale_of(byte) * tl.load(unit_ptr)) * _scale_of(tl.load(column_ptr + column))
    w = tl.minimum(tl.maximum(w, -limit), limit).to(w_ptr.dtype.element_ty)
    tl.store(w_ptr + row.to(tl.int64) * K + column, w, mask=(row < N) & (column < K))


@triton.jit
def decode_kernel(code_ptr, scale_ptr, column_ptr, unit_ptr, back_ptr, w_ptr, N, K, groups, limit, BLOCK: tl.constexpr):
    """w [N, K] in its own dtype from codes int32 [ceil(N / 16), 96 groups], see vbrt/formats/t3.py.

    Grid (ceil(N / 16), 64 groups / BLOCK). back_ptr: bf16 [BLOCK, BLOCK], the rotation back, of 1 and -1. Sums are
    whole numbers of 1/64 of up to 15 bits; times 8/BLOCK and all scales they are exact in fp32, too.
    """
    _decode(
        code_ptr, scale_ptr, column_ptr, unit_ptr, back_ptr, w_ptr, N, K, groups,
        tl.program_id(0), tl.program_id(1), limit, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "N", "groups", "code_at", "scale_at", "column_at", "unit_at"])
def decode_experts_kernel(
    address_ptr, bound_ptr, back_ptr, w_ptr, first, N, K, groups, limit, code_at, scale_at, column_at, unit_at,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """w [experts, N, K] from the pages of experts `first` .. that have pairs; the others are left uninitialized.

    Grid (ceil(N / 16), experts). code_at and the like: bytes from a page's address on. bound_ptr: pairs before each
    expert's.
    """
    expert = first + tl.program_id(1)
    if tl.load(bound_ptr + expert + 1) > tl.load(bound_ptr + expert):
        address = tl.load(address_ptr + expert)
        w_ptr += tl.program_id(1).to(tl.int64) * N * K
        for block in range(groups * 64 // BLOCK):
            _decode(
                pointer_of(address + code_at, "int32"), pointer_of(address + scale_at, "uint8"),
                pointer_of(address + column_at, "uint8"), pointer_of(address + unit_at, "float32"), back_ptr, w_ptr,
                N, K, groups, tl.program_id(0), block, limit, BLOCK,
            )  # fmt: skip
