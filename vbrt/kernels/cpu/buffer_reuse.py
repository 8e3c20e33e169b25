"""Host memory for decoded weights, which the next one takes over once nobody holds the one before.

A weight of 32 MiB or more is fresh memory from the operating system each time: the C library maps it and unmaps it, and
a page fault every 4 KiB costs five times what decoding does (8192 x 8192 in bf16: 59 ms instead of 14 with the matmul
behind it). Here a few blocks are kept, each for weights of one size. A block is free when the storage in it is
gone, whoever held it last, so what comes from here may be kept, shared and written to like any other tensor.
"""

import mmap
import weakref
from collections import deque
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

__all__ = ["empty", "trim"]

_SMALLEST_BYTES = 16 << 20  # what the C library reuses by itself, whatever its thresholds have become
_BLOCKS = 4  # that are kept while they are free


class _Loan(weakref.ref):
    """Watches the view of a block that a storage holds."""

    block: mmap.mmap


# Only calls that cannot be interrupted change these: a loan ends wherever its storage is freed, in any thread.
_loans: dict[int, _Loan] = {}
_ended: deque[_Loan] = deque()
_free: deque[mmap.mmap] = deque()


def empty(shape: tuple[int, ...], dtype: torch.dtype, *, smallest_bytes: int = _SMALLEST_BYTES) -> Tensor:
    """An uninitialised CPU tensor.

    Args:
        smallest_bytes: what is smaller is left to the C library, which outside the main thread gives megabytes back to
            the operating system each time.
    """
    nbytes = prod(shape) * dtype.itemsize
    if nbytes < smallest_bytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    block = _take(nbytes)
    view = memoryview(block)
    loan = _Loan(view, _ended.append)
    loan.block = block
    _loans[id(loan)] = loan
    return torch.frombuffer(view, dtype=dtype).view(shape)


def _take(nbytes: int) -> mmap.mmap:
    _settle()
    for block in list(_free):
        if len(block) == nbytes:
            try:
                _free.remove(block)
            except ValueError:  # another thread was faster
                continue
            return block
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # private: a fork has its own
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _settle() -> None:
    """Collect the blocks whose storages are gone; free those that were unused longest."""
    with suppress(IndexError):  # another thread may take the last one
        while True:
            loan = _ended.popleft()
            _loans.pop(id(loan), None)
            _free.append(loan.block)
    with suppress(IndexError):
        while len(_free) > _BLOCKS:
            _free.popleft()


def trim() -> None:
    """Give the free blocks back to the operating system."""
    _settle()
    _free.clear()
    for number, loan in list(_loans.items()):
        if loan() is None:  # an interrupt came while it was settled
            _loans.pop(number, None)
