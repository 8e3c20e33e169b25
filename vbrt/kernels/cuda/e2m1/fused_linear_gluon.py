"""Gluon kernels of `fused_linear`: several matrices in tile order per launch, and the norms around them.

The loop over K is `narrow_gluon`'s; the gated kernel multiplies a row tile of each of two matrices. Constants are
explained in `narrow_gluon`; SQUARES is the number of sums of squares to read: 0, or a power of two, at least 128 and
ceil(K / 16).

The norm is a short launch of its own: the next kernel starts and prefetches weights while it runs. Computing the norm's
statistics within the linear kernel, by mma instructions on x, was faster on an H200 in two of thirteen cases (1.06x),
slower in nine (by up to 1.5x), and needed four times the code.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from vbrt.kernels.cuda.e2m1.narrow_gluon import (
    RESCALE,
    Constants,
    Sizes,
    activate,
    allow_launch_after,
    linear_program,
    out_layout,
    places,
    result_places,
    squares_at,
    store_result,
    sum_over_warps,
    sums_of_products,
    wait_for_launch_before,
)

__all__ = ["gated_kernel", "norm_kernel", "residual_kernel", "siblings_kernel"]


@gluon.jit
def room_for_squares(SQUARES: gl.constexpr):
    return gl.allocate_shared_memory(gl.float32, [SQUARES], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def read_squares(squares, K_WARPS: gl.constexpr):
    """Each warp reads all of them, so that none waits for another's sum."""
    async_copy.wait_group(0)
    return squares.load(gl.SliceLayout(0, gl.BlockedLayout([1, 4], [1, 32], [K_WARPS, 1], [1, 0])))


@gluon.jit
def inverse_rms(squares, K, eps):
    return gl.rsqrt(gl.sum(squares, 0) / K + eps)


@gluon.jit(do_not_specialize=["M", "N0", "N1", "N2", "columns", "eps"])
def siblings_kernel(
    x_ptr,
    tile0_ptr,
    scale0_ptr,
    y0_ptr,
    tile1_ptr,
    scale1_ptr,
    y1_ptr,
    tile2_ptr,
    scale2_ptr,
    y2_ptr,
    square_ptr,
    M,
    N0,
    N1,
    N2,
    K,
    columns,
    x_stride,
    eps,
    ROW_TILES: gl.constexpr,
    K_WARPS: gl.constexpr,
    PREFETCH: gl.constexpr,
    CARRY_POINTERS: gl.constexpr,
    E8M0_SCALES: gl.constexpr,
    K_TAIL: gl.constexpr,
    WORD_LOADS: gl.constexpr,
    SQUARES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Three products of one x of up to 8 tokens, y0 [M, N0] etc.; N1 and N2 may be 0.

    Grid: the sum of the `linear_kernel` grids. SQUARES: x is one token, to be divided by its root mean square.
    """
    program = gl.program_id(0)
    first = (N0 + 16 * ROW_TILES - 1) // (16 * ROW_TILES)
    second = first + (N1 + 16 * ROW_TILES - 1) // (16 * ROW_TILES)
    tile_ptr = gl.where(program < first, tile0_ptr, gl.where(program < second, tile1_ptr, tile2_ptr))
    scale_ptr = gl.where(program < first, scale0_ptr, gl.where(program < second, scale1_ptr, scale2_ptr))
    y_ptr = gl.where(program < first, y0_ptr, gl.where(program < second, y1_ptr, y2_ptr))
    N = gl.where(program < first, N0, gl.where(program < second, N1, N2))
    program = program - gl.where(program < first, 0, gl.where(program < second, first, second))
    row, token = result_places(program, ROW_TILES, 1, K_WARPS)
    extras = ()
    if SQUARES:
        extras = squares_at(square_ptr, K, SQUARES, K_WARPS)
    C: gl.constexpr = Constants(
        ROW_TILES, 1, K_WARPS, PREFETCH, E8M0_SCALES, K_TAIL, DEPENDENT, CARRY_POINTERS, WORD_LOADS, ALL_TOKENS=False
    )
    sizes = Sizes(M, N, K, columns, x_stride)
    v, read = linear_program(x_ptr, tile_ptr, scale_ptr, None, row, extras, program, sizes, C)
    if SQUARES:
        v = v * inverse_rms(read[0], K, eps)
    store_result(v, y_ptr, row, token, M, N, N)


@gluon.jit(do_not_specialize=["columns"])
def residual_kernel(
    x_ptr,
    tile_ptr,
    scale_ptr,
    other_ptr,
    gain_ptr,
    total_ptr,
    y_ptr,
    square_ptr,
    N,
    K,
    columns,
    ROW_TILES: gl.constexpr,
    K_WARPS: gl.constexpr,
    PREFETCH: gl.constexpr,
    CARRY_POINTERS: gl.constexpr,
    E8M0_SCALES: gl.constexpr,
    K_TAIL: gl.constexpr,
    WORD_LOADS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """total [N] = x [K] @ w.T * scale + other, y = total * gain, and the sums of squares of total per 16 columns.

    That is an RMS norm except for a factor, which the next kernel derives from the squares. Grid as `linear_kernel`.
    """
    row, token = result_places(gl.program_id(0), ROW_TILES, 1, K_WARPS)
    keep = (row < N) & (token == 0)
    extras = (other_ptr + row, keep, gain_ptr + row, keep)
    C: gl.constexpr = Constants(
        ROW_TILES, 1, K_WARPS, PREFETCH, E8M0_SCALES, K_TAIL, DEPENDENT, CARRY_POINTERS, WORD_LOADS, ALL_TOKENS=False
    )
    sizes = Sizes(1, N, K, columns, K)
    v, read = linear_program(x_ptr, tile_ptr, scale_ptr, None, row, extras, gl.program_id(0), sizes, C)
    total = (v + read[0].to(gl.float32)).to(total_ptr.dtype.element_ty)
    gl.store(total_ptr + row, total, mask=keep)
    v = total.to(gl.float32)
    gl.store(y_ptr + row, (v * read[1].to(gl.float32)).to(y_ptr.dtype.element_ty), mask=keep)
    squares = gl.sum(gl.reshape(gl.where(keep, v * v, 0.0), (ROW_TILES, 4, 32)), 2)  # one per warp
    squares = gl.sum(gl.convert_layout(squares, gl.BlockedLayout([1, 4], [32, 1], [K_WARPS, 1], [1, 0])), 1)
    at = gl.program_id(0) * ROW_TILES + gl.arange(0, ROW_TILES, layout=squares.type.layout)
    gl.store(square_ptr + at, squares, mask=at * 16 < N)


@gluon.jit(do_not_specialize=["M", "N", "columns", "eps"])
def gated_kernel(
    x_ptr,
    tile_ptr,
    scale_ptr,
    other_ptr,
    other_scale_ptr,
    square_ptr,
    y_ptr,
    M,
    N,
    K,
    columns,
    x_stride,
    y_stride,
    eps,
    ROW_TILES: gl.constexpr,
    TOKEN_GROUPS: gl.constexpr,
    K_WARPS: gl.constexpr,
    PREFETCH: gl.constexpr,
    E8M0_SCALES: gl.constexpr,
    ALL_TOKENS: gl.constexpr,
    K_TAIL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SQUARES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """y [M, N] = activation(x [M, K] @ w.T) * (x @ other.T). Grid (ceil(row tiles / ROW_TILES),), K_WARPS warps.

    TOKEN_GROUPS is one or two.
    """
    squares = ()
    if SQUARES:  # not in registers: high occupancy leaves none
        squares = (square_ptr, room_for_squares(SQUARES))
    C: gl.constexpr = Constants(
        ROW_TILES, TOKEN_GROUPS, K_WARPS, PREFETCH, E8M0_SCALES, K_TAIL, DEPENDENT, CARRY_POINTERS=False,
        WORD_LOADS=False, ALL_TOKENS=ALL_TOKENS,
    )  # fmt: skip
    sizes = Sizes(M, N, K, columns, x_stride)
    sums, _ = sums_of_products(x_ptr, (tile_ptr, other_ptr), None, (), squares, None, sizes, C)
    COUNT: gl.constexpr = TOKEN_GROUPS * ROW_TILES
    first = gl.load(scale_ptr) * RESCALE
    second = gl.load(other_scale_ptr) * RESCALE
    v = sum_over_warps(sums, 0, COUNT, K_WARPS)
    up = sum_over_warps(sums, COUNT, COUNT, K_WARPS)
    if SQUARES:
        factor = inverse_rms(read_squares(squares[1], K_WARPS), K, eps)
        first = first * factor
        second = second * factor
    v = activate(v * first, ACTIVATION, y_ptr.dtype.element_ty) * (up * second)
    row, token = places(gl.program_id(0), ROW_TILES, COUNT, out_layout(K_WARPS))
    gl.store(y_ptr + token.to(gl.int64) * y_stride + row, v.to(y_ptr.dtype.element_ty), mask=(row < N) & (token < M))


@gluon.jit(do_not_specialize=["eps"])
def norm_kernel(
    x_ptr,
    other_ptr,
    gain_ptr,
    sum_ptr,
    y_ptr,
    eps,
    K,
    x_stride,
    other_stride,
    BLOCK: gl.constexpr,
    WARPS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """sum [M, K] = x + other, y = its RMS norm times gain; K up to BLOCK, statistics in fp32. Grid (M,)."""
    if DEPENDENT:
        wait_for_launch_before()
        allow_launch_after()
    m = gl.program_id(0).to(gl.int64)
    at = gl.arange(0, BLOCK, layout=gl.BlockedLayout([8], [32], [WARPS], [0]))
    inside = at < K
    v = gl.load(x_ptr + m * x_stride + at, mask=inside, other=0.0).to(gl.float32)
    v = v + gl.load(other_ptr + m * other_stride + at, mask=inside, other=0.0).to(gl.float32)
    rounded = v.to(sum_ptr.dtype.element_ty)
    gl.store(sum_ptr + m * K + at, rounded, mask=inside)
    v = rounded.to(gl.float32)
    v = v * gl.rsqrt(gl.sum(v * v, 0) / K + eps)
    v = v * gl.load(gain_ptr + at, mask=inside, other=0.0).to(gl.float32)
    gl.store(y_ptr + m * K + at, v.to(y_ptr.dtype.element_ty), mask=inside)
