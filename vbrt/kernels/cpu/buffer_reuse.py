"""Buffer reuse for decoded weights in host memory: a freed weight's pages back the next one.

For 32 MiB or more the C library maps fresh memory each time and unmaps it; a page fault every 4 KiB costs five times as
much as decoding (8192 x 8192 in bf16: 59 ms instead of 14 including the matmul). Here a few blocks are kept, each for
one size. A block is free once its storage is gone, whoever held it last, so tensors from here can be kept, shared and
written to like any other.
"""

import mmap
import weakref
from collections import deque
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from vbrt.host.host_memory import private_mapping

__all__ = ["empty", "trim"]

_SMALLEST_BYTES = 16 << 20  # smaller blocks are reused by the C library, whatever its thresholds
_BLOCKS = 4  # free blocks kept


class _Loan(weakref.ref):
    """Weak reference to a storage's view of a block."""

    block: mmap.mmap


# Changed only by atomic calls: a loan ends wherever its storage is freed, in any thread.
_loans: dict[int, _Loan] = {}
_ended: deque[_Loan] = deque()
_free: deque[mmap.mmap] = deque()


def empty(shape: tuple[int, ...], dtype: torch.dtype, *, smallest_bytes: int = _SMALLEST_BYTES) -> Tensor:
    """An uninitialised CPU tensor.

    Args:
        smallest_bytes: smaller tensors use the C library's allocator, which outside the main thread returns megabytes
            to the operating system each time.
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
    block = private_mapping(nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # no transparent huge pages in this kernel
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _settle() -> None:
    """Collect blocks whose storages are gone; free the longest unused."""
    with suppress(IndexError):  # another thread may take the last one
        while True:
            loan = _ended.popleft()
            _loans.pop(id(loan), None)
            _free.append(loan.block)
    with suppress(IndexError):
        while len(_free) > _BLOCKS:
            _free.popleft()


def trim() -> None:
    """Return the free blocks to the operating system."""
    _settle()
    _free.clear()
    for number, loan in list(_loans.items()):
        if loan() is None:  # interrupted in `_settle`
            _loans.pop(number, None)
