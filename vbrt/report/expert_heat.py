"""Heat maps of a timeline: hits and misses of routed experts during its recording."""

from dataclasses import dataclass

from vbrt.report.expert_counters import ExpertCounts

__all__ = ["LayerHeat", "heat_between"]


@dataclass(frozen=True, slots=True)
class LayerHeat:
    """Hits and misses of page leases, by expert of one layer."""

    layer: str
    hits: tuple[int, ...]
    misses: tuple[int, ...]

    @property
    def touches(self) -> tuple[int, ...]:
        """All leases, by expert."""
        return tuple(map(sum, zip(self.hits, self.misses, strict=True)))


def heat_between(layer: str, before: ExpertCounts | None, after: ExpertCounts) -> LayerHeat:
    """Return the counts between two snapshots; from zero without an earlier one, or if counters restarted since."""
    same = before is not None and all(map(int.__le__, before.hits + before.misses, after.hits + after.misses))
    hits = tuple(map(int.__sub__, after.hits, before.hits)) if same else after.hits
    return LayerHeat(layer, hits, tuple(map(int.__sub__, after.misses, before.misses)) if same else after.misses)
