"""Leases on host-memory pages, for CPU compute below the computing tier.

    lower = LowerLease(stack, keys)
    held = lower.begin()       # decides now, in this thread; lease pages that are not held in the computing tier
    views = lower.wait()       # uint8, by key, once their bytes are there; any thread may call it
    lower.end()                # any thread

A page whose home is host memory is held there. A page whose home is a drive is first copied into host memory, as on its
way to the computing tier. The policy of the computing tier is told of the access, but neither evicts nor loads a page
for it now: see `Passed`. The page's counters count a miss that moves no bytes to the computing tier.

Deadlock freedom: a lower lease waits for no lease. Pages from a drive that do not fit besides the held ones are not
held; the others are loaded in decision order, as all loads are. A thread that waits for a lease in the computing tier
after `begin` must let another thread end the lower lease.
"""

from collections.abc import Iterable, Sequence

import torch

from vbrt.tiers.stack.event_recorder import LeaseNote
from vbrt.tiers.stack.page_stack import PageStack
from vbrt.tiers.stack.slots import Borrower, Level, Page, Slot, State

__all__ = ["LowerLease", "has_host_below", "host_level", "missing_worth"]


def host_level(stack: PageStack, page: Page) -> Level | None:
    """Return the level in which the CPU can compute with a page: host memory with whole pages, as the page's home or on
    its way up; None without one."""
    if not page.home or page.due or not page.passes:
        return None
    between = [level for level in stack.levels[1 : page.home] if level.keeps_copies]
    levels = [*between, stack.levels[page.home]] if stack.levels[page.home].tier.memory else between
    return next((level for level in reversed(levels) if _is_host_memory(level)), None)


def has_host_below(stack: PageStack) -> bool:
    """True if there is host memory below the computing tier."""
    return any(map(_is_host_memory, stack.levels[1:]))


def _is_host_memory(level: Level) -> bool:
    return level.tier.memory and level.tier.device.type == "cpu"


def missing_worth(stack: PageStack, keys: Iterable[str]) -> dict[str, int]:
    """Return the pages that are neither in the computing tier nor being loaded, each with its policy's worth: higher is
    better."""
    top = stack.levels[0]
    with stack.guard.lock:
        missing = [stack.pages[key] for key in keys if key in stack.pages and key not in top.slots]
        return {page.key: top.policy.passed.worth(page.key, page.nbytes + top.overhead_bytes) for page in missing}


class LowerLease:
    """Lease of pages in host memory, from `begin` to `end`. A lost lease is released at the next access.

    Args:
        looks: hold only pages that are already there: no counter or policy is updated, and no drive is read.
    """

    note: LeaseNote | None = None

    def __init__(self, stack: PageStack, keys: Sequence[str], *, looks: bool = False) -> None:
        self.stack, self.keys, self._looks = stack, keys, looks
        self.slots: list[Slot] = []
        self.borrower = Borrower()

    def begin(self) -> list[str]:
        """Hold the pages that the CPU can use in place; return their keys. Moves no bytes.

        Raises TierError: the stack was closed.
        """
        stack, ledger = self.stack, self.stack.ledger
        with stack.guard.lock:
            ledger.check_open(self.keys[0])
            if ledger.retired or ledger.lost:
                stack.decider.catch_up()
            with ledger.deciding:
                for key in self.keys:
                    page = stack.pages.get(key)
                    level = None if page is None else host_level(stack, page)
                    if level is not None:
                        self._hold(level, page)
                if not self._looks:
                    self._count()
        return [slot.page.key for slot in self.slots]

    def _count(self) -> None:
        """Count the pages, and tell the policy of the computing tier."""
        top, decider = self.stack.levels[0], self.stack.decider
        for page in (slot.page for slot in self.slots):
            decider.count_lookup(page)
            if page.tally is not None:
                page.tally.misses += 1
            top.policy.passed.note(page.key, page.nbytes + top.overhead_bytes)

    def _hold(self, level: Level, page: Page) -> None:
        slot = level.slots.get(page.key) if page.home == level.index or self._looks else self._copy_in(level, page)
        if slot is not None and (slot.state is State.READY or not self._looks):
            self.slots.append(slot)
            slot.holders.add(self.borrower)
            page.borrowers.add(self.borrower)

    def _copy_in(self, level: Level, page: Page) -> Slot | None:
        """Return the slot of a page's copy in a tier; None if it does not fit besides copies in use, there or below."""
        decider, nbytes = self.stack.decider, page.nbytes + level.overhead_bytes
        if page.key not in level.leased:
            held = sum(level.slots[key].charge for key in level.leased)
            if held + nbytes > level.policy.capacity_bytes or decider.blocked(page, level.index):
                return None
        decision = level.policy.access(page.key, nbytes, {*level.leased, page.key})
        if decision is None:
            return None
        level.leased.add(page.key)
        return decider.place(level, page, decision)

    def views(self) -> dict[str, torch.Tensor] | None:
        """Return the bytes of each page, by key; None while some are still being loaded."""
        if any(slot.state is not State.READY for slot in self.slots):
            return None
        return {slot.page.key: slot.view for slot in self.slots}

    def wait(self) -> dict[str, torch.Tensor]:
        """Wait for all loads; return the bytes of each page, by key. Raises TierError: a page cannot be read."""
        missing = [slot for slot in self.slots if slot.state is not State.READY]
        if missing:
            self.stack.mover.await_all(missing)
        return {slot.page.key: slot.view for slot in self.slots}

    def end(self) -> None:
        """Release the pages. Idempotent."""
        if self.slots:
            self.stack.decider.release(self)

    def __del__(self) -> None:
        if self.slots:  # Ctrl-C came before `end`
            self.stack.ledger.lost.append(self)
