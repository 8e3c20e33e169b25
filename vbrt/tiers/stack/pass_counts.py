"""The pass under way: its phase, and what is counted for each phase."""

from dataclasses import replace

from vbrt.libraries.torch_api import current_graph_task
from vbrt.residency.access_counts import PhaseCounts
from vbrt.residency.policy import FORWARD
from vbrt.tiers.stack.ledger import Ledger
from vbrt.tiers.stack.slots import Page

__all__ = ["Passes", "in_backward"]


class Passes:
    """Phases and their counts; written under the guard of the stack.

    Hits are counted by pages, also where pages are used without a lease; whoever changes the phase pays for the sum.

    Attributes:
        current: counts of the phase under way; misses are added there.
        backward: the phase that the first lease within autograd's backward begins; "" for none.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.phase, self.backward = FORWARD, ""
        self.current = PhaseCounts()
        self._of_phase = {FORWARD: self.current}
        self._earlier_hits = 0  # hits of pages up to the phase under way
        self._retired_hits = 0  # hits of pages that are gone

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
        """Count misses for the phase, and those of them that had been staged ahead."""
        self.current.misses += misses
        self.current.prefetched += prefetched

    def retire(self, page: Page) -> None:
        """Keep the hits of a page that goes, which its layer's tally has no longer."""
        self._retired_hits += page.hits
        if page.tally is not None:
            page.tally.add(page, -1)

    def counts(self) -> dict[str, PhaseCounts]:
        """Return the counts of every phase that has had passes or accesses, up to now."""
        now = {phase: replace(counts) for phase, counts in self._of_phase.items()}
        now[self.phase].hits += self._new_hits()
        return {phase: counts for phase, counts in now.items() if counts != PhaseCounts()}

    def _new_hits(self) -> int:
        return self._retired_hits + sum([one.hits for one in self._ledger.census().counted]) - self._earlier_hits


def in_backward() -> bool:
    """True if autograd's engine runs this thread's computation."""
    return current_graph_task() != -1
