"""Counters of a running model as frozen records."""

from collections import Counter
from collections.abc import Mapping, Sequence

from vbrt.layers import VBLayer
from vbrt.report.stats import LayerStats, TierStats
from vbrt.residency.counts import PhaseCounts
from vbrt.residency.plan import Swap
from vbrt.tiers import TierStack
from vbrt.training import TrainedLayer

__all__ = ["layer_stats", "own_phases", "stack_fallbacks", "tier_stats", "trained_layer_stats"]


def layer_stats(stack: TierStack, swap: Swap, layer: VBLayer) -> LayerStats:
    """Return the counters of one VB layer."""
    handle = layer.handle
    pages = [page for page in map(stack.pages.get, handle.keys) if page is not None]
    top, planes, homes, moved = stack.levels[0].slots, {}, {}, {}
    hits = misses = prefetched = wait_ns = 0
    for page in pages:  # one loop: this runs for every layer, in at most 10 µs
        planes[page.layout.plane] = page.nbytes
        homes[stack.names[page.home]] = None
        hits, misses, prefetched = hits + page.hits, misses + page.misses, prefetched + page.prefetched
        wait_ns += page.wait_ns
        for link, nbytes in page.bytes_moved.items():
            moved[link] = moved.get(link, 0) + nbytes
    separation = handle.separation.counters if handle.separation else None
    return LayerStats(
        format=handle.spec.label,
        kernel=handle.kernel,
        materialized=layer.materialized,
        home="/".join(homes),
        resident=bool(pages) and all(page.key in top for page in pages),
        plane_bytes=planes or {"dense": swap.dense_bytes},
        forwards=handle.forwards,
        weight_reads=handle.weight_reads,
        hits=hits,
        misses=misses,
        prefetched=prefetched,
        bytes_moved=moved,
        wait_us=wait_ns // 1000,
        separation_hits=separation.hits if separation else 0,
        separation_refreshes=separation.refreshes if separation else 0,
        clipped_share=separation.clipped_share if separation else 0.0,
    )


def trained_layer_stats(stack: TierStack, swap: Swap, layer: TrainedLayer) -> LayerStats:
    """Return the counters of one layer whose weight trains: it is resident and never leased."""
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
    """Return the bytes and pages of every tier of a stack, whichever model they belong to."""
    homes = Counter(page.home for page in list(stack.pages.values()))
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
        phases: those of all models.
        prefix: of this model's phases; "" for the model that the runtime was built for.
        others: the prefixes of other models.
    """
    return {
        phase.removeprefix(prefix): counts
        for phase, counts in phases.items()
        if phase.startswith(prefix) and not phase.startswith(tuple(others))
    }


def stack_fallbacks(stack: TierStack) -> list[str]:
    """Return what the tiers fell back to, in words."""
    return [reason for level in stack.levels for reason in level.tier.fallbacks]
