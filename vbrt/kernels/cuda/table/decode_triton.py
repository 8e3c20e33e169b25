"""Triton decoder of `linear`: 4-bit codes to levels of a table, or with offsets. Importing needs Triton.

A weight is level[code] * (scale * tensor scale), both products rounded to fp32, as the formats define it; scales of 16
or 32 bits have no tensor scale. The table is one cache line: a warp's lookups hit it without conflicts, so the kernel
stays memory-bound. With OFFSETS (see `linear_gluon`) it is code * scale + offset, (code - 8) * scale + offset or
(code - zero) * scale.
"""

import triton
import triton.language as tl

from vbrt.kernels.cuda.plain.linear_triton import pointer_of

__all__ = ["decode_experts_kernel", "decode_kernel"]


@triton.jit
def _level(level_ptr, code, SIGNED: tl.constexpr):
    if SIGNED:
        level = tl.load(level_ptr + (code & 7))
        return (level.to(tl.int32, bitcast=True) ^ ((code & 8) << 28)).to(tl.float32, bitcast=True)
    return tl.load(level_ptr + code)


@triton.jit
def _decode(
    code_ptr, block_ptr, level_ptr, scale_ptr, offset_ptr, least_ptr, w_ptr, row, block, N, K, blocks,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, SIGNED: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """Store weights of `row` [ROWS, 1, 1] and `block` [1, BLOCKS, 1]; see `decode_kernel`."""
    inside = (row < N) & (block < blocks)
    index = row.to(tl.int64) * blocks + block
    HALF: tl.constexpr = BLOCK // 2
    byte = tl.load(code_ptr + (index * HALF + tl.arange(0, HALF)[None, None, :]), mask=inside, other=0).to(tl.int32)
    stored = tl.load(block_ptr + index, mask=inside, other=0)
    if OFFSETS == "superblock":
        large = row.to(tl.int64) * ((blocks * BLOCK + 255) // 256) + block * BLOCK // 256
        scale = tl.load(scale_ptr + large, mask=inside, other=0).to(tl.float32) * stored.to(tl.float32)
        least = tl.load(least_ptr + large, mask=inside, other=0).to(tl.float32)
        offset = least * tl.load(offset_ptr + index, mask=inside, other=0).to(tl.float32)
        low = (byte & 15).to(tl.float32) * scale - offset
        high = (byte >> 4).to(tl.float32) * scale - offset
    elif OFFSETS == "zeros":
        scale = stored.to(tl.float32)
        zero = tl.load(offset_ptr + index, mask=inside, other=0).to(tl.int32)
        low = ((byte & 15) - zero).to(tl.float32) * scale
        high = ((byte >> 4) - zero).to(tl.float32) * scale
    elif OFFSETS == "middle":
        scale = stored.to(tl.float32)
        low = ((byte & 15).to(tl.float32) - 8.0) * scale
        high = ((byte >> 4).to(tl.float32) - 8.0) * scale
    elif OFFSETS == "values" or OFFSETS == "middles":
        MIDDLE: tl.constexpr = 8.0 if OFFSETS == "middles" else 0.0
        scale = stored.to(tl.float32)
        offset = tl.load(offset_ptr + index, mask=inside, other=0).to(tl.float32)
        low = ((byte & 15).to(tl.float32) - MIDDLE) * scale + offset
        high = ((byte >> 4).to(tl.float32) - MIDDLE) * scale + offset
    else:
        if block_ptr.dtype.element_ty == tl.uint8:
            scale_byte = stored.to(tl.int32)
            scale = ((scale_byte + 1920) << 19).to(tl.float32, bitcast=True)  # 1920 = (127 - 7) << 4
            scale = tl.where(scale_byte > 0, scale, 0.0) * tl.load(scale_ptr)
        else:
            scale = stored.to(tl.float32)
        low = _level(level_ptr, byte & 15, SIGNED) * scale
        high = _level(level_ptr, byte >> 4, SIGNED) * scale
    low = low.to(w_ptr.dtype.element_ty)
    high = high.to(w_ptr.dtype.element_ty)
    w = tl.reshape(tl.join(low, high), (ROWS, BLOCKS, BLOCK))
    column = block * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    tl.store(w_ptr + (row.to(tl.int64) * K + column), w, mask=inside & (column < K))


@triton.jit
def decode_kernel(
    code_ptr, block_ptr, level_ptr, scale_ptr, offset_ptr, least_ptr, w_ptr, N, K, blocks,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, SIGNED: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """w [N, K] in its own dtype from codes [N, blocks * BLOCK / 2] and block scales [N, blocks], UE4M4 bytes or floats.

    level: 16 entries, or with SIGNED 8 magnitudes, bit 3 of a code being the sign. offset: [N, blocks]; of superblocks
    scale and least have the fp16 numbers, [N, blocks * BLOCK / 256 rounded up]. Without contraction to FMA, which with
    fp32 scales would round once. Grid (row groups, block groups).
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None, None]
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[None, :, None]
    _decode(
        code_ptr, block_ptr, level_ptr, scale_ptr, offset_ptr, least_ptr, w_ptr, row, block, N, K, blocks,
        ROWS, BLOCKS, BLOCK, SIGNED, OFFSETS,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "first", "N", "blocks", "code_at", "block_at", "scale_at", "offset_at", "least_at", "level_at",
    ]
)  # fmt: skip
def decode_experts_kernel(
    address_ptr, bound_ptr, level_ptr, w_ptr, first, N, K, blocks, code_at, block_at, scale_at, offset_at, least_at,
    level_at,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, OFFSETS: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """w [experts, N, K] from the pages of experts `first` .. that have pairs; the others are left uninitialized.

    Grid (ceil(N / ROWS), experts). code_at and the like: bytes from a page's address on. bound_ptr: pairs before each
    expert's. LEVELS and SCALES: see `linear_gluon.experts_kernel`.
    """
    expert = first + tl.program_id(1)
    if tl.load(bound_ptr + expert + 1) > tl.load(bound_ptr + expert):
        address = tl.load(address_ptr + expert)
        OFFSET: tl.constexpr = SCALES if OFFSETS == "values" or OFFSETS == "middles" else "uint8"
        LARGE: tl.constexpr = "float16" if OFFSETS == "superblock" else "float32"
        own_ptr = level_ptr if LEVELS == 0 else pointer_of(address + level_at, "float32")
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None, None]
        for start in range(0, blocks, BLOCKS):
            _decode(
                pointer_of(address + code_at, "uint8"), pointer_of(address + block_at, SCALES), own_ptr,
                pointer_of(address + scale_at, LARGE), pointer_of(address + offset_at, OFFSET),
                pointer_of(address + least_at, "float16"), w_ptr + tl.program_id(1).to(tl.int64) * N * K,
                row, start + tl.arange(0, BLOCKS)[None, :, None], N, K, blocks,
                ROWS, BLOCKS, BLOCK, LEVELS == 8, OFFSETS,
            )  # fmt: skip
