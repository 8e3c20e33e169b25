"""CUDA graph capture of a programme's run, and the reset of its ring before each replay.

A captured run keeps the addresses of its ring's buffers. Other pages may use the buffers between replays; before a
replay the run takes them back and reloads the pages that the programme begins with. Neither the buffers nor the
resident pages are pinned: once a buffer is returned to the system or a resident page evicted, the recording is invalid.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from vbrt.errors import TierError
from vbrt.host import accelerator
from vbrt.residency.programme import RESIDENT
from vbrt.tiers.schedule.programme_run import ProgrammeRun
from vbrt.tiers.stack.bounded_waits import Waiting
from vbrt.tiers.stack.page_stack import PageStack
from vbrt.tiers.stack.slots import State
from vbrt.tiers.storage.memory_tiers import Buffer

__all__ = ["RecordedRun", "run_to_record"]

_DRY_PASSES = 6  # warm-up until the policy is steady: pages move, nothing computes


def run_to_record(stack: PageStack, phase: str) -> ProgrammeRun | None:
    """Begin a pass of a phase and return its run; None if all pages of the pass are at home in the top tier.

    Up to `_DRY_PASSES` passes that move pages and compute nothing come first, until the policy's decisions recur.

    Raises:
        TierError: no programme serves the pass; the message has the reason.
    """
    ledger, programmes, leases = stack.ledger, stack.ledger.programmes, None
    for _ in range(_DRY_PASSES):
        programmes.hurry()
        stack.begin_pass(phase)
        leases = leases or programmes.orders.get(phase)
        if leases is None and ledger.travellers:
            raise TierError(f"a CUDA graph cannot record a pass of phase {phase}: none has run yet")
        if not any(stack.pages[key].home for keys in leases or () for key in keys if key in stack.pages):
            return None
        run = ledger.running
        if isinstance(run, ProgrammeRun) and _is_a_pass_of(run, leases):
            return run
        for keys in leases:
            with stack.lease(keys):
                pass
    raise TierError(f"a CUDA graph cannot record a pass of phase {phase}: {programmes.reason or 'it does not recur'}")


def _is_a_pass_of(run: ProgrammeRun, leases: Sequence[tuple[str, ...]]) -> bool:
    """True if a run is at the start of its round, and the round is one pass of these leases."""
    begins = len(run.programme.segments) == 1 and run.at == 0
    return begins and all(step.keys == keys for step, keys in zip(run.programme.steps, leases, strict=False))


class RecordedRun:
    """Programme run captured in a CUDA graph.

    Attributes:
        ended: why the graph must not be replayed any more; "" while it may.
    """

    def __init__(self, stack: PageStack, run: ProgrammeRun) -> None:
        self._stack, self._run = stack, run
        self._level, self._programmes = stack.levels[0], stack.ledger.programmes
        slots = self._level.slots
        self._ring = [weakref.ref(buffer) for buffer in run.ring.buffers]
        accesses = [access for step in run.programme.steps for access in step.accesses]
        self._staying = {a.key: weakref.ref(slots[a.key].room) for a in accesses if a.slot == RESIDENT}
        self._keys = list(run.ring.keys)  # in the ring before the capture
        self._freed: dict[int, Any] = {}
        self.ended = ""

    # -- recording ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Record the leases of the pass that begins into the capture of the current stream; counters stay unchanged.

        Raises:
            TierError: a pass has begun since the run was prepared.
        """
        stack, run = self._stack, self._run
        with stack.guard.lock:
            if stack.ledger.running is not run or run.at or run.out is not None:
                raise TierError(
                    "a pass has begun since the recording was prepared; prepare it right before the capture"
                )
            run.captured, run.freed, self._keys = True, self._freed, list(run.ring.keys)
            run.ring.link.begin_capture()

    def end(self, *, completed: bool) -> None:
        """End the capture; nothing has run yet. Raises TierError: the pass has fewer leases than its phase's order."""
        run = self._run
        with self._stack.guard.lock:
            left = len(run.programme.steps) - run.at if run.captured else len(run.programme.steps)
            if run.captured:
                if completed:
                    run.ring.link.join()
                run.ring.link.end_capture()
                run.ring.keys[:], run.captured = self._keys, False
                run.at, run.out = 0, None
        if completed and left:
            self.ended = "the recorded pass was not complete"
            raise TierError(f"the recorded pass ended before its order: {left} leases are missing")

    # -- replaying ----------------------------------------------------------------------------------------------------

    def replay(self, graph: accelerator.Graph, phase: str) -> bool:
        """Replay the graph as a pass of the phase; False if the recording is invalid. Waits for other threads' leases
        of slots that the graph needs.

        Raises:
            TierError: this thread itself has leased such a slot.
        """
        guard, ledger, begun, waiting = self._stack.guard, self._stack.ledger, False, None
        self._level.check()
        while True:
            with guard.lock:
                if not begun and not self.ended:
                    begun = True
                    self._begin_pass(phase)
                if self._has_ring():
                    with ledger.writing:
                        self._run.ring.link.replay(graph)
                        self._run.count_pass(self._freed)
                    return True
                if self.ended:
                    return False
                bell = guard.listen()
            waiting = waiting or Waiting(
                ledger, f"phase {phase}", "the slots that its CUDA graph knows", level=self._level
            )
            waiting.look(bell)

    def _begin_pass(self, phase: str) -> None:
        stack, run, ledger = self._stack, self._run, self._stack.ledger
        begun = ledger.running is run and run.begin_pass(phase)
        if begun and (run.expected or self._has_its_room()):
            return
        stack.decider.catch_up()
        with ledger.deciding:  # ends the run
            if not begun:
                stack.decider.begin_pass_alone(phase)

    def _has_ring(self) -> bool:
        """True once the run owns its ring, taken back here if need be; False while other threads use it, or if the
        recording is invalid.

        Raises:
            TierError: this thread uses a buffer of the ring.
        """
        run, level, ledger = self._run, self._level, self._stack.ledger
        if self.ended or (ledger.running is run and not ledger.torn):
            return not self.ended
        ledger.end_run()
        ring = [ref() for ref in self._ring]
        self.ended = self._why_not(ring)
        own, passing = {id(buffer) for buffer in ring}, set(run.foresight.residents().keys)
        passing -= self._staying.keys()
        holding = [slot for key, slot in level.slots.items() if key in passing or id(slot.room) in own]
        busy = [slot for slot in holding if slot.holders or slot.state is not State.READY]
        for holder in (holder for slot in busy for holder in slot.holders):
            if getattr(holder, "thread", 0) == threading.get_ident():
                raise TierError(f"{busy[0].page.key}: a CUDA graph needs its slot, and this thread has leased it")
        if self.ended or busy:
            return False
        with ledger.deciding:
            ledger.running = run
            run.resume(ring, holding)
        return True

    def _why_not(self, ring: list[Buffer | None]) -> str:
        level = self._level
        if self._stack.closed:
            return "the model was closed"
        for key, room in self._staying.items():
            slot = level.slots.get(key)
            if slot is None or slot.room is None or slot.room is not room():
                return f"{key}: it has moved since the recording"
        held = {id(slot.room) for slot in level.slots.values()}
        if not all(buffer is not None and (id(buffer) in held or level.tier.caches(buffer)) for buffer in ring):
            return "the room that pages pass through was given back since the recording"
        if not self._has_its_room():
            return "other pages stay in the tier now"
        return ""

    def _has_its_room(self) -> bool:
        """True if the policy divides its room as it did when the programme was compiled."""
        run = self._run
        return run.policy is self._level.policy and run.foresight.room() == run.programme.segments[0].state[:3]
