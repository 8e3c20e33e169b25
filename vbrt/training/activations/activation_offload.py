"""Activation offload: inputs of checkpointed blocks wait in host memory from the forward to the backward pass.

Autograd's saved-tensor hooks: `pack` replaces a block's input by a handle, `unpack` gives it back when the backward
pass reaches the block. In between the bytes are in pinned memory: D2H on a separate stream overlaps the next blocks,
H2D prefetches in reverse order, one block ahead. Copies are exact, so results are the same bit for bit.

On the device at a time: two inputs on their way out, one on its way back.
"""

import threading
import weakref
from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from vbrt.host import accelerator
from vbrt.report.activation_counters import ActivationStats
from vbrt.tiers import Buffer, MemoryTier

__all__ = ["CudaLink", "HostLink", "Offload"]

_LEAST_BYTES = 1 << 16  # smaller tensors are not worth a copy
_LEAVING = 2  # D2H copies in flight while blocks go on computing
_WAITS = 4096  # pending wait measurements before they are added up


class Link(Protocol):
    """Ordered copies between a device and host memory."""

    def out(self, tensor: Tensor, buffer: Buffer) -> object:
        """Start copying a tensor into a buffer; return a token for `wait`."""

    def back(self, buffer: Buffer, tensor: Tensor) -> object:
        """Start copying a buffer into a tensor; return a token for `wait`."""

    def wait(self, done: object) -> None:
        """Order later computation after a copy."""

    def drop(self, tensor: Tensor) -> None:
        """Release a tensor that a copy may still use."""

    def waited_us(self) -> int:
        """Return the µs that compute has waited in `wait`, as far as known."""


class CudaLink:
    """Copies on a separate CUDA stream; compute waits by events, the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self.stream = accelerator.Stream(device)
        self._waits: deque[tuple[torch.Event, torch.Event]] = deque()
        self._waited_ms = 0.0

    def out(self, tensor: Tensor, buffer: Buffer) -> torch.Event:
        """Copy, ordered after the work queued so far."""
        return self._copy(_view(buffer, tensor), tensor, buffer)

    def back(self, buffer: Buffer, tensor: Tensor) -> torch.Event:
        """Copy, ordered after the work queued so far, which may still use the memory of `tensor`."""
        return self._copy(tensor, _view(buffer, tensor), buffer)

    def _copy(self, to: Tensor, of: Tensor, buffer: Buffer) -> torch.Event:
        self.stream.wait_stream(accelerator.current_stream(self.stream.device))
        with accelerator.stream(self.stream):
            to.copy_(of, non_blocking=True)
        return buffer.fence(self.stream)

    def wait(self, done: torch.Event) -> None:
        """Make the current stream wait, and time the wait."""
        stream = accelerator.current_stream(self.stream.device)
        before, after = accelerator.Event(enable_timing=True), accelerator.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(done)
        after.record(stream)
        self._waits.append((before, after))
        if len(self._waits) > _WAITS:
            self._add_up()

    def drop(self, tensor: Tensor) -> None:
        """Keep the caching allocator from reusing the memory until the copies are done."""
        tensor.record_stream(self.stream)

    def waited_us(self) -> int:
        """Return the sum of finished waits, µs."""
        self._add_up()
        return int(1000 * self._waited_ms)

    def _add_up(self) -> None:
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            self._waited_ms += before.elapsed_time(after)


class HostLink:
    """Synchronous copies within host memory, for tests without a GPU."""

    def out(self, tensor: Tensor, buffer: Buffer) -> bool:
        """Copy now."""
        _view(buffer, tensor).copy_(tensor)
        return True

    def back(self, buffer: Buffer, tensor: Tensor) -> bool:
        """Copy now."""
        tensor.copy_(_view(buffer, tensor))
        return True

    def wait(self, done: bool) -> None:
        """Do nothing: copies are synchronous."""

    def drop(self, tensor: Tensor) -> None:
        """Do nothing: no copy is in flight."""

    def waited_us(self) -> int:
        """Return 0."""
        return 0


class Parked:
    """Offloaded tensor: its bytes are in `room`, and in `tensor` while it is on the device.

    `pending` is the copy, either way, that has not been waited for.
    """

    __slots__ = ("__weakref__", "before", "dtype", "owner", "pending", "room", "shape", "tensor")

    def __init__(self, owner: "Offload", tensor: Tensor) -> None:
        self.room: Buffer | None = None  # until it is reserved
        self.owner, self.tensor = owner, tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.pending: object = None
        self.before = owner.last  # the backward pass asks for that one next

    def __del__(self) -> None:
        if getattr(self, "room", None) is not None:  # Ctrl-C may come before it is set
            self.owner.free(self)


class Offload:
    """Saved-tensor hooks that offload, and their host memory.

    Args:
        link: makes the copies.
        host: its capacity bounds the offload; inputs beyond it stay on the device.
        device: of the tensors to offload.
    """

    def __init__(self, link: Link, host: MemoryTier, device: torch.device) -> None:
        self.link, self.host, self.device = link, host, torch.empty(0, dtype=torch.uint8, device=device).device
        self.fallbacks: list[str] = []
        self.out_bytes = self.back_bytes = self.prefetched = self.late = 0
        self.last: weakref.ref[Parked] | None = None
        self._leaving: deque[weakref.ref[Parked]] = deque()
        self._lock = threading.RLock()  # the backward pass runs in autograd's threads; garbage collection may re-enter

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context in which autograd's saved tensors are offloaded."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def counted(self, stats: dict) -> ActivationStats:
        """Return the counters, merged with `stats`."""
        return ActivationStats(
            **stats,
            offloaded_bytes=self.out_bytes,
            returned_bytes=self.back_bytes,
            prefetched=self.prefetched,
            late=self.late,
            host_bytes=self.host.held_bytes,
            host_peak_bytes=self.host.peak_bytes,
            wait_us=self.link.waited_us(),
        )

    def pack(self, tensor: Tensor) -> "Parked | Tensor":
        """Offload a tensor; return its handle, or the tensor itself if it is small, elsewhere, or beyond the host's
        capacity."""
        if tensor.device != self.device or tensor.nbytes < _LEAST_BYTES or not tensor.is_contiguous():
            return tensor.detach()
        tensor = tensor.detach()
        with self._lock:
            parked = Parked(self, tensor)
            if not self.host.reserve(tensor.nbytes, parked):
                self._note_full(tensor)
                return tensor
            parked.pending = self.link.out(tensor, parked.room)
            self.out_bytes += tensor.nbytes
            self.last = weakref.ref(parked)
            self._leaving.append(self.last)
            while len(self._leaving) > _LEAVING:
                self._leave(self._leaving.popleft()())
        return parked

    def unpack(self, kept: "Parked | Tensor") -> Tensor:
        """Return the tensor, and prefetch the next one of the backward pass."""
        if not isinstance(kept, Parked):
            return kept
        with self._lock:
            if kept.tensor is None:
                self._fetch(kept)
                self.late += 1
            self._settle(kept)
            tensor, kept.tensor = kept.tensor, None  # the caller owns it; the buffer keeps the bytes
            before = kept.before and kept.before()
            if before is not None and before.tensor is None:
                self._fetch(before)
                self.prefetched += 1
        return tensor

    def free(self, parked: Parked) -> None:
        """Free the host memory of a tensor that autograd has released."""
        with self._lock:
            if parked.pending is not None and parked.tensor is not None:
                self.link.drop(parked.tensor)
            self.host.free(parked.room, reuse=True)

    def _leave(self, parked: Parked | None) -> None:
        """Release a tensor's device memory, ordered after its copy."""
        if parked is not None and parked.tensor is not None:
            self._settle(parked)
            parked.tensor = None

    def _settle(self, parked: Parked) -> None:
        if parked.pending is not None:
            self.link.wait(parked.pending)
            parked.pending = None

    def _fetch(self, parked: Parked) -> None:
        tensor = torch.empty(parked.shape, dtype=parked.dtype, device=self.device)
        parked.pending, parked.tensor = self.link.back(parked.room, tensor), tensor
        self.back_bytes += tensor.nbytes

    def _note_full(self, tensor: Tensor) -> None:
        if not self.fallbacks:
            self.fallbacks.append(
                f"activations: training.activations_host ({self.host.capacity_bytes} bytes) has no room for one more "
                f"input of {tensor.nbytes} bytes; it and those like it stay on the device"
            )


def _view(buffer: Buffer, like: Tensor) -> Tensor:
    """Return a buffer as a tensor with another's dtype and shape."""
    return buffer.tensor.view(like.dtype).view(like.shape)
