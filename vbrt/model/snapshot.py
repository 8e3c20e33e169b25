"""Snapshots of a running model's counters, as frozen records for `stats()`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vbrt.layers import SwappedLayer
from vbrt.layers.experts import VBExperts
from vbrt.report.expert_counters import ExpertCounts, ExpertsStats
from vbrt.report.stats import LayerStats, TierStats
from vbrt.residency.access_counts import PhaseCounts, RoutingCounts
from vbrt.residency.plan import Swap
from vbrt.tiers import TierStack
from vbrt.tiers.stack.page_census import Family
from vbrt.training import TrainedLayer

__all__ = [
    "expert_counts",
    "experts_stats",
    "layer_stats",
    "own_phases",
    "stack_fallbacks",
    "tier_stats",
    "trained_layer_stats",
]


def layer_stats(stack: TierStack, swap: Swap, layer: SwappedLayer, *, each: bool = False) -> LayerStats:
    """Return the counters of one layer; with `each`, also per routed expert."""
    handle = layer.handle
    family = stack.ledger.census().family(handle.keys)
    tally = family.tally()  # per-layer budget: 10 µs
    experts = _experts_of(stack, family, layer, each=each) if isinstance(layer, VBExperts) else None
    separation = handle.separation.counters if handle.separation else None
    return LayerStats(
        format=handle.spec.label,
        kernel=handle.kernel,
        materialized=layer.materialized,
        home="/".join(stack.names[home] for home in family.homes),
        resident=_is_resident(stack, family) if experts is None else experts.resident == experts.experts,
        plane_bytes=family.plane_bytes or {"dense": swap.dense_bytes},
        forwards=handle.forwards,
        weight_reads=handle.weight_reads,
        hits=tally.hits,
        misses=tally.misses,
        prefetched=tally.prefetched,
        bytes_moved={**family.links, **tally.bytes_moved},
        wait_us=tally.wait_ns // 1000,
        separation_hits=separation.hits if separation else 0,
        separation_refreshes=separation.refreshes if separation else 0,
        clipped_share=separation.clipped_share if separation else 0.0,
        experts=experts,
        computed=handle.computed,
    )


def _is_resident(stack: TierStack, family: Family) -> bool:
    here = stack.levels[0].slots.__contains__
    return bool(family.pages) and all(all(map(here, keys)) for keys in family.keys)


def _experts_of(stack: TierStack, family: Family, layer: VBExperts, *, each: bool) -> ExpertsStats:
    handle = layer.handle
    found = experts_stats(stack, family, handle.routing, decides=handle.deciding.by, each=each)
    return found if handle.deciding.cache is None else replace(found, resident=handle.deciding.resident)


def expert_counts(stack: TierStack, layers: Mapping[str, SwappedLayer]) -> dict[str, ExpertCounts]:
    """Return the counters per expert, by layer, for layers with pages of routed experts."""
    found = {}
    for name, layer in layers.items():
        if isinstance(layer, VBExperts):
            family = stack.ledger.census().family(layer.handle.keys)
            if family.pages:
                found[name] = _expert_counts(family, layer.handle.routing)
    return found


def experts_stats(
    stack: TierStack, family: Family, routing: RoutingCounts, *, decides: str, each: bool = False
) -> ExpertsStats:
    """Return the routing counters of a layer's experts, with `each` also per expert."""
    return ExpertsStats(
        experts=len(routing.last),
        resident=_residents(stack, family),
        decides=decides,
        scans=routing.scans,
        cached=routing.cached,
        tokens=routing.tokens,
        touched=routing.touched,
        compared=routing.compared,
        reused=routing.reused,
        unleased=routing.unleased,
        computed=routing.computed,
        each=_expert_counts(family, routing) if each else None,
    )


def _residents(stack: TierStack, family: Family) -> int:
    """Return the number of experts with the pages of all planes in the top tier."""
    here = stack.levels[0].slots.__contains__
    flags = [map(here, keys) for keys in family.keys]
    return sum(flags[0]) if len(flags) == 1 else sum(map(all, zip(*flags, strict=False)))


def _expert_counts(family: Family, routing: RoutingCounts) -> ExpertCounts:
    by_expert = list(
        zip(*family.planes.values(), strict=False)
    )  # planes have unequal numbers of pages while a layer is being encoded
    by_expert += [()] * (len(routing.last) - len(by_expert))
    return ExpertCounts(
        tuple(sum(page.hits for page in pages) for pages in by_expert),
        tuple(sum(page.misses for page in pages) for pages in by_expert),
        tuple(sum(sum(page.bytes_moved.values()) for page in pages) for pages in by_expert),
        tuple(routing.last),
        routing.passes,
    )


def trained_layer_stats(stack: TierStack, swap: Swap, layer: TrainedLayer) -> LayerStats:
    """Return the counters of a layer in mode "train": resident, never leased."""
    handle = layer.handle
    engine = handle.separation
    separation = engine.counters if engine else None
    return LayerStats(
        format=handle.spec.label,
        kernel="reference",
        materialized=True,
        home=stack.names[0],
        resident=True,
        plane_bytes={"dense": swap.dense_bytes} | ({"scales": engine.nbytes} if engine else {}),
        forwards=handle.forwards,
        weight_reads=0,
        hits=0,
        misses=0,
        prefetched=0,
        bytes_moved={},
        wait_us=0,
        separation_hits=separation.hits if separation else 0,
        separation_refreshes=separation.refreshes if separation else 0,
        clipped_share=separation.clipped_share if separation else 0.0,
    )


def tier_stats(stack: TierStack) -> dict[str, TierStats]:
    """Return the bytes and pages of every tier of a stack, over all models."""
    homes = stack.ledger.census().home_pages
    return {
        level.tier.name: TierStats(
            level.tier.capacity_bytes,
            level.tier.held_bytes,
            level.tier.peak_bytes,
            homes[level.index],
            len(level.slots),
        )
        for level in stack.levels
    }


def own_phases(phases: Mapping[str, PhaseCounts], prefix: str, others: Sequence[str]) -> dict[str, PhaseCounts]:
    """Return the phases of one model of a stack, without their prefix.

    Args:
        phases: of all models.
        prefix: of this model's phases; "" for the model that the runtime was built for.
        others: the prefixes of other models.
    """
    return {
        phase.removeprefix(prefix): counts
        for phase, counts in phases.items()
        if phase.startswith(prefix) and not phase.startswith(tuple(others))
    }


def stack_fallbacks(stack: TierStack) -> list[str]:
    """Return the fallback messages of all tiers."""
    return [reason for level in stack.levels for reason in level.tier.fallbacks]
