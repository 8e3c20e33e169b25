"""Bounded waits for a state change in a stack: room, another thread's copy, the rewrite of a page.

The guard's bells wake a waiting thread; it also polls once a second, in case a wake-up is lost. Every wait is bounded;
it raises after some seconds if no other live thread could cause the change, after minutes without any change in the
stack, and, for room, after an hour of starvation. Polls are counted instead of clock time: a process that was stopped
meanwhile has not waited.

    waiting = None
    while True:
        with guard.lock:
            if ...:
                break
            bell = guard.listen()
        waiting = waiting or Waiting(ledger, key, "its copy")
        waiting.look(bell)
"""

import gc
import sys
import threading
import time
from collections.abc import Collection, Iterator

from vbrt.errors import TierError
from vbrt.tiers.stack.ledger import Ledger
from vbrt.tiers.stack.slots import Borrower, Level, Slot, State
from vbrt.tiers.stack.stack_lock import LOOK_SECONDS

__all__ = ["Waiting"]

_ABANDONED_LOOKS = 3  # polls without a change, until leaked leases and loads are collected
_ALONE_LOOKS = 6  # polls without a change and without a thread that could cause one
_STILL_LOOKS = 600  # polls without a change: longer than any copy of a page, or gap between two leases of a pass
_LONGEST_SECONDS = 3600.0  # for room, while other threads get some
_NAMED = 4  # holders named in an error


class Waiting:
    """Wait of one thread.

    Args:
        key: of the page or budget; errors begin with it.
        what: the awaited change, for errors.
        level: the level, for waits for room; else None.
        by_step: True if an optimizer step causes the change; its thread may hold no page meanwhile.
    """

    def __init__(
        self, ledger: Ledger, key: str, what: str, *, level: Level | None = None, by_step: bool = False
    ) -> None:
        self._ledger, self._guard = ledger, ledger.guard
        self._key, self._what, self._level, self.by_step = key, what, level, by_step
        self._me = threading.get_ident()
        self._looks = 0  # since the last change
        self._alone = False  # at the last look
        self._seconds = 0.0

    def look(self, bell: threading.Lock) -> None:
        """Wait for the bell, at most one second. Raises TierError: the wait has exceeded its bound."""
        began = time.monotonic()
        self._guard.waiting[self._me] = began + 2 * LOOK_SECONDS
        rung = bell.acquire(timeout=LOOK_SECONDS)
        self._seconds += min(2 * LOOK_SECONDS, time.monotonic() - began)
        self._looks = 0 if rung else self._looks + 1
        if self._looks == _ABANDONED_LOOKS:
            self._end_what_was_left()
        alone = self._looks >= _ALONE_LOOKS and not self.by_step and not self._others()
        if alone and self._alone:  # the first time the last one may just have ended it
            raise TierError(self._told("no other thread is left that could end that"))
        self._alone = alone
        if self._looks >= _STILL_LOOKS:
            raise TierError(self._told(f"nothing has changed for {self._looks * LOOK_SECONDS:.0f} s"))
        if self._level is not None and self._seconds > _LONGEST_SECONDS:
            raise TierError(self._told("only other threads got room meanwhile"))

    # -- liveness -----------------------------------------------------------------------------------------------------

    def _others(self) -> bool:
        """True if another live thread uses, fills or rewrites a page, and is not waiting itself."""
        living, now = set(sys._current_frames()) - {self._me}, time.monotonic()
        with self._guard.lock:
            busy = {thread for slot in _slots(self._ledger.levels) for thread in _threads(slot)}
            busy |= {page.writer for page in self._ledger.pages.values()}
            if self._ledger.running is not None:
                busy.add(self._ledger.running.thread)
        return any(self._guard.waiting.get(thread, 0.0) < now for thread in busy & living)

    def _end_what_was_left(self) -> None:
        """Release leases that only a garbage cycle holds; cancel loads of dead threads, and this thread's own loads
        that have room: it waits for room, so it is not running them, and their cancellation was interrupted."""
        gc.collect()
        living, ledger = set(sys._current_frames()), self._ledger
        with self._guard.lock:
            if ledger.lost or ledger.retired:
                ledger.catch_up()
            for slot in _slots(ledger.levels):
                if slot.state is not State.LOADING or slot.at_home:
                    continue
                mine = slot.loader == self._me and slot.room is not None and self._level is not None
                if mine or slot.loader not in living:
                    error = TierError(f"{slot.page.key}: the thread that copied it has died or left it")
                    with ledger.deciding:
                        slot.level.cancel(slot, error)

    # -- errors -------------------------------------------------------------------------------------------------------

    def _told(self, why: str) -> str:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        living = set(sys._current_frames())
        with self._guard.lock:
            levels = self._ledger.levels if self._level is None else [self._level]
            used = [slot for slot in _slots(levels) if _threads(slot)]
            holders = [_described(slot, names, living) for slot in used[:_NAMED]]
            holders += [f"{len(used) - _NAMED} more"] if len(used) > _NAMED else []
            room = "" if self._level is None else _room_of(self._level)
        holding = f"pages in use: {', '.join(holders) or 'none'}"
        return (
            f"{self._key}: waited {self._seconds:.0f} s for {self._what}{room}, and {why} ({holding}); end the passes "
            "and leases that hold pages, and run the forward again"
            + (f", or raise tiers.{self._level.tier.name}.budget" if self._level is not None else "")
        )


def _slots(levels: Collection[Level]) -> Iterator[Slot]:
    """Yield each slot of levels once, including slots being filled or evicted."""
    for level in levels:
        yield from list(dict.fromkeys((*level.slots.values(), *level.leaving, *level.pending, *level.living)))


def _threads(slot: Slot) -> list[int]:
    """Return the threads that lease or fill a slot."""
    threads = [holder.thread for holder in slot.holders if isinstance(holder, Borrower)]
    return [*threads, slot.loader] if slot.state is State.LOADING else threads


def _described(slot: Slot, names: dict[int | None, str], living: Collection[int]) -> str:
    thread = _threads(slot)[-1]
    does = "copied" if slot.state is State.LOADING else "leased"
    who = f"thread {names.get(thread, thread)}" if thread in living else "a thread that is gone"
    return f"{slot.page.key} ({slot.charge} bytes, {does} by {who})"


def _room_of(level: Level) -> str:
    tier = level.tier
    known = sum(slot.charge for slot in _slots([level]) if slot.room is not None)
    lost = f", {tier.used_bytes - known} of them no page's" if tier.used_bytes > known else ""
    return f" in tiers.{tier.name}.budget = {tier.capacity_bytes}, of which {tier.used_bytes} bytes are used{lost}"
