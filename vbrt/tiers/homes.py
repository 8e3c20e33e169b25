"""Who re-homes: gives each page its home, and another one when budgets change.

A page moves in three steps: its bytes are copied to the new home, the page is said to live there, the old copy goes.
Whoever moves the next page ends what was begun: forwards from the second step on, back before it. The bytes of a page
and its home are written without a call in between, so Ctrl-C finds the page here or there.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from vbrt.errors import TierError
from vbrt.formats.page import PageLayout, unpack
from vbrt.residency.division import spread
from vbrt.tiers.decider import Decider
from vbrt.tiers.ledger import Ledger
from vbrt.tiers.mover import Mover
from vbrt.tiers.slots import Level, Owner, Page, Slot, State
from vbrt.tiers.ssd import HEADER_BYTES

__all__ = ["Homes"]

_PASSING_PAGES = 4  # slots that pages pass through, where a budget shrinks: two leased, two ahead

Fill = Callable[[torch.Tensor], object]
"""Writes a page's bytes into the uint8 tensor that it is given."""


@dataclass(slots=True, eq=False)
class _Arrival:
    """A page on its way to a home: `slot` is its place in a memory tier, None where it becomes a file."""

    page: Page
    home: int
    slot: Slot | None


class Homes:
    """Where pages live: one is given its home at a time, by whoever holds `ledger.encoding`."""

    def __init__(self, ledger: Ledger, mover: Mover, decider: Decider) -> None:
        self._ledger, self._mover, self._decider, self._guard = ledger, mover, decider, ledger.guard
        self._arrival: _Arrival | None = None

    def after_fork(self) -> None:
        """Forget, in a forked child, the page that a thread of the parent was giving a home."""
        self._arrival = None

    def add(self, key: str, layout: PageLayout, home: str, fill: Fill, owner: Owner) -> Page:
        """Store a new page; see TierStack.add."""
        ledger = self._ledger
        page = Page(key, layout, ledger.names.index(home))
        page.bytes_moved = {f"{low}>{high}": 0 for high, low in pairwise(ledger.names[: page.home + 1])}
        page.owners.add(owner.claim)
        with ledger.encoding:
            self._finish()
            with self._guard.entered:
                ledger.check_open(key)
                self._decider.catch_up()
                if key in ledger.pages:
                    raise TierError(f"{key}: the stack holds a page of this name already; retire it first")
            owner.claim.keys.append(key)
            self._install(page, page.home, fill)
        return page

    # -- one page -----------------------------------------------------------------------------------------------------

    def _install(self, page: Page, home: int, fill: Fill) -> None:
        """Have a page live in a tier: a new one, or one that lives elsewhere until its bytes are there."""
        ledger = self._ledger
        level = ledger.levels[home] if home < len(ledger.levels) else None
        slot = None
        if level is not None:
            slot = Slot(page, level, at_home=True)
            slot.state, slot.loader = State.LOADING, threading.get_ident()
        self._arrival = _Arrival(page, home, slot)
        try:
            if slot is None:
                staging = torch.empty(page.nbytes, dtype=torch.uint8, device="cpu")
                fill(staging)
                ledger.ssd.write(page.key, staging, page.layout.to_dict())
            else:
                self._reserve(slot)
                self._fill(slot, fill)
            with self._guard.entered:
                ledger.check_open(page.key)
                ledger.begin()
                self._declare(page, home, slot)
                self._evict_old_home(page)
                self._guard.deciding = False
        finally:
            self._finish()

    def _reserve(self, slot: Slot) -> None:
        """Make room for a page that will live in a memory tier: copies are evicted, if need be."""
        level, page = slot.level, slot.page
        with self._guard.entered:
            self._ledger.begin()
            tier = level.tier
            if level.home_bytes + page.nbytes > tier.capacity_bytes:
                self._guard.deciding = False
                raise TierError(
                    f"{page.key}: {page.nbytes} bytes do not fit into tiers.{tier.name}.budget = "
                    f"{tier.capacity_bytes} ({level.home_bytes} live there); raise the budget or enable a "
                    "tier below it"
                )
            level.move_in(slot)
            level.pending[slot] = None
            self._guard.deciding = False

    def _fill(self, slot: Slot, fill: Fill) -> None:
        self._mover.allocate(slot)
        slot.buffer.synchronize()
        fill(slot.buffer.tensor)
        slot.tensors = unpack(slot.buffer.tensor, slot.page.layout)
        if slot.level.stream is not None:
            torch.cuda.current_stream(slot.level.tier.device).synchronize()  # once a page: its leases wait for nothing

    def _declare(self, page: Page, home: int, slot: Slot | None) -> None:
        """Say that the page lives at `home` from now on, and is nowhere between there and where it was."""
        ledger = self._ledger
        known = page.key in ledger.pages
        moved = {f"{low}>{high}": 0 for high, low in pairwise(ledger.names[: home + 1])} | page.bytes_moved
        for level in ledger.levels[home : page.home]:
            level.policy.remove(page.key)
            if page.key in level.slots:
                level.evict(page.key)
        slots = {} if slot is None else slot.level.slots
        # no call from here on: Ctrl-C finds the page here or there
        if slot is not None:
            slot.state = State.READY
        slots[page.key] = slot
        ledger.travellers += (home > 0) - (known and page.home > 0)
        page.moves += known
        page.home, page.bytes_moved = home, moved
        ledger.pages[page.key] = page

    def _evict_old_home(self, page: Page) -> None:
        """Take the page out of the memory where it lived before."""
        for level in self._ledger.levels:
            slot = level.slots.get(page.key)
            if slot is not None and slot.at_home and level.index != page.home:
                level.evict(page.key)

    def _finish(self) -> None:
        """End what giving a page a home began, also when that was interrupted: its old file goes, or its new copy."""
        arrival, ledger = self._arrival, self._ledger
        if arrival is None:
            return
        page, slot = arrival.page, arrival.slot
        arrived = ledger.pages.get(page.key) is page and page.home == arrival.home
        if ledger.ssd is not None and arrived is (slot is not None):
            ledger.ssd.drop(page.key)
        with self._guard.entered:
            ledger.begin()
            if slot is not None and not arrived:
                slot.level.cancel(slot, TierError(f"{page.key}: it did not get there"))
            self._guard.deciding = False
            self._arrival = None
            self._guard.ring()

    # -- budgets ------------------------------------------------------------------------------------------------------

    def set_budget(self, name: str, nbytes: int) -> None:
        """Change a tier's budget; see TierStack.set_budget."""
        ledger = self._ledger
        if name == "ssd" and ledger.ssd is not None:
            if nbytes < ledger.ssd.held_bytes:
                raise TierError(f"tiers.ssd.budget = {nbytes}: {ledger.ssd.held_bytes} bytes of pages live there")
            ledger.ssd.capacity_bytes = nbytes
            return
        level = next((level for level in ledger.levels if level.tier.name == name), None)
        if level is None:
            raise TierError(f"tiers.{name}: this model has the tiers {', '.join(ledger.names)}")
        with ledger.encoding:  # no page is added meanwhile
            self._finish()
            moves = self._new_homes(level, self._too_many(level, nbytes))
            if moves and ledger.captured:
                raise TierError(
                    f"tiers.{name}.budget = {nbytes}: a CUDA graph has recorded where the pages lie, they "
                    "cannot move; choose the budget before the capture, or wrap the model anew"
                )
            level.room = level.tier.capacity_bytes  # pages that are rehomed make room for those that pass through
            for page, home in moves:
                self._rehome(page, home)
            with self._guard.entered:
                ledger.begin()
                level.resize(nbytes)
                level.tier.shrink()
                level.tier.peak_bytes = level.tier.held_bytes
                self._guard.deciding = False
                self._guard.ring()
            self._rehome_on_top()

    def rehome(self, homes: Mapping[str, str]) -> None:
        """Give pages other homes; see TierStack.rehome."""
        ledger = self._ledger
        with ledger.encoding:
            self._finish()
            with self._guard.entered:
                self._decider.catch_up()
                moves = [
                    (ledger.pages[key], ledger.names.index(home)) for key, home in homes.items() if key in ledger.pages
                ]
            moves = [(page, home) for page, home in moves if page.home != home]
            if moves and ledger.captured:
                raise TierError(
                    f"{moves[0][0].key}: a CUDA graph has recorded where the pages lie, they cannot move; attach all "
                    "models before the capture"
                )
            for level in ledger.levels:
                level.room = level.tier.capacity_bytes
            for page, home in sorted(moves, key=_deepest_first):
                self._rehome(page, home)
            with self._guard.entered:
                self._decider.catch_up()
                ledger.begin()
                for level in ledger.levels:
                    level.resize(level.tier.capacity_bytes)
                self._guard.deciding = False
                self._guard.ring()

    def _rehome_on_top(self) -> None:
        """Where the top tier has room for every page, have all of them live there from now on."""
        ledger = self._ledger
        with self._guard.entered:
            self._decider.catch_up()
            below = [page for page in ledger.pages.values() if page.home > 0]
            nbytes = sum(page.nbytes for page in ledger.pages.values())
        if nbytes > ledger.levels[0].tier.capacity_bytes:
            return
        for page in below:
            self._rehome(page, 0)
        with self._guard.entered:
            self._decider.catch_up()

    def _too_many(self, level: Level, nbytes: int) -> list[Page]:
        """Return the pages that must find another home for a budget of `nbytes`."""
        with self._guard.entered:
            self._decider.catch_up()
            living = {key: slot.page for key, slot in level.slots.items() if slot.at_home}
            passing = self._passing_bytes()
            travel = any(page.home > level.index for page in self._ledger.pages.values())
        if level.home_bytes + travel * passing <= nbytes:
            return []
        stay = set(spread(list(living), {key: page.nbytes for key, page in living.items()}, nbytes - passing))
        return [page for key, page in living.items() if key not in stay]

    def _passing_bytes(self) -> int:
        return _PASSING_PAGES * max((page.nbytes for page in self._ledger.pages.values() if page.passes), default=0)

    def _new_homes(self, level: Level, pages: Sequence[Page]) -> list[tuple[Page, int]]:
        """For each page the first tier below `level` that has room, beside slots for pages from further down."""
        homes = self._first_homes(level, pages, passing=0)
        deepest = max((home for _, home in homes), default=0)
        deepest = max([deepest, *(page.home for page in self._ledger.pages.values())])
        if deepest > level.index + 1:
            homes = self._first_homes(level, pages, passing=self._passing_bytes())
        return homes

    def _first_homes(self, level: Level, pages: Sequence[Page], *, passing: int) -> list[tuple[Page, int]]:
        """Leaving `passing` bytes in every memory tier that has one below it."""
        ledger = self._ledger
        last = len(ledger.names) - 1
        room = {
            lower.index: lower.tier.capacity_bytes - lower.home_bytes - passing * (lower.index < last)
            for lower in ledger.levels[level.index + 1 :]
        }
        cost = dict.fromkeys(room, 0)
        if ledger.ssd is not None:
            ssd = len(ledger.levels)
            room[ssd], cost[ssd] = ledger.ssd.capacity_bytes - ledger.ssd.held_bytes, HEADER_BYTES
        homes = []
        for page in pages:
            home = next((index for index in room if room[index] >= page.nbytes + cost[index]), None)
            if home is None:
                raise TierError(
                    f"{page.key}: no tier below {level.tier.name} has room for {page.nbytes} more bytes; "
                    "raise its budget first, or enable tiers.ssd"
                )
            room[home] -= page.nbytes + cost[home]
            homes.append((page, home))
        return homes

    def _rehome(self, page: Page, home: int) -> None:
        """Give a page another home, unless it was retired."""
        owner, retired = Owner(self._ledger), self._ledger.retired  # the page stays, whatever becomes of its owners
        claims = (owner.claim,)
        try:
            if self.share(owner, page):
                self._install(page, home, partial(self._read_home, page))
        finally:
            retired += claims  # no call: Ctrl-C cannot come in between

    def _read_home(self, page: Page, target: torch.Tensor) -> None:
        """Copy a page from where it lives; returns when that is done."""
        ledger = self._ledger
        if page.home == len(ledger.levels):
            staging = torch.empty(page.nbytes, dtype=torch.uint8, device="cpu")
            ledger.ssd.read(page.key, staging)
            target.copy_(staging)
        else:
            target.copy_(ledger.levels[page.home].slots[page.key].buffer.tensor)

    def share(self, owner: Owner, page: Page) -> bool:
        """Add an owner to a page; False if the page was retired."""
        owner.claim.keys.append(page.key)
        with self._guard.entered:
            if self._ledger.pages.get(page.key) is not page:
                return False
            page.owners.add(owner.claim)
            return True


def _deepest_first(move: tuple[Page, int]) -> tuple[bool, int]:
    """Sort moves so that each finds room: first down, into the deepest tier first; then up, into the top tier first."""
    page, home = move
    return (False, -home) if home > page.home else (True, home)
