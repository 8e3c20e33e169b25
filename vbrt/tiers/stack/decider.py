"""Residency decisions: which pages are leased, evicted and prefetched. Moves no bytes.

All decisions are made under one lock, in access order, by the accessing thread. Policies never see the progress of a
copy, so hit and miss counts do not depend on timing.

A thread that waits for room holds no lease. Lost leases are released, and pages without owners retired, at the next
access.
"""

import threading
from collections.abc import Collection, Sequence

from vbrt.errors import TierError
from vbrt.host import accelerator
from vbrt.residency.access_counts import PhaseCounts
from vbrt.residency.policy import Decision
from vbrt.tiers.stack.bounded_waits import Waiting
from vbrt.tiers.stack.ledger import Ledger
from vbrt.tiers.stack.mover import Mover
from vbrt.tiers.stack.pass_counts import Passes, in_backward
from vbrt.tiers.stack.scheduling import Borrowing
from vbrt.tiers.stack.slots import Level, Page, Slot, State

__all__ = ["Decider"]

_AT_HOME = Decision("", hit=True)


class Decider:
    """Decisions of the policies, turned into slots. The mover fills them; the ledger's schedule is told of passes."""

    def __init__(self, ledger: Ledger, mover: Mover, passes: Passes) -> None:
        self._ledger, self._mover, self._guard = ledger, mover, ledger.guard
        self._levels, self._pages, self._top = ledger.levels, ledger.pages, ledger.levels[0]
        self._passes, self._programmes = passes, ledger.programmes
        ledger.catch_up = self.catch_up

    # -- passes, retired pages ----------------------------------------------------------------------------------------

    def begin_pass(self, phase: str, *, backward: str) -> None:
        """Tell every policy that the next lease starts a new pass over the model, of the named phase."""
        with self._guard.lock:
            running = self._ledger.running
            if running is not None and running.begin_pass(phase, backward):
                return
            self.catch_up()
            with self._ledger.deciding:
                self.begin_pass_alone(phase, backward, may_run=True)

    def begin_pass_alone(self, phase: str, backward: str = "", *, may_run: bool = False) -> None:
        """Tell every policy that a pass begins; call it within `ledger.deciding`. `may_run`: True if a programme may
        start with this pass."""
        before = self._passes.phase
        self._passes.begin(phase, backward=backward)
        if self._guard.recorder is not None:
            self._guard.recorder.name_pass(phase)
        for level in self._ledger.copying:
            level.policy.begin_pass(phase)
        self._programmes.begin_pass(before, may_run=may_run)

    def phases(self) -> dict[str, PhaseCounts]:
        """Return the counters of each phase."""
        with self._guard.lock:
            return self._passes.counts()

    def catch_up(self) -> None:
        """Release lost leases and retire pages without owners. Call it under the lock."""
        ledger, lost, retired = self._ledger, self._ledger.lost, self._ledger.retired
        with ledger.deciding:
            while lost:
                self._release(lost[0])
                lost.popleft()
            while retired:
                for key in retired[0].keys:
                    page = self._pages.get(key)
                    if page is not None:
                        page.owners.discard(retired[0])
                        if page.put is retired[0]:
                            ledger.release_put(page)
                        if not page.owners:
                            self.retire_page(page)
                retired.popleft()

    def retire_page(self, page: Page) -> None:
        """Take a page out of every tier. Call it under the lock."""
        if page.put is not None:
            self._ledger.release_put(page)
        for level in self._levels:
            if level.index < page.home:
                level.policy.remove(page.key)
            if page.key in level.slots:
                level.evict(page.key)
        self._passes.retire(page)
        del self._pages[page.key]  # no call in between
        self._ledger.travellers -= page.home > 0
        self._ledger.changes += not page.unseen

    # -- leases -------------------------------------------------------------------------------------------------------

    def acquire(self, lease: Borrowing) -> None:
        """Give a lease its slots, once all of them fit besides the leased pages; their bytes may still be in flight.

        Raises:
            TierError: no release could make room, a page was retired, or the stack is closed.
        """
        guard, ledger = self._guard, self._ledger
        waiting = None
        while True:
            with guard.lock:
                if guard.closed:
                    ledger.check_open(lease.keys[0])
                if ledger.retired or ledger.lost:
                    self.catch_up()
                pages = [self._page(key) for key in lease.keys]
                with ledger.deciding:
                    due = False  # True while a rewrite of a page is expected
                    for page in pages:  # not any(): its generator would double the cost of this block
                        due = due or bool(page.due)
                    fit = not due and (self._has_room(pages) or self._has_room_in_exact_slots(pages))
                    if fit:
                        if self._passes.backward and in_backward():
                            self.begin_pass_alone(self._passes.backward)
                        self._programmes.note(lease.keys)
                        self._admit(lease, pages)
                        if len(self._levels) > 1:
                            self._look_ahead(ledger.copying)
                if fit:
                    return
                if not due:
                    self._check_that_waiting_helps(pages)
                bell = guard.listen()
            waiting = self._await_change(waiting, bell, pages, due=due)

    def _await_change(
        self, before: Waiting | None, bell: threading.Lock, pages: Sequence[Page], *, due: bool
    ) -> Waiting:
        """Wait for room or, where pages are due, for their rewrite; return the wait, for the next round."""
        waiting = before
        if waiting is None or waiting.by_step != due:
            keys, nbytes = " + ".join(page.key for page in pages), sum(page.nbytes for page in pages)
            if due:
                waiting = Waiting(self._ledger, keys, "its rewriting", by_step=True)
            else:
                waiting = Waiting(self._ledger, keys, f"room for {nbytes} bytes", level=self._top)
        waiting.look(bell)
        return waiting

    def announce(self, keys: Sequence[str]) -> None:
        """Announce a scan: the pages of the next leases, each once, in this order.

        Policies with `announce` prefetch them, the first ones now, and treat the leases as a scan, which does not
        evict frequently used pages. A tier is told of the pages whose home is below it and that no tier above holds.
        An announcement ends with its last page, with the next announcement, and with the pass.
        """
        with self._guard.lock:
            self.catch_up()
            with self._ledger.deciding:
                pages, listening = [page for page in map(self._pages.get, keys) if page is not None], []
                for level in self._ledger.copying:
                    pages = [page for page in pages if page.home > level.index]
                    announce = getattr(level.policy, "announce", None)
                    if announce is not None:
                        announce({page.key: page.nbytes + level.overhead_bytes for page in pages})
                        listening.append(level)
                    pages = [page for page in pages if page.key not in level.slots]
                self._look_ahead(listening)

    def release(self, lease: Borrowing) -> None:
        """End a lease. Idempotent."""
        with self._guard.lock, self._ledger.writing:
            self._release(lease)

    def _release(self, lease: Borrowing) -> None:
        for slot in lease.slots:
            level = slot.level
            if slot.page.borrowers:
                slot.page.borrowers.discard(lease.borrower)
            if level.stream is not None and slot.room is not None and not slot.at_home:
                slot.room.fence(accelerator.current_stream(level.tier.device))
            level.release(slot, lease.borrower)
        lease.slots = []
        if self._guard.bells:
            self._guard.ring()

    def _page(self, key: str) -> Page:
        page = self._pages.get(key)
        if page is None:
            raise TierError(f"{key}: its page was retired: the layer holds another weight now; run the forward again")
        return page

    # -- room ---------------------------------------------------------------------------------------------------------

    def _has_room(self, pages: Sequence[Page]) -> bool:
        """True if all pages fit besides the leased ones: then every decision about them succeeds."""
        top, needed = self._top, 0
        for page in pages:
            if page.home and page.key not in top.leased:
                here = top.slots.get(page.key)
                needed += here.charge if here else page.nbytes
            if page.home > 1 and self.blocked(page):
                return False
        if top.leased:
            needed += sum(top.slots[key].charge for key in top.leased)
        return needed <= top.policy.capacity_bytes

    def _has_room_in_exact_slots(self, pages: Sequence[Page]) -> bool:
        """Evict unused copies that occupy whole ring slots, larger than their pages: they are reloaded into slots of
        their own size. True if all pages fit then."""
        top, evicted = self._top, False
        for page in pages:
            slot = top.slots.get(page.key)
            if slot is not None and slot.charge > page.nbytes and not slot.holders:
                top.policy.remove(page.key)
                top.evict(page.key)
                evicted = True
        return evicted and self._has_room(pages)

    def blocked(self, page: Page, above: int = 0) -> Level | None:
        """Return the tier between the page's home and level `above` that is too small for it; None without one."""
        for level in self._levels[above + 1 : page.home]:
            if level.keeps_copies and page.nbytes + level.overhead_bytes > level.policy.capacity_bytes:
                return level
        return None

    def _check_that_waiting_helps(self, pages: Sequence[Page]) -> None:
        """Raise TierError unless other threads hold the room, or pages are being rehomed in another tier."""
        top, me = self._top, threading.get_ident()
        mine = [key for key in top.leased if any(holder.thread == me for holder in top.slots[key].holders)]
        blocked = next((level for level in map(self.blocked, pages) if level), None)
        if top.leased and not mine and blocked is None:
            return
        level = blocked or top
        if level.home_bytes > sum(slot.charge for slot in level.slots.values() if slot.at_home):
            return
        beside = f", and this thread has leased {', '.join(mine)}" if mine and not blocked else ""
        raise TierError(
            f"{' + '.join(page.key for page in pages)}: {sum(page.nbytes for page in pages)} bytes do not "
            f"fit into tiers.{level.tier.name}.budget = {level.tier.capacity_bytes} ({level.home_bytes} "
            f"bytes live there{beside}); raise the budget"
        )

    # -- slots --------------------------------------------------------------------------------------------------------

    def _admit(self, lease: Borrowing, pages: Sequence[Page]) -> None:
        """Decide on every page; the first thread that needs a missing one fills its slot."""
        top, misses, prefetched, rewrites = self._top, 0, 0, self._ledger.rewrites
        busy = {page.key for page in pages if page.home}
        busy |= top.leased
        for page in pages:
            slot, decision = self._find(0, page, busy)
            lease.slots.append(slot)
            slot.holders.add(lease.borrower)
            if rewrites:
                page.borrowers.add(lease.borrower)
            if page.home:
                top.leased.add(page.key)
            if decision.hit:
                page.hits += 1
            else:
                page.misses += 1
                page.prefetched += decision.prefetched
                misses, prefetched = misses + 1, prefetched + decision.prefetched
        if misses:
            self._passes.count_misses(misses, prefetched)
        tally = pages[0].tally if pages else None
        if tally is not None:  # once per lease, not per page
            tally.hits += len(pages) - misses
            tally.misses += misses
            tally.prefetched += prefetched

    def count_lookup(self, page: Page) -> None:
        """Count a use of a page in place, without a lease; call it under the lock."""
        if page.home:
            page.misses += 1
            self._passes.count_misses(1, 0)
        else:
            page.hits += 1

    def _find(self, index: int, page: Page, busy: Collection[str]) -> tuple[Slot, Decision]:
        level = self._levels[index]
        if page.home == index:
            return level.slots[page.key], _AT_HOME
        decision = level.policy.access(page.key, page.nbytes + level.overhead_bytes, busy)
        if decision.hit and page.key in level.slots and not decision.evict:
            return level.slots[page.key], decision  # most accesses
        return self.place(level, page, decision), decision

    def place(self, level: Level, page: Page, decision: Decision) -> Slot:
        """Apply a decision: evict, then find or create the slot, and its source in a lower level. Call it within
        `ledger.deciding`."""
        for key in decision.evict:
            level.evict(key)
        slot = level.slots.get(page.key)
        if slot is None:
            slot = level.slots[page.key] = Slot(page, level, decision.charge)
            level.pending[slot] = None
            below = level.index + 1
            while below < page.home and not self._levels[below].keeps_copies:
                below += 1
            # no page is busy there: an evicted source keeps its room until it has been copied
            source = self._levels[below].slots[page.key] if below == page.home else self._find(below, page, ())[0]
            slot.source = source
            source.holders.add(slot)
        return slot

    def _look_ahead(self, levels: Sequence[Level]) -> None:
        """Prefetch: create slots for the pages that policies want ahead of their use, and let the mover stage them."""
        for level in levels:
            for decision in level.policy.ahead(level.leased):
                page = self._pages.get(decision.key)
                if page is None or self.blocked(page, level.index):
                    for key in decision.evict:
                        level.evict(key)
                    level.policy.remove(decision.key)
                    continue
                slot = self.place(level, page, decision)
                if slot.state is State.QUEUED:
                    self._mover.stage(slot)
