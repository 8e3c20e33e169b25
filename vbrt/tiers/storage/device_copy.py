"""Copies to a GPU by the CUDA runtime's own call, on a stream of any device.

torch's copies between two GPUs run on the source's current stream, which a CUDA graph cannot record where that is the
default one. The runtime's run on the stream that they are given, of whichever device, also while that is recorded.
"""

import ctypes
import functools
from collections.abc import Callable

import torch

__all__ = ["Signal", "checked", "copying", "cuda_runtime", "reach", "wait_for"]

_HOST_TO_DEVICE, _DEFAULT = ctypes.c_int(1), ctypes.c_int(4)  # the second lets addresses tell
_WITHOUT_TIMING, _NO_FLAGS = ctypes.c_uint(2), ctypes.c_uint(0)


@functools.cache
def cuda_runtime() -> ctypes.CDLL | None:
    """Return the CUDA runtime that torch has loaded; None where it has none of its own to be called."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        return ctypes.CDLL(f"libcudart.so.{major}") if major else None
    except OSError:
        return None  # torch's own calls do the same, but for what this file says


def copying(
    runtime: ctypes.CDLL, target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream
) -> Callable[[], int]:
    """Return what queues a copy of all bytes of `source` on a stream each time that it is called, and returns CUDA's
    error code; both tensors must live as long as the copies."""
    return functools.partial(
        runtime.cudaMemcpyAsync,
        ctypes.c_void_p(target.data_ptr()),
        ctypes.c_void_p(source.data_ptr()),
        ctypes.c_size_t(target.nbytes),
        _DEFAULT if source.is_cuda else _HOST_TO_DEVICE,
        ctypes.c_void_p(stream.cuda_stream),
    )


class Signal:
    """An event of one device between its streams and those of others, by calls that do not change the current device:
    torch's do, twice each."""

    def __init__(self, runtime: ctypes.CDLL, device: torch.device) -> None:
        self._runtime, self.handle = runtime, ctypes.c_void_p()
        with torch.cuda.device(device):
            checked(runtime.cudaEventCreateWithFlags(ctypes.byref(self.handle), _WITHOUT_TIMING))

    def __del__(self) -> None:
        if self.handle:
            self._runtime.cudaEventDestroy(self.handle)

    def pass_on(self, given: torch.cuda.Stream, waits: torch.cuda.Stream) -> None:
        """Have one stream wait for what another, of the event's device, has been given."""
        self.note(given)
        self.wait(waits)

    def note(self, stream: torch.cuda.Stream) -> None:
        """Stand for what a stream of the event's device has been given."""
        checked(self._runtime.cudaEventRecord(self.handle, ctypes.c_void_p(stream.cuda_stream)))

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Have a stream wait for what the event stands for."""
        checked(self._runtime.cudaStreamWaitEvent(ctypes.c_void_p(stream.cuda_stream), self.handle, _NO_FLAGS))


def wait_for(runtime: ctypes.CDLL, event: torch.cuda.Event, *streams: torch.cuda.Stream) -> None:
    """Have streams of whichever device wait for an event."""
    handle = ctypes.c_void_p(event.cuda_event)
    for stream in streams:
        checked(runtime.cudaStreamWaitEvent(ctypes.c_void_p(stream.cuda_stream), handle, _NO_FLAGS))


def checked(code: int) -> None:
    """Raise torch's error for an error code of the runtime."""
    if code:
        torch.cuda.check_error(code)


def reach(own: torch.device, other: torch.device) -> str:
    """Have two GPUs copy directly to each other; return why they cannot, "" if they can."""
    for one, two in ((own, other), (other, own)):
        if not torch.cuda.can_device_access_peer(one, two):
            return f"{one} cannot reach the memory of {two} directly, copies go through host memory"
        _byte(one).copy_(_byte(two))  # torch enables the access
    return ""


def _byte(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8, device=device)
