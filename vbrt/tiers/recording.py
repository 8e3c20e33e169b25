"""Recordings of passes as CUDA graphs, and what must hold while a graph is replayed.

    reason = refusal(stack, "decode")              # None: a graph can record a pass of this phase
    recording = Recording(stack, "decode")         # right before the capture; may move pages
    with torch.cuda.graph(graph), recording:       # what this thread leases now is recorded
        model(ids)
    while recording.replay(graph):                 # False once pages have moved: record again
        ...

A graph knows pages by their addresses. Nothing is kept from moving for its sake: a budget that changes, a page that is
rehomed or retired, a weight that is loaded anew end the recording, and `replay` runs nothing from then on.
"""

import threading
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from vbrt.errors import TierError

if TYPE_CHECKING:
    from vbrt.tiers.stack import TierStack

__all__ = ["Recording", "refusal"]


def refusal(stack: "TierStack", phase: str, keys: Collection[str] | None = None) -> str | None:
    """Return why a CUDA graph cannot record a pass of a phase now; None if it can. `keys`: of the pages that it takes,
    where that is known."""
    if stack.closed:
        return "the model was closed"
    if stack.levels[0].stream is None:
        return f"tiers.{stack.names[0]} computes on {stack.device}, which has no CUDA graphs"
    if stack.guard.recorder is not None:
        return "a timeline is being recorded"
    if stack.ledger.travellers if keys is None else any(stack.pages[key].home for key in keys):
        nbytes = sum(page.nbytes for page in stack.pages.values())
        return f"pages move: tiers.{stack.names[0]}.budget has no room for all of them ({nbytes} bytes)"
    return None


class Recording:
    """A pass that a CUDA graph records, and its replays.

    Attributes:
        ended: why the graph must not be replayed any more; "" while it may.
    """

    def __init__(self, stack: "TierStack", phase: str, keys: Collection[str] | None = None) -> None:
        """Prepare a recording of the phase's passes. Raises TierError with the reason why it cannot be recorded."""
        with stack.guard.entered:
            stack.decider.catch_up()
            reason = refusal(stack, phase, keys)
            if reason is not None:
                raise TierError(f"a CUDA graph cannot record a pass of phase {phase}: {reason}")
            self._changes = stack.ledger.changes
        self._stack, self._phase = stack, phase
        self.ended = ""

    def __enter__(self) -> "Recording":
        guard = self._stack.guard
        if guard.recording is not None:
            raise TierError("another pass of this model is being recorded; leave that `with` block first")
        self._thread = threading.get_ident()
        guard.recording = self
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.guard.recording = None

    @property
    def mine(self) -> bool:
        """True in the thread that records."""
        return self._thread == threading.get_ident()

    def replay(self, graph: torch.cuda.CUDAGraph) -> bool:
        """Replay the graph on the current stream, as one pass of the phase; False, with nothing run, once the pages
        that it knows have moved: record the pass again."""
        stack = self._stack
        with stack.guard.entered:
            if stack.retired or stack.ledger.lost:
                stack.decider.catch_up()
            if not self.ended and (stack.closed or stack.ledger.changes != self._changes):
                self.ended = "the model was closed" if stack.closed else "pages have moved since the recording"
            if self.ended:
                return False
        stack.begin_pass(self._phase)
        graph.replay()
        return True
