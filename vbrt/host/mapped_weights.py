"""Memory-mapped weights, as `from_pretrained` makes them: page them out once they are encoded.

A mapping lives as long as any tensor in it, so a kept embedding keeps the pages of all encoded weights resident.
MADV_PAGEOUT evicts them from the process, and from the page cache if no other process maps them. It never loses data:
later reads fault the page back in from the file, and dirty pages go to swap, or stay. Rejected: MADV_DONTNEED would
leave the page cache warm at a tenth of the cost, but loses another thread's recent writes.
"""

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

import torch

__all__ = ["page_out", "populate"]

_MADV_PAGEOUT, _MADV_POPULATE_READ = 21, 22  # Linux 5.4, 5.14; Python's mmap has no names for them
_NO_FILES = (b"/dev/", b"/memfd:", b"/SYSV")  # shared memory without a file to fault back from, except swap


def page_out(weight: torch.Tensor) -> int:
    """Page a memory-mapped weight's whole pages out; return their bytes, 0 for any other weight.

    The content stays valid.
    """
    if sys.platform != "linux" or weight.device.type != "cpu" or not weight.is_contiguous():
        return 0
    if weight.untyped_storage().resizable():  # torch's own memory: no need to search the mappings
        return 0
    page = mmap.PAGESIZE
    first = -(-weight.data_ptr() // page) * page
    end = (weight.data_ptr() + weight.nbytes) // page * page
    if end <= first or not _is_mapped_file(first, end):
        return 0
    return end - first if _madvise()(first, end - first, _MADV_PAGEOUT) == 0 else 0


def populate(weight: torch.Tensor) -> bool:
    """Prefault the pages of a contiguous memory-mapped weight at once, before a read from end to end: one page fault
    per few pages takes longer than the read. Returns False if the system cannot; nothing is lost then."""
    if sys.platform != "linux" or weight.device.type != "cpu" or weight.untyped_storage().resizable():
        return False
    first = weight.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    return _madvise()(first, weight.data_ptr() + weight.nbytes - first, _MADV_POPULATE_READ) == 0


def _is_mapped_file(first: int, end: int) -> bool:
    with open("/proc/self/maps", "rb") as maps:
        for line in maps:
            addresses, _, _, _, inode, *path = line.split(maxsplit=5)
            begin, _, stop = addresses.partition(b"-")
            if int(begin, 16) <= first < int(stop, 16):
                return end <= int(stop, 16) and inode != b"0" and not path[0].startswith(_NO_FILES)
    return False


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes, madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return madvise
