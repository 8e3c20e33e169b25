"""Programmes: static schedules of copies and ring slots, compiled from one round of recurring passes.

Once a policy's state recurs after a round of passes, its decisions in the next round are known. A programme lists for
each lease where its pages are, and which copies start at its release. Each streamed page has a fixed slot of the ring,
the same in every round, and a round ends with the ring contents that it begins with; CUDA graph capture needs both.

Hits and misses are the policy's own, so counts equal those of `simulate`. Copies start as soon as their slot is free,
which may be somewhat earlier or later than under the policy.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vbrt.residency.resident_pages import Residents
from vbrt.residency.scheduled import Foresight, ScheduledPolicy

__all__ = ["Access", "Load", "PassOrder", "Programme", "Segment", "Step", "compile_programme"]

RESIDENT = -1  # instead of a slot: the page stays in the tier; also in a larger slot than it takes, of an earlier ring


class PassOrder(NamedTuple):
    """Order of a pass: its phase, and the keys of each lease."""

    phase: str
    leases: tuple[tuple[str, ...], ...]


class Access(NamedTuple):
    """Leased page: its ring slot, or RESIDENT, and whether it counts as a hit and as prefetched."""

    key: str
    slot: int
    hit: bool
    prefetched: bool


class Load(NamedTuple):
    """Copy of a page into a ring slot."""

    key: str
    slot: int


class Step(NamedTuple):
    """Lease: its pages, and the copies that start at its release, in order of use."""

    keys: tuple[str, ...]
    accesses: tuple[Access, ...]
    loads: tuple[Load, ...]


class Segment(NamedTuple):
    """Pass of the round: steps from `start` to `end`, the policy's state before and its residents after."""

    start: int
    end: int
    state: tuple
    after: Residents


@dataclass(frozen=True, slots=True)
class Programme:
    """Static schedule of a round of passes.

    Attributes:
        steps: leases of all passes.
        segments: the passes.
        slots, slot_bytes: number and size of the ring's slots.
        begin: ring contents at the beginning and at the end of the round, in order of use.
        head: copies that start with the round.
        before: the policy's residents at the beginning of the round.
    """

    steps: tuple[Step, ...]
    segments: tuple[Segment, ...]
    slots: int
    slot_bytes: int
    begin: tuple[Load, ...]
    head: tuple[Load, ...]
    before: Residents


@dataclass(slots=True, eq=False)
class _Stay:
    """Lifetime of a page in a ring slot. `uses`: positions of leases; those of the next round count on."""

    key: str
    uses: list[int] = field(default_factory=list)
    slot: int = RESIDENT
    crosses: bool = False  # True if it is resident when a round begins


class _Trial:
    """Dry run of a round on a copy of a policy, recording the stays of streamed pages in the ring."""

    def __init__(self, policy: ScheduledPolicy, sizes: Mapping[str, int]) -> None:
        self.policy, self.sizes, self.length = copy.deepcopy(policy), sizes, 0
        self.stays: list[_Stay] = []
        self.accesses: list[list[tuple[str, _Stay | None, bool, bool]]] = []
        self.pinned = set(policy.foresight.pinned)
        self.found = {key: _Stay(key) for key in policy.foresight.residents().keys}
        self.live = dict(self.found)

    def run(self, leases: Sequence[tuple[str, ...]]) -> bool:
        """Run the leases of a pass; False if a page does not take exactly one slot."""
        return all(map(self._lease, leases))

    def _lease(self, keys: tuple[str, ...]) -> bool:
        policy, sizes, slot_bytes = self.policy, self.sizes, self.policy.foresight.slot_bytes
        busy = {key for key in keys if key in sizes}
        noted: list[tuple[str, _Stay | None, bool, bool]] = []
        for key in keys:
            if key not in busy:
                noted.append((key, None, True, False))  # at home in the tier
                continue
            decision = policy.access(key, sizes[key], busy)
            if decision is None or (decision.charge and decision.charge != slot_bytes):
                return False
            stay = None if key in self.pinned else self._stay_of(key, decision.evict)
            if stay is not None:
                stay.uses.append(self.length)
            noted.append((key, stay, decision.hit, decision.prefetched))
        for decision in policy.ahead(busy):
            if decision.charge != slot_bytes:
                return False
            self._stay_of(decision.key, decision.evict)
        self.accesses.append(noted)
        self.length += 1
        return True

    def _stay_of(self, key: str, evicted: Sequence[str]) -> _Stay:
        for victim in evicted:
            self.live.pop(victim, None)
            self.pinned.discard(victim)
        stay = self.live.get(key)
        if stay is None:
            stay = self.live[key] = _Stay(key)
            self.stays.append(stay)
        return stay

    def close(self) -> list[_Stay]:
        """Join stays across the end of the round with those at its start; return the stays that never end."""
        forever = []
        for key, stay in self.live.items():
            found = self.found[key]
            if found is stay:
                forever += [stay] if stay.uses else []
            elif found.uses:
                stay.uses += [use + self.length for use in found.uses]
                stay.crosses = found.crosses = True
        return forever


def compile_programme(
    policy: ScheduledPolicy, passes: Sequence[PassOrder], sizes: Mapping[str, int]
) -> Programme | None:
    """Compile the programme of a round; None if the policy's state does not recur, or streamed pages do not share one
    slot size.

    Args:
        policy: at the beginning of the first pass; unchanged.
        passes: the round; the first pass has begun.
        sizes: bytes of the pages at home below the tier; the others are at home in it.
    """
    foresight = policy.foresight
    if not foresight.steady:
        return None
    trial, segments = _Trial(policy, sizes), []
    for number, one in enumerate(passes):
        if number:
            trial.policy.begin_pass(one.phase)
        start, state = trial.length, trial.policy.foresight.state()
        if not trial.policy.foresight.steady or not trial.run(one.leases):
            return None
        segments.append(Segment(start, trial.length, state, trial.policy.foresight.residents()))
    trial.policy.begin_pass(passes[0].phase)
    if trial.policy.foresight.state() != segments[0].state:
        return None
    return _laid_out(trial, passes, tuple(segments), foresight)


def _laid_out(
    trial: _Trial, passes: Sequence[PassOrder], segments: tuple[Segment, ...], foresight: Foresight
) -> Programme | None:
    """Assign a slot to every stay, and a start to every copy."""
    forever = trial.close()
    stays = [stay for stay in trial.stays if stay.uses]
    slot_bytes, before = foresight.slot_bytes, foresight.residents()
    free_bytes = (
        trial.policy.capacity_bytes - before.resident_bytes + sum(c for _, c in (*before.staged, *before.fresh))
    )
    slots = min(free_bytes // slot_bytes if slot_bytes else 0, len(stays) + len(forever))
    loads = _Slots(slots, trial.length, [stay for stay in stays if stay.crosses], forever).loads(stays)
    if loads is None:
        return None
    for stay in trial.found.values():
        if stay.crosses:
            stay.slot = trial.live[stay.key].slot
    passing = (stay for stay in trial.found.values() if stay.uses and stay.slot != RESIDENT)
    begin = sorted(passing, key=lambda stay: stay.uses[0])
    leases = [keys for one in passes for keys in one.leases]
    steps = (
        Step(keys, tuple(_access(noted) for noted in trial.accesses[at]), tuple(loads.get(at, ())))
        for at, keys in enumerate(leases)
    )
    return Programme(
        steps=tuple(steps),
        segments=segments,
        slots=slots,
        slot_bytes=slot_bytes,
        begin=tuple(Load(stay.key, stay.slot) for stay in begin),
        head=tuple(loads.get(-1, ())),
        before=before,
    )


def _access(noted: tuple[str, _Stay | None, bool, bool]) -> Access:
    key, stay, hit, prefetched = noted
    return Access(key, RESIDENT if stay is None else stay.slot, hit, prefetched)


class _Slots:
    """Allocator of ring slots to stays."""

    def __init__(self, slots: int, length: int, crossing: Sequence[_Stay], forever: Sequence[_Stay]) -> None:
        """crossing: stays that continue into the next round, in the same slot. forever: stays that never end."""
        self._length = length
        self._last_use = [-1] * slots  # of each slot's page
        self._claimed = [2 * length] * slots  # by a crossing stay, from that use on
        self._fits = len(crossing) + len(forever) <= slots
        for slot, stay in enumerate([*crossing, *forever][:slots]):
            stay.slot = slot
            self._last_use[slot] = stay.uses[-1] - length if stay.crosses else 2 * length
            self._claimed[slot] = stay.uses[0]

    def loads(self, stays: Sequence[_Stay]) -> dict[int, list[Load]] | None:
        """Assign a slot to every stay; return the copies by the lease that they follow (-1: the round's start), or None
        if there are too few slots."""
        loads: dict[int, list[Load]] = {}
        begins = -1
        for stay in sorted(stays, key=lambda stay: stay.uses[0]):
            slot = stay.slot if stay.crosses else self._free_slot(stay)
            if not self._fits or slot is None or self._last_use[slot] >= stay.uses[0]:
                return None
            begins = max(begins, self._last_use[slot])  # copies start in order of use
            if begins >= min(stay.uses[0], self._length):
                return None
            stay.slot, self._last_use[slot] = slot, stay.uses[-1]
            loads.setdefault(begins, []).append(Load(stay.key, slot))
        return loads

    def _free_slot(self, stay: _Stay) -> int | None:
        """Return the slot with the earliest last use among those free for the whole stay."""
        return min(self._candidates(stay), key=lambda slot: self._last_use[slot], default=None)

    def _candidates(self, stay: _Stay) -> Iterator[int]:
        for slot, last_use in enumerate(self._last_use):
            if last_use < stay.uses[0] and stay.uses[-1] < self._claimed[slot]:
                yield slot
