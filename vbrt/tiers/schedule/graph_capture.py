"""CUDA graph capture of passes over a tier stack, and the validity checks of each replay.

    reason = refusal(stack, "decode")              # None: a graph can record a pass of this phase
    recording = Recording(stack, "decode")         # right before the capture; may move pages
    with torch.cuda.graph(graph), recording:       # leases of this thread under capture are recorded
        model(ids)
    while recording.replay(graph):                 # False once pages have moved: record again
        ...

A graph holds the addresses of pages, but does not pin them: a changed budget, a rehomed or retired page, or a reloaded
weight invalidates the recording, and `replay` returns False from then on.
"""

import threading
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

from vbrt.errors import TierError
from vbrt.host import accelerator
from vbrt.tiers.schedule.block_ring import BlockPlaces
from vbrt.tiers.schedule.programme_graph import RecordedRun, run_to_record
from vbrt.tiers.stack.page_stack import PageStack
from vbrt.tiers.stack.scheduling import LeasedTensors

__all__ = ["Recording", "refusal"]


def refusal(stack: PageStack, phase: str, keys: Collection[str] | None = None) -> str | None:
    """Return why a pass of a phase cannot be captured as a CUDA graph now; None if it can. `keys`: the pages that the
    pass leases, where known."""
    if stack.closed:
        return "the model was closed"
    if stack.levels[0].stream is None:
        return f"tiers.{stack.names[0]} computes on {stack.device}, which has no CUDA graphs"
    if stack.guard.recorder is not None:
        return "a timeline is being recorded"
    moves = stack.ledger.travellers if keys is None else any(stack.pages[key].home for key in keys)
    return stack.ledger.programmes.refusal() if moves else None


class Recording:
    """Capture of one pass as a CUDA graph, and its replays."""

    def __init__(
        self, stack: PageStack, phase: str, keys: Collection[str] | None = None, *, places: BlockPlaces | None = None
    ) -> None:
        """Prepare the capture of a pass of the phase. Raises TierError, with the reason, where there can be none.

        Args:
            keys: of the pages that the pass leases, where known, without those that have places.
            places: of pages in a ring of blocks.
        """
        self._places = places
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

    def lease(self, keys: Sequence[str]) -> AbstractContextManager[LeasedTensors] | None:
        """Return a lease of pages at places of their own; None: the stack leases them."""
        return None if self._places is None or not self.mine else self._places.lease(keys)

    def begin(self) -> bool:
        """Start to record this thread's leases into the capture of its stream; False if that has started before.
        Raises TierError: a pass has begun since the recording was prepared."""
        if self._begun:
            return False
        if self._streamed is not None:
            self._streamed.begin()
        self._begun = True
        return True

    def end(self) -> None:
        """End the recorded pass. Call it inside the capture where the `with` block ends after the capture.

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
        """True in the recording thread."""
        return self._thread == threading.get_ident()

    def holds(self) -> bool:
        """True while no page of the recorded pass has moved, and the model is open."""
        stack = self._stack
        with stack.guard.lock:
            if stack.retired or stack.ledger.lost:
                stack.decider.catch_up()
            if self._streamed is None and not self._ended and stack.ledger.changes != self._changes:
                self._ended = "pages have moved since the recording"
            self._ended = self._ended or ("the model was closed" if stack.closed else "")
            return not self._ended

    def replay(self, graph: accelerator.Graph) -> bool:
        """Replay the graph on the current stream, as one pass of the phase; False, with nothing run, once its pages
        have moved: then capture the pass again."""
        if not self.holds():
            return False
        if self._streamed is not None:
            return self._streamed.replay(graph, self._phase)
        self._stack.begin_pass(self._phase)
        graph.replay()
        return True
