"""What routed experts counted during a recording, for the heat maps of a timeline's page."""

from dataclasses import dataclass

from vbrt.report.expert_counters import ExpertCounts

__all__ = ["LayerHeat", "heat_between"]


@dataclass(frozen=True, slots=True)
class LayerHeat:
    """What the experts of a layer have counted: leases of their pages that moved nothing, and those that did."""

    layer: str
    hits: tuple[int, ...]
    misses: tuple[int, ...]

    @property
    def touches(self) -> tuple[int, ...]:
        """All leases, by expert."""
        return tuple(map(sum, zip(self.hits, self.misses, strict=True)))


def heat_between(layer: str, before: ExpertCounts | None, after: ExpertCounts) -> LayerHeat:
    """Return what was counted from one moment to another; counts that began in between are taken whole."""
    same = before is not None and all(map(int.__le__, before.hits + before.misses, after.hits + after.misses))
    hits = tuple(map(int.__sub__, after.hits, before.hits)) if same else after.hits
    return LayerHeat(layer, hits, tuple(map(int.__sub__, after.misses, before.misses)) if same else after.misses)
