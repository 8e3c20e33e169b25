"""Run a policy over a trace without moving a byte: the counts of the live stack, exactly."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from vbrt.residency.counts import PhaseCounts
from vbrt.residency.lru import LRUPolicy
from vbrt.residency.policy import FORWARD, Decision, Policy
from vbrt.residency.scheduled import ScheduledPolicy

__all__ = ["PASS", "Pass", "Simulation", "make_policy", "simulate"]

_KINDS: dict[str, Callable[..., Policy]] = {
    "lru": lambda capacity_bytes, **ahead: LRUPolicy(capacity_bytes),
    "scheduled": ScheduledPolicy,
}


@dataclass(frozen=True, slots=True)
class Pass:
    """The start of a pass in a trace given to `simulate`."""

    phase: str = FORWARD


PASS = Pass()
"""The start of a pass of no particular phase."""


def make_policy(kind: str, capacity_bytes: int, *, prefetch: int = 2, group: int = 1) -> Policy:
    """Make the policy named `kind` ("lru" or "scheduled"), for `capacity_bytes` of room."""
    if kind not in _KINDS:
        raise ValueError(f"policy.kind = {kind!r}; expected 'lru' or 'scheduled'")
    return _KINDS[kind](capacity_bytes, prefetch=prefetch, group=group)


@dataclass(slots=True)
class Simulation:
    """Counts of a simulated run: hits and misses by page and by phase, bytes moved in."""

    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    prefetched: Counter[str] = field(default_factory=Counter)
    bytes_in: int = 0
    phases: dict[str, PhaseCounts] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Hits over accesses; 0.0 without any access."""
        accesses = self.hits.total() + self.misses.total()
        return self.hits.total() / accesses if accesses else 0.0

    def count(self, decision: Decision, size: int, phase: str) -> None:
        """Count one access of a page of `size` bytes."""
        key, counts = decision.key, self.phases.setdefault(phase, PhaseCounts())
        counts.hits += decision.hit
        counts.misses += not decision.hit
        counts.prefetched += decision.prefetched
        self.hits[key] += decision.hit
        self.misses[key] += not decision.hit
        self.prefetched[key] += decision.prefetched
        self.bytes_in += 0 if decision.hit else size


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
        policy: "lru", "scheduled", or a fresh policy object, also one of your own; then `capacity_bytes`,
            `prefetch` and `group` are its own.
        trace: page keys in order; a tuple of keys is one lease of several pages; `PASS` marks the start of a pass,
            `Pass("draft")` that of a phase.
        capacity_bytes: room in bytes.
        sizes: bytes of each page; without it each page is one byte, so that capacity counts pages.

    Raises:
        ValueError: one lease does not fit into the capacity.
    """
    if isinstance(policy, str):
        policy = make_policy(policy, capacity_bytes, prefetch=prefetch, group=group)
    counts, phase = Simulation(), FORWARD
    for item in trace:
        if isinstance(item, Pass):
            phase = item.phase
            policy.begin_pass(phase)
            counts.phases.setdefault(phase, PhaseCounts()).passes += 1
            continue
        keys = item if isinstance(item, tuple) else (item,)
        for key in keys:
            size = 1 if sizes is None else sizes[key]
            decision = policy.access(key, size, keys)
            if decision is None:
                raise ValueError(f"{keys}: does not fit into {policy.capacity_bytes} bytes")
            counts.count(decision, size, phase)
        policy.ahead(keys)
    return counts
