"""Triton decoder of `linear`: 8-bit integers dequantized. Importing needs Triton."""

import triton
import triton.language as tl

__all__ = ["decode_kernel"]


@triton.jit
def decode_kernel(code_ptr, block_ptr, w_ptr, N, K, blocks, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """w [N, K] in its own dtype from codes int8 [N, 32 blocks] and E8M0 bytes [N, blocks].

    code * 2^(byte - 127) / 64 is rounded to fp32, then to the dtype. Grid (row groups, block groups).
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None, None]
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[None, :, None]
    inside = (row < N) & (block < blocks)
    index = row.to(tl.int64) * blocks + block
    place = tl.arange(0, 32)[None, None, :]
    number = tl.load(code_ptr + (index * 32 + place), mask=inside, other=0).to(tl.float32)
    byte = tl.load(block_ptr + index, mask=inside, other=0).to(tl.int32)
    bits = tl.where(byte > 6, (byte - 6) << 23, 0x10000 << (byte & 7))
    scale = tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    column = block * 32 + place
    w = (number * scale).to(w_ptr.dtype.element_ty)
    tl.store(w_ptr + (row.to(tl.int64) * K + column), w, mask=inside & (column < K))
