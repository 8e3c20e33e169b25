"""The ring that extents of a KV cache come through on their way to the computing device.

Their order of use is a circle: layer by layer, the oldest tokens first, and from the last layer to the first one of the
next pass. So the next ones are always on their way, as many as there are slots. A slot is filled again as soon as the
kernels that read it have been queued: copies wait for kernels and kernels for copies on the device, the host for
neither. Files are read by two threads beside a GPU; where the CPU computes, threads would take its cores, and the
system only reads ahead what is needed next.

Whoever takes another extent than the next (after a crop, in another pass than was expected) has the ring begin anew
there. What was interrupted is begun anew, too.
"""

import time
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vbrt.errors import TierError
from vbrt.host.host_memory import aligned, map_memory, pin
from vbrt.host.worker_threads import Crew
from vbrt.tiers import Tally
from vbrt.tiers.stack.slots import Level, Slot

if TYPE_CHECKING:
    from vbrt.generation.kv.extent_store import Extent, Memory

__all__ = ["Load", "Place", "Ring"]

Place = tuple[int, int]
"""A layer, and the number of an extent among those that it holds."""

_THREADS = 2
_LONGEST_S = 600.0  # that an extent takes to be read, at most


@dataclass(slots=True, eq=False)
class Load:
    """The pages of an extent in a slot, or on their way.

    Attributes:
        ahead: True if it began before it was asked for.
        lazy: True if whoever takes it moves the bytes.
        arrived: the event after which kernels may read it.
        bell: held until a thread has read the file; None if no thread does.
        error: what that thread met.
    """

    place: Place
    extent: "Extent"
    pages: int
    slot: int
    ahead: bool
    lazy: bool = False
    arrived: torch.cuda.Event | None = None
    bell: LockType | None = None
    error: Exception | None = field(default=None)

    def join(self) -> None:
        """Wait until no thread reads into the slot. Raises TierError: one has not ended within `_LONGEST_S`."""
        if self.bell is None:
            return
        if not self.bell.acquire(timeout=_LONGEST_S):
            raise TierError(
                f"KV cache, layer {self.place[0]}: extent {self.place[1]} was not read from its file within "
                f"{_LONGEST_S:.0f} s: the drive does not answer, or the thread has ended; make another cache"
            )
        self.bell.release()


class Ring:
    """Slots on the computing device that extents pass through.

    Args:
        memory: of the slots, each of `slot_bytes`.
        tally: counts what comes.
        order: returns place, extent and pages of what comes after a place; None if nothing does.
    """

    def __init__(self, memory: "Memory", slot_bytes: int, tally: Tally, order: Callable) -> None:
        self.memory, self._tally, self._order = memory, tally, order
        self._views = memory.bytes.view(-1, slot_bytes).unbind(0)
        self._stack = memory.stack
        self._room = memory.level.slots[memory.key].room
        self._stream = torch.cuda.Stream(self._stack.device) if self._stack.device.type == "cuda" else None
        self._used: list[torch.cuda.Event | None] = [None] * len(self._views)  # when kernels have read a slot
        self._staging: dict[int, Tensor] = {}  # page-locked, for files, by slot
        self._crew = Crew(_THREADS)
        self._loads: deque[Load] = deque()
        self._free = list(range(len(self._views)))
        self._last: Place | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return self.memory.page.nbytes

    # -- for those who read -------------------------------------------------------------------------------------------

    def take(self, place: Place, extent: "Extent", pages: int) -> Load:
        """Return the load of an extent whose pages may be read by kernels that are queued from now on; `done` ends it.

        Raises:
            TierError: a page cannot be read or verified, or the stack was closed.
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
        """Return the pages of a load, uint8 [n, page_bytes]."""
        return self._views[load.slot][: load.pages * load.extent.code.page_bytes].view(load.pages, -1)

    def done(self, load: Load) -> None:
        """Note that all kernels that read a load have been queued; its slot is filled with what comes next."""
        if self._stream is not None:
            self._used[load.slot] = torch.cuda.current_stream(self._stack.device).record_event()
        self._loads.remove(load)
        self._free.append(load.slot)
        self._look_ahead()

    def reset(self) -> None:
        """Give up all loads; return when no thread reads into a slot."""
        for load in self._loads:
            load.join()
        if self._stream is not None:
            event = torch.cuda.current_stream(self._stack.device).record_event()
            self._used = [event] * len(self._views)
        self._loads.clear()
        self._free = list(range(len(self._views)))
        self._last = None

    def close(self) -> None:
        """Give the slots back, after the kernels and copies that use them."""
        self.reset()
        self._crew.stop()
        if self._stream is not None:
            self._stream.synchronize()
        self._stack.retire(self.memory.owner)

    # -- what comes next ----------------------------------------------------------------------------------------------

    def _expected(self, extent: "Extent", pages: int) -> Load | None:
        """Return the load of an extent, if it has begun with enough pages; give up what should have come before."""
        found = next((load for load in self._loads if load.extent is extent and load.pages >= pages), None)
        while found is not None and self._loads[0] is not found:
            skipped = self._loads[0]
            skipped.join()
            self._loads.popleft()
            self._free.append(skipped.slot)
        return found

    def _look_ahead(self) -> None:
        """Fill free slots with what comes next, around the end of a pass."""
        while self._free and self._last is not None:
            following = self._order(self._last)
            if following is None or any(load.extent is following[1] for load in self._loads):
                return
            self._begin(*following, ahead=True)

    # -- bytes --------------------------------------------------------------------------------------------------------

    def _begin(self, place: Place, extent: "Extent", pages: int, *, ahead: bool) -> Load:
        """Begin to bring an extent's pages into a slot."""
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
            torch.cuda.current_stream(self._stack.device).wait_event(load.arrived)

    def _fetch(self, load: Load) -> None:
        """Bring a load's bytes into its slot, in this thread, where the CPU computes."""
        level, extent = load.extent.level, load.extent
        source, began = level.slots[extent.key], time.perf_counter_ns()
        if level.tier.memory:
            self.pages(load).copy_(extent.pages(load.pages))
        else:
            level.tier.get(source.room, self._views[load.slot][: extent.page.nbytes], key=extent.key)
        self._note(level, load, began, time.perf_counter_ns())

    def _copy(self, load: Load, level: Level, source: Slot) -> None:
        """Queue a copy from host memory."""
        stream, recorder, target = self._stream, self._stack.guard.recorder, self.pages(load)
        self._wait_for_slot(load)
        if load.extent.written is not None:
            stream.wait_event(load.extent.written)
        began = None if recorder is None else recorder.mark_on(stream)
        origin = source.view[: target.numel()]
        if source.room.asynchronous:
            with torch.cuda.stream(stream):
                target.view(-1).copy_(origin, non_blocking=True)
        else:
            self._stack.levels[0].relay.copy(target.view(-1), origin, stream)
        load.arrived = source.room.fence(stream)
        self._room.fences[stream.cuda_stream] = load.arrived  # a ring that is collected is freed after it
        self._note(level, load, began, None if recorder is None else recorder.mark_on(stream))

    def _wait_for_slot(self, load: Load) -> None:
        used = self._used[load.slot]
        if used is not None:
            self._stream.wait_event(used)

    def _read(self, load: Load, level: Level, source: Slot) -> None:
        """Read a file, in a thread; what fails is raised to whoever takes the load."""
        try:
            began, view = time.perf_counter_ns(), self._views[load.slot][: load.extent.page.nbytes]
            target = view if self._stream is None else self._staged(load.slot)[: view.numel()]
            level.tier.get(source.room, target, key=load.extent.key)
            if self._stream is not None:
                self._wait_for_slot(load)
                with torch.cuda.stream(self._stream):
                    view.copy_(target, non_blocking=True)
                load.arrived = self._stream.record_event()
                load.arrived.synchronize()  # the staging is free then
            self._note(level, load, began, time.perf_counter_ns())
        except Exception as error:  # noqa: BLE001 - raised by _await
            load.error = error
        finally:
            load.bell.release()

    def _staged(self, slot: int) -> Tensor:
        """Page-locked memory beside a slot; no tier counts it."""
        if slot not in self._staging:
            memory = map_memory(self._views[slot].numel(), shared=True)
            try:
                pin(memory, memory)
            except OSError:  # a slower copy
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
