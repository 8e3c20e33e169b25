"""Prefetch ring: slots through which extents of a KV cache are streamed to the computing device.

The order of use is cyclic: layer by layer, oldest tokens first, and from the last layer to the first one of the next
pass. So the next extents are always in flight, as many as there are slots. A slot is refilled as soon as the kernels
that read it are queued: copies and kernels wait for each other by events, never the host. With a GPU, two threads read
files; on a CPU they would compete with compute for cores, so the OS only reads ahead what is needed next.

An unexpected extent (after a crop, or in another pass than predicted) restarts the ring there, and so does an
interrupt.
"""

import time
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vbrt.errors import TierError
from vbrt.generation.kv.extent import Extent, Memory
from vbrt.host import accelerator
from vbrt.host.host_memory import aligned, map_memory, pin
from vbrt.host.worker_threads import Crew
from vbrt.tiers import Tally
from vbrt.tiers.stack.slots import Level, Slot

__all__ = ["Load", "Place", "Ring"]

Place = tuple[int, int]
"""(layer, index of an extent in that layer)."""

_THREADS = 2
_LONGEST_S = 600.0  # timeout for reading an extent


@dataclass(slots=True, eq=False)
class Load:
    """Load of an extent's pages into a slot, in flight or complete.

    Attributes:
        ahead: True if it was prefetched.
        lazy: True if the consumer copies the bytes itself.
        arrived: event after which kernels may read the slot.
        bell: lock held until a thread has read the file; None without a thread.
        error: exception of that thread.
    """

    place: Place
    extent: Extent
    pages: int
    slot: int
    ahead: bool
    lazy: bool = False
    arrived: torch.Event | None = None
    bell: LockType | None = None
    error: Exception | None = field(default=None)

    def join(self) -> None:
        """Wait until no thread writes to the slot. Raises TierError after `_LONGEST_S`."""
        if self.bell is None:
            return
        if not self.bell.acquire(timeout=_LONGEST_S):
            raise TierError(
                f"KV cache, layer {self.place[0]}: extent {self.place[1]} was not read from its file within "
                f"{_LONGEST_S:.0f} s: the drive does not answer, or the thread has ended; make another cache"
            )
        self.bell.release()


class Ring:
    """Ring of slots on the computing device.

    Args:
        memory: of the slots, each of `slot_bytes`.
        tally: counts loads.
        order: returns (place, extent, pages) after a place; None at the end.
    """

    def __init__(self, memory: Memory, slot_bytes: int, tally: Tally, order: Callable) -> None:
        self.memory, self._tally, self._order = memory, tally, order
        self._views = memory.bytes.view(-1, slot_bytes).unbind(0)
        self._stack = memory.stack
        self._room = memory.level.slots[memory.key].room
        self._stream = accelerator.Stream(self._stack.device) if accelerator.has_streams(self._stack.device) else None
        self._used: list[torch.Event | None] = [None] * len(self._views)  # events after the last read of each slot
        self._staging: dict[int, Tensor] = {}  # pinned staging buffers for files, by slot
        self._crew = Crew(_THREADS)
        self._loads: deque[Load] = deque()
        self._free = list(range(len(self._views)))
        self._last: Place | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.memory.page.nbytes

    # -- consumers -----------------------------------------------------------------------------------------------------

    def take(self, place: Place, extent: Extent, pages: int) -> Load:
        """Return a load whose pages may be read by kernels queued from now on; end it with `done`.

        Raises:
            TierError: a page cannot be read or verified, or the stack is closed.
        """
        if len(self._free) + len(self._loads) != len(self._views):
            self.reset()  # after an interrupt
        load = self._expected(extent, pages)
        if load is None:
            self.reset()
            load = self._begin(place, extent, pages, ahead=False)
        self._look_ahead()
        began = time.perf_counter_ns()
        try:
            self._await(load)
        except BaseException:
            self.reset()
            raise
        self._tally.wait_ns += time.perf_counter_ns() - began
        self._tally.misses += 1
        self._tally.prefetched += load.ahead
        return load

    def pages(self, load: Load) -> Tensor:
        """Return the load's pages, uint8 [n, page_bytes]."""
        return self._views[load.slot][: load.pages * load.extent.code.page_bytes].view(load.pages, -1)

    def done(self, load: Load) -> None:
        """Release a load once all kernels that read it are queued; refill its slot."""
        if self._stream is not None:
            self._used[load.slot] = accelerator.current_stream(self._stack.device).record_event()
        self._loads.remove(load)
        self._free.append(load.slot)
        self._look_ahead()

    def reset(self) -> None:
        """Cancel all loads; returns when no thread writes to a slot."""
        for load in self._loads:
            load.join()
        if self._stream is not None:
            event = accelerator.current_stream(self._stack.device).record_event()
            self._used = [event] * len(self._views)
        self._loads.clear()
        self._free = list(range(len(self._views)))
        self._last = None

    def close(self) -> None:
        """Free the slots after the kernels and copies that use them."""
        self.reset()
        self._crew.stop()
        if self._stream is not None:
            self._stream.synchronize()
        self._stack.retire(self.memory.owner)

    # -- prefetch ------------------------------------------------------------------------------------------------------

    def _expected(self, extent: Extent, pages: int) -> Load | None:
        """Return an extent's load in flight with enough pages, dropping the ones before it; None if there is none."""
        found = next((load for load in self._loads if load.extent is extent and load.pages >= pages), None)
        while found is not None and self._loads[0] is not found:
            skipped = self._loads[0]
            skipped.join()
            self._loads.popleft()
            self._free.append(skipped.slot)
        return found

    def _look_ahead(self) -> None:
        """Fill free slots with the next extents, across the end of a pass."""
        while self._free and self._last is not None:
            following = self._order(self._last)
            if following is None or any(load.extent is following[1] for load in self._loads):
                return
            self._begin(*following, ahead=True)

    # -- bytes --------------------------------------------------------------------------------------------------------

    def _begin(self, place: Place, extent: Extent, pages: int, *, ahead: bool) -> Load:
        """Start a load into a free slot."""
        load = Load(place, extent, pages, self._free[-1], ahead)
        level = extent.level
        source = level.slots[extent.key]
        if self._stream is None:
            load.lazy = True
            if ahead and not level.tier.memory:
                self._read_ahead(load, level, source)
        elif level.tier.memory:
            self._copy(load, level, source)
        else:
            load.bell = allocate_lock()
            load.bell.acquire()
            self._crew.give(self._read, load, level, source)
        self._loads.append(load)
        del self._free[-1]
        self._last = place
        return load

    def _read_ahead(self, load: Load, level: Level, source: Slot) -> None:
        if level.tier.reads_ahead:
            self._crew.give(level.tier.read_ahead, source.room)
            return
        load.lazy, load.bell = False, allocate_lock()
        load.bell.acquire()
        self._crew.give(self._read, load, level, source)

    def _await(self, load: Load) -> None:
        load.join()
        if load.error is not None:
            raise TierError(str(load.error)) from load.error
        if load.lazy:
            self._fetch(load)
            load.lazy = False
        if load.arrived is not None:
            accelerator.current_stream(self._stack.device).wait_event(load.arrived)

    def _fetch(self, load: Load) -> None:
        """CPU compute: copy or read a load's bytes into its slot, in this thread."""
        level, extent = load.extent.level, load.extent
        source, began = level.slots[extent.key], time.perf_counter_ns()
        if level.tier.memory:
            self.pages(load).copy_(extent.pages(load.pages))
        else:
            level.tier.get(source.room, self._views[load.slot][: extent.page.nbytes], key=extent.key)
        self._note(level, load, began, time.perf_counter_ns())

    def _copy(self, load: Load, level: Level, source: Slot) -> None:
        """Queue an H2D copy."""
        stream, recorder, target = self._stream, self._stack.guard.recorder, self.pages(load)
        self._wait_for_slot(load)
        if load.extent.written is not None:
            stream.wait_event(load.extent.written)
        began = None if recorder is None else recorder.mark_on(stream)
        origin = source.view[: target.numel()]
        if source.room.asynchronous:
            with accelerator.stream(stream):
                target.view(-1).copy_(origin, non_blocking=True)
        else:
            self._stack.levels[0].relay.copy(target.view(-1), origin, stream)
        load.arrived = source.room.fence(stream)
        # keeps a collected ring's memory until the copy is done
        self._room.fences[accelerator.stream_key(stream)] = load.arrived
        self._note(level, load, began, None if recorder is None else recorder.mark_on(stream))

    def _wait_for_slot(self, load: Load) -> None:
        used = self._used[load.slot]
        if used is not None:
            self._stream.wait_event(used)

    def _read(self, load: Load, level: Level, source: Slot) -> None:
        """Read a file in a worker thread; errors are raised to the consumer."""
        try:
            began, view = time.perf_counter_ns(), self._views[load.slot][: load.extent.page.nbytes]
            target = view if self._stream is None else self._staged(load.slot)[: view.numel()]
            level.tier.get(source.room, target, key=load.extent.key)
            if self._stream is not None:
                self._wait_for_slot(load)
                with accelerator.stream(self._stream):
                    view.copy_(target, non_blocking=True)
                load.arrived = self._stream.record_event()
                load.arrived.synchronize()  # then the staging buffer is free
            self._note(level, load, began, time.perf_counter_ns())
        except Exception as error:  # noqa: BLE001 - raised by _await
            load.error = error
        finally:
            load.bell.release()

    def _staged(self, slot: int) -> Tensor:
        """Pinned staging buffer of a slot, outside of all budgets."""
        if slot not in self._staging:
            memory = map_memory(self._views[slot].numel(), shared=True)
            try:
                pin(memory, memory)
            except OSError:  # pageable: a slower copy
                memory = aligned(memory.numel())
            self._staging[slot] = memory
        return self._staging[slot]

    def _note(self, level: Level, load: Load, began: object, ended: object) -> None:
        link, nbytes = f"{level.tier.name}>{self._stack.names[0]}", load.pages * load.extent.code.page_bytes
        moved = self._tally.bytes_moved
        moved[link] = moved.get(link, 0) + nbytes
        recorder = self._stack.guard.recorder
        if recorder is not None and began is not None and ended is not None:
            recorder.note(link, load.extent.key, began, ended, nbytes)
