"""Triton kernels of `kv_pages`. Importing needs Triton."""

import triton
import triton.language as tl

__all__ = ["copy_kernel", "decode_kernel", "gather_kernel"]


@triton.jit(do_not_specialize=["heads", "row_stride", "head_stride"])
def copy_kernel(
    page_ptr,
    row_ptr,
    out_ptr,
    heads,
    row_stride,
    head_stride,
    PAGE_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    PAIRED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [R, H, n WORDS] from pages [n, B, H, WORDS] of int64, with a page stride of PAGE_WORDS.

    ROWS: True if row_ptr, int64 [R], maps rows to the B sequences. PAIRED: all strides are even. Grid
    (n * WORDS / BLOCK, R * H).
    """
    BLOCKS: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    page = (tl.program_id(0) // BLOCKS).to(tl.int64)
    row = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    source = row.to(tl.int64)
    if ROWS:
        source = tl.load(row_ptr + row)
    word = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    begin = row.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride
    if PAIRED:
        begin = tl.multiple_of(begin, 2)
    x = tl.load(page_ptr + page * PAGE_WORDS + (source * heads + head) * WORDS + word, mask=word < WORDS)
    tl.store(out_ptr + begin + page * WORDS + word, x, mask=word < WORDS)


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
    """out [R, H, n TOKENS, CHANNELS] = low + code * step, from codes uint8 [n, B, H, TOKENS, CHANNELS * BITS / 8] and
    bounds bf16 [n, 2, B, H, TOKENS / TOKEN_GROUP, CHANNELS / CHANNEL_GROUP], both with a page stride of PAGE_BYTES. One
    of the group sizes is 1.
    ROWS: as for `copy_kernel`. A program has BLOCK tokens, within one group if tokens are grouped, and WIDTH channels:
    the power of two that holds a channel group, or all channels if they are not grouped. Grid (n * TOKENS / BLOCK, R *
    H * channel groups, if channels are grouped).
    """
    ACROSS: tl.constexpr = CHANNELS // CHANNEL_GROUP
    PARTS: tl.constexpr = ACROSS if CHANNEL_GROUP > 1 else 1
    MEMBERS: tl.constexpr = CHANNEL_GROUP if CHANNEL_GROUP > 1 else CHANNELS
    BLOCKS: tl.constexpr = (TOKENS + BLOCK - 1) // BLOCK
    PACKED: tl.constexpr = CHANNELS * BITS // 8
    GROUPS: tl.constexpr = (TOKENS // TOKEN_GROUP) * ACROSS
    page = (tl.program_id(0) // BLOCKS).to(tl.int64)
    part = tl.program_id(1) % PARTS
    place = tl.program_id(1) // PARTS
    row = place // heads
    head = place % heads
    source = row.to(tl.int64)
    if ROWS:
        source = tl.load(row_ptr + row)
    first = (tl.program_id(0) % BLOCKS) * BLOCK
    token = first + tl.arange(0, BLOCK)[:, None]
    channel = tl.arange(0, WIDTH)[None, :]
    inside = (token < TOKENS) & (channel < MEMBERS)
    codes = (
        page_ptr + page * PAGE_BYTES + ((source * heads + head) * TOKENS + token) * PACKED + part * MEMBERS * BITS // 8
    )
    if BITS == 4:
        half = tl.arange(0, WIDTH // 2)[None, :]
        byte = tl.load(codes + half, mask=(token < TOKENS) & (half < MEMBERS // 2), other=0)
        code = tl.reshape(tl.join(byte & 15, byte >> 4), (BLOCK, WIDTH))
    else:
        code = tl.load(codes + channel, mask=inside, other=0)
    bound = bound_ptr + page * (PAGE_BYTES // 2) + (source * heads + head) * GROUPS
    if CHANNEL_GROUP > 1:
        group = token * ACROSS + part
        there = token < TOKENS
    else:
        group = (first // TOKEN_GROUP) * ACROSS + channel
        there = channel < MEMBERS
    low = tl.load(bound + group, mask=there, other=0).to(tl.float32)
    step = tl.load(bound + rows_in_page * heads * GROUPS + group, mask=there, other=0).to(tl.float32)
    x = low + code.to(tl.float32) * step
    begin = row.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride
    out = out_ptr + begin + (page * TOKENS + token) * CHANNELS + part * MEMBERS + channel
    tl.store(out, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count", "heads"])
def gather_kernel(
    page_ptr,
    bound_ptr,
    number_ptr,
    place_ptr,
    out_ptr,
    count,
    heads,
    PAGE_BYTES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKEN_GROUP: tl.constexpr,
    CHANNEL_GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """out [count, H, CHANNELS] = low + code * step of tokens: number_ptr int64 [count] has the page of each, place_ptr
    int64 [count] its place there; codes and bounds are those of `decode_kernel` with B = 1. A program has BLOCK tokens
    of one head, and WIDTH channels: the power of two that holds all. Grid (count / BLOCK, H).
    """
    ACROSS: tl.constexpr = CHANNELS // CHANNEL_GROUP
    PACKED: tl.constexpr = CHANNELS * BITS // 8
    GROUPS: tl.constexpr = (TOKENS // TOKEN_GROUP) * ACROSS
    head = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = token < count
    page = tl.load(number_ptr + token, mask=there, other=0)[:, None]
    place = tl.load(place_ptr + token, mask=there, other=0)[:, None]
    channel = tl.arange(0, WIDTH)[None, :]
    inside = there[:, None] & (channel < CHANNELS)
    codes = page_ptr + page * PAGE_BYTES + (head * TOKENS + place) * PACKED
    if BITS == 4:
        half = tl.arange(0, WIDTH // 2)[None, :]
        byte = tl.load(codes + half, mask=there[:, None] & (half < CHANNELS // 2), other=0)
        code = tl.reshape(tl.join(byte & 15, byte >> 4), (BLOCK, WIDTH))
    else:
        code = tl.load(codes + channel, mask=inside, other=0)
    group = (place // TOKEN_GROUP) * ACROSS + channel // CHANNEL_GROUP
    bound = bound_ptr + page * (PAGE_BYTES // 2) + head * GROUPS + group
    low = tl.load(bound, mask=inside, other=0).to(tl.float32)
    step = tl.load(bound + heads * GROUPS, mask=inside, other=0).to(tl.float32)
    out = out_ptr + (token[:, None] * heads + head) * CHANNELS + channel
    tl.store(out, (low + code.to(tl.float32) * step).to(out_ptr.dtype.element_ty), mask=inside)
