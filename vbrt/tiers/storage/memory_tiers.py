"""GPU and CPU memory tiers: buffers of exact page sizes, with a free list per size, within a budget."""

import weakref
from collections import defaultdict
from collections.abc import Collection, Hashable

import torch

from vbrt.errors import TierError
from vbrt.host import accelerator
from vbrt.host.host_memory import PinError, map_memory, pin
from vbrt.host.logger import warn
from vbrt.tiers.protocols.tier import Holder

__all__ = ["Buffer", "MemoryTier"]


class Buffer:
    """Buffer of one page: a uint8 tensor, and the CUDA events (fences) after which it may be overwritten."""

    __slots__ = ("__weakref__", "fences", "part", "tensor", "unpin")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.fences: dict[Hashable, torch.Event] = {}  # last one per stream: it covers the earlier ones
        self.unpin: weakref.finalize | None = None
        self.part: MemoryTier | None = None  # owner, in a tier of several devices

    @property
    def nbytes(self) -> int:
        """Size of the buffer."""
        return self.tensor.numel()

    @property
    def pinned(self) -> bool:
        """True for pinned host memory."""
        return self.unpin is not None

    @property
    def asynchronous(self) -> bool:
        """True if copies to a GPU are asynchronous: pinned host memory, or a GPU's memory."""
        return self.pinned or accelerator.is_device(self.tensor)

    def synchronize(self) -> None:
        """Wait for all copies and kernels that use this buffer."""
        for fence in self.fences.values():
            fence.synchronize()
        self.fences.clear()

    def fence(self, stream: torch.Stream) -> torch.Event:
        """Fence the buffer: no reuse before the work queued so far on `stream` has ended."""
        event = self.fences[accelerator.stream_key(stream)] = stream.record_event()
        return event


class MemoryTier:
    """Memory tier on one device.

    Not thread-safe: the stack that owns the tier serializes calls.

    Args:
        name: "gpu" or "cpu", as in the config.
        device: of the buffers.
        capacity_bytes: the budget; `held_bytes` never exceeds it.
        pinned: pin host buffers, so that H2D copies are asynchronous and run at link speed.
    """

    memory = True
    overhead_bytes = stuck_bytes = 0
    reads_ahead = False

    def __init__(self, name: str, device: torch.device, capacity_bytes: int, *, pinned: bool = False) -> None:
        self.name, self.device, self.capacity_bytes = name, device, capacity_bytes
        self.pinned = pinned and accelerator.is_available() and "registration" not in accelerator.LACKS
        self.held_bytes = 0
        self.peak_bytes = 0
        self.fallbacks: list[str] = []
        self._cached: defaultdict[int, list[Buffer]] = defaultdict(list)

    @property
    def used_bytes(self) -> int:
        """Bytes of the buffers in use; the rest of `held_bytes` is on the free lists."""
        return self.held_bytes - sum(nbytes * len(buffers) for nbytes, buffers in self._cached.items())

    def reserve(self, nbytes: int, holder: Holder, *, reserved_bytes: int = 0, pinned: bool = True) -> bool:
        """Reserve a buffer of exactly `nbytes`, in `holder.room`; False while the budget has no room for it besides
        `reserved_bytes`. `pinned`: False allows a pageable buffer."""
        if self.used_bytes + reserved_bytes + nbytes > self.capacity_bytes:
            return False
        cached = self._cached[nbytes]
        if cached:
            holder.room = cached[-1]
            del cached[-1]  # not pop(): no call in between
            return True
        self.trim(self.capacity_bytes - nbytes)
        buffer = self._new(nbytes)
        if pinned and self.pinned:
            self._pin(buffer)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + nbytes)
        holder.room = buffer  # no call in between
        self.held_bytes += nbytes
        return True

    def free(self, buffer: Buffer, *, reuse: bool) -> None:
        """Free a buffer: with `reuse` it goes to the free list of its size and its bytes still count as held; else its
        memory is released now, after waiting for copies and kernels that use it."""
        if not reuse:
            self._trim_buffer(buffer)
            return
        cached = self._cached[buffer.nbytes]
        if buffer not in cached:
            cached += [buffer]  # not append(): no call in between

    def caches(self, buffer: Buffer) -> bool:
        """True if a buffer is on the free list of its size."""
        return buffer in self._cached.get(buffer.nbytes, ())

    def take(self, buffer: Buffer) -> None:
        """Take this buffer from its free list."""
        self._cached[buffer.nbytes].remove(buffer)

    def trim(self, held_bytes: int = 0) -> None:
        """Release free-list buffers until at most `held_bytes` are held, or none is left."""
        while self.held_bytes > held_bytes and self._trim_one():
            pass

    def after_fork(self, buffers: Collection[Buffer]) -> None:
        """Reset the accounting in a forked child to these buffers."""
        self._cached.clear()
        self.held_bytes = sum(buffer.nbytes for buffer in buffers)

    def close(self) -> None:
        """Do nothing: `free` and `trim` release the buffers."""

    def _trim_one(self) -> bool:
        for buffers in self._cached.values():
            if buffers:
                self._trim_buffer(buffers[-1])
                del buffers[-1]
                return True
        return False

    def _trim_buffer(self, buffer: Buffer) -> None:
        buffer.synchronize()
        if buffer.unpin is not None:
            buffer.unpin()
        self.held_bytes -= buffer.nbytes

    @torch.inference_mode(False)  # a page made in inference mode is also used outside of it
    def _new(self, nbytes: int) -> Buffer:
        if self.device.type != "cpu":
            try:
                buffer = Buffer(torch.empty(nbytes, dtype=torch.uint8, device=self.device))
            except torch.OutOfMemoryError as error:
                raise TierError(
                    f"tier {self.name}: {self.device} has no room for a page of {nbytes} bytes although "
                    f"the budget has; lower tiers.{self.name}.budget ({self.capacity_bytes})"
                ) from error
            if accelerator.has_streams(self.device):
                buffer.fence(accelerator.current_stream(self.device))  # whose kernels may still use this memory
            return buffer
        try:
            buffer = Buffer(map_memory(nbytes, shared=self.pinned))
        except (OSError, ValueError) as error:
            raise TierError(
                f"tier {self.name}: the system refused {nbytes} bytes ({error}); "
                f"lower tiers.{self.name}.budget ({self.capacity_bytes})"
            ) from error
        return buffer

    def _pin(self, buffer: Buffer) -> None:
        try:
            buffer.unpin = pin(buffer.tensor, buffer)
        except PinError as error:
            self.pinned = False
            reason = (
                f"cpu tier: page-locking {buffer.nbytes} bytes failed ({error}); further pages are "
                "pageable, and copies to the GPU go through a relay, slower. Raise the "
                "locked-memory limit or set tiers.cpu.pinned = false"
            )
            self.fallbacks.append(reason)
            warn(reason, stacklevel=2)
