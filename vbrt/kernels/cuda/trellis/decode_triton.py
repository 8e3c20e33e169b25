"""Triton decoder of `linear`: trellis codes to the weight. Importing needs Triton."""

import triton
import triton.language as tl

__all__ = ["decode_kernel"]


@triton.jit
def values_of(word):
    """Two values of bf16 of a word of hashed bits, as they are added."""
    return (word & 0x81F081F0) ^ 0x3F803F80


@triton.jit
def decode_kernel(code_ptr, scale_ptr, unit_ptr, back_ptr, w_ptr, N, K, groups, limit, BLOCK: tl.constexpr):
    """w [N, K] in its own dtype from codes int32 [ceil(N / 16), 96 groups], see vbrt/formats/t3.py.

    Grid (ceil(N / 16), 64 groups / BLOCK). back_ptr: bf16 [BLOCK, BLOCK], the rotation back, of 1 and -1. Sums are
    whole numbers of 1/64 of up to 15 bits; times 8/BLOCK, a block's scale and the tensor's they are exact in fp32, too.
    """
    row = tl.arange(0, 16)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    block = tl.program_id(1)
    group = block * BLOCK // 64 + column // 64
    base = code_ptr + (tl.program_id(0).to(tl.int64) * groups + group) * 96
    tile = column % 64 // 16
    lane = 4 * (row % 8) + column % 8 // 2
    low = tl.load(base + lane).to(tl.uint32, bitcast=True) >> 8 * tile & 0xFF
    before = tl.load(base + (lane + 31) % 32).to(tl.uint32, bitcast=True) >> 8 * tile & 0xFF
    top = tl.load(base + 32 * (1 + tile // 2) + lane).to(tl.uint32, bitcast=True) >> 16 * (tile % 2) & 0xFFFF
    window = before << 24 | top << 8 | low
    state = window >> 18 - 6 * (2 * (column % 16 // 8) + row // 8) & 0x3FFF
    hashed = state * 0x9E3779B1 + 64248484
    half = 16 * (column % 2)
    first = (values_of(hashed) >> half << 16).to(tl.float32, bitcast=True)
    second = (values_of(hashed << 5) >> half << 16).to(tl.float32, bitcast=True)
    back = tl.load(back_ptr + tl.arange(0, BLOCK)[:, None] * BLOCK + column)
    sums = tl.dot((first + second).to(tl.bfloat16), back) * (8 / BLOCK)
    row += tl.program_id(0) * 16
    byte = tl.load(scale_ptr + row.to(tl.int64) * (groups * 64 // BLOCK) + block, mask=row < N, other=0).to(tl.int32)
    scale = tl.where(byte == 0, 0, (byte + (120 << 4)) << 19).to(tl.float32, bitcast=True)
    w = sums * (scale * tl.load(unit_ptr))
    w = tl.minimum(tl.maximum(w, -limit), limit).to(w_ptr.dtype.element_ty)
    column += block * BLOCK
    tl.store(w_ptr + row.to(tl.int64) * K + column, w, mask=(row < N) & (column < K))
