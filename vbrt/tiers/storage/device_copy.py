"""Direct `cudaMemcpyAsync` and event calls, on a stream of any device.

torch's copies between two GPUs run on the source's current stream, which CUDA graph capture refuses if that is the
default stream. The runtime's copies run on the given stream, of any device, also under capture.
"""

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from vbrt.host import accelerator

__all__ = ["Signal", "Span", "checked", "copy_pages", "copying", "cuda_runtime", "reach", "span", "wait_for"]

_HOST_TO_DEVICE, _DEFAULT = ctypes.c_int(1), ctypes.c_int(4)  # default: inferred from the addresses
_WITHOUT_TIMING, _NO_FLAGS = ctypes.c_uint(2), ctypes.c_uint(0)
_RUNTIME = "cudart64_{}.dll" if sys.platform == "win32" else "libcudart.so.{}"  # torch has loaded it: found by name


@functools.cache
def cuda_runtime() -> ctypes.CDLL | None:
    """Return the CUDA runtime library that torch has loaded; None if there is none to call."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        return ctypes.CDLL(_RUNTIME.format(major)) if major else None
    except OSError:
        return None  # fallback: torch's calls, with the limits named above


def copying(
    runtime: ctypes.CDLL, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream
) -> Callable[[], int]:
    """Return a callable that queues a copy of all bytes of `source` on a stream and returns CUDA's error code; both
    tensors must outlive the copies."""
    return functools.partial(
        runtime.cudaMemcpyAsync,
        ctypes.c_void_p(target.data_ptr()),
        ctypes.c_void_p(source.data_ptr()),
        ctypes.c_size_t(target.nbytes),
        _DEFAULT if accelerator.is_device(source) else _HOST_TO_DEVICE,
        ctypes.c_void_p(stream.cuda_stream),
    )


class Span(NamedTuple):
    """Bytes of a tensor, uint8 [nbytes], which must outlive the copies of them."""

    bytes: torch.Tensor
    address: int
    nbytes: int


def span(tensor: torch.Tensor) -> Span:
    """Return the span of all bytes of a uint8 tensor."""
    return Span(tensor, tensor.data_ptr(), tensor.numel())


def copy_pages(slots: Sequence[Span], pages: Sequence[Sequence[Span]], stream: torch.Stream | None) -> None:
    """Queue copies of pages in pinned host memory to slots on a stream, those of one slot one behind the other; torch's
    own calls take the host longer. On a device without streams (None) they are done at the return."""
    runtime = cuda_runtime() if stream is not None and accelerator.TYPE == accelerator.CUDA else None
    if runtime is None:
        with contextlib.nullcontext() if stream is None else accelerator.stream(stream):
            for slot, of_slot in zip(slots, pages, strict=False):
                at = 0
                for page in of_slot:
                    slot.bytes[at : at + page.nbytes].copy_(page.bytes, non_blocking=stream is not None)
                    at += page.nbytes
        return
    copy, queue = runtime.cudaMemcpyAsync, ctypes.c_void_p(stream.cuda_stream)
    for slot, of_slot in zip(slots, pages, strict=False):
        target = slot.address
        for _, address, nbytes in of_slot:
            source, size = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
            checked(copy(ctypes.c_void_p(target), source, size, _HOST_TO_DEVICE, queue))
            target += nbytes


class Signal:
    """CUDA event for cross-device stream waits, without switching the current device: torch's calls switch it twice
    each."""

    def __init__(self, runtime: ctypes.CDLL, device: torch.device) -> None:
        self._runtime, self.handle = runtime, ctypes.c_void_p()
        with accelerator.device(device):
            checked(runtime.cudaEventCreateWithFlags(ctypes.byref(self.handle), _WITHOUT_TIMING))

    def __del__(self) -> None:
        if self.handle:
            self._runtime.cudaEventDestroy(self.handle)

    def pass_on(self, given: torch.Stream, waits: torch.Stream) -> None:
        """Make stream `waits` wait for the work queued on `given`, a stream of the event's device."""
        self.note(given)
        self.wait(waits)

    def note(self, stream: torch.Stream) -> None:
        """Record the event behind the work queued on a stream of its device."""
        checked(self._runtime.cudaEventRecord(self.handle, ctypes.c_void_p(stream.cuda_stream)))

    def wait(self, stream: torch.Stream) -> None:
        """Make a stream wait for the event."""
        checked(self._runtime.cudaStreamWaitEvent(ctypes.c_void_p(stream.cuda_stream), self.handle, _NO_FLAGS))


def wait_for(runtime: ctypes.CDLL, event: torch.Event, *streams: torch.Stream) -> None:
    """Make streams of any device wait for an event."""
    handle = ctypes.c_void_p(event.cuda_event)
    for stream in streams:
        checked(runtime.cudaStreamWaitEvent(ctypes.c_void_p(stream.cuda_stream), handle, _NO_FLAGS))


def checked(code: int) -> None:
    """Raise torch's exception for a CUDA error code other than 0."""
    if code:
        accelerator.check_error(code)


def reach(own: torch.device, other: torch.device) -> str:
    """Enable peer access between two GPUs; return why they cannot have it, "" if they do."""
    for one, two in ((own, other), (other, own)):
        if not accelerator.can_device_access_peer(one, two):
            return f"{one} cannot reach the memory of {two} directly, copies go through host memory"
        _byte(one).copy_(_byte(two))  # torch enables peer access
    return ""


def _byte(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8, device=device)
