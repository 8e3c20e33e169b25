"""Host memory as the system gives it: anonymous mappings, page-locked for a GPU, and the heap's leftovers.

Buffers are mappings of their own: aligned for direct I/O, returned to the system when they are freed, and registered
as page-locked memory where CUDA is there (`pin_memory=True` would round each up to a power of two).
"""

import contextlib
import ctypes
import mmap
import sys
import weakref

import torch

__all__ = [
    "ALIGNMENT_BYTES",
    "Loan",
    "PinError",
    "aligned",
    "bytes_view",
    "map_memory",
    "pin",
    "storage_of",
    "trim_heap",
]

ALIGNMENT_BYTES = 4096  # of memory for direct I/O
_HUGE_PAGE_BYTES = 2 << 20


class PinError(OSError):
    """The system, or CUDA, refuses to page-lock memory."""


def bytes_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, writable, without a copy; the tensor must outlive the view."""
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the memory that a tensor is a part of."""
    return tensor.untyped_storage().data_ptr()


class Loan:
    """Memory of a contiguous CPU tensor that others are given, and whether they still have it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._buffer: weakref.ref[ctypes.Array] | None = None
        self._tensor: weakref.ref[torch.Tensor] | None = None

    @property
    def alive(self) -> bool:
        """True while a tensor that was given, a view of one or an array on one is there."""
        return self._buffer is not None and self._buffer() is not None

    @property
    def last(self) -> torch.Tensor | None:
        """The tensor that was given last, if it is there."""
        return None if self._tensor is None else self._tensor()

    def tensor(self) -> torch.Tensor:
        """Return a tensor on the memory, the one before if it is there; it keeps the memory."""
        found = self.last
        if found is None:
            buffer = None if self._buffer is None else self._buffer()
            if buffer is None:
                buffer = (ctypes.c_ubyte * self.memory.nbytes).from_address(self.memory.data_ptr())
                buffer.memory = self.memory
                self._buffer = weakref.ref(buffer)
            found = torch.frombuffer(buffer, dtype=self.memory.dtype).view(self.memory.shape)
            self._tensor = weakref.ref(found)
        return found


def aligned(nbytes: int) -> torch.Tensor:
    """Return uint8 [nbytes] of the heap, whose address direct I/O takes."""
    memory = torch.empty(nbytes + ALIGNMENT_BYTES, dtype=torch.uint8, device="cpu")
    return memory[-memory.data_ptr() % ALIGNMENT_BYTES :][:nbytes]


def map_memory(nbytes: int, *, shared: bool = False) -> torch.Tensor:
    """Return uint8 [nbytes] that goes back to the system with the tensor, in huge pages where that is worth it.

    Memory to page-lock is `shared`: a fork may give private memory other physical pages than a GPU copies from. Linux
    has huge pages for private memory only; with them two cores read weights a quarter to a half faster.

    Raises:
        OSError, ValueError: the system refuses it.
    """
    if shared or sys.platform != "linux" or nbytes < _HUGE_PAGE_BYTES:
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    mapping = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = (
        -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % _HUGE_PAGE_BYTES
    )  # what is not touched takes nothing
    with contextlib.suppress(OSError):  # advice only: kernels without huge pages refuse it
        mapping.madvise(mmap.MADV_HUGEPAGE, first, nbytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES)
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=first, count=nbytes)


def pin(tensor: torch.Tensor, owner: object) -> weakref.finalize:
    """Page-lock a tensor's memory until the returned function is called or `owner` is collected.

    Raises:
        PinError: it cannot be page-locked.
    """
    runtime, address = torch.cuda.cudart(), tensor.data_ptr()
    status = int(runtime.cudaHostRegister(address, tensor.nbytes, 0))
    if status != 0:
        raise PinError(f"CUDA error {status}")
    return weakref.finalize(owner, runtime.cudaHostUnregister, address)


def trim_heap() -> None:
    """Give freed chunks of the heap back to the system; glibc keeps them otherwise."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        if trim is not None:
            trim(0)
