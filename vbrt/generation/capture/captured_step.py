"""Captured decode steps: one for each input signature and length bucket, on one cache's static memory."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import Node

from vbrt.generation.capture.exact_attention import ExactAttention, as_captured, is_captured
from vbrt.generation.capture.side_effects import Written
from vbrt.generation.capture.step_io import Call, Results
from vbrt.generation.fusion.deterministic_attention import steady_attention
from vbrt.generation.fusion.fuse_step import Joined, joined
from vbrt.generation.fusion.graph_backends import Recorder
from vbrt.generation.fusion.step_graph import StepGraph
from vbrt.generation.static.cache_kinds import NotRecordable, room_wanted
from vbrt.generation.static.length_buckets import Span
from vbrt.generation.static.static_cache import Statics
from vbrt.kernels.cuda.compiling import Compilation
from vbrt.kernels.operator_trace import StepRefused
from vbrt.layers.weights.linear_product import pass_precision
from vbrt.libraries.transformers_api import replace_capture_query

__all__ = [
    "Counted",
    "Feed",
    "Kept",
    "PagesMoved",
    "Recording",
    "RowsRecording",
    "Terms",
    "answer_captures",
    "difference",
]

#: tolerance of a replay, relative to the norm of the eager result
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE_ROUNDING = 0.06
#: passes over as many rows before they are recorded. On an H200 with the 8B shape in streamed fp4, 9 rows take 105 ms
#: from Python and 65 recorded, and the recording takes 700
_LIVE = 16
_ALIGNED = 16  # bytes; kernels are compiled for addresses with and without it

Plain = Callable[..., Any]
Feed = Callable[[int, Tensor], None]
"""(tokens in the cache before, hidden states [B, T, D] of the T tokens after them)."""


class Terms(Protocol):
    """Runtime interface of captured steps.

    Attributes:
        joins: True if captured steps of 4-bit models may be fused and so round differently from eager ones.
        passes_masks: True if captured attention skips masked slots: it is fused, or batch-invariant.
        steady: True if lossless steps use the batch-invariant attention of `deterministic_attention.py`.
        exact: True if lossless steps attend as plain ones do (`exact_attention.py`).
        decoder: module whose last hidden state is a result of captured steps, too; None if nothing reads it.
    """

    decoder: nn.Module | None
    exact: bool
    joins: bool
    passes_masks: bool
    steady: bool

    def new_recorder(self) -> Recorder:
        """Return a recorder for the steps on one cache."""

    def kind(self) -> object:
        """Return the kind of the thread's steps, by phase and precision; captures of each kind are kept apart."""

    def make_room(self, nbytes: int) -> None:
        """Have pages give way to so many bytes, which are about to be allocated, if they are in the way."""

    def gives_way(self) -> bool:
        """True while pages have less room than they were given."""

    def prepare(self, tokens: int) -> None:
        """Settle what steps of so many tokens compute with; it may change `moment`."""

    def moment(self) -> object:
        """Return the runtime state that a capture depends on; compared before each step."""

    def refusal(self) -> str:
        """Return why no forward can be captured now; "" if one can."""

    def begin_pass(self) -> None:
        """Begin an eager pass."""

    def compile_ahead(self, tokens: int, *, soon: bool) -> list[Compilation]:
        """Start to compile kernels for forwards of `tokens` tokens; `soon`: the next forward needs them."""

    def recorded(self, recorder: Recorder, body: Callable[[], None]) -> Callable[[], bool]:
        """Capture a pass; return its replay, which returns False and does nothing once the capture is stale."""

    def handles(self) -> list[Any]:
        """Return layers whose forwards and page hits are counted per pass."""


def answer_captures() -> None:
    """Patch transformers' query for CUDA graph capture to include ours. Idempotent."""
    replace_capture_query(lambda asked: asked if hasattr(asked, "vbrt") else _or_captured(asked))


def _or_captured(asked: Callable[[], bool]) -> Callable[[], bool]:
    @functools.wraps(asked)
    def is_cuda_stream_capturing() -> bool:
        return is_captured() or asked()

    is_cuda_stream_capturing.vbrt = True
    return is_cuda_stream_capturing


class PagesMoved(NotRecordable):
    """A captured step refers to pages that have moved since."""


class Counted:
    """Counter increments of one captured pass: layer forwards and hits of pages that never move.

    Attributes:
        passes: replays since the last `settle`.
        live: passes since then that ran the same calls without a graph; these count hits themselves.
    """

    def __init__(self) -> None:
        self.passes = self.live = 0
        self._added: list[tuple[Any, int, int]] = []

    @contextmanager
    def during(self, handles: list[Any]) -> Iterator[None]:
        """Record which layers run in the block."""
        before = [(handle.forwards, handle.computed) for handle in handles]
        yield
        pairs = zip(handles, before, strict=True)
        added = [(of, of.forwards - forwards, of.computed - computed) for of, (forwards, computed) in pairs]
        self._added = [each for each in added if each[1]] or self._added

    def settle(self) -> None:
        """Apply the increments of all replays since the last call."""
        passes, live, self.passes, self.live = self.passes, self.live, 0, 0
        for handle, more, computed in self._added:
            handle.forwards += (passes + live) * more
            for page in handle.pages if not handle.stack.ledger.travellers else ():  # else replays count pages
                page.hits += passes * more
            handle.computed += passes * computed


class Recording:
    """One captured step: for one input signature and one length bucket.

    Attributes:
        inputs: static input tensors.
        again: launches the replay on the current contents of `inputs` and the cache; returns False and does nothing
            if pages have moved.
        report: what was fused.
        written: side effects: model state that the step mutates besides the cache.
        graph: the fused step; None if it is not one of operators.
        results, counted: static results; counters.
        compared: whether it was checked against eager steps, within sliding windows (False) and past them (True).
    """

    @torch.inference_mode(False)  # tensors of inference mode are writable only in it
    @torch.no_grad()
    def __init__(self, model: Any, plain: Plain, call: Call, kept: "Kept", terms: Terms) -> None:
        statics, self._terms, self.counted = kept.statics, terms, Counted()
        self.exact = ExactAttention(statics) if terms.exact and pass_precision() != "coarse" else None
        self.inputs = call.inputs(statics.span.end)
        self.compared: set[bool] = set()
        self._last: Call | None = None
        self.results: Results | None = None
        statics.put_at(call.length or 0)
        self.written = Written((*statics.tensors(), *self.inputs))
        with statics.undone():
            try:
                self._run = run = self._joined(model, plain, call, kept)  # run holds constants that the graph reads

                def body() -> None:
                    tensors = run(*self.inputs)
                    self.results.put(tensors)
                    statics.position.add_(1)  # for the next replay

                self.again = terms.recorded(kept.recorder, body)
            finally:
                self.written.undo()
        self.results.drop_cache()

    def _joined(self, model: Any, plain: Plain, call: Call, kept: "Kept") -> Joined:
        """Run the step once and return it with its launches fused."""
        step = functools.partial(self._step, model, plain, call, kept.statics)
        keeps = None if self._terms.joins else True
        how = {"same_bits": keeps, "program": kept.recorder.program, "before_write": self.written.note}
        if self.exact is not None:
            how["accept"] = self.exact.check
        try:
            run = joined(lambda *inputs: step(inputs), self.inputs, **how)
        except StepRefused as error:
            raise NotRecordable(str(error)) from error
        self.report, self.graph = run.report, run.graph
        if run.report.from_host:
            raise NotRecordable(run.report.from_host)
        run.first = None
        return run

    def _step(self, model: Any, plain: Plain, call: Call, statics: Statics, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Run the model's forward on the static inputs."""
        self._terms.begin_pass()
        answer_captures()
        statics.recording, statics.exact = True, self.exact is not None
        try:
            steady = steady_attention(wanted=statics.steady and pass_precision() != "coarse")
            attention = steady if self.exact is None else self.exact.of(model)
            with self.counted.during(self._terms.handles()), as_captured(), attention, _noted(self._terms) as hidden:
                out = plain(**call.kwargs(inputs))
        finally:
            statics.recording = statics.exact = False
        statics.settle()
        self.results = Results(out, call.cache, hidden[-1] if hidden else None)
        return self.results.tensors

    def replay(self, call: Call, statics: Statics, feed: Feed | None = None) -> Any:
        """Replay a step; return the forward's result. Raises PagesMoved, without side effects.

        feed: takes the hidden state, if there is one.
        """
        statics.settle()  # a beam reorder may be pending
        call.load(self.inputs, self._last)
        self._last = call
        statics.put_at(call.length or 0)
        if self.exact is not None:
            self.exact.begin()
        if not self.again():
            raise PagesMoved("pages have moved since the step was recorded")
        self.counted.passes += 1
        statics.advance(call.length or 0)
        if feed is not None:
            _hand_out(self.results, [self.results.tensors], call.length or 0, feed)
        return self.results.copied(call, self.inputs)

    def tried(self, call: Call, statics: Statics) -> Any:
        """Replay for a check: restore the cache and the side effects afterwards; do not count the pass."""
        with statics.undone(), statics.spoiled(), self.written.undone():
            out = self.replay(call, statics)
        self.counted.passes -= 1
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of static results outside of a CUDA graph's own pool."""
        return self._run.run.nbytes

    def end_call(self) -> None:
        """Drop references to the caller's tensors and settle the counters of replays."""
        self._last = None
        self.counted.settle()


@contextmanager
def _noted(terms: Terms) -> Iterator[list[Tensor]]:
    """Collect the decoder's hidden states of passes in the block."""
    found: list[Tensor] = []
    if terms.decoder is None:
        yield found
        return
    handle = terms.decoder.register_forward_hook(lambda module, args, out: found.append(out.last_hidden_state))
    try:
        yield found
    finally:
        handle.remove()


def _hand_out(results: Results, rows: Sequence[Sequence[Tensor]], length: int, feed: Feed) -> None:
    hidden_BTD = results.hidden(rows)
    if hidden_BTD is not None:
        feed(length, hidden_BTD)


class RowsRecording:
    """A captured step for several rows: consecutive steps in one pass, each with the bits of the step alone.

    The first passes run its calls from Python; later ones replay a graph.
    """

    @torch.inference_mode(False)  # tensors of inference mode are writable only in it
    @torch.no_grad()
    def __init__(self, step: Recording, calls: Sequence[Call], kept: "Kept", terms: Terms) -> None:
        """Raises NotRecordable: the step cannot be computed for several rows at once."""
        statics, graph = kept.statics, step.graph
        if graph is None:
            raise NotRecordable(f"a step is not recorded as a graph of operators: {step.report.refused}")
        if step.written.any:
            raise NotRecordable("a step changes other memory of the model than its cache")
        if statics.states():
            raise NotRecordable("a step keeps a state of fixed size, which has one row at a time")
        self._step, self._statics, self._terms, self._recorder = step, statics, terms, kept.recorder
        self._inputs = [call.inputs(statics.span.end) for call in calls]
        rows, device = len(calls), statics.position.device
        self._ahead = torch.arange(rows, dtype=torch.int64, device=device)
        # apart by as much as kernels may assume of an address
        self._positions = torch.zeros((rows, _ALIGNED // 8), dtype=torch.int64, device=device)
        self._run = kept.recorder.rows(graph, [self._given(graph, row) for row in range(rows)])
        self._passes, self._again = 0, None
        self._outputs: list[Any] = []

    def _given(self, graph: StepGraph, row: int) -> dict[Node, Tensor]:
        pairs = zip(self._step.inputs, self._inputs[row], strict=True)
        pairs = [*pairs, (self._statics.position, self._positions[row, :1])]
        found = ((graph.placeholder_of(own), mine) for own, mine in pairs)
        return {node: mine for node, mine in found if node is not None}

    @property
    def captures(self) -> int:
        """Count of what was made once: these calls, and a graph of them."""
        return 1 + (self._again is not None)

    def replay(self, calls: Sequence[Call], feed: Feed | None = None) -> list[Any]:
        """Compute the rows; return the forward's result for each. Raises PagesMoved, without side effects.

        feed: takes the hidden states, if there are any.
        """
        statics = self._statics
        statics.settle()
        for call, inputs in zip(calls, self._inputs, strict=True):
            call.load(inputs, None)
        length = calls[0].length or 0
        statics.put_at(length)
        if self._step.exact is not None:
            self._step.exact.begin()
        with torch.no_grad():
            outputs = self._ran()
        statics.advance(length, len(calls))
        if feed is not None:
            _hand_out(self._step.results, outputs, length, feed)
        rows = zip(calls, self._inputs, outputs, strict=True)
        return [self._step.results.copied(call, inputs, tensors) for call, inputs, tensors in rows]

    def _ran(self) -> list[Any]:
        self._passes += 1
        if self._again is not None:
            if not self._again():
                raise PagesMoved("pages have moved since the rows were recorded")
            self._step.counted.passes += 1
            return self._outputs
        self._step.counted.live += 1
        if self._passes <= _LIVE:
            return self._pass()
        first: list[list[Any]] = []

        def body() -> None:
            self._outputs = self._pass()
            if not first:
                first.append(self._outputs)

        again = self._terms.recorded(self._recorder, body)  # runs it before it is captured; on a CPU not at all
        if not first:
            again()
        self._again = again
        return first[0]

    def _pass(self) -> list[Any]:
        """Run the rows on the static inputs."""
        self._terms.begin_pass()
        statics = self._statics
        torch.add(statics.position, self._ahead, out=self._positions[:, 0])
        outputs = self._run()
        statics.position.add_(len(self._inputs))
        return outputs


class Kept:
    """Static memory of one cache and the steps captured on it. Attributes: cause: why it was made."""

    def __init__(self, cache: Any, limit: int | None, terms: Terms, cause: str) -> None:
        self.cause = cause
        room, wide = room_wanted(cache, limit), terms.passes_masks
        self.statics, self.recorder = Statics(cache, room, wide=wide, steady=terms.steady), terms.new_recorder()
        self.recordings: dict[tuple[tuple, Span], Recording] = {}
        self.rows: dict[tuple[tuple, Span, int], RowsRecording] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the static cache and of the results of CPU tapes."""
        return self.statics.nbytes + sum(recording.nbytes for recording in list(self.recordings.values()))

    def end_call(self) -> None:
        """Drop references to the caller's tensors; see `Recording.end_call`."""
        self.statics.forget()
        for recording in self.recordings.values():
            recording.end_call()

    def release(self) -> None:
        """Free graphs and static memory."""
        for recording in self.recordings.values():
            recording.end_call()
        self.recordings.clear()
        self.rows.clear()
        self.recorder.release()


def difference(out: Any, expected: Any, *, joined: float = 0.0, exact: bool = False) -> str:
    """Return where a replay deviates from the expected result by more than rounding; "" if nowhere.

    Args:
        joined: relative error that fusion alone introduced, measured when the step was captured.
        exact: no rounding is allowed.
    """
    for name, wanted in expected.items() if hasattr(expected, "items") else enumerate(expected):
        got = out[name]
        if not isinstance(wanted, Tensor) or not wanted.is_floating_point():
            continue
        if got.shape != wanted.shape:
            return f"{name} has the shape {tuple(got.shape)}, not {tuple(wanted.shape)}"
        scale = wanted.float().nan_to_num(0, 0, 0).norm()
        error = float((got.float() - wanted.float()).nan_to_num(0, 0, 0).norm() / scale.clamp_min(1e-30))
        if exact and not torch.equal(got, wanted):
            return f"{name} has other bits, {error:.1e} off"
        if error > max(2 * joined, _ROUNDING.get(wanted.dtype, _COARSE_ROUNDING)):
            return f"{name} is {error:.1e} off"
    return ""
