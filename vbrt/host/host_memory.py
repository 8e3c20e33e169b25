"""Host memory: anonymous mappings, pinning, and trimming of the heap.

Buffers are mappings of their own: aligned for direct I/O, returned to the system when freed, and registered as pinned
memory with CUDA (`pin_memory=True` would round each up to a power of two).
"""

import contextlib
import ctypes
import mmap
import sys
import weakref

import torch

from vbrt.host import accelerator

__all__ = [
    "ALIGNMENT_BYTES",
    "Loan",
    "PinError",
    "aligned",
    "bytes_view",
    "map_memory",
    "pin",
    "private_mapping",
    "storage_of",
    "trim_heap",
]

ALIGNMENT_BYTES = 4096  # for direct I/O
_HUGE_PAGE_BYTES = 2 << 20


class PinError(OSError):
    """The system, or CUDA, refuses to pin memory."""


def bytes_view(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's bytes, writable, without a copy. The view keeps the tensor."""
    nbytes = tensor.numel() * tensor.element_size()
    array = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    array.kept = tensor
    return memoryview(array).cast("B")


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


class Loan:
    """Tracks whether handed-out tensors on a contiguous CPU tensor's memory are still alive."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._buffer: weakref.ref[ctypes.Array] | None = None
        self._tensor: weakref.ref[torch.Tensor] | None = None

    @property
    def alive(self) -> bool:
        """True while a handed-out tensor, a view of one or an array on one is alive."""
        return self._buffer is not None and self._buffer() is not None

    @property
    def last(self) -> torch.Tensor | None:
        """The tensor handed out last, if it is alive."""
        return None if self._tensor is None else self._tensor()

    def tensor(self) -> torch.Tensor:
        """Return a tensor on the memory, the previous one if it is alive; it keeps the memory alive."""
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
    """Return uint8 [nbytes] of the heap, aligned for direct I/O."""
    memory = torch.empty(nbytes + ALIGNMENT_BYTES, dtype=torch.uint8, device="cpu")
    return memory[-memory.data_ptr() % ALIGNMENT_BYTES :][:nbytes]


def map_memory(nbytes: int, *, shared: bool = False) -> torch.Tensor:
    """Return uint8 [nbytes] that is unmapped with the tensor, in huge pages if large enough.

    Memory to pin must be `shared`: after a fork, private memory may get other physical pages than the GPU copies from.
    Linux has huge pages for private memory only; with them two cores read weights a quarter to a half faster.

    Raises:
        OSError, ValueError: the system refuses it.
    """
    if shared or sys.platform != "linux" or nbytes < _HUGE_PAGE_BYTES:
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    mapping = private_mapping(nbytes + _HUGE_PAGE_BYTES)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % _HUGE_PAGE_BYTES  # untouched pages take no memory
    with contextlib.suppress(OSError):  # advice only: kernels without huge pages refuse it
        mapping.madvise(mmap.MADV_HUGEPAGE, first, nbytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES)
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=first, count=nbytes)


def private_mapping(nbytes: int) -> mmap.mmap:
    """Map anonymous memory: copy-on-write in a fork; on Windows, which has no fork, an ordinary section."""
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def pin(tensor: torch.Tensor, owner: object) -> weakref.finalize:
    """Pin a tensor's memory until the returned function is called or `owner` is collected.

    Raises:
        PinError: it cannot be pinned.
    """
    if accelerator.cudart is None:
        raise PinError(accelerator.LACKS["registration"])
    runtime, address = accelerator.cudart(), tensor.data_ptr()
    status = int(runtime.cudaHostRegister(address, tensor.nbytes, 0))
    if status != 0:
        raise PinError(f"CUDA error {status}")
    return weakref.finalize(owner, runtime.cudaHostUnregister, address)


def trim_heap() -> None:
    """Return free heap chunks to the system; glibc keeps them otherwise."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries lack it
        if trim is not None:
            trim(0)
