"""Page fetch from host memory and, by a mailbox, from a drive.

Importing this needs Triton. Words of the mailbox are read and written as in `mailbox_triton.py`.
"""

import triton
import triton.language as tl

from vbrt.kernels.cuda.mailbox_triton import answered, give_up, release

__all__ = ["ask_kernel", "bring_kernel"]


@triton.jit(do_not_specialize=["first", "most"])
def ask_kernel(
    fetch_ptr, rank_ptr, words_ptr, state_ptr, first, most,
    POST: tl.constexpr, COUNT: tl.constexpr, LIST: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """Post the pages on the drive that a lease is missing: `most` of them, from the one numbered `first`; grid (1,).

    fetch_ptr: as of `fetch_kernel`; a source below 0 is -1 - number of a page on the drive. rank_ptr [PAGES]: gets the
    place of each entry among those posted, -1 if it is not. state_ptr [3]: number of the last post; whether the device
    has given up on one; pages of this post, which is none without pages. LIST: word of the posted page numbers.
    """
    i = tl.arange(0, PAGES)
    source = tl.load(fetch_ptr + 1 + i, mask=i < tl.load(fetch_ptr), other=0)
    far = (source < 0).to(tl.int32)
    rank = tl.cumsum(far, 0) - 1 - first
    posted = (far != 0) & (rank >= 0) & (rank < most)
    tl.store(rank_ptr + i, tl.where(posted, rank, -1).to(tl.int64))
    count = tl.sum(posted.to(tl.int64))
    number = tl.load(state_ptr) + (count > 0).to(tl.int64)
    tl.store(words_ptr + LIST + rank, -1 - source, mask=posted)
    if count > 0:
        tl.store(words_ptr + COUNT, count)
    tl.debug_barrier()  # all threads have written their part, and read the state
    if count > 0:
        release(words_ptr + POST, number)
    tl.store(state_ptr, number)
    tl.store(state_ptr + 2, count)


@triton.jit
def _copy(base_ptr, source, target, units, at, words):
    """Copy a block of a page, or all ones where it did not come."""
    # through a pointer that the compiler knows to be aligned: then it loads 16 bytes per thread
    origin = base_ptr.to(tl.int64)
    source = tl.multiple_of((source - origin) // 8, 512)
    target = tl.multiple_of((target - origin) // 8, 512)
    word = tl.load(base_ptr + (source + at), mask=at < words, other=-1)
    tl.store(base_ptr + (target + at), word, mask=at < units * 512)


@triton.jit(do_not_specialize=["units", "wait_us"])
def bring_kernel(
    fetch_ptr, rank_ptr, base_ptr, words_ptr, state_ptr, units, wait_us,
    ANSWER: tl.constexpr, GAVE_UP: tl.constexpr, ADDRESSES: tl.constexpr, FIRST: tl.constexpr, PAGES: tl.constexpr,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Copy the pages listed in fetch_ptr as `fetch_kernel` does, and those of the last post once the host has answered
    with their addresses, at ADDRESSES; grid (PROGRAMS,).

    FIRST: the post is the lease's first one: pages in host memory are copied, too, before the wait. Without an answer
    within `wait_us`, pages are filled with ones, which are NaN in all formats' scales.
    """
    blocks = tl.cdiv(units * 512, BLOCK)
    count = tl.load(fetch_ptr).to(tl.int32) * blocks
    if FIRST:
        for item in range(tl.program_id(0), count, PROGRAMS):
            entry_ptr = fetch_ptr + 1 + item // blocks
            source = tl.load(entry_ptr)
            own = tl.load(entry_ptr + 2 * PAGES).to(tl.int32)
            if source >= 0:
                at = item % blocks * BLOCK + tl.arange(0, BLOCK)
                _copy(base_ptr, source, tl.load(entry_ptr + PAGES), own, at, own * 512)
    if tl.load(state_ptr + 2) > 0:
        number = tl.load(state_ptr)
        broken = tl.load(state_ptr + 1)
        came = answered(words_ptr, number, broken, wait_us.to(tl.int64) * 1000, ANSWER)
        for item in range(tl.program_id(0), count, PROGRAMS):
            rank = tl.load(rank_ptr + item // blocks)
            if rank >= 0:
                entry_ptr = fetch_ptr + 1 + item // blocks
                source = tl.load(words_ptr + ADDRESSES + rank)
                own = tl.load(entry_ptr + 2 * PAGES).to(tl.int32)
                at = item % blocks * BLOCK + tl.arange(0, BLOCK)
                _copy(base_ptr, source, tl.load(entry_ptr + PAGES), own, at, tl.where(came, own * 512, 0))
        if came == 0:
            give_up(words_ptr, state_ptr, number, broken, GAVE_UP)
