"""Counters per phase, and the phase of the current pass."""

from dataclasses import replace

from vbrt.libraries.torch_api import current_graph_task
from vbrt.residency.access_counts import PhaseCounts
from vbrt.residency.policy import FORWARD
from vbrt.tiers.stack.ledger import Ledger
from vbrt.tiers.stack.slots import Page

__all__ = ["Passes", "in_backward"]


class Passes:
    """Phases and their counters; written under the guard of the stack.

    Pages count their own hits, with or without a lease; the sum is taken only when the phase changes.

    Attributes:
        current: counters of the current phase; misses are added there.
        backward: phase that begins at the first lease within autograd's backward; "" for none.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.phase, self.backward = FORWARD, ""
        self.current = PhaseCounts()
        self._of_phase = {FORWARD: self.current}
        self._earlier_hits = 0  # hits of pages before the current phase
        self._retired_hits = 0  # hits of retired pages

    def begin(self, phase: str, *, backward: str = "") -> None:
        """Begin a pass of the named phase."""
        if phase != self.phase:
            hits = self._new_hits()
            self.current.hits += hits
            self._earlier_hits += hits
            self.phase, self.current = phase, self._of_phase.setdefault(phase, PhaseCounts())
        self.current.passes += 1
        self.backward = backward

    def count_misses(self, misses: int, prefetched: int) -> None:
        """Count misses of the phase, and how many of them had been prefetched."""
        self.current.misses += misses
        self.current.prefetched += prefetched

    def retire(self, page: Page) -> None:
        """Keep the hits of a retired page, and subtract it from its layer's tally."""
        self._retired_hits += page.hits
        if page.tally is not None:
            page.tally.add(page, -1)

    def counts(self) -> dict[str, PhaseCounts]:
        """Return the counters so far of every phase with passes or accesses."""
        now = {phase: replace(counts) for phase, counts in self._of_phase.items()}
        now[self.phase].hits += self._new_hits()
        return {phase: counts for phase, counts in now.items() if counts != PhaseCounts()}

    def _new_hits(self) -> int:
        return self._retired_hits + sum([one.hits for one in self._ledger.census().counted]) - self._earlier_hits


def in_backward() -> bool:
    """True if this thread runs within autograd's backward."""
    return current_graph_task() != -1
