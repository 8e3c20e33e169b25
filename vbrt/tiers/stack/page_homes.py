"""Homes of pages: placement of new pages, and migration when budgets change.

A page is rehomed in three steps: copy its bytes to the new home, declare the new home, evict the old one. After an
interrupt, the next rehoming rolls the page back (before the second step) or forward (after it).
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vbrt.errors import TierError
from vbrt.report.progress import Progress
from vbrt.residency.expert_room import split_key
from vbrt.residency.host_slots import reserved_bytes
from vbrt.residency.room_division import spread
from vbrt.tiers.stack.bounded_waits import Waiting
from vbrt.tiers.stack.decider import Decider
from vbrt.tiers.stack.ledger import Ledger
from vbrt.tiers.stack.mover import Mover, Write
from vbrt.tiers.stack.slots import Level, Owner, Page, Slot, State

__all__ = ["Homes"]

_PUT = "kernels of a device cache or of an embedding read it where it lies; close the cache or the model first"
_ALL, _HALF, _NONE = float("inf"), 1, 0  # experts leave with others, by bytes per byte that must: see `_staying`
_PASSING_PAGES = 4  # slots left for streamed pages when a budget shrinks: two leased, two prefetched


@dataclass(slots=True, eq=False)
class _Arrival:
    """Migration in flight: a page, its new home and its slot there."""

    page: Page
    home: int
    slot: Slot


class Homes:
    """Assigns pages to homes, one at a time, under `ledger.encoding`."""

    def __init__(self, ledger: Ledger, mover: Mover, decider: Decider) -> None:
        self._ledger, self._mover, self._decider, self._guard = ledger, mover, decider, ledger.guard
        self._arrival: _Arrival | None = None

    def after_fork(self) -> None:
        """Drop, in a forked child, a migration of one of the parent's threads."""
        self._arrival = None

    def add(self, page: Page, write: Write, owner: Owner) -> Page:
        """Store a new page in its home; see TierStack.add."""
        ledger, key = self._ledger, page.key
        page.bytes_moved = ledger.links(page.home)
        page.owners.add(owner.claim)
        with ledger.encoding:
            self._begin(lent=not (page.unseen and page.home))
            with self._guard.lock:
                ledger.check_open(key)
                self._decider.catch_up()
                if key in ledger.pages:
                    raise TierError(f"{key}: the stack holds a page of this name already; retire it first")
            owner.claim.keys.append(key)
            self._install(page, page.home, write)
        return page

    # -- one page -----------------------------------------------------------------------------------------------------

    def _install(self, page: Page, home: int, write: Write) -> None:
        """Store a new page in a tier, or migrate one there; the old home stays valid until the bytes have arrived."""
        ledger = self._ledger
        slot = Slot(page, ledger.levels[home], at_home=True)
        slot.state, slot.loader = State.LOADING, threading.get_ident()
        self._arrival = _Arrival(page, home, slot)
        try:
            self._reserve(slot)
            self._mover.fill(slot, write)
            with self._guard.lock:
                ledger.check_open(page.key)
                with ledger.deciding:
                    slot.level.recount(slot)
                    self._declare(page, home, slot)
                    self._evict_old_home(page)
        finally:
            self._finish()

    def _reserve(self, slot: Slot) -> None:
        """Reserve budget for a page's home in a tier, evicting copies for it."""
        level, tier = slot.level, slot.level.tier
        with self._guard.lock:
            with self._ledger.deciding:
                fits = slot.charge <= level.free_bytes
                if fits:
                    level.move_in(slot)
                    level.pending[slot] = None
            if not fits:
                raise TierError(
                    f"{slot.page.key}: {slot.charge} bytes do not fit into tiers.{tier.name}.budget = "
                    f"{tier.capacity_bytes} ({tier.capacity_bytes - level.free_bytes} live there); raise the budget"
                    + (" or enable a tier below it" if tier.memory else "")
                )

    def _declare(self, page: Page, home: int, slot: Slot) -> None:
        """Declare `home` the page's home, and evict its copies between the new and the old home."""
        ledger, slots = self._ledger, slot.level.slots
        known = page.key in ledger.pages
        moved = ledger.links(home) | page.bytes_moved
        for level in ledger.levels[home : page.home]:
            level.policy.remove(page.key)
            if page.key in level.slots:
                level.evict(page.key)
        # no call from here on: the page is here or there
        slot.state = State.READY
        slots[page.key] = slot
        ledger.travellers += (home > 0) - (known and page.home > 0)
        page.home, page.bytes_moved = home, moved
        ledger.pages[page.key] = page
        ledger.changes += not page.unseen  # last: invalidates lookups cached under an earlier number

    def _evict_old_home(self, page: Page) -> None:
        """Evict the page from its old home, with the copies from there that have no room yet and no lease."""
        for level in self._ledger.levels:
            slot = level.slots.get(page.key)
            if slot is None or not slot.at_home or level.index == page.home:
                continue
            for copy in [copy for copy in slot.holders if isinstance(copy, Slot)]:
                mine = copy.state is State.LOADING and copy.loader == threading.get_ident()  # left by an interrupt
                wanted = copy.room is not None or copy.holders or copy.doomed or mine
                if not wanted:  # else the old home stays until that has read it
                    copy.level.policy.remove(page.key)
                    copy.level.evict(page.key)
            level.evict(page.key)

    def _begin(self, *, lent: bool = True) -> None:
        """Complete or roll back an interrupted migration, and have lent room given back, unless a page needs none of
        the top tier (`lent`)."""
        self._finish()
        for loan in list(self._ledger.loans) if lent else ():
            loan.give_back()

    def _finish(self) -> None:
        """Complete a migration, or roll back an interrupted one."""
        arrival, ledger = self._arrival, self._ledger
        if arrival is None:
            return
        page, slot = arrival.page, arrival.slot
        with self._guard.lock, ledger.deciding:  # evicts its old home, if that was interrupted
            if ledger.pages.get(page.key) is not page or page.home != arrival.home:
                slot.level.cancel(slot, TierError(f"{page.key}: it did not get there"))
            page.readers.discard(slot)
            self._arrival = None
            self._guard.ring()

    # -- budgets ------------------------------------------------------------------------------------------------------

    def set_budget(self, name: str, nbytes: int, lease_bytes: int = 0) -> None:
        """Change a tier's budget; see TierStack.set_budget."""
        ledger = self._ledger
        level = next((level for level in ledger.levels if level.tier.name == name), None)
        if level is None:
            raise TierError(f"tiers.{name}: this model has the tiers {', '.join(ledger.names)}")
        with ledger.encoding:  # no page is added meanwhile
            self._begin()
            if level is ledger.levels[-1] and not level.tier.memory and nbytes < level.home_bytes:
                raise TierError(f"tiers.{name}.budget = {nbytes}: {level.home_bytes} bytes of pages live there")
            moves = self._moves(level, nbytes, lease_bytes)
            if moves and ledger.captured:
                raise TierError(
                    f"tiers.{name}.budget = {nbytes}: a CUDA graph has recorded where the pages lie, they "
                    "cannot move; choose the budget before the capture, or wrap the model again"
                )
            level.copies_bytes = level.tier.capacity_bytes  # leave room for streamed pages besides the rehomed ones
            self._rehome_all(moves)
            with self._guard.lock, ledger.deciding:
                level.resize(nbytes)
                level.tier.trim(nbytes)
                self._guard.ring()
            self._settle(level)
            self._rehome_on_top()

    def _settle(self, level: Level) -> None:
        """Wait for copies in flight to leave the room that a lowered budget takes away; reset the peak."""
        waiting = None
        while True:
            with self._guard.lock:
                if not level.exceeds_until_copied():
                    level.tier.peak_bytes = level.tier.held_bytes
                    return
                bell = self._guard.listen()
            what = "copies that are under way"
            waiting = waiting or Waiting(self._ledger, f"tiers.{level.tier.name}.budget", what, level=level)
            waiting.look(bell)

    def rehome(self, homes: Mapping[str, str]) -> None:
        """Give pages other homes; see TierStack.rehome."""
        ledger = self._ledger
        with ledger.encoding:
            self._begin()
            with self._guard.lock:
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
            put = next((page for page, _ in moves if page.put), None)
            if put is not None:
                raise TierError(f"{put.key}: {_PUT}")
            for level in ledger.levels:
                level.copies_bytes = level.tier.capacity_bytes
            self._rehome_all(sorted(moves, key=_deepest_first))
            with self._guard.lock:
                self._decider.catch_up()
                with ledger.deciding:
                    for level in ledger.levels:
                        level.resize(level.tier.capacity_bytes)
                    self._guard.ring()

    def _rehome_all(self, moves: Sequence[tuple[Page, int]]) -> None:
        with Progress("moving pages", sum(page.nbytes for page, _ in moves)) as work:
            for page, home in moves:
                work.at(page.key)
                self._rehome(page, home)
                work.done(page.nbytes)

    def _rehome_on_top(self) -> None:
        """Rehome all pages in the top tier if it has room for every one."""
        ledger = self._ledger
        if ledger.rewrites:
            return  # pages that the host rewrites stay in host memory
        with self._guard.lock:
            self._decider.catch_up()
            below = [page for page in ledger.pages.values() if page.home > 0 and page.put is None]
            nbytes = sum(page.nbytes for page in ledger.pages.values() if page.home == 0 or page.put is None)
        if nbytes > ledger.levels[0].tier.capacity_bytes:
            return
        self._rehome_all([(page, 0) for page in below])
        with self._guard.lock:
            self._decider.catch_up()

    def _moves(self, level: Level, nbytes: int, lease_bytes: int) -> list[tuple[Page, int]]:
        """Return the pages that must be rehomed for a budget of `nbytes`, with their new homes."""
        routed = any(map(split_key, self._ledger.pages))  # streamed experts need room for one token's only
        passing = lease_bytes if lease_bytes and routed else max(self._passing_bytes(), lease_bytes)
        decides = self._device_may_decide(level)  # only on experts of which none is at home on the GPU
        for slots in (True, False):  # and, of those on a drive, with slots for them in host memory
            own = passing + (self._slots_bytes(level, nbytes) if slots else 0)
            for copies in (_ALL, _HALF, _NONE)[not decides :]:
                leaving = self._too_many(level, nbytes, own if level.keeps_copies else 0, copies)
                try:
                    return self._new_homes(level, leaving, lease_bytes, slots=slots)
                except TierError as error:
                    refusal = error
        raise refusal

    def _device_may_decide(self, level: Level) -> bool:
        """True for a GPU's memory, in front of host memory, if it may decide which experts are resident."""
        below = (lower.tier for lower in self._ledger.levels[1:])
        return (
            not level.index
            and level.policy.kind == "experts"
            and any(tier.memory and tier.device.type == "cpu" for tier in below)
        )

    def _slots_bytes(self, level: Level, nbytes: int) -> int:
        """Return the bytes of a budget that homes of pages leave to slots, from which the GPU reads experts on a drive:
        in host memory between the two, where the GPU may decide which are resident."""
        levels = self._ledger.levels
        if level.index in (0, len(levels) - 1) or not level.keeps_copies or levels[0].policy.kind != "experts":
            return 0
        planes: dict[tuple[str, int], int] = {}
        largest = 0
        for key, page in self._ledger.pages.items():
            parts = split_key(key)
            if parts is not None:
                expert = parts[0].rpartition("#")[0], parts[1]
                planes[expert] = planes.get(expert, 0) + 1
                largest = max(largest, page.nbytes + level.overhead_bytes)
        return reserved_bytes(largest, max(planes.values()), nbytes) if largest else 0

    def _too_many(self, level: Level, nbytes: int, passing: int, copies: float) -> list[Page]:
        """Return the pages that leave for a budget of `nbytes`, `passing` bytes of it for streamed pages."""
        with self._guard.lock:
            self._decider.catch_up()
            living = {key: slot for key, slot in level.slots.items() if slot.at_home}
            travel = any(page.home > level.index and page.put is None for page in self._ledger.pages.values())
        if level.home_bytes + travel * passing <= nbytes:
            return []
        put = {key: slot.charge for key, slot in living.items() if slot.page.put}
        if sum(put.values()) > nbytes:
            raise TierError(
                f"tiers.{level.tier.name}.budget = {nbytes}: kernels of a device cache or of an embedding read "
                f"{sum(put.values())} bytes in place, which cannot move; resize or close the cache first"
            )
        others = {key: slot.charge for key, slot in living.items() if key not in put}
        stay = _staying(others, nbytes - passing - sum(put.values()), copies)
        return [living[key].page for key in others if key not in stay]

    def _passing_bytes(self) -> int:
        passing = (page.nbytes for page in self._ledger.pages.values() if page.passes and page.put is None)
        return _PASSING_PAGES * max(passing, default=0)

    def _new_homes(
        self, level: Level, pages: Sequence[Page], lease_bytes: int, *, slots: bool
    ) -> list[tuple[Page, int]]:
        """Return for each page the first tier below `level` with room, besides room for pages from deeper tiers to pass
        and, with `slots`, for those of experts, which others give way to."""
        below = self._ledger.levels[level.index + 1 :]
        room = {lower: lower.free_bytes for lower in below}
        homes = _first_homes(level, pages, dict(room))
        deepest = max((home for _, home in homes), default=0)
        deepest = max([deepest, *(page.home for page in self._ledger.pages.values())])
        if deepest <= level.index + 1:
            return homes
        passing, first = self._passing_bytes(), []
        for lower in (lower for lower in below[:-1] if lower.keeps_copies):
            own = self._slots_bytes(lower, lower.tier.capacity_bytes) if slots and pages else 0
            room[lower] -= max(passing, lease_bytes) + own if own else passing
            leaving = self._giving_way(lower, -room[lower]) if own and room[lower] < 0 else []
            first += _first_homes(lower, leaving, room)
            room[lower] += sum(page.nbytes + lower.overhead_bytes for page in leaving)
        return first + _first_homes(level, pages, room)

    def _giving_way(self, level: Level, nbytes: int) -> list[Page]:
        """Return experts at home in a tier that take so many bytes, evenly spread, as far as there are."""
        with self._guard.lock:
            living = {key: slot for key, slot in level.slots.items() if slot.at_home and slot.page.put is None}
        sizes = {key: slot.charge for key, slot in living.items() if split_key(key)}
        stay = set(spread(list(sizes), sizes, sum(sizes.values()) - nbytes))
        return [living[key].page for key in sizes if key not in stay]

    def _rehome(self, page: Page, home: int) -> None:
        """Give a page another home, unless it was retired."""
        owner, retired = Owner(self._ledger), self._ledger.retired  # keeps the page stored if its other owners go
        claims = (owner.claim,)
        try:
            if self.share(owner, page):
                self._install(page, home, partial(self._read_home, page))
        finally:
            retired += claims  # no call

    def _read_home(self, page: Page, target: torch.Tensor) -> None:
        """Copy a page out of its home; synchronous."""
        waiting = None
        while True:
            with self._guard.lock:
                self._ledger.check_open(page.key)
                if not page.writer:
                    page.readers.add(self._arrival.slot)  # blocks rewrites until the new home is declared
                    source = self._ledger.levels[page.home].slots[page.key]
                    break
                bell = self._guard.listen()
            waiting = waiting or Waiting(self._ledger, page.key, "its rewriting")
            waiting.look(bell)
        self._mover.read(source, target)

    def share(self, owner: Owner, page: Page) -> bool:
        """Add an owner to a page; False if the page was retired."""
        owner.claim.keys.append(page.key)
        with self._guard.lock:
            if self._ledger.pages.get(page.key) is not page:
                return False
            page.owners.add(owner.claim)
            return True


def _first_homes(level: Level, pages: Sequence[Page], room: dict[Level, int]) -> list[tuple[Page, int]]:
    """First fit of pages that leave a tier: takes from the room of those below it."""
    homes = []
    for page in pages:
        below = (lower for lower in room if lower.index > level.index)
        home = next((lower for lower in below if room[lower] >= page.nbytes + lower.overhead_bytes), None)
        if home is None:
            raise TierError(
                f"{page.key}: no tier below {level.tier.name} has room for {page.nbytes} more bytes; "
                "raise its budget first, or enable tiers.ssd"
            )
        room[home] -= page.nbytes + home.overhead_bytes
        homes.append((page, home.index))
    return homes


def _staying(sizes: Mapping[str, int], nbytes: int, copies: float) -> set[str]:
    """Return the keys of pages that may stay in `nbytes`: evenly spread, routed experts after all others.

    copies: room for copies of experts that leave, of as many bytes more; infinite: all leave.
    """
    routed = {key: size for key, size in sizes.items() if split_key(key)}
    every = {key: size for key, size in sizes.items() if key not in routed}
    stay = set(spread(list(every), every, nbytes))
    room = nbytes - sum(every.values())
    leave = max(0, sum(routed.values()) - room)
    return stay | set(spread(list(routed), routed, room - copies * leave if leave else room))


def _deepest_first(move: tuple[Page, int]) -> tuple[bool, int]:
    """Sort key under which each move finds room: first moves down, deepest tier first; then up, top tier first."""
    page, home = move
    return (False, -home) if home > page.home else (True, home)
