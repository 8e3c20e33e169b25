"""Policy "scheduled": evenly spread pins and a small ring with prefetch, from the learned order of each phase.

Belady's optimum for a cyclic scan of n equal pages with room for r is (r - 1) / (n - 1); with `prefetch` pages of
look-ahead this policy reaches (r - 1 - prefetch) / n, and the remaining copies are prefetched.

Rejected: eviction by predicted next use (Belady on the learned order), which needs a search per miss and gains one
slot over static pins.
"""

from collections.abc import Collection, Generator, Iterable
from itertools import chain

from vbrt.residency.pass_order import PassRecord
from vbrt.residency.phases import Course
from vbrt.residency.policy import FORWARD, Decision, PolicyBase
from vbrt.residency.resident_pages import ResidentPages, Residents
from vbrt.residency.ring_length import RingSearch
from vbrt.residency.room_division import Division, Room, divide

__all__ = ["Foresight", "ScheduledPolicy"]


class Foresight:
    """Look-ahead of a `ScheduledPolicy` over whole passes, while they follow the learned orders.

    The policy is deterministic, so the decisions of a pass can be replayed when its state recurs; `skip_pass` then
    applies the pass to the policy.

    Attributes:
        policy: the policy; inside another policy it decides on some of the pages only.
    """

    def __init__(self, policy: "ScheduledPolicy") -> None:
        self.policy = policy

    @property
    def steady(self) -> bool:
        """True at the beginning of a pass with a learned order, while no ring search runs."""
        policy = self.policy
        return not policy._record.keys and policy._rings.trial is None and policy._course.knows_order

    @property
    def pinned(self) -> tuple[str, ...]:
        """Pinned pages."""
        return tuple(self.policy._pages.pinned)

    @property
    def slot_bytes(self) -> int:
        """Bytes per ring slot; 0 if every page takes its own size."""
        return self.policy._division.slot_bytes

    def room(self) -> tuple:
        """Return the room, its division, and the pinned pages."""
        policy = self.policy
        return policy.capacity_bytes, policy._division, tuple(policy._pages.pinned)

    def state(self) -> tuple:
        """Return all state that the decisions of the pass depend on; begins with `room()`."""
        policy = self.policy
        return *self.room(), self.residents(), frozenset(policy._gone), policy._course.outlook()

    def residents(self) -> Residents:
        """Return the unpinned resident pages."""
        return self.policy._pages.snapshot(self.policy.resident_bytes)

    def assume(self, residents: Residents) -> None:
        """Replace the unpinned resident pages."""
        self.policy._pages.restore(residents)
        self.policy.resident_bytes = residents.resident_bytes

    def skip_pass(self, after: Residents) -> None:
        """Apply the whole pass in its learned order. `after`: the unpinned resident pages at its end."""
        policy = self.policy
        policy._record.add_all(policy._course.finish())
        self.assume(after)


class ScheduledPolicy(PolicyBase):
    """Evenly spread pins and a small ring, from the order of each phase's last pass.

    The very first pass runs as LRU; the first pass of a further phase follows the previous phase's order until it
    deviates. Layers that are skipped, repeated or reordered cost misses in that pass and are learned for the phase's
    next. A pass that stops early (an exception, Ctrl-C) is recognised as a prefix of its phase's order and does not
    replace it; of two in a row (early exits) the longer one does.

    All phases share one room, divided for one round of recurring phases (`Phases.round`). Prefetch across the end of a
    pass follows the predicted next phase.

    `begin_pass` marks passes. Without marks a pass begins when its first page recurs, unless the order has it there.
    Marks may cease (a model is compiled after its first call): assumed once a pass is longer than the previous one, has
    repeated itself as a whole, and begins a third time.

    Ring slots have one size, so that the memory of an evicted page fits the next; smaller pages take a whole slot.
    `RingSearch` chooses their number.

    Args:
        capacity_bytes: room for pages, in bytes.
        prefetch: most pages prefetched.
        group: pages per lease (2 if coarse and fine planes are separate pages).

    Attributes:
        foresight: look-ahead on decisions.
    """

    kind = "scheduled"

    def __init__(self, capacity_bytes: int, *, prefetch: int = 2, group: int = 1) -> None:
        self.prefetch, self.group = prefetch, group
        self.foresight = Foresight(self)
        super().__init__(capacity_bytes)

    def reset(self) -> None:
        """Return to the initial state."""
        super().reset()
        self._sizes: dict[str, int] = {}  # of the orders' pages, for prefetch
        self._pages = ResidentPages()
        self._gone: set[str] = set()  # removed: not prefetched until their next access
        self._record = PassRecord()
        self._course = Course()
        self._round: tuple[str, ...] = ()
        self._division = Division(frozenset(), 0)
        self._rings = RingSearch(self._divided, self._steady_bytes)

    # -- Policy protocol ------------------------------------------------------------------------------------------

    def begin_pass(self, phase: str = FORWARD) -> None:
        """Note that the next access starts a new pass of the named phase."""
        self._record.mark()
        if self._record.keys or phase != self._course.phases.current:
            self._end_pass(phase)

    def access(self, key: str, size: int, busy: Collection[str] = ()) -> Decision | None:
        """Decide on a demanded page: see `Policy.access`."""
        pages = self._pages
        pinned, staged, fresh = pages.classes
        if key in fresh or key in pinned or key in staged:
            unused = key in pages.unused
            decision = Decision(key, not unused, prefetched=unused)
        else:
            charge = self._charge(key, size, busy)
            victims = self._make_room(charge, busy)
            if victims is None:
                return None
            self.resident_bytes += charge
            staged[key] = charge
            decision = Decision(key, hit=False, evict=victims, charge=charge)
        pages.unused.discard(key)
        self._gone.discard(key)
        self._note(key, size)
        if key not in pinned:
            charge = fresh.pop(key, None) or staged.pop(key)
            kept = pinned if key in self._division.pins and charge == size else staged
            kept[key] = charge
        return decision

    def ahead(self, busy: Collection[str] = ()) -> list[Decision]:
        """Return the pages to prefetch now: the next ones of the order that are not resident."""
        decisions: list[Decision] = []
        pages = self._pages
        if not self._course.streams or len(pages.fresh) >= self.prefetch:
            return decisions
        stay = set(busy)
        for key in self._course.upcoming():
            if key in pages.staged:
                stay.add(key)  # never evict a page for one that is needed later
            elif key not in pages.fresh and key not in pages.pinned and key not in self._gone:
                charge = self._division.charge(key, self._sizes[key])
                victims = self._make_room(charge, stay, pages.staged.items())
                if victims is None:
                    break
                pages.fresh[key] = charge
                pages.unused.add(key)
                self.resident_bytes += charge
                decisions.append(Decision(key, hit=False, evict=victims, prefetched=True, charge=charge))
                if len(pages.fresh) >= self.prefetch:
                    break
        return decisions

    def remove(self, key: str) -> None:
        """Remove a page: see `Policy.remove`."""
        self._evict(key)
        self._gone.add(key)

    def resident(self) -> tuple[str, ...]:
        """Return the keys of resident pages."""
        return tuple(chain(*self._pages.classes))

    def resize(self, capacity_bytes: int, busy: Collection[str] = ()) -> tuple[str, ...]:
        """Set the room; return the evicted pages, none of them busy."""
        if capacity_bytes == self.capacity_bytes:
            return ()
        victims = super().resize(capacity_bytes, busy)
        if self._round:
            self._rings.restart(room=capacity_bytes)
            self._divide()
            self._rings.skip_pass()
            victims += self._evict_wide(busy)
            self._course.stream(self._pages.pinned)
        return victims

    def _evict_wide(self, busy: Collection[str]) -> tuple[str, ...]:
        """Evict pages whose slots are larger than those of the new division."""
        wide = tuple(
            key
            for pages in (self._pages.staged, self._pages.fresh)
            for key, charge in pages.items()
            if key not in busy and charge > self._division.charge(key, self._sizes.get(key, charge))
        )
        for key in wide:
            self._evict(key)
        return wide

    def _candidates(self) -> Iterable[tuple[str, int]]:
        pages = self._pages
        return chain(pages.staged.items(), reversed(pages.fresh.items()), pages.pinned.items())

    def _evict(self, key: str) -> None:
        self.resident_bytes -= self._pages.evict(key)

    def _charge(self, key: str, size: int, busy: Collection[str]) -> int:
        """Return a slot's bytes, or the page's own size if whole slots for all busy pages do not fit."""
        whole = self._division.charge(key, size)
        if whole > size:
            taken = whole
            for other in busy:
                if other != key:
                    charge = self._charge_of(other)
                    if not charge:
                        return size
                    taken += charge
            if taken > self.capacity_bytes:
                return size
        return whole

    def _charge_of(self, key: str) -> int:
        """Return the present or future charge of a page; 0 if it is unknown."""
        for pages in self._pages.classes:
            if key in pages:
                return pages[key]
        return self._division.charge(key, self._sizes[key]) if key in self._sizes else 0

    # -- learning the order ---------------------------------------------------------------------------------------

    def _note(self, key: str, size: int) -> None:
        """Record an access of the current pass."""
        self._sizes[key] = size
        record = self._record
        if record.begins_again(key, self._course.order.keys):
            self._end_pass(self._course.phases.current)
            self._sizes[key] = size
        record.keys.append(key)
        record.distinct.add(key)
        late = self._course.advance(key, self._pages.fresh)
        if late:
            self._pages.demote(self._pages.fresh, late)
        if self._rings.trial is not None:
            self._rings.step()

    def _end_pass(self, phase: str) -> None:
        """End the current pass, learn its order, and begin a pass of the named phase."""
        course, finished, repeated = self._course, self._course.finished, False
        current = self._record.take()
        if current:
            repeated, learned = course.learn(current)
            if learned:
                self._prune()
        if not course.start(phase, after_accesses=bool(current)) or not finished:
            self._pages.demote(self._pages.fresh, list(self._pages.fresh))  # prefetched pages are used late in it
        self._divide_round()
        if repeated and self._rings.settle(self._round, self._division, self.capacity_bytes):
            self._divide()
        course.stream(self._pages.pinned)

    def _prune(self) -> None:
        """Forget pages outside the orders and the round."""
        known = {*self._round, *self._course.keys()}
        self._sizes = {key: size for key, size in self._sizes.items() if key in known}
        self._gone &= known

    # -- dividing the room ----------------------------------------------------------------------------------------

    def _divide_round(self) -> None:
        """Divide the room for the predicted round, if that has changed."""
        phases = self._course.phases
        if not phases.changed:
            return
        expected, phases.changed = phases.round(self._course.order), False
        if expected and expected != self._round:
            self._round = expected
            self._prune()
            self._rings.restart()
            self._divide()

    def _divide(self) -> None:
        """Divide the room and reclassify resident pages; no bytes move."""
        self._division = self._divided(self._rings.extra)
        self._pages.pin(self._division.pins, self._sizes)

    def _divided(self, extra: int) -> Division:
        return divide(self._round, self._sizes, Room(self.capacity_bytes, self.group, self.prefetch, extra))

    def _steady_bytes(self, division: Division) -> Generator[None, None, int]:
        """Simulate a steady round under a division, one access per step; return the bytes loaded."""
        trial = ScheduledPolicy(self.capacity_bytes, prefetch=self.prefetch, group=self.group)
        trial._course.learn(self._round)
        trial._sizes = {key: self._sizes[key] for key in self._round}
        trial._round, trial._division, trial._course.phases.changed = self._round, division, False
        trial._rings.enabled = False
        interval: int | None = len(self._round)
        for _ in range(2):
            trial._record.mark(interval=interval)
            if trial._record.keys:
                trial._end_pass(FORWARD)
            moved, interval = 0, None
            for key in self._round:
                moved += 0 if trial.access(key, self._sizes[key], (key,)).hit else self._sizes[key]
                trial.ahead((key,))
                yield
        return moved
