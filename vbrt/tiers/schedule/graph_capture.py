"""Recordings of passes as CUDA graphs, and what must hold while a graph is replayed.

    reason = refusal(stack, "decode")              # None: a graph can record a pass of this phase
    recording = Recording(stack, "decode")         # right before the capture; may move pages
    with torch.cuda.graph(graph), recording:       # what this thread leases in a capture is recorded
        model(ids)
    while recording.replay(graph):                 # False once pages have moved: record again
        ...

A graph knows pages by their addresses. Nothing is kept from moving for its sake: a budget that changes, a page that is
rehomed or retired, a weight that is loaded anew end the recording, and `replay` runs nothing from then on.
"""

import threading
from collections.abc import Collection

import torch

from vbrt.errors import TierError
from vbrt.tiers.schedule.programme_graph import RecordedRun, run_to_record
from vbrt.tiers.stack.page_stack import PageStack

__all__ = ["Recording", "refusal"]


def refusal(stack: PageStack, phase: str, keys: Collection[str] | None = None) -> str | None:
    """Return why a CUDA graph cannot record a pass of a phase now; None if it can. `keys`: of the pages that it takes,
    where that is known."""
    if stack.closed:
        return "the model was closed"
    if stack.levels[0].stream is None:
        return f"tiers.{stack.names[0]} computes on {stack.device}, which has no CUDA graphs"
    if stack.guard.recorder is not None:
        return "a timeline is being recorded"
    moves = stack.ledger.travellers if keys is None else any(stack.pages[key].home for key in keys)
    return stack.ledger.programmes.refusal() if moves else None


class Recording:
    """A pass that a CUDA graph records, and its replays."""

    def __init__(self, stack: PageStack, phase: str, keys: Collection[str] | None = None) -> None:
        """Prepare a recording of the phase's passes. Raises TierError with the reason why it cannot be recorded."""
        with stack.guard.lock:
            stack.decider.catch_up()
            reason = refusal(stack, phase, keys)
            stays = keys is not None and not any(stack.pages[key].home for key in keys)
        if reason is not None:
            raise TierError(f"a CUDA graph cannot record a pass of phase {phase}: {reason}")
        self._stack, self._phase, self._ended = stack, phase, ""
        run = None if stays else run_to_record(stack, phase)
        self._streamed = None if run is None else RecordedRun(stack, run)
        self._changes, self._thread, self._begun = stack.ledger.changes, 0, False

    @property
    def ended(self) -> str:
        """Why the graph must not be replayed any more; "" while it may."""
        return self._ended or ("" if self._streamed is None else self._streamed.ended)

    def __enter__(self) -> "Recording":
        ledger = self._stack.ledger
        if ledger.recording is not None:
            raise TierError("another pass of this model is being recorded; leave that `with` block first")
        self._thread = threading.get_ident()
        self._begun = False
        ledger.recording = self
        return self

    def begin(self) -> bool:
        """Have what this thread leases from now on be recorded, by the capture of its stream; False if that has been
        done. Raises TierError: a pass has begun since the recording was prepared."""
        if self._begun:
            return False
        if self._streamed is not None:
            self._streamed.begin()
        self._begun = True
        return True

    def end(self) -> None:
        """Have the pass that is recorded end: to be called in the capture, where the `with` block ends after it.

        Raises:
            TierError: the pass took fewer pages than its order has.
        """
        if self._begun and self._streamed is not None:
            self._begun = False
            self._streamed.end(completed=True)

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._stack.ledger.recording = None
        if kind is None:
            self.end()
        elif self._begun and self._streamed is not None:
            self._streamed.end(completed=False)

    @property
    def mine(self) -> bool:
        """True in the thread that records."""
        return self._thread == threading.get_ident()

    def replay(self, graph: torch.cuda.CUDAGraph) -> bool:
        """Replay the graph on the current stream, as one pass of the phase; False, with nothing run, once the pages
        that it knows have moved: record the pass again."""
        stack = self._stack
        with stack.guard.lock:
            if stack.retired or stack.ledger.lost:
                stack.decider.catch_up()
            if self._streamed is None and not self._ended and stack.ledger.changes != self._changes:
                self._ended = "pages have moved since the recording"
            self._ended = self._ended or ("the model was closed" if stack.closed else "")
            if self._ended:
                return False
        if self._streamed is not None:
            return self._streamed.replay(graph, self._phase)
        stack.begin_pass(self._phase)
        graph.replay()
        return True
