"""Captured decode steps: one for each input signature and length bucket, on one cache's static memory."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from vbrt.generation.capture.exact_attention import ExactAttention, as_captured, is_captured
from vbrt.generation.capture.side_effects import Written
from vbrt.generation.capture.step_io import Call, Results, cache_in, take_apart
from vbrt.generation.fusion.deterministic_attention import steady_attention
from vbrt.generation.fusion.fuse_step import Joined, joined
from vbrt.generation.fusion.graph_backends import Recorder
from vbrt.generation.static.cache_kinds import NotRecordable, room_wanted
from vbrt.generation.static.length_buckets import Span
from vbrt.generation.static.static_cache import Statics
from vbrt.kernels.cuda.compiling import Compilation
from vbrt.kernels.operator_trace import StepRefused
from vbrt.layers.weights.linear_product import pass_precision
from vbrt.libraries.transformers_api import replace_capture_query

__all__ = [
    "Counted",
    "Kept",
    "PagesMoved",
    "Recording",
    "Terms",
    "answer_captures",
    "computed_as_recorded",
    "difference",
]

#: tolerance of a replay, relative to the norm of the eager result
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE_ROUNDING = 0.06

Plain = Callable[..., Any]


class Terms(Protocol):
    """Runtime interface of captured steps.

    Attributes:
        joins: True if captured steps of 4-bit models may be fused and so round differently from eager ones.
        passes_masks: True if captured attention skips masked slots: it is fused, or batch-invariant.
        steady: True if lossless steps use the batch-invariant attention of `deterministic_attention.py`.
        exact: True if lossless steps attend as plain ones do (`exact_attention.py`).
    """

    exact: bool
    joins: bool
    passes_masks: bool
    steady: bool

    def new_recorder(self) -> Recorder:
        """Return a recorder for the steps on one cache."""

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
    """Counter increments of one replayed pass: layer forwards and hits of pages that never move."""

    def __init__(self) -> None:
        self.passes = 0
        self._added: list[tuple[Any, int]] = []

    @contextmanager
    def during(self, handles: list[Any]) -> Iterator[None]:
        """Record which layers run in the block."""
        before = [handle.forwards for handle in handles]
        yield
        added = [(handle, handle.forwards - old) for handle, old in zip(handles, before, strict=True)]
        self._added = [(handle, more) for handle, more in added if more] or self._added

    def settle(self) -> None:
        """Apply the increments of all replays since the last call."""
        passes, self.passes = self.passes, 0
        for handle, more in self._added:
            handle.forwards += passes * more
            for page in handle.pages if not handle.stack.ledger.travellers else ():  # else replays count pages
                page.hits += passes * more


class Recording:
    """One captured step: for one input signature and one length bucket.

    Attributes:
        inputs: static input tensors.
        again: launches the replay on the current contents of `inputs` and the cache; returns False and does nothing
            if pages have moved.
        report: what was fused.
        written: side effects: model state that the step mutates besides the cache.
        compared: whether it was checked against eager steps, within sliding windows (False) and past them (True).
    """

    @torch.inference_mode(False)  # tensors of inference mode are writable only in it
    @torch.no_grad()
    def __init__(self, model: Any, plain: Plain, call: Call, kept: "Kept", terms: Terms) -> None:
        statics, self._terms, self._counted = kept.statics, terms, Counted()
        self.exact = ExactAttention(statics) if terms.exact and pass_precision() != "coarse" else None
        self.inputs = call.inputs(statics.span.end)
        self.compared: set[bool] = set()
        self._last: Call | None = None
        self._results: Results | None = None
        statics.put_at(call.length or 0)
        self.written = Written((*statics.tensors(), *self.inputs))
        with statics.undone():
            try:
                self._run = run = self._joined(model, plain, call, kept)  # run holds constants that the graph reads

                def body() -> None:
                    tensors = run(*self.inputs)
                    self._results.put(tensors)
                    statics.position.add_(1)  # for the next replay

                self.again = terms.recorded(kept.recorder, body)
            finally:
                self.written.undo()
        self._results.drop_cache()

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
        self.report = run.report
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
            with self._counted.during(self._terms.handles()), as_captured(), attention:
                out = plain(**call.kwargs(inputs))
        finally:
            statics.recording = statics.exact = False
        statics.settle()
        self._results = Results(out, call.cache)
        return self._results.tensors

    def replay(self, call: Call, statics: Statics) -> Any:
        """Replay a step; return the forward's result. Raises PagesMoved, without side effects."""
        statics.settle()  # a beam reorder may be pending
        call.load(self.inputs, self._last)
        self._last = call
        statics.put_at(call.length or 0)
        if self.exact is not None:
            self.exact.begin()
        if not self.again():
            raise PagesMoved("pages have moved since the step was recorded")
        self._counted.passes += 1
        statics.advance(call.length or 0)
        return self._results.copied(call, self.inputs)

    def tried(self, call: Call, statics: Statics) -> Any:
        """Replay for a check: restore the cache and the side effects afterwards; do not count the pass."""
        with statics.undone(), statics.spoiled(), self.written.undone():
            out = self.replay(call, statics)
        self._counted.passes -= 1
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of static results outside of a CUDA graph's own pool."""
        return self._run.run.nbytes

    def end_call(self) -> None:
        """Drop references to the caller's tensors and settle the counters of replays."""
        self._last = None
        self._counted.settle()


def computed_as_recorded(plain: Plain, kwargs: Mapping[str, Any], statics: Statics) -> Any:
    """Run a step eagerly on a static cache with the kernels of a captured step; capture nothing.

    Raises:
        NotRecordable: an argument is neither a tensor nor a constant.
    """
    call = take_apart(kwargs, cache_in(kwargs)[0], statics.length)
    inputs = call.inputs(statics.span.end)
    answer_captures()
    with statics.as_recorded(), as_captured(), steady_attention(wanted=statics.steady):
        return plain(**call.kwargs(inputs))


class Kept:
    """Static memory of one cache and the steps captured on it."""

    def __init__(self, cache: Any, limit: int | None, terms: Terms) -> None:
        room, wide = room_wanted(cache, limit), terms.passes_masks
        self.statics, self.recorder = Statics(cache, room, wide=wide, steady=terms.steady), terms.new_recorder()
        self.recordings: dict[tuple[tuple, Span], Recording] = {}

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
