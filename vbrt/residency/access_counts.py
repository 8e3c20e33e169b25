"""Counts of accesses by phase, and of what is asked of routed experts."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PhaseCounts", "RoutingCounts"]


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


class RoutingCounts:
    """What has been asked of one layer of routed experts, pass by pass.

    Attributes:
        scans: passes that took the layer's pages in order, as long prompts do.
        cached: passes that took the pages of the experts they touched, as decoding does.
        unleased: passes on a GPU where all pages live: they take no lease, and nobody looks which experts they touch.
        tokens, touched: of cached passes: their tokens, and the experts they touched (each once a pass).
        compared, reused: experts touched by a cached pass right after another one, and those of them that the other
            one had touched, too.
        computed: experts of cached passes that the CPU has computed where they lie, each once a pass.
        last: by expert, the number of the last pass that touched it; 0: none has. Passes are counted from 1.
    """

    __slots__ = (
        "_decoding",
        "cached",
        "compared",
        "computed",
        "last",
        "reused",
        "scans",
        "tokens",
        "touched",
        "unleased",
    )

    def __init__(self, experts: int) -> None:
        self.scans = self.cached = self.unleased = self.tokens = self.touched = self.compared = self.reused = 0
        self.computed = 0
        self.last = [0] * experts
        self._decoding = False  # the last pass was a cached one

    @property
    def passes(self) -> int:
        """All passes so far."""
        return self.scans + self.cached + self.unleased

    def unlease(self) -> None:
        """Count a pass without leases."""
        self.unleased += 1
        self._decoding = False

    def scan_unseen(self) -> None:
        """Count a pass through the layer's pages in order of which the device alone knows the experts."""
        self.scans += 1
        self._decoding = False

    def add(self, cached: int, tokens: int, touched: int, *, compared: int, reused: int) -> None:
        """Count passes from the cache that the device has counted: it decides, and nobody here sees the experts."""
        self.cached += cached
        self.tokens += tokens
        self.touched += touched
        self.compared += compared
        self.reused += reused
        self._decoding = self._decoding and not cached

    def scan(self, experts: Sequence[int]) -> None:
        """Count a pass through the layer's pages in order, and the experts that tokens went to."""
        self.scans += 1
        self._decoding = False
        now, last = self.passes, self.last
        for expert in experts:
            last[expert] = now

    def decode(self, experts: Sequence[int], tokens: int) -> None:
        """Count a pass from the cache, and the experts that its tokens went to, each once."""
        before, last = self.passes, self.last
        self.cached += 1
        self.tokens += tokens
        self.touched += len(experts)
        reused = 0
        for expert in experts:
            reused += last[expert] == before
            last[expert] = before + 1
        if self._decoding:
            self.compared += len(experts)
            self.reused += reused
        self._decoding = True
