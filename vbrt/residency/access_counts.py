"""Access counters per phase, and routing counters of routed experts."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PhaseCounts", "RoutingCounts"]


@dataclass(slots=True)
class PhaseCounts:
    """Counters of one phase: passes, hits, misses. A prefetched access counts as a miss, too."""

    passes: int = 0
    hits: int = 0
    misses: int = 0
    prefetched: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Hit rate: hits / accesses; None without accesses."""
        accesses = self.hits + self.misses
        return self.hits / accesses if accesses else None


class RoutingCounts:
    """Routing counters of one layer of routed experts, over passes.

    Attributes:
        scans: passes that leased the layer's pages in order, as long prompts do.
        cached: passes that leased the pages of the touched experts only, as decoding does.
        unleased: passes with all pages at home on the GPU: without leases, touched experts are not observed.
        tokens, touched: tokens of cached passes, and experts touched by them (each once per pass).
        compared, reused: experts touched by cached passes that follow another cached pass, and how many of them that
            one had touched, too.
        computed: experts of cached passes computed by the CPU in host memory, each once per pass.
        last: by expert, the number of the last pass that touched it; 0: none. Passes are numbered from 1.
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
        self._decoding = False  # True after a cached pass

    @property
    def passes(self) -> int:
        """All passes so far."""
        return self.scans + self.cached + self.unleased

    def unlease(self) -> None:
        """Count a pass without leases."""
        self.unleased += 1
        self._decoding = False

    def scan_unseen(self) -> None:
        """Count a scan whose touched experts only the device knows."""
        self.scans += 1
        self._decoding = False

    def add(self, cached: int, tokens: int, touched: int, *, compared: int, reused: int) -> None:
        """Add counts of cached passes from a device cache, which the host does not observe one by one."""
        self.cached += cached
        self.tokens += tokens
        self.touched += touched
        self.compared += compared
        self.reused += reused
        self._decoding = self._decoding and not cached

    def scan(self, experts: Sequence[int]) -> None:
        """Count a scan, and the experts that it touched."""
        self.scans += 1
        self._decoding = False
        now, last = self.passes, self.last
        for expert in experts:
            last[expert] = now

    def decode(self, experts: Sequence[int], tokens: int) -> None:
        """Count a cached pass, and the experts that it touched, each once."""
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
