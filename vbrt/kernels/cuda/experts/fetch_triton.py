"""Page fetch by GPU threads: pages from pinned host memory into their slots (zero-copy reads).

Importing this needs Triton; plain operations only, so that its interpreter runs it too.
"""

import triton
import triton.language as tl

__all__ = ["fetch_kernel"]


@triton.jit(do_not_specialize=["units"])
def fetch_kernel(fetch_ptr, base_ptr, units, PAGES: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    """Copy the pages listed in fetch_ptr, of up to 4096 * `units` bytes each; grid (PROGRAMS,).

    fetch_ptr int64 [1 + 3 PAGES]: count, source addresses, target addresses, sizes in 4096 bytes. Pages are 4 KiB
    aligned. base_ptr: any aligned int64 memory, from which addresses count. Programs take blocks round-robin, so that
    even one page uses the whole link.
    """
    blocks = tl.cdiv(units * 512, BLOCK)
    count = tl.load(fetch_ptr).to(tl.int32) * blocks
    origin = base_ptr.to(tl.int64)
    for item in range(tl.program_id(0), count, PROGRAMS):
        entry_ptr = fetch_ptr + 1 + item // blocks
        # through a pointer that the compiler knows to be aligned: then it loads 16 bytes per thread
        source = tl.multiple_of((tl.load(entry_ptr) - origin) // 8, 512)
        target = tl.multiple_of((tl.load(entry_ptr + PAGES) - origin) // 8, 512)
        words = tl.load(entry_ptr + 2 * PAGES).to(tl.int32) * 512
        at = item % blocks * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(base_ptr + (source + at), mask=at < words)
        tl.store(base_ptr + (target + at), word, mask=at < words)
