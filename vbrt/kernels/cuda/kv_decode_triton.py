"""Rounded pages of a KV cache to keys or values, where they are wanted. Importing needs Triton."""

import triton
import triton.language as tl

__all__ = ["decode_kernel"]


@triton.jit(do_not_specialize=["rows_in_page", "heads", "row_stride", "head_stride"])
def decode_kernel(
    page_ptr,
    bound_ptr,
    row_ptr,
    out_ptr,
    rows_in_page,
    heads,
    row_stride,
    head_stride,
    PAGE_BYTES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKEN_GROUP: tl.constexpr,
    CHANNEL_GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """out [R, H, n TOKENS, CHANNELS] = low + code * step, of codes uint8 [n, B, H, TOKENS, CHANNELS * BITS / 8] and
    bounds bf16 [n, 2, B, H, TOKENS / TOKEN_GROUP, CHANNELS / CHANNEL_GROUP], which begin where the pointers say, every
    PAGE_BYTES.

    ROWS: True if row_ptr, int64 [R], says which of the B sequences each row is. BLOCK tokens a program; WIDTH: the
    power of two that holds CHANNELS. Grid (tokens of a page / BLOCK * n, R * H).
    """
    BLOCKS: tl.constexpr = (TOKENS + BLOCK - 1) // BLOCK
    page = tl.program_id(0) // BLOCKS
    row = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    source = row
    if ROWS:
        source = tl.load(row_ptr + row).to(tl.int32)
    token = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)[:, None]
    channel = tl.arange(0, WIDTH)[None, :]
    inside = (token < TOKENS) & (channel < CHANNELS)
    place = source * heads + head
    begin = page.to(tl.int64) * PAGE_BYTES
    PACKED: tl.constexpr = CHANNELS * BITS // 8
    code = tl.load(page_ptr + begin + (place * TOKENS + token) * PACKED + channel * BITS // 8, mask=inside, other=0).to(
        tl.int32
    )
    if BITS == 4:
        code = (code >> (4 * (channel & 1))) & 15
    ACROSS: tl.constexpr = CHANNELS // CHANNEL_GROUP
    GROUPS: tl.constexpr = (TOKENS // TOKEN_GROUP) * ACROSS
    group = place * GROUPS + (token // TOKEN_GROUP) * ACROSS + channel // CHANNEL_GROUP
    bound = bound_ptr + begin // 2 + group
    low = tl.load(bound, mask=inside, other=0).to(tl.float32)
    step = tl.load(bound + rows_in_page * heads * GROUPS, mask=inside, other=0).to(tl.float32)
    x = low + code.to(tl.float32) * step
    to = row.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride
    out = out_ptr + to + (page.to(tl.int64) * TOKENS + token) * CHANNELS + channel
    tl.store(out, x.to(out_ptr.dtype.element_ty), mask=inside)
