"""Aggregation of layers by kind, and of snapshots by rank."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeVar

from vbrt.report.expert_counters import ExpertsStats
from vbrt.report.stats_data import LayerStats, StatsData, sums_by_name
from vbrt.report.timeline import LayerTotals, TimelineTotals
from vbrt.residency.name_patterns import grouped, label_of, pattern_of

__all__ = ["by_kind", "of_ranks"]

Snapshot = TypeVar("Snapshot", bound=StatsData)

_SUMMED = (
    *("weight_reads", "hits", "misses", "prefetched", "wait_us", "computed"),
    *("separation_hits", "separation_refreshes"),
)
_BY_NAME = ("plane_bytes", "bytes_moved")


def by_kind(stats: Snapshot) -> Snapshot:
    """Return a snapshot that merges layers whose names differ in numbers only, the longest wait first.

    Counts, bytes and waits are sums; forwards and the share of clipped weights are the largest of the group.
    """
    groups = grouped(list(stats.layers.items()), _kind)
    groups.sort(key=lambda of: -sum(layer.wait_us for _, layer in of))
    layers, timed = {}, {}
    for of in groups:
        names = [name for name, _ in of]
        label = names[0] if len(of) == 1 else f"{label_of(names)} × {len(of)}"
        layers[label] = of[0][1] if len(of) == 1 else _together([layer for _, layer in of])
        timed |= _timed(label, names, stats.timeline)
    timeline = stats.timeline and replace(stats.timeline, layers=timed)
    return replace(stats, layers=layers, timeline=timeline)


def of_ranks(parts: Sequence[Snapshot]) -> Snapshot:
    """Return the merged snapshot of ranks: counts, bytes and waits are sums, passes and forwards are maxima.

    Fallbacks that only some ranks report have the numbers of these ranks in front.
    """
    first = parts[0]
    names = dict.fromkeys(name for part in parts for name in part.layers)
    layers = {name: _together([part.layers[name] for part in parts if name in part.layers]) for name in names}
    tiers = {
        tier: type(held)(*(sum(getattr(p.tiers[tier], f.name) for p in parts if tier in p.tiers) for f in fields(held)))
        for tier, held in first.tiers.items()
    }
    sums = {name: sum(getattr(part, name) for part in parts) for name in ("dense_bytes", "kept_bytes", "device_bytes")}
    return replace(
        first, passes=max(p.passes for p in parts), layers=layers, tiers=tiers, fallbacks=_reasons(parts), **sums
    )


def _reasons(parts: Sequence[StatsData]) -> tuple[str, ...]:
    found: dict[str, list[int]] = {}
    for rank, part in enumerate(parts):
        for reason in part.fallbacks:
            found.setdefault(reason, []).append(rank)
    everywhere = [reason for reason, ranks in found.items() if len(ranks) == len(parts)]
    others = {reason: ranks for reason, ranks in found.items() if len(ranks) < len(parts)}
    return (*everywhere, *(f"rank {', '.join(map(str, ranks))}: {reason}" for reason, ranks in others.items()))


def _kind(item: tuple[str, LayerStats]) -> tuple:
    name, layer = item
    return pattern_of(name), layer.format, layer.kernel, layer.home, layer.materialized, layer.experts is None


def _together(layers: Sequence[LayerStats]) -> LayerStats:
    sums = {name: sum(getattr(layer, name) for layer in layers) for name in _SUMMED}
    by_name = {name: sums_by_name(getattr(layer, name) for layer in layers) for name in _BY_NAME}
    largest = {name: max(getattr(layer, name) for layer in layers) for name in ("forwards", "clipped_share")}
    experts = _experts([layer.experts for layer in layers if layer.experts is not None])
    return replace(layers[0], resident=all(x.resident for x in layers), experts=experts, **sums, **by_name, **largest)


def _experts(layers: Sequence[ExpertsStats]) -> ExpertsStats | None:
    if not layers:
        return None
    numbers = [f.name for f in fields(ExpertsStats) if f.name not in ("decides", "each")]
    decides = "/".join(sorted({of.decides for of in layers}))
    return ExpertsStats(**{n: sum(getattr(of, n) for of in layers) for n in numbers}, decides=decides)


def _timed(label: str, names: Sequence[str], timeline: TimelineTotals | None) -> dict[str, LayerTotals]:
    found = [timeline.layers[name] for name in names if name in timeline.layers] if timeline else []
    if not found:
        return {}
    moved = sums_by_name(of.bytes_moved for of in found)
    return {label: LayerTotals(sum(of.compute_us for of in found), sum(of.wait_us for of in found), moved)}
