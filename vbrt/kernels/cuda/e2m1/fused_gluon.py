"""The GPU side of `fused_linear`: a norm, and two matrices in tile order with the product of their results.

The gated kernel's loop is the linear kernels', with the row tile of a second matrix beside the first one's.

The norm is a launch of its own, short because the next kernel's is under way meanwhile and its weights with it.
Gathering the norm's statistics inside the linear kernel, as matrix instructions on x, was faster on an H200 in two of
thirteen cases (1.06x), slower in nine (by up to 1.5x), and needed four times the code.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vbrt.kernels.cuda.e2m1.narrow_gluon import (
    RESCALE,
    activate,
    allow_launch_after,
    inverse_rms,
    out_layout,
    places,
    read_squares,
    room_for_squares,
    summed,
    sums_of_products,
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

    Other arguments as of `fp4_gluon.sums_of_products`, NT is one or two; SQUARES as of `fp4_gluon.siblings_kernel`.
    """
    squares = ()
    if SQUARES:  # not in registers, of which many programs beside each other have none left
        squares = room_for_squares(SQUARES)
    # If weights read ahead shared a scoreboard with activations, a wait for these would be one for those too: 8 to 15 %
    # slower on an H200. How ptxas shares them out depends on the order of lines, here on who asks for the program.
    sums, _ = sums_of_products(
        x_ptr, (tile_ptr, other_ptr), scale_ptr, (), square_ptr, squares, None, M, N, K, columns, x_stride,
        2, R, NT, WK, PREFETCH, False, E8, FULL, TAIL, False, EARLY, False, 0, SQUARES,
    )  # fmt: skip
    COUNT: gl.constexpr = NT * R
    first = gl.load(scale_ptr) * RESCALE
    second = gl.load(other_scale_ptr) * RESCALE
    v = summed(sums, 0, COUNT, WK)
    up = summed(sums, COUNT, COUNT, WK)
    if SQUARES:
        factor = inverse_rms(read_squares(squares, WK), K, eps)
        first = first * factor
        second = second * factor
    v = activate(v * first, ACTIVATION, y_ptr.dtype.element_ty) * (up * second)
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
