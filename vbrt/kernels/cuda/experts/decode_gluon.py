"""Decoder of routed experts' pages. Importing this needs Triton."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vbrt.kernels.cuda.e2m1.narrow_gluon import decode_program

__all__ = ["decode_kernel"]


@gluon.jit(do_not_specialize=["first", "N", "columns"])
def decode_kernel(
    address_ptr,
    offset_ptr,
    w_ptr,
    tile_offset,
    scale_offset,
    first,
    N,
    K,
    columns,
    E8M0_SCALES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """w [experts, N, K] from the pages of experts `first` .. that have pairs; the others are left uninitialized.

    Matrices start tile_offset bytes after an address, their scales scale_offset. Grid (row tiles * column groups,
    experts). See `narrow_gluon.decode_kernel`.
    """
    expert = first + gl.program_id(1)
    if gl.load(offset_ptr + expert + 1) > gl.load(offset_ptr + expert):
        address = gl.load(address_ptr + expert)
        tile_ptr = gl.multiple_of((address + tile_offset).to(gl.pointer_type(gl.int32)), 16)
        scale_ptr = (address + scale_offset).to(gl.pointer_type(gl.float32))
        own_ptr = w_ptr + gl.program_id(1).to(gl.int64) * N * K
        decode_program(gl.program_id(0), tile_ptr, scale_ptr, own_ptr, N, K, columns, E8M0_SCALES, WARPS)
