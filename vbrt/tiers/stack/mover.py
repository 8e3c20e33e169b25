"""Page copies between tiers: fills slots from a lower tier, on demand or by prefetch.

A QUEUED slot is claimed and filled by the first thread that needs it: a prefetch worker, or the leasing thread.

Deadlock freedom: slots are decided one after another, and a slot waits only for earlier decisions: for its source in
the tier below (first, while it holds no room itself), for the room promised to earlier slots (`pending`), and for the
room of pages that were evicted for it.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile

import torch

from vbrt.errors import TierError
from vbrt.formats.page import unpack
from vbrt.host import accelerator
from vbrt.host.host_memory import aligned
from vbrt.host.worker_threads import Crew
from vbrt.tiers.stack.bounded_waits import Waiting
from vbrt.tiers.stack.ledger import Ledger
from vbrt.tiers.stack.slots import Slot, State
from vbrt.tiers.storage.mapped_memory import MappedTier
from vbrt.tiers.storage.memory_tiers import Buffer

__all__ = ["Mover", "Write"]

Write = Callable[[torch.Tensor], object]
"""Callback that writes a page's bytes into a uint8 tensor."""


class Mover:
    """Mover of page bytes into slots.

    Args:
        ledger: the stack's.
        workers: number of prefetch threads.
        share_cores: True where the CPU computes: copies by workers would compete for its cores, so workers only ask the
            system to read files ahead, and the leasing thread copies the page.
    """

    def __init__(self, ledger: Ledger, *, workers: int, share_cores: bool) -> None:
        self._ledger, self._guard = ledger, ledger.guard
        self._share_cores, self._threads = share_cores, workers
        self._workers = Crew(workers)

    def stop(self) -> None:
        """Stop the workers, after the pages that they are copying. Idempotent."""
        self._workers.stop()

    def after_fork(self) -> None:
        """Start new workers in a forked child."""
        self._workers = Crew(self._threads)

    # -- claiming -----------------------------------------------------------------------------------------------------

    def stage(self, slot: Slot) -> None:
        """Prefetch a QUEUED slot: this thread issues the copy if nothing blocks it, else a worker does. Call it under
        the lock."""
        source, lanes = slot.source, slot.level.lanes
        if self._issue(slot) or (lanes is not None and lanes.together and lanes.take(source)):
            return  # collectives are left to the lease: workers have no deterministic order
        if self._share_cores and source.level.tier.reads_ahead and source.room is not None:
            if not source.level.tier.is_cached(source.room):  # else no need to wake a worker
                self._workers.give(source.level.tier.read_ahead, source.room)
        else:
            self._workers.give(self._load_ahead, slot)

    def _load_ahead(self, slot: Slot) -> None:
        """Load a slot in a worker. An error is raised at the lease of the page instead."""
        with self._guard.lock:
            claimed = _claim(slot)
        if claimed:
            with contextlib.suppress(Exception):  # kept in slot.error; a demand reads the page again
                self._load(slot)

    def await_all(self, slots: Sequence[Slot]) -> None:
        """Wait for every slot, earliest first, even after a failure: later slots wait for the room promised to them."""
        failed: Exception | None = None
        for slot in sorted(slots, key=lambda slot: slot.ticket):
            try:
                self._await_counted(slot)
            except Exception as error:  # noqa: BLE001 - raised below
                failed = failed or error
        if failed is not None:
            raise failed

    def _await_counted(self, slot: Slot) -> None:
        start = time.perf_counter_ns()
        try:
            self._await(slot)
        finally:
            with self._guard.lock:
                waited = time.perf_counter_ns() - start
                slot.page.wait_ns += waited
                if slot.page.tally is not None:
                    slot.page.tally.wait_ns += waited

    def _await(self, slot: Slot) -> None:
        """Wait for a slot's bytes; load them in this thread if no other has claimed the slot."""
        waiting = None
        while True:
            with self._guard.lock:
                claimed = _claim(slot)
                if slot.state is State.LOADING and not claimed and slot.loader == threading.get_ident():
                    slot.level.cancel(slot, KeyboardInterrupt())  # this thread's own load, left by an interrupt
                if slot.state is not State.LOADING or claimed:
                    break
                bell = self._guard.listen()
            waiting = waiting or Waiting(self._ledger, slot.page.key, "another thread's copy of it")
            waiting.look(bell)
        if claimed:
            self._load(slot)
        elif slot.state is State.FAILED:
            raise TierError(str(slot.error)) from slot.error

    # -- loading ------------------------------------------------------------------------------------------------------

    def _load(self, slot: Slot) -> None:
        ledger, guard, level = self._ledger, self._guard, slot.level
        try:
            if slot.source.state is not State.READY:
                self._await(slot.source)
            self._reserve(slot)
            self._begin_reading(slot)
            self._copy(slot)
        except BaseException as error:
            with guard.lock, ledger.deciding:
                slot.page.readers.discard(slot)
                level.cancel(slot, error)
            raise
        with guard.lock, ledger.deciding:
            level.release_source(slot)
            slot.state = State.READY
            slot.page.readers.discard(slot)
            if slot.doomed:
                level.free(slot)
            guard.ring()

    def _begin_reading(self, slot: Slot) -> None:
        """Wait for an expected rewrite of the page, then register as a reader, which blocks further rewrites."""
        waiting = None
        while True:
            with self._guard.lock:
                self._ledger.check_open(slot.page.key)
                if not slot.page.due or (slot.page.borrowers and not slot.page.writer):  # of an earlier lease
                    slot.page.readers.add(slot)
                    return
                if slot.doomed and not slot.holders:
                    raise TierError(f"{slot.page.key}: no longer wanted")
                bell = self._guard.listen()
            waiting = waiting or Waiting(self._ledger, slot.page.key, "its rewriting", by_step=True)
            waiting.look(bell)

    def _issue(self, slot: Slot) -> bool:
        """Issue the copy to the GPU in this thread; False if that would block: then it is a worker's."""
        source, level = slot.source, slot.level
        if level.stream is None or source.state is not State.READY or slot.page.due:
            return False
        if not (source.level.tier.memory or level.brings(source)) or not source.room.asynchronous:
            return False
        try:
            slot.loader, slot.state = threading.get_ident(), State.LOADING
            if not self._try_reserve(slot):
                slot.state = State.QUEUED
                return False
            self._copy_memory(slot, source)
            _count_moved(slot)
            slot.tensors = unpack(slot.view, slot.page.layout)
            level.release_source(slot)
            slot.state = State.READY
        except BaseException as error:
            level.cancel(slot, error)
            if not isinstance(error, Exception):
                raise
        return True

    def _reserve(self, slot: Slot) -> None:
        """Reserve the slot's room, once enough is free besides the room promised to earlier slots."""
        waiting = None
        while True:
            with self._guard.lock:
                self._ledger.check_open(slot.page.key)
                if slot.doomed and not slot.holders:
                    raise TierError(f"{slot.page.key}: no longer wanted")
                if not self._try_reserve(slot) and slot.doomed:
                    with self._ledger.deciding:
                        slot.level.make_way(partial(self._try_reserve, slot))
                if slot.room is not None:
                    break
                bell = self._guard.listen()
            what = f"room for {slot.charge} bytes"
            waiting = waiting or Waiting(self._ledger, slot.page.key, what, level=slot.level)
            waiting.look(bell)

    def _try_reserve(self, slot: Slot) -> bool:
        level = slot.level
        earlier = takewhile(lambda other: other is not slot, level.pending)
        pageable = level.tier.memory and (not slot.page.pinned or _is_shared(slot))  # what is shared is pinned then
        options = {"pinned": False} if pageable else {}
        if level.tier.reserve(slot.charge, slot, reserved_bytes=sum(e.charge for e in earlier), **options):
            del level.pending[slot]
            return True
        return False

    # -- bytes --------------------------------------------------------------------------------------------------------

    def fill(self, slot: Slot, write: Write) -> None:
        """Reserve a slot's room and let `write` fill it; synchronous."""
        self._reserve(slot)
        self._fill(slot, write)
        if slot.level.stream is not None:
            accelerator.current_stream(slot.view.device).synchronize()  # once per page, so that its leases need no wait
        if _is_shared(slot):
            slot.tier.share(slot.room, key=slot.page.key)
            slot.tensors = unpack(slot.view, slot.page.layout)

    def _fill(self, slot: Slot, write: Write) -> None:
        tier, page = slot.level.tier, slot.page
        if tier.memory:
            slot.room.synchronize()
            write(slot.view)
            slot.tensors = unpack(slot.view, page.layout)
        else:
            staging = aligned(page.nbytes)
            write(staging)
            tier.put(slot.room, staging, key=page.key, layout=page.layout.to_dict())

    def read(self, source: Slot, target: torch.Tensor) -> None:
        """Copy a page's bytes out of a READY slot into `target`; synchronous."""
        tier, key = source.level.tier, source.page.key
        if tier.memory:
            target.copy_(source.view)
        elif target.device.type == "cpu":
            tier.get(source.room, target, key=key)
        else:
            staging = aligned(source.page.nbytes)
            tier.get(source.room, staging, key=key)
            target.copy_(staging)

    def _copy(self, slot: Slot) -> None:
        source = slot.source
        if slot.level.tier.memory and (source.level.tier.memory or slot.level.brings(source)):
            self._copy_memory(slot, source)
            slot.tensors = unpack(slot.view, slot.page.layout)
        else:
            recorder = self._guard.recorder
            began = None if recorder is None else recorder.mark_on(None)
            self._fill(slot, partial(self.read, source))
            if recorder is not None:
                recorder.note(_link(slot), slot.page.key, began, recorder.mark_on(None), slot.page.nbytes)
        with self._guard.lock:
            _count_moved(slot)

    def _copy_memory(self, slot: Slot, source: Slot) -> None:
        if slot.level.brings(source):
            self._bring(slot, source)
        else:
            self.copy_bytes(slot, source.view, source.room, _link(slot))

    def _bring(self, slot: Slot, source: Slot) -> None:
        """Copy a page by the carrier of its slot's level."""
        level, recorder = slot.level, self._guard.recorder
        stream = level.stream
        for fence in slot.room.fences.values():  # kernels that still read this buffer
            stream.wait_event(fence)
            level.lanes.wait(fence)
        slot.room.fences.clear()
        began = None if recorder is None else recorder.mark_on(stream)
        level.lanes.copy(level.lanes.parts(slot.view, source))
        if stream is not None:
            slot.arrived = source.room.fence(stream)
            slot.room.fences[accelerator.stream_key(stream)] = slot.arrived
        if recorder is not None:
            recorder.note(_link(slot), slot.page.key, began, recorder.mark_on(stream), slot.page.nbytes)

    def copy_bytes(self, slot: Slot, origin: torch.Tensor, room: Buffer, link: str = "refresh") -> None:
        """Copy a page's bytes from a memory into a slot, on the copy stream of the slot's tier if it has one.

        Args:
            origin: uint8, in `room`.
            link: name of the copy in a timeline.
        """
        stream, nbytes, target = slot.level.stream, slot.page.nbytes, slot.view
        recorder = self._guard.recorder
        if stream is None:
            began = None if recorder is None else recorder.mark_on(None)
            slot.room.synchronize()
            target.copy_(origin)
            if recorder is not None:
                recorder.note(link, slot.page.key, began, recorder.mark_on(None), nbytes)
            return
        for fence in slot.room.fences.values():  # kernels that still read this buffer
            stream.wait_event(fence)
        slot.room.fences.clear()
        began = None if recorder is None else recorder.mark_on(stream)
        if room.asynchronous:
            with accelerator.stream(stream):
                target.copy_(origin, non_blocking=True)
        else:
            slot.level.relay.copy(target, origin, stream)
        slot.arrived = room.fence(stream)  # no refill of the source before its copy has been read
        # no reuse of the target before its copy has been written
        slot.room.fences[accelerator.stream_key(stream)] = slot.arrived
        if recorder is not None:
            recorder.note(link, slot.page.key, began, recorder.mark_on(stream), nbytes)


def _claim(slot: Slot) -> bool:
    if slot.state is not State.QUEUED:
        return False
    slot.loader = threading.get_ident()
    slot.state = State.LOADING
    return True


def _is_shared(slot: Slot) -> bool:
    return slot.at_home and slot.page.frozen and isinstance(slot.tier, MappedTier)


def _count_moved(slot: Slot) -> None:
    page, link = slot.page, _link(slot)
    page.bytes_moved[link] += page.nbytes
    if page.tally is not None:
        moved = page.tally.bytes_moved
        moved[link] = moved.get(link, 0) + page.nbytes


def _link(slot: Slot) -> str:
    return f"{slot.source.level.tier.name}>{slot.level.tier.name}"
