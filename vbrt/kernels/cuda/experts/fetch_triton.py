"""Pages from page-locked host memory into their slots, read by the GPU's own threads.

Importing this needs Triton; plain operations only, so that its interpreter runs it too.
"""

import triton
import triton.language as tl

__all__ = ["fetch_kernel"]


@triton.jit(do_not_specialize=["units"])
def fetch_kernel(fetch_ptr, arena_ptr, units, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    """Copy as many pages of 4096 * `units` bytes as fetch_ptr says; grid (PROGRAMS,).

    fetch_ptr int64 [1 + 2 EXPERTS]: how many, the address of each source, that of each target. Pages lie at 4 KiB.
    Programs take blocks in turn, so that the whole link is used for one page too.
    """
    words = units * 512
    blocks = tl.cdiv(words, BLOCK)
    count = tl.load(fetch_ptr).to(tl.int32) * blocks
    arena = arena_ptr.to(tl.int64)
    for item in range(tl.program_id(0), count, PROGRAMS):
        entry_ptr = fetch_ptr + 1 + item // blocks
        # from a pointer that the compiler knows to be aligned: it loads 16 bytes a thread then
        source = tl.multiple_of((tl.load(entry_ptr) - arena) // 8, 512)
        target = tl.multiple_of((tl.load(entry_ptr + EXPERTS) - arena) // 8, 512)
        at = item % blocks * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(arena_ptr + (source + at), mask=at < words)
        tl.store(arena_ptr + (target + at), word, mask=at < words)
