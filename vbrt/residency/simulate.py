"""Policy simulator: runs a policy over a trace without moving bytes, with exactly the counts of the live stack."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vbrt.config.argument_checks import check_instance, check_one_of, check_whole
from vbrt.errors import ArgumentError
from vbrt.residency.access_counts import PhaseCounts
from vbrt.residency.access_trace import PASS, Announce, Pass
from vbrt.residency.expert_pages import ExpertsPolicy
from vbrt.residency.expert_room import largest_pages
from vbrt.residency.lru import LRUPolicy
from vbrt.residency.policy import FORWARD, Decision, Policy
from vbrt.residency.routing_file import read_routing
from vbrt.residency.routing_trace import Routing
from vbrt.residency.scheduled import ScheduledPolicy
from vbrt.residency.user_policy import check_policy

__all__ = ["PASS", "Announce", "Pass", "Simulation", "best_scope", "make_policy", "simulate"]


class _Options(NamedTuple):
    prefetch: int
    scan: int
    group: int
    scope: str
    layers: Mapping[str, int] | None


_KINDS: dict[str, Callable[[int, _Options], Policy]] = {
    "lru": lambda room, options: LRUPolicy(room),
    "scheduled": lambda room, options: ScheduledPolicy(room, prefetch=options.prefetch, group=options.group),
    "experts": lambda room, options: ExpertsPolicy(room, **options._asdict()),
}


def make_policy(
    kind: str,
    capacity_bytes: int,
    *,
    prefetch: int = 2,
    scan: int = 0,
    group: int = 1,
    scope: str = "layer",
    layers: Mapping[str, int] | None = None,
) -> Policy:
    """Make the policy named `kind` ("lru", "scheduled" or "experts"), for `capacity_bytes` of room.

    scan, scope, layers: for "experts" only, see `ExpertsPolicy`.
    """
    check_one_of(kind, _KINDS, "policy.kind")
    check_whole(capacity_bytes, "capacity_bytes", least=0)
    return _KINDS[kind](capacity_bytes, _Options(prefetch, scan, group, scope, layers))


@dataclass(slots=True)
class Simulation:
    """Counts of a simulated run: hits and misses by page and by phase, bytes moved in; and by page how often it was
    hosted, which leases nothing."""

    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    prefetched: Counter[str] = field(default_factory=Counter)
    bytes_in: int = 0
    phases: dict[str, PhaseCounts] = field(default_factory=dict)
    hosted: Counter[str] = field(default_factory=Counter)

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
    trace: Iterable | Routing | str | os.PathLike[str],
    capacity_bytes: int,
    *,
    sizes: Mapping[str, int] | None = None,
    prefetch: int = 2,
    group: int = 1,
    scope: str = "layer",
    hosted: Collection[str] = (),
) -> Simulation:
    """Simulate a policy over a trace, without moving bytes.

    Args:
        policy: "lru", "scheduled", "experts", or a fresh policy object (user-defined ones too), whose own
            `capacity_bytes`, `prefetch` and `group` apply.
        trace: page keys in order; a tuple of keys is one lease of several pages; `PASS` starts a pass, `Pass("draft")`
            one of a named phase; `Announce(keys)` announces a scan. Or a recorded routing, or its file (see
            `vb.record_routing`), for the leases of its layers, with their page sizes.
        capacity_bytes: room in bytes.
        sizes: bytes of each page; without it each page is one byte, so that capacity counts pages.
        scope: for "experts", see `ExpertsPolicy`.
        hosted: pages that the CPU computes where they lie, as `hosted_keys` chooses: the policy never sees them.

    Raises:
        ArgumentError: the file of a routing cannot be read, or is damaged; one lease does not fit into the capacity.
    """
    _check_arguments(trace, sizes, prefetch, group, scope)
    check_instance(hosted, Collection, "simulate(): hosted", "a collection of page keys")
    routing = read_routing(trace) if isinstance(trace, str | os.PathLike) else trace
    if isinstance(routing, Routing):
        sizes = sizes or routing.sizes
    if isinstance(policy, str):
        layers = largest_pages(sizes or {})
        policy = make_policy(policy, capacity_bytes, prefetch=prefetch, group=group, scope=scope, layers=layers)
    else:
        check_policy(policy)
    if isinstance(routing, Routing):
        trace = routing.leases(policy.capacity_bytes, at_once=getattr(policy, "scan_pages", 1))
    run = _Run(policy, sizes, frozenset(hosted))
    for item in trace:
        run.take(item)
    return run.counts


def _check_arguments(trace: object, sizes: object, prefetch: object, group: object, scope: object) -> None:
    expected = "page keys in order, a Routing, or the path of its file"
    check_instance(trace, (Routing, Iterable, os.PathLike), "simulate(): trace", expected)
    check_instance(sizes, Mapping | None, "simulate(): sizes", "the bytes of each page by its key, or None")
    check_whole(prefetch, "simulate(): prefetch", least=0)
    check_whole(group, "simulate(): group")
    check_one_of(scope, ("layer", "model"), "simulate(): scope")


class _Run:
    """Replay of a trace through a policy, with the calls that a stack makes."""

    def __init__(self, policy: Policy, sizes: Mapping[str, int] | None, hosted: frozenset[str]) -> None:
        self.policy, self.sizes, self.hosted = policy, sizes, hosted
        self.counts, self.phase = Simulation(), FORWARD
        self.announce = getattr(policy, "announce", None)

    def take(self, item: Pass | Announce | str | tuple[str, ...]) -> None:
        """Replay one item of the trace."""
        if isinstance(item, Pass):
            self.phase = item.phase
            self.policy.begin_pass(self.phase)
            self.counts.phases.setdefault(self.phase, PhaseCounts()).passes += 1
        elif not isinstance(item, Announce):
            self.lease(item if isinstance(item, tuple) else (item,))
        elif self.announce is not None:
            self.announce({key: self.size(key) for key in item.keys if key not in self.hosted})
            self.policy.ahead(())

    def lease(self, keys: tuple[str, ...]) -> None:
        """Lease pages except hosted ones. Raises ArgumentError: they do not fit."""
        self.counts.hosted.update(self.hosted.intersection(keys))
        left = tuple(key for key in keys if key not in self.hosted)
        if keys and not left:
            return
        keys = left
        for key in keys:
            size = self.size(key)
            decision = self.policy.access(key, size, keys)
            if decision is None:
                raise ArgumentError(f"{keys}: does not fit into {self.policy.capacity_bytes} bytes")
            self.counts.count(decision, size, self.phase)
        self.policy.ahead(keys)

    def size(self, key: str) -> int:
        """Return the bytes of a page."""
        if self.sizes is None:
            return 1
        if key not in self.sizes:
            raise ArgumentError(f"simulate(): the trace has a page {key!r}, and sizes has none; expected its bytes")
        return self.sizes[key]


def best_scope(routing: Routing, capacity_bytes: int, *, prefetch: int = 2) -> str:
    """Return the scope of policy "experts" ("layer" or "model") that loads fewer bytes; "layer" if both are equal."""
    loaded = {
        scope: simulate("experts", routing, capacity_bytes, prefetch=prefetch, scope=scope).bytes_in
        for scope in ("layer", "model")
    }
    return min(loaded, key=loaded.get)
