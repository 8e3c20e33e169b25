"""Replay of a programme: a lease finds its pages by its position in the pass, without a policy decision.

The run owns the buffers of its ring; the level has no slots for the pages in them. A lease in the expected order is
counted and waits for the copies of its pages; its release starts the copies scheduled after it. Anything unexpected
(another page, a second lease, a lease of another thread, a new budget, a retired page, Ctrl-C) ends the run first: the
policy is told of the leases so far, and the pages in the ring become slots as it wants. All of it runs under the
stack's lock.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vbrt.residency.programme import RESIDENT, Programme, Step
from vbrt.tiers.schedule.programme_ring import Copy, Ring
from vbrt.tiers.stack.ledger import Ledger
from vbrt.tiers.stack.mover import Mover
from vbrt.tiers.stack.pass_counts import Passes, in_backward
from vbrt.tiers.stack.scheduling import Leased, LeasedTensors
from vbrt.tiers.stack.slots import Borrower, Page, Slot, State, slot_below
from vbrt.tiers.storage.memory_tiers import Buffer

__all__ = ["Bound", "ProgrammeRun"]


class Bound:
    """Step of a programme bound to its pages.

    waits: ring slots of its pages, whose copies it waits for. tensors: of its pages, cached at first use. stays: the
    page of a step with one resident page; else None. loads: copies that start at its release, `ahead` of them for the
    next pass.
    """

    __slots__ = ("ahead", "counts", "keys", "loads", "misses", "prefetched", "slots", "stays", "tensors", "waits")

    def __init__(self, step: Step, pages: Sequence[Page]) -> None:
        self.keys, self.tensors = step.keys, None
        self.slots = tuple(access.slot for access in step.accesses)
        self.waits = tuple(slot for slot in self.slots if slot != RESIDENT)
        self.counts = [(page, access.hit, access.prefetched) for page, access in zip(pages, step.accesses, strict=True)]
        self.misses = sum(not access.hit for access in step.accesses)
        self.prefetched = sum(access.prefetched for access in step.accesses)
        self.stays = pages[0] if len(pages) == 1 and self.slots[0] == RESIDENT else None
        self.loads: list[Copy] = []
        self.ahead: list[Copy] = []


class ProgrammeRun:
    """Run of a programme on the top level of a stack.

    Attributes:
        programme: the programme that is replayed.
        ring: buffers of the streamed pages.
        steps: bound steps; None ends a pass.
        at: index of the next step, or of the step with the open lease.
        expected: False if the policy's state at the start of this pass differs from the programme's: then the next
            lease ends the run.
        captured: True while leases are captured in a CUDA graph, which leaves counters unchanged.
        freed: of the capture: steps by index, with the event that the graph records where their copies for the next
            pass may start.
        passed: called with the index of each completed pass of the round.
        out: the open lease; None without one.
    """

    def __init__(self, ledger: Ledger, mover: Mover, passes: Passes, programme: Programme) -> None:
        self.programme = programme
        self.passed: Callable[[int], None] = int
        self._ledger, self._mover, self._passes, self._guard = ledger, mover, passes, ledger.guard
        self._level = ledger.levels[0]
        self.policy = self._level.policy
        self.foresight = self.policy.foresight  # a composite policy has it at times only
        self.ring = Ring(ledger, programme.slots, programme.slot_bytes)
        self.steps: list[Bound | None] = []  # None ends a pass
        self._head: list[Copy] = []  # first copies of a round
        self._segment = self.at = 0
        self.expected = True
        self._ahead = False  # the next round's first copies have started
        self.out: Leased | None = None
        self.thread = 0  # of the open lease
        self._borrower: Borrower | None = None  # of the open lease's slots, once it has slots
        self.captured = False
        self.freed: dict[int, Any] = {}

    # -- beginning ----------------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Take over the ring at the start of the round; False, with some buffers taken, where slots are in use. Call it
        under the lock, with `ledger.running` set."""
        level, programme = self._level, self.programme
        wanted = {load.key: load.slot for load in programme.begin}
        accesses = (access for step in programme.steps for access in step.accesses)
        staying = {access.key for access in accesses if access.slot == RESIDENT}
        others = []
        for key in programme.before.keys:
            slot = level.slots.get(key)
            if slot is None or slot.state is not State.READY or slot.holders:
                return False
            if key in staying:
                continue
            if key not in wanted:
                others.append(key)
            elif slot.charge != programme.slot_bytes:
                return False
            else:
                self.ring.take(slot, wanted[key])
        if not self.ring.reserve(others):  # evicts pages that no pass hits while resident
            return False
        self.bind()
        return True

    def bind(self) -> None:
        """Bind all steps to their pages, and start the first copies of the round."""
        pages, programme = self._ledger.pages, self.programme
        self.ring.settle()
        steps: list[Bound | None] = []
        for number, segment in enumerate(programme.segments):
            for step in programme.steps[segment.start : segment.end]:
                bound = Bound(step, [pages[key] for key in step.keys])
                bound.loads = self.ring.copies(step.loads)
                steps.append(bound)
            _split(steps[_start_of(programme, number) :])
            steps.append(None)
        self.steps = steps
        self._head = self.ring.copies(programme.head)
        self.ring.start(self._head)

    def resume(self, buffers: Sequence[Buffer], holding: Sequence[Slot]) -> None:
        """Restart the round with the buffers captured in a CUDA graph.

        Args:
            buffers: of the ring, not in use.
            holding: slots of the level that hold one of the buffers or a streamed page.
        """
        programme, ring = self.programme, self.ring
        self._segment, self.at, self.expected, self._ahead = 0, 0, True, False
        self.out, ring.keys = None, [""] * programme.slots
        ring.link.follow()
        wanted = {load.key: load.slot for load in programme.begin}
        for slot in holding:
            at = wanted.get(slot.page.key)
            if at is not None and slot.room is buffers[at]:
                ring.take(slot, at)
            else:
                self._level.evict(slot.page.key)
        ring.take_cached(buffers)
        self.foresight.assume(programme.before)
        ring.settle()
        ring.start(ring.copies([load for load in programme.begin if ring.keys[load.slot] != load.key]))
        self.bind()

    # -- leases -------------------------------------------------------------------------------------------------------

    def lease(self, lease: Leased) -> LeasedTensors | None:
        """Return a lease's tensors if it is the next one of the programme; else None: the policy decides."""
        with self._guard.lock:
            if self._stops() or not self.expected:
                return None
            step = self.steps[self.at] or self._first_of_backward()
            if step is None or (step.keys is not lease.keys and step.keys != tuple(lease.keys)):
                return None
            tensors = step.tensors or self._tensors(step)
            page = step.stays
            if page is not None and not self.captured:  # most leases
                page.hits += 1
            else:
                for slot in step.waits:
                    self.ring.link.wait(slot)
                if not self.captured:
                    self._count(step)
            self.thread, self._borrower = threading.get_ident(), None
            lease.run, self.out = self, lease  # no call from here on: interrupt-safe
        return tensors

    def release(self, lease: Leased) -> bool:
        """End a lease and start the copies scheduled after it; False if this run no longer owns the lease."""
        guard = self._guard
        with guard.lock:
            if self.out is not lease or self._ledger.torn:
                return False
            step = self.steps[self.at]
            loads = step.loads
            self.out = lease.run = None  # first: copies may overwrite its pages from now on
            if loads:
                try:
                    if self.captured:
                        loads = self._left_in_graph(step)
                    self.ring.start(loads, counted=not self.captured)
                except BaseException:  # a `with ledger.writing` costs as much as a twentieth of the lease
                    self._ledger.torn = True
                    raise
            self.at += 1
            if guard.bells:
                guard.ring()
        return True

    def _left_in_graph(self, step: Bound) -> list[Copy]:
        """Return a step's copies without those for the next pass, which start outside of the graph: it would end with
        them, and what comes after it would wait."""
        event = self.ring.link.freed() if step.ahead else None
        if event is None:
            return step.loads
        self.freed[self.at] = event
        return [copy for copy in step.loads if copy not in step.ahead]

    def _count(self, step: Bound) -> None:
        for page, hit, prefetched in step.counts:
            page.hits += hit
            page.misses += not hit
            page.prefetched += prefetched
        if step.misses:
            self._passes.count_misses(step.misses, step.prefetched)

    def count_pass(self, freed: Mapping[int, Any]) -> None:
        """Count the current pass as complete, and start the first copies of the next one, which the device can do while
        the host prepares it; for rounds of one pass. `freed`: as recorded by the pass's graph."""
        for step in self.steps[:-1]:
            self._count(step)
            for copy in step.loads:
                self.ring.keys[copy.load.slot] = copy.load.key
                copy.page.bytes_moved[copy.link] += copy.page.nbytes
        self.at = len(self.steps) - 1
        for at, event in freed.items():
            self.ring.start(self.steps[at].ahead, counted=False, freed=event)
        self.ring.start(self._head)
        self._ahead = True

    def _stops(self) -> bool:
        """True if the policy must decide leases now."""
        ledger, guard = self._ledger, self._guard
        return (
            ledger.running is not self
            or self.out is not None
            or ledger.torn
            or guard.recorder is not None
            or len(ledger.retired) + len(ledger.lost) > 0
            or guard.closed
            or not self.ring.link.follows()
        )

    def _tensors(self, step: Bound) -> LeasedTensors:
        slots = self._level.slots
        step.tensors = LeasedTensors(
            slots[page.key].tensors if at == RESIDENT else self.ring.tensors(at, page)
            for at, (page, _, _) in zip(step.slots, step.counts, strict=True)
        )
        return step.tensors

    # -- passes -------------------------------------------------------------------------------------------------------

    def begin_pass(self, phase: str, backward: str = "") -> bool:
        """Advance to the next pass of the round; False in the middle of a pass: then the policy must see it."""
        if self._stops():
            return False
        start = _start_of(self.programme, self._segment)
        following, finished = self._segment, self.at != start
        if finished:
            if self.steps[self.at] is not None:
                return False
            following = (self._segment + 1) % len(self.programme.segments)
        with self._ledger.writing:
            if finished and not self.expected:
                self._tell_policy()
            elif finished:
                self.foresight.skip_pass(self.programme.segments[self._segment].after)
            if finished:
                self.passed(self._segment)
            self._passes.begin(phase, backward=backward)
            for level in self._ledger.copying:
                level.policy.begin_pass(phase)
            self._segment, self.at = following, _start_of(self.programme, following)
            self.expected = self.foresight.state() == self.programme.segments[following].state
            if finished and following == 0 and not self._ahead:
                self.ring.start(self._head)
            self._ahead = False
        return True

    def _first_of_backward(self) -> Bound | None:
        """Begin the backward pass if this lease is its first one; return its step."""
        backward = self._passes.backward
        if backward and in_backward() and self.begin_pass(backward) and self.expected:
            return self.steps[self.at]
        return None

    # -- the end ------------------------------------------------------------------------------------------------------

    def done(self) -> list[tuple[str, ...]]:
        """Return the leases of the current pass so far, the open one included."""
        start = _start_of(self.programme, self._segment)
        return [step.keys for step in self.steps[start : self.at + (self.out is not None)] if step is not None]

    def hand_over(self) -> None:
        """Replay the leases so far to the policy, and turn the ring's pages into slots as it wants; call it under the
        lock. After an interrupt in here, call `drop`."""
        self._tell_policy()
        self.ring.fence({page for step in self.steps if step is not None for page, _, _ in step.counts})
        level, places = self._level, {key: at for at, key in enumerate(self.ring.keys)}
        missing = [key for key in self.policy.resident() if key not in level.slots]
        for key in missing:
            if key in places:
                self.ring.give(places[key])
        self.ring.free()
        for key in missing:
            if key not in level.slots:
                self._queue(self._ledger.pages[key])
        self._convert()

    def drop(self) -> None:
        """End the run without telling the policy, which is reset: after Ctrl-C, and when the stack closes."""
        self.ring.link.synchronize()
        self._convert()
        self.ring.free()

    def unbind(self) -> None:
        """Drop all views of pages, so that their memory can be freed."""
        self.steps, self._head = [], []
        self.ring.link.end_capture()
        self.captured = False

    def _tell_policy(self) -> None:
        policy, pages = self.policy, self._ledger.pages
        overhead = self._level.overhead_bytes
        for keys in self.done():
            busy = {key for key in keys if pages[key].home}
            for key in keys:
                if key in busy:
                    policy.access(key, pages[key].nbytes + overhead, busy)
            policy.ahead(busy)

    def _queue(self, page: Page) -> None:
        """Prefetch a page that the policy counts as resident or in flight."""
        level = self._level
        slot = level.slots[page.key] = Slot(page, level, max(page.nbytes, self.programme.slot_bytes))
        level.pending[slot] = None
        slot.source = slot_below(self._ledger, page)
        slot.source.holders.add(slot)
        self._mover.stage(slot)

    def _slot_at(self, key: str, at: int) -> Slot:
        return self._level.slots[key] if at == RESIDENT or self.ring.buffers[at] is None else self.ring.give(at)

    def _convert(self) -> None:
        """Make the open lease hold slots instead of ring buffers."""
        lease = self.out
        if lease is None:
            return
        step = self.steps[self.at]
        borrower = self._borrower
        if borrower is None:  # else this was interrupted before
            borrower = self._borrower = Borrower()
            borrower.thread = self.thread
        lease.borrower = borrower
        lease.slots = [self._slot_at(key, at) for key, at in zip(step.keys, step.slots, strict=True)]
        for slot in lease.slots:
            slot.holders.add(borrower)
            if not slot.at_home:
                self._level.leased.add(slot.page.key)
        self.out = lease.run = None


def _split(steps: Sequence[Bound]) -> None:
    """Find the copies of a pass that none of its own leases waits for."""
    waited: set[int] = set()
    for step in reversed(steps):
        step.ahead = [copy for copy in step.loads if copy.load.slot not in waited]
        waited.update(step.waits)


def _start_of(programme: Programme, segment: int) -> int:
    return programme.segments[segment].start + segment  # a None ends each segment
