"""Which pages stay resident above their home: pure decisions, no bytes moved here.

A policy sees accesses and answers with decisions; the tier stack acts on them. Two are here:

- `LRUPolicy`, the classic stack. On a cyclic scan larger than its room it hits 0 %: it evicts each page just
  before its next use. It is optimal for palindromes (forward + backward) and shines under skewed access.
- `ScheduledPolicy` learns the order of the last pass, pins an evenly spread set of pages, and stages the others
  through a ring of equal slots: one lease's and `prefetch` pages ahead. Belady's optimum for a cyclic scan of n equal
  pages with room for r is (r - 1) / (n - 1); with `prefetch` pages of look-ahead this one reaches
  (r - 1 - prefetch) / n, and the copies that remain are started ahead of their use.

A **hit** moves no bytes: the page was resident because it had been kept. A page that was staged ahead of its use
counts as a miss that was `prefetched`, however early its copy finished, so counts never depend on timing and
`simulate` gives exactly the counts of the live stack.

The road not taken: eviction by predicted next use (Belady on the learned order). It needs a search per miss and
gains one slot over static pins.
"""

from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from math import gcd
from typing import NamedTuple

__all__ = [
    "PASS",
    "Decision",
    "Division",
    "LRUPolicy",
    "Policy",
    "ScheduledPolicy",
    "Simulation",
    "auto_prefetch",
    "divide",
    "make_policy",
    "rebalanced",
    "simulate",
    "spread",
]

PASS = object()
"""Marks the start of a pass in a trace given to `simulate`."""

_SLOT_SIZES = 8  # sizes that are tried for the slots of a ring, the largest first
_LONG_COPY_BYTES = 64 << 20
_LONGEST_TRIAL = 8192  # accesses of a pass that is tried out, see ScheduledPolicy
_TRIAL_PACE = 32  # accesses that are tried out with each that happens: 0.1 ms, and a pass is enough for most
_SAME_ROOM = 8  # a room that has changed by less than this part of it keeps the ring that was found for it
_LONGEST_PASS = 16  # accesses per distinct page after which an unmarked pass is cut, so that its record stays bounded


class Decision(NamedTuple):
    """What one access, or one look ahead, does: `evict` leaves first, then `key` comes in unless it is there.

    `charge` is the room that a page which comes in takes, in bytes: at least its own, 0 for just those.
    """

    key: str
    hit: bool
    evict: tuple[str, ...] = ()
    prefetched: bool = False
    charge: int = 0


class Policy:
    """Common bookkeeping: the room that resident pages take, never above `capacity_bytes`."""

    kind = ""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.reset()

    def reset(self) -> None:
        """Forget everything, as if new."""
        self.resident_bytes = 0

    def begin_pass(self) -> None:
        """The next access starts a new pass over the model."""

    def access(self, key: str, size: int, busy: Collection[str] = ()) -> Decision | None:
        """Decide on a demanded page of `size` bytes; pages in `busy` are in use and must stay.

        Returns None, with nothing changed, when there is no room beside the busy pages.
        """
        raise TypeError(f"{type(self).__name__} is abstract: use LRUPolicy or ScheduledPolicy")

    def ahead(self, busy: Collection[str] = ()) -> list[Decision]:
        """Pages to start moving now, before they are demanded."""
        return []

    def forget(self, key: str) -> None:
        """The page is gone (removed, or its read failed): not resident, and not fetched ahead until it is accessed."""
        raise TypeError(f"{type(self).__name__} is abstract: use LRUPolicy or ScheduledPolicy")

    def resident(self) -> tuple[str, ...]:
        """Keys of the pages that are resident now, in no promised order."""
        raise TypeError(f"{type(self).__name__} is abstract: use LRUPolicy or ScheduledPolicy")

    def resize(self, capacity_bytes: int) -> tuple[str, ...]:
        """More or less room from now on; returns the pages that had to leave."""
        self.capacity_bytes = capacity_bytes
        return self._make_room(0, ()) or ()

    def _candidates(self) -> Iterable[tuple[str, int]]:
        """(key, room it takes) of resident pages, those that should leave first in front."""
        raise TypeError(f"{type(self).__name__} is abstract: use LRUPolicy or ScheduledPolicy")

    def _leave(self, key: str) -> None:
        """The page is no longer resident."""
        raise TypeError(f"{type(self).__name__} is abstract: use LRUPolicy or ScheduledPolicy")

    def _make_room(
        self, size: int, busy: Collection[str], candidates: Iterable[tuple[str, int]] | None = None
    ) -> tuple[str, ...] | None:
        """Let the first candidates leave until `size` bytes are free; None, with nothing changed, if that fails."""
        free = self.capacity_bytes - self.resident_bytes
        victims: list[str] = []
        for key, nbytes in self._candidates() if candidates is None else candidates:
            if free >= size:
                break
            if key not in busy:
                victims.append(key)
                free += nbytes
        if free < size:
            return None
        for key in victims:
            self._leave(key)
        return tuple(victims)


class LRUPolicy(Policy):
    """Least recently used leaves first; nothing is fetched ahead."""

    kind = "lru"
    prefetch = 0

    def reset(self) -> None:
        super().reset()
        self._pages: OrderedDict[str, int] = OrderedDict()

    def access(self, key: str, size: int, busy: Collection[str] = ()) -> Decision | None:
        if key in self._pages:
            self._pages.move_to_end(key)
            return Decision(key, hit=True)
        victims = self._make_room(size, busy)
        if victims is None:
            return None
        self._pages[key] = size
        self.resident_bytes += size
        return Decision(key, hit=False, evict=victims, charge=size)

    def forget(self, key: str) -> None:
        self._leave(key)

    def resident(self) -> tuple[str, ...]:
        return tuple(self._pages)

    def _candidates(self) -> Iterable[tuple[str, int]]:
        return self._pages.items()

    def _leave(self, key: str) -> None:
        self.resident_bytes -= self._pages.pop(key, 0)


class ScheduledPolicy(Policy):
    """Evenly spread pins and a small ring, from the order of the last pass.

    The first pass has no order to go by and behaves as LRU. Layers that are skipped, repeated or reordered cost
    misses in that pass and are learned for the next. A pass that stops early (an exception, Ctrl-C) is recognised as a
    prefix of the last order and does not replace it; of two in a row (early exits) the longer one does.

    Passes are marked by `begin_pass`; a trace without any mark starts a pass whenever its first page comes again,
    unless the order has it there. Marks may stop coming (a model is compiled after its first call): that is so once a
    pass is longer than the one before, has repeated itself as a whole, and begins a third time.

    Pages of several sizes pass through slots of one size, so that memory which one left fits the next: it is reused
    as it is, never given back and asked for again. A page in the ring takes a whole slot.

    A pass that uses pages more than once may be served better by a longer ring than by more pins: activation
    checkpointing runs a block forward again just before it runs it backward, and a ring with room for the block saves
    the second read. So once such an order has repeated, longer rings are tried out on it, a few steps with each access
    of the next passes, and the best is taken when a pass begins. It stays while the room changes little.

    Args:
        capacity_bytes: room for pages, in bytes.
        prefetch: pages staged ahead of their use, at most.
        group: pages that one lease takes together (2 when coarse and fine planes are separate pages).
    """

    kind = "scheduled"

    def __init__(self, capacity_bytes: int, *, prefetch: int = 2, group: int = 1) -> None:
        self.prefetch, self.group = prefetch, group
        super().__init__(capacity_bytes)

    def reset(self) -> None:
        super().reset()
        self._sizes: dict[str, int] = {}  # of the order's pages: needed to stage one that is not resident
        self._pinned: OrderedDict[str, int] = OrderedDict()
        self._staged: OrderedDict[str, int] = OrderedDict()  # evictable, the first to leave in front
        self._fresh: OrderedDict[str, int] = OrderedDict()  # staged ahead, not used yet, nearest first
        self._unused: set[str] = set()  # resident pages that were brought ahead and have not been used since
        self._gone: set[str] = set()  # not to be fetched ahead
        self._current: list[str] = []
        self._distinct: set[str] = set()
        self._order: tuple[str, ...] = ()
        self._positions: dict[str, list[int]] = {}
        self._streamed: list[int] = []  # positions in the order of pages that are not kept
        self._division = Division(frozenset(), 0)
        self._steady = 0  # passes of this order in this room
        self._trial: Iterator[None] | None = None  # of longer rings, under way
        self._found: int | None = None  # what it has found: slots more than one lease and `prefetch` need
        self._extra = self._extra_room = 0  # that number, and the room that it was found for (0: not yet)
        self._cursor = 0
        self._stopped = 0  # length of the last pass, if it was shorter than the order
        self._marked = False
        self._since_mark = self._interval = 0  # accesses since the last mark, and between that and the one before

    # -- the protocol ---------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        whole = self._since_mark <= self._longest_pass()  # else marks had stopped
        self._interval, self._since_mark = self._since_mark if whole else 0, 0
        self._marked = True
        self._end_pass()

    def access(self, key: str, size: int, busy: Collection[str] = ()) -> Decision | None:
        if key in self._fresh or key in self._pinned or key in self._staged:
            decision = Decision(key, hit=key not in self._unused, prefetched=key in self._unused)
        else:
            charge = self._charge(key, size, busy)
            victims = self._make_room(charge, busy)
            if victims is None:
                return None
            self.resident_bytes += charge
            self._staged[key] = charge
            decision = Decision(key, hit=False, evict=victims, charge=charge)
        self._unused.discard(key)
        self._gone.discard(key)
        self._record(key, size)
        if key not in self._pinned:
            charge = self._fresh.pop(key, None) or self._staged.pop(key)
            kept = self._pinned if key in self._division.pins and charge == size else self._staged
            kept[key] = charge
        return decision

    def ahead(self, busy: Collection[str] = ()) -> list[Decision]:
        decisions: list[Decision] = []
        if not self._streamed or len(self._fresh) >= self.prefetch:
            return decisions
        stay = set(busy)
        for key in self._upcoming():
            if key in self._staged:
                stay.add(key)  # never evict a page for one that is needed later
            elif key not in self._fresh and key not in self._pinned and key not in self._gone:
                charge = self._division.charge(key, self._sizes[key])
                victims = self._make_room(charge, stay, self._staged.items())
                if victims is None:
                    break
                self._fresh[key] = charge
                self._unused.add(key)
                self.resident_bytes += charge
                decisions.append(Decision(key, hit=False, evict=victims, prefetched=True, charge=charge))
                if len(self._fresh) >= self.prefetch:
                    break
        return decisions

    def forget(self, key: str) -> None:
        self._leave(key)
        self._gone.add(key)

    def resident(self) -> tuple[str, ...]:
        return (*self._pinned, *self._staged, *self._fresh)

    def resize(self, capacity_bytes: int) -> tuple[str, ...]:
        if capacity_bytes == self.capacity_bytes:
            return ()
        victims = super().resize(capacity_bytes)
        if self._order:
            self._choose_pins(known=abs(capacity_bytes - self._extra_room) * _SAME_ROOM < self._extra_room)
            self._steady -= 1  # the pass that is under way, or is about to begin, is not one in this room
            wide = tuple(
                key
                for pages in (self._staged, self._fresh)
                for key, charge in pages.items()
                if charge > self._division.charge(key, self._sizes.get(key, charge))
            )
            for key in wide:  # in slots of a size that the new room may have too few of
                self._leave(key)
            self._stream()
            victims += wide
        return victims

    def _candidates(self) -> Iterable[tuple[str, int]]:
        return chain(self._staged.items(), reversed(self._fresh.items()), self._pinned.items())

    def _leave(self, key: str) -> None:
        self._unused.discard(key)
        for pages in (self._pinned, self._staged, self._fresh):
            self.resident_bytes -= pages.pop(key, 0)

    def _charge(self, key: str, size: int, busy: Collection[str]) -> int:
        """A slot, or the page's own bytes where slots for all that is busy with it would be too many."""
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
        """The room that a page takes, or will; 0 for one that is not known."""
        for pages in (self._pinned, self._staged, self._fresh):
            if key in pages:
                return pages[key]
        return self._division.charge(key, self._sizes[key]) if key in self._sizes else 0

    # -- learning the order ---------------------------------------------------------------------------------------

    def _record(self, key: str, size: int) -> None:
        self._sizes[key] = size
        self._since_mark += 1
        if self._begins_anew(key):
            self._end_pass()
            self._sizes[key] = size
        self._current.append(key)
        self._distinct.add(key)
        self._advance(key)
        if self._trial is not None:
            deque(islice(self._trial, _TRIAL_PACE), maxlen=0)

    def _begins_anew(self, key: str) -> bool:
        """Whether a pass begins with this access although nothing marks it."""
        current = self._current
        if not current or key != current[0]:
            return len(current) > self._longest_pass()
        if not self._marked:
            known = tuple(current) == self._order[: len(current)] != self._order
            return not (known and self._order[len(current)] == key)
        half = len(current) // 2
        if self._since_mark > self._interval and current[:half] == current[half:]:  # marks have stopped
            del current[half:]
            self._marked = False
        return not self._marked or len(current) > self._longest_pass()

    def _longest_pass(self) -> int:
        return _LONGEST_PASS * (len(self._distinct) + 256)

    def _advance(self, key: str) -> None:
        """Move the cursor past `key`; pages staged for places that were jumped over become evictable."""
        if key not in self._positions:
            return
        jumped = self._distance(key)
        if jumped:
            self._demote([k for k in self._fresh if k != key and self._distance(k) < jumped])
        self._cursor = (self._cursor + jumped + 1) % len(self._order)

    def _distance(self, key: str) -> int:
        """Places from the cursor to the next one of `key`; 0 for a page that is not in the order."""
        places = self._positions.get(key)
        if not places:
            return 0
        at = bisect_left(places, self._cursor)
        place = places[at] if at < len(places) else places[0]
        return (place - self._cursor) % len(self._order)

    def _demote(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._staged[key] = self._fresh.pop(key)
            self._staged.move_to_end(key, last=False)

    def _end_pass(self) -> None:
        current, self._current = tuple(self._current), []
        self._distinct.clear()
        if not current:
            return
        if self._cursor:  # it ended elsewhere than the order does: what is staged there comes late in the next pass
            self._demote(list(self._fresh))
        self._cursor = 0
        stopped, self._stopped = self._stopped, 0
        if current != self._order[: len(current)]:
            self._learn(current)
        elif current == self._order:
            self._settle()
        elif stopped:
            self._learn(self._order[: max(stopped, len(current))])
        else:  # the same, but for its end
            self._stopped = len(current)
        self._stream()

    def _learn(self, order: tuple[str, ...]) -> None:
        self._follow(order, self._sizes)
        self._gone &= self._positions.keys()
        self._choose_pins()

    def _follow(self, order: tuple[str, ...], sizes: Mapping[str, int]) -> None:
        self._order, self._positions = order, {}
        for place, key in enumerate(order):
            self._positions.setdefault(key, []).append(place)
        self._sizes = {key: sizes[key] for key in self._positions}

    def _choose_pins(self, *, known: bool = False) -> None:
        """known: the ring that was found for another room will do."""
        self._trial, self._found, self._steady = None, None, 0
        if not known:
            self._extra = self._extra_room = 0
        self._divide(self._divided(self._extra))

    def _divided(self, extra: int) -> "Division":
        return divide(
            self._order, self._sizes, self.capacity_bytes, group=self.group, prefetch=self.prefetch, extra=extra
        )

    # -- the length of the ring -----------------------------------------------------------------------------------

    def _settle(self) -> None:
        """The order has repeated: take the ring that was found for it, or have it looked for during the next passes."""
        self._steady += 1
        if self._found is not None:
            self._extra, self._extra_room = self._found, self.capacity_bytes
            self._trial = self._found = None
            if self._extra:
                self._divide(self._divided(self._extra))
        elif self._steady == 1 and not self._extra_room:
            self._try_rings()

    def _try_rings(self) -> None:
        repeats = len(self._positions) < len(self._order) <= _LONGEST_TRIAL
        if repeats and len(self._division.pins) < len(self._positions):
            self._trial = self._trials()

    def _trials(self) -> Iterator[None]:
        """Finds the ring under which a steady pass over the order moves the fewest bytes; a step is one access."""
        fewest, best, longer = (yield from self._steady_bytes(self._division)), 0, None
        for extra in (2**power for power in range(1, len(self._order).bit_length() + 1)):
            shorter, longer = longer, self._divided(extra)
            if longer == shorter:
                break  # there is no room for more
            moved = yield from self._steady_bytes(longer)
            if moved < fewest:
                fewest, best = moved, extra
        self._found = best

    def _steady_bytes(self, division: "Division") -> Generator[None, None, int]:
        """Bytes that come in during a steady pass over the order, by trying it."""
        trial = ScheduledPolicy(self.capacity_bytes, prefetch=self.prefetch, group=self.group)
        trial._follow(self._order, self._sizes)
        trial._divide(division)
        trial._extra_room, trial._since_mark = self.capacity_bytes, len(self._order)  # tries nothing out itself
        for _ in range(2):
            trial.begin_pass()
            moved = 0
            for key in self._order:
                moved += 0 if trial.access(key, self._sizes[key], (key,)).hit else self._sizes[key]
                trial.ahead((key,))
                yield
        return moved

    def _divide(self, division: "Division") -> None:
        """Room is divided anew; what is resident changes its class, nothing moves."""
        self._division, pins = division, division.pins
        for key in [k for k in self._pinned if k not in pins]:
            self._staged[key] = self._pinned.pop(key)
            self._staged.move_to_end(key, last=False)
        self._demote([k for k in self._fresh if k not in self._positions])
        for pages in (self._staged, self._fresh):
            for key in [k for k in pages if k in pins and pages[k] == self._sizes[k]]:  # not in a slot of the ring
                self._pinned[key] = pages.pop(key)

    def _stream(self) -> None:
        """Pins that have not come in yet are streamed like the rest, and stay when they are used."""
        self._streamed = [place for place, key in enumerate(self._order) if key not in self._pinned]

    def _upcoming(self) -> Iterator[str]:
        """Pages that are not kept, from the cursor on, around the end of the pass into the next one."""
        start = bisect_left(self._streamed, self._cursor)
        for step in range(len(self._streamed)):
            yield self._order[self._streamed[(start + step) % len(self._streamed)]]


class Division(NamedTuple):
    """How room is divided: pages that stay, and the bytes of each slot of the ring (0: every page its own bytes)."""

    pins: frozenset[str]
    slot_bytes: int

    def charge(self, key: str, size: int) -> int:
        """The room that a page takes."""
        return size if key in self.pins else max(size, self.slot_bytes)


def divide(
    order: tuple[str, ...], sizes: Mapping[str, int], capacity_bytes: int, *, group: int, prefetch: int, extra: int = 0
) -> Division:
    """The pages of one pass to keep resident, and the slots that the others pass through.

    Everything is kept when everything fits. Otherwise the ring has `group` + `prefetch` slots of the size that leaves
    the fewest bytes to stream: pages larger than a slot must stay. Where not even `group` + 1 slots fit, pages pass
    through in their own sizes.

    Args:
        order: page keys in the order of a pass, repeats included.
        sizes: bytes of each page.
        capacity_bytes: room for pages, the ring included.
        group: pages that one lease takes.
        prefetch: pages staged ahead.
        extra: more slots than that, for pages that are used again soon.
    """
    uses, window = Counter(order), group + prefetch + extra
    if sum(sizes[key] for key in uses) <= capacity_bytes:
        return Division(frozenset(uses), 0)
    best, fewest = None, 0
    for slot in sorted({sizes[key] for key in uses}, reverse=True)[:_SLOT_SIZES]:
        slots = min(window, capacity_bytes // slot)
        large = [key for key in uses if sizes[key] > slot]
        budget = capacity_bytes - slots * slot - sum(sizes[key] for key in large)
        if capacity_bytes // slot <= group or budget < 0:
            continue
        pins = frozenset(large + _spread_by_use([k for k in uses if sizes[k] <= slot], uses, sizes, budget))
        streamed = sum(sizes[key] for key in order if key not in pins)
        if best is None or streamed < fewest:
            best, fewest = Division(pins, slot), streamed
    return best or Division(_pins_beside(order, sizes, capacity_bytes, window=window), 0)


def _pins_beside(
    order: tuple[str, ...], sizes: Mapping[str, int], capacity_bytes: int, *, window: int
) -> frozenset[str]:
    """The pages of one pass to keep resident beside the largest `window` consecutive ones in their own sizes."""
    uses = Counter(order)
    around = order * (1 + window // len(order)) if len(order) < window else order + order[: window - 1]
    ring = max(sum(sizes[key] for key in around[at : at + window]) for at in range(len(order)))
    return frozenset(_spread_by_use(list(uses), uses, sizes, capacity_bytes - ring))


def _spread_by_use(keys: list[str], uses: Mapping[str, int], sizes: Mapping[str, int], budget: int) -> list[str]:
    """First the pages that a pass uses most often (each use of a kept page saves its bytes once), then evenly: a kept
    prefix would have the same hit rate but leave the link idle while it runs."""
    pins: list[str] = []
    for count in sorted({uses[key] for key in keys}, reverse=True):
        chosen = spread([key for key in keys if uses[key] == count], sizes, budget)
        budget -= sum(sizes[key] for key in chosen)
        pins += chosen
    return pins


def spread(keys: list[str], sizes: Mapping[str, int], budget_bytes: int) -> list[str]:
    """An evenly spread share of `keys`, of at most `budget_bytes` together: error diffusion over the bytes."""
    if budget_bytes <= 0 or not keys:
        return []
    budget_bytes -= budget_bytes % gcd(*(sizes[key] for key in keys))  # bytes that no page can use skew the share
    share, owed, left = min(1.0, budget_bytes / sum(sizes[key] for key in keys)), 0.0, budget_bytes
    chosen: dict[str, None] = {}
    for key in keys:
        owed += share * sizes[key]
        if owed >= sizes[key] * (1 - 1e-9) and sizes[key] <= left:
            owed -= sizes[key]
            left -= sizes[key]
            chosen[key] = None
    for key in keys:  # bytes that rounding left over
        if key not in chosen and sizes[key] <= left:
            left -= sizes[key]
            chosen[key] = None
    return list(chosen)


def auto_prefetch(largest_page_bytes: int, *, group: int = 1, from_drive: bool = False) -> int:
    """Pages to stage ahead where the config leaves it open.

    Towards a GPU the link needs one copy under way beside the one that is being used. Two smooth over layers of unequal
    work, at the price of a slot; a page of 64 MiB takes a millisecond on its way, which is long enough for one. A drive
    wants several reads at once.
    """
    if from_drive:
        return 4 * group
    return max(group, 1 if largest_page_bytes >= _LONG_COPY_BYTES else 2)


def rebalanced(budget_bytes: int, wanted_bytes: int, free_bytes: int, margin_bytes: int) -> int:
    """What a budget should be, given the memory that is free now.

    The model may use the margin. When half of it is gone the budget gives way until the margin is whole; when there is
    half a margin more than that, it grows back towards `wanted_bytes`. In between it stays, so that it does not swing.
    """
    if free_bytes < margin_bytes // 2 or (free_bytes > margin_bytes * 3 // 2 and budget_bytes < wanted_bytes):
        return max(0, min(wanted_bytes, budget_bytes + free_bytes - margin_bytes))
    return budget_bytes


def make_policy(kind: str, capacity_bytes: int, *, prefetch: int = 2, group: int = 1) -> Policy:
    """The policy named `kind` ("lru" or "scheduled"), for `capacity_bytes` of room."""
    if kind == "lru":
        return LRUPolicy(capacity_bytes)
    if kind == "scheduled":
        return ScheduledPolicy(capacity_bytes, prefetch=prefetch, group=group)
    raise ValueError(f"policy.kind = {kind!r}; expected 'lru' or 'scheduled'")


@dataclass(slots=True)
class Simulation:
    """Counts of a simulated run: per page hits and misses, bytes moved in."""

    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    prefetched: Counter[str] = field(default_factory=Counter)
    bytes_in: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits over accesses; 0.0 without any access."""
        accesses = self.hits.total() + self.misses.total()
        return self.hits.total() / accesses if accesses else 0.0


def simulate(
    policy: str | Policy,
    trace: Iterable,
    capacity_bytes: int,
    *,
    sizes: Mapping[str, int] | None = None,
    prefetch: int = 2,
    group: int = 1,
) -> Simulation:
    """Run a policy over a trace without moving a byte.

    Args:
        policy: "lru", "scheduled", or a fresh policy object (then `capacity_bytes`, `prefetch`, `group` are its own).
        trace: page keys in order; a tuple of keys is one lease of several pages; `PASS` marks the start of a pass.
        capacity_bytes: room in bytes.
        sizes: bytes of each page; without it each page is one byte, so that capacity counts pages.

    Raises:
        ValueError: one lease does not fit into the capacity.
    """
    if isinstance(policy, str):
        policy = make_policy(policy, capacity_bytes, prefetch=prefetch, group=group)
    counts = Simulation()
    for item in trace:
        if item is PASS:
            policy.begin_pass()
            continue
        keys = item if isinstance(item, tuple) else (item,)
        for key in keys:
            size = 1 if sizes is None else sizes[key]
            decision = policy.access(key, size, busy=keys)
            if decision is None:
                raise ValueError(f"{keys}: does not fit into {policy.capacity_bytes} bytes")
            counts.hits[key] += decision.hit
            counts.misses[key] += not decision.hit
            counts.prefetched[key] += decision.prefetched
            counts.bytes_in += 0 if decision.hit else size
        policy.ahead(busy=keys)
    return counts
