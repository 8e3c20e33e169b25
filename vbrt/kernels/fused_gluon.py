"""The GPU side of `fused_linear`: a norm, and two matrices in tile order with the product of their results.

The gated kernel's loop is that of `fp4_gluon.linear_program`, with the row tile of a second matrix beside the first
one's. The norm is a launch of its own, short because the next kernel's is under way meanwhile and its weights with it.
Gathering the norm's statistics inside the linear kernel, as matrix instructions on x, was faster on an H200 in two of
thirteen cases (1.06x), slower in nine (by up to 1.5x), and needed four times the code.
"""

# ruff: noqa: RUF005  # the kernel language has no starred expressions

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vbrt.kernels.fp4_gluon import (
    DECODE,
    DECODE_REGISTERS,
    E4M3_HIGH,
    E4M3_LOW,
    E8M0,
    MULTIPLY,
    MULTIPLY_REGISTERS,
    RESCALE,
    SCALE_REGISTERS,
    activate,
    allow_launch_after,
    inverse_rms,
    load_tiles,
    load_tokens,
    out_layout,
    places,
    squares_at,
    summed,
    wait_for_launch_before,
)

__all__ = ["gated_kernel", "norm_kernel"]


@gluon.jit(do_not_specialize=["M", "N", "columns", "eps"])
def gated_kernel(
    x_ptr, tile_ptr, scale_ptr, other_ptr, other_scale_ptr, square_ptr, y_ptr, M, N, K, columns, x_stride, y_stride,
    eps, R: gl.constexpr, NT: gl.constexpr, WK: gl.constexpr, PREFETCH: gl.constexpr, E8: gl.constexpr,
    FULL: gl.constexpr, TAIL: gl.constexpr, ACTIVATION: gl.constexpr, SQUARES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """y [M, N] = activation(x [M, K] @ w.T) * (x @ other.T). Grid (ceil(row tiles / R),), WK warps.

    Other arguments as of `fp4_gluon.linear_program`, NT is one or two; SQUARES as of `fp4_gluon.siblings_kernel`.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WK, 1], [1, 0])
    THREADS: gl.constexpr = 32 * WK
    thread = gl.arange(0, THREADS, layout=gl.SliceLayout(1, LAYOUT))
    lane = thread % 32
    column = thread // 32
    row_tiles = (N + 15) // 16
    row_tile = gl.program_id(0) * R + thread * 0
    x_words = x_ptr.to(gl.pointer_type(gl.int32))
    COUNT: gl.constexpr = NT * R
    sums = ()  # of the first matrix the token groups, of each its row tiles; then of the second
    for _ in gl.static_range(2 * COUNT):
        sums = sums + (gl.zeros((THREADS, 4), gl.float32, layout=LAYOUT),)
    if PREFETCH:
        tiles = load_tiles(tile_ptr, row_tile, row_tiles, column, columns, lane, LAYOUT, R, E8)
        tiles = tiles + load_tiles(other_ptr, row_tile, row_tiles, column, columns, lane, LAYOUT, R, E8)
    if EARLY:
        wait_for_launch_before()
    if SQUARES:
        square_at, is_there = squares_at(square_ptr, K, SQUARES, WK)
        squares = gl.load(square_at, mask=is_there, other=0.0)
    for _ in range((columns + WK - 1) // WK):
        here = column < columns
        at = column + WK if PREFETCH else column
        ahead = load_tiles(tile_ptr, row_tile, row_tiles, at, columns, lane, LAYOUT, R, E8)
        ahead = ahead + load_tiles(other_ptr, row_tile, row_tiles, at, columns, lane, LAYOUT, R, E8)
        if not PREFETCH:
            tiles = ahead
        tokens = ()
        for n in gl.static_range(NT):
            for p in gl.static_range(4):
                loaded = load_tokens(x_words, x_stride, column, here, n, p, lane, M, K, LAYOUT, FULL, TAIL, False)
                tokens = tokens + (loaded,)
        for part in gl.static_range(2):
            added = ()
            for m in gl.static_range(2):
                a = ()
                for r in gl.static_range(R):
                    scale_g, scale_h = gl.inline_asm_elementwise(
                        E8M0 if E8 else (E4M3_LOW if part == 0 else E4M3_HIGH), SCALE_REGISTERS,
                        [tiles[3 * (m * R + r) + 2]], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
                    )  # fmt: skip
                    a0, a1, a2, a3 = gl.inline_asm_elementwise(
                        DECODE, DECODE_REGISTERS, [tiles[3 * (m * R + r) + part], scale_g[:, None], scale_h[:, None]],
                        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=4,
                    )  # fmt: skip
                    a = a + (a0, a1, a2, a3)
                for n in gl.static_range(NT):
                    for r in gl.static_range(R):
                        total = gl.inline_asm_elementwise(
                            MULTIPLY, MULTIPLY_REGISTERS,
                            [a[4 * r], a[4 * r + 1], a[4 * r + 2], a[4 * r + 3], tokens[4 * n + 2 * part],
                             tokens[4 * n + 2 * part + 1], sums[(m * NT + n) * R + r]],
                            dtype=gl.float32, is_pure=True, pack=4,
                        )  # fmt: skip
                        added = added + (total,)
            sums = added
        if PREFETCH:
            tiles = ahead
        column = column + WK

    if EARLY:
        allow_launch_after()
    first = gl.load(scale_ptr) * RESCALE
    second = gl.load(other_scale_ptr) * RESCALE
    if SQUARES:
        factor = inverse_rms(squares, K, eps)
        first = first * factor
        second = second * factor
    v = summed(sums, 0, COUNT, WK) * first
    v = activate(v, ACTIVATION, y_ptr.dtype.element_ty) * (summed(sums, COUNT, COUNT, WK) * second)
    row, token = places(gl.program_id(0), R, COUNT, out_layout(WK))
    gl.store(y_ptr + token.to(gl.int64) * y_stride + row, v.to(y_ptr.dtype.element_ty), mask=(row < N) & (token < M))


@gluon.jit(do_not_specialize=["eps"])
def norm_kernel(
    x_ptr, other_ptr, gain_ptr, shift_ptr, sum_ptr, y_ptr, eps, K, x_stride, other_stride,
    BLOCK: gl.constexpr, WARPS: gl.constexpr, LAYER: gl.constexpr, GAIN: gl.constexpr, SHIFT: gl.constexpr,
    ADD: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """y [M, K] = norm(x [M, K]), K up to BLOCK, statistics in fp32. Grid (M,). EARLY: a dependent launch.

    ADD: the norm of sum [M, K] = x + other, which is written too.
    """
    if EARLY:
        wait_for_launch_before()
        allow_launch_after()
    m = gl.program_id(0).to(gl.int64)
    at = gl.arange(0, BLOCK, layout=gl.BlockedLayout([8], [32], [WARPS], [0]))
    inside = at < K
    v = gl.load(x_ptr + m * x_stride + at, mask=inside, other=0.0).to(gl.float32)
    if ADD:
        v = v + gl.load(other_ptr + m * other_stride + at, mask=inside, other=0.0).to(gl.float32)
        rounded = v.to(sum_ptr.dtype.element_ty)
        gl.store(sum_ptr + m * K + at, rounded, mask=inside)
        v = rounded.to(gl.float32)
    if LAYER:
        v = gl.where(inside, v - gl.sum(v, 0) / K, 0.0)
    v = v * gl.rsqrt(gl.sum(v * v, 0) / K + eps)
    if GAIN:
        v = v * gl.load(gain_ptr + at, mask=inside, other=0.0).to(gl.float32)
    if SHIFT:
        v = v + gl.load(shift_ptr + at, mask=inside, other=0.0).to(gl.float32)
    gl.store(y_ptr + m * K + at, v.to(y_ptr.dtype.element_ty), mask=inside)
