"""Counts of accesses by phase."""

from dataclasses import dataclass

__all__ = ["PhaseCounts"]


@dataclass(slots=True)
class PhaseCounts:
    """Passes of one phase and their accesses. A prefetched access is a miss, too."""

    passes: int = 0
    hits: int = 0
    misses: int = 0
    prefetched: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Hits over accesses; None before the first."""
        accesses = self.hits + self.misses
        return self.hits / accesses if accesses else None
