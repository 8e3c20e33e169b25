"""Gluon kernel of `token_sums`. Importing this needs Triton."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vbrt.kernels.cuda.e2m1.narrow_gluon import allow_launch_after, wait_for_launch_before

__all__ = ["sum_kernel"]


@gluon.jit(do_not_specialize=["E", "N"])
def sum_kernel(
    row_ptr,
    id_ptr,
    weight_ptr,
    y_ptr,
    E,
    N,
    K_EXPERTS: gl.constexpr,
    WARPS: gl.constexpr,
    SPAN: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """y [T, N]: fp32 sum of each token's K_EXPERTS rows [P, N] times weight [P], in their order.

    Sentinels add nothing, whatever their rows contain. Grid (T, ceil(N / SPAN)).
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([SPAN // (32 * WARPS)], [32], [WARPS], [0])
    token = gl.program_id(0)
    at = gl.program_id(1) * SPAN + gl.arange(0, SPAN, layout=LAYOUT)
    if DEPENDENT:
        allow_launch_after()
        wait_for_launch_before()
    total = gl.zeros([SPAN], gl.float32, layout=LAYOUT)
    for j in gl.static_range(K_EXPERTS):
        pair = token * K_EXPERTS + j
        expert = gl.load(id_ptr + pair)
        routed = (expert >= 0) & (expert < E)
        weight = gl.load(weight_ptr + pair, mask=routed, other=0.0).to(gl.float32)
        row = gl.load(row_ptr + pair.to(gl.int64) * N + at, mask=(at < N) & routed, other=0.0)
        total = total + row.to(gl.float32) * weight
    gl.store(y_ptr + token.to(gl.int64) * N + at, total.to(y_ptr.dtype.element_ty), mask=at < N)
