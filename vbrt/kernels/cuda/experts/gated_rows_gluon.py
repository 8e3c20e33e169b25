"""Gluon kernel of `gated_rows`. Importing this needs Triton."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vbrt.kernels.cuda.e2m1.narrow_gluon import allow_launch_after, wait_for_launch_before
from vbrt.kernels.cuda.experts.few_tokens_gluon import gate_function, gated_product

__all__ = ["gate_kernel"]


@gluon.jit(do_not_specialize=["N"])
def gate_kernel(
    v_ptr,
    y_ptr,
    N,
    GATING: gl.constexpr,
    FUNCTION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    SHIFT: gl.constexpr,
    WARPS: gl.constexpr,
    SPAN: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """y [P, N], or [P, N / 2] by GATING "halves" (all gates, then all values) or "interleaved", of v [P, N].

    Grid (P, ceil(columns of y / SPAN)).
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([SPAN // (32 * WARPS)], [32], [WARPS], [0])
    DTYPE: gl.constexpr = y_ptr.dtype.element_ty
    pair = gl.program_id(0).to(gl.int64)
    at = gl.program_id(1) * SPAN + gl.arange(0, SPAN, layout=LAYOUT)
    columns = N if GATING == "none" else N // 2
    keep = at < columns
    row = v_ptr + pair * N
    if DEPENDENT:
        allow_launch_after()
        wait_for_launch_before()
    if GATING == "none":
        y = gate_function(gl.load(row + at, mask=keep, other=0.0).to(gl.float32), FUNCTION, ALPHA, DTYPE)
    else:
        STEP: gl.constexpr = 2 if GATING == "interleaved" else 1
        gate = gl.load(row + STEP * at, mask=keep, other=0.0).to(gl.float32)
        value = gl.load(row + STEP * at + (1 if GATING == "interleaved" else columns), mask=keep, other=0.0)
        y = gated_product(gate, value.to(gl.float32), FUNCTION, ALPHA, LIMIT, SHIFT, DTYPE)
    gl.store(y_ptr + pair * columns + at, y.to(DTYPE), mask=keep)
