"""Captured decode steps of a continuous batch: one for each padded size, replayed in place of eager passes.

A step of a batch reads and writes tensors of fixed addresses (token ids, places in the paged KV cache, sampled tokens),
so there is nothing to place and nothing to copy out, unlike in a `generate` call. A step is traced, sampling included,
and captured with the leases of its pages. Steps of few sequences are fused as `generate`'s are (`fuse_step.py`); those
of many wait for the GPU, and fusing takes longer than it saves. A size is captured when it comes again.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from vbrt.errors import VBError, first_line
from vbrt.generation.capture.captured_step import Counted, Terms, answer_captures
from vbrt.generation.capture.exact_attention import as_captured
from vbrt.generation.capture.side_effects import Written
from vbrt.generation.fusion.fuse_step import PATTERNS, joined
from vbrt.generation.fusion.graph_backends import Recorder
from vbrt.kernels.operator_trace import StepRefused
from vbrt.layers.modules.compiled_forward import FEW_TOKENS

__all__ = ["AGAIN", "NEW_SIZE", "BatchSteps", "StepsOfModel"]

NEW_SIZE = "the first pass of a batch of its size"
AGAIN = "a size of a batch that has come again"  # why a step is captured
_SEEN = 2  # passes of a size before it is captured
_TRIES = 3  # captures of a size, where other passes came between
_MOST = 64  # captures; then all are made anew
_SETTLED = 64  # replays until counters are brought up to date


class StepsOfModel(Protocol):
    """Counters of a model's captured steps, shared by `generate` calls and batches."""

    captured: int
    causes: Counter[str]
    record_us: int
    joined: Counter[str]
    unjoined: Counter[str]

    def refusal(self) -> str:
        """Return why no forward can be captured now; "" if one can."""

    def note(self, why: str) -> None:
        """Count an eager step by reason; warn once per reason."""


class BatchSteps:
    """Captured decode steps of one batch, which runs in one thread.

    Args:
        steps, terms: of the model.
        decoding: context in which passes are decode steps.
    """

    def __init__(self, steps: StepsOfModel, terms: Terms, decoding: Callable[[], AbstractContextManager]) -> None:
        self._steps, self._terms, self._decoding = steps, terms, decoding
        self._recorder: Recorder | None = None
        self._captured: dict[Hashable, _Captured] = {}
        self._seen: Counter[Hashable] = Counter()
        self._failed: Counter[Hashable] = Counter()
        self._last_error: dict[Hashable, str] = {}
        self._moment: object = None
        self._why = self._refused = ""
        self._lock, self._ended = threading.Lock(), False

    def refusal(self) -> str:
        """Return why steps cannot be captured now; "" if they can. Captures of another state are dropped first."""
        if not self._refused:
            try:
                with self._decoding():
                    self._follow(self._terms.moment())
            except Exception as error:  # noqa: BLE001 - steps that are eager need none of this
                with self._lock:
                    self._end(error)
        why = self._refused or self._why
        if why:
            self._steps.note(why)
        return why

    def _follow(self, moment: object) -> None:
        """Drop captures of another state."""
        if moment != self._moment:
            with self._lock:
                self._drop()
            self._moment, self._why = moment, self._steps.refusal()

    def refuse(self, why: str) -> None:
        """Free all captures, and have all steps run eagerly from now on."""
        with self._lock:
            self._refused = self._refused or why
            self._drop()

    def run(self, key: Hashable, step: Callable[[], Tensor], written: Sequence[Tensor], *, sequences: int) -> None:
        """Run a step, or replay what an earlier step of this key did; see `DecodeSteps`."""
        with self._lock, self._decoding():
            if self._replayed(key):
                self._steps.captured += 1
                return
            self._seen[key] += 1
            if self._refused:
                self._steps.note(self._refused)
                step()
            elif self._seen[key] < _SEEN or self._failed[key] >= _TRIES or self._ended:
                self._steps.note(self._last_error.get(key, NEW_SIZE))
                step()
            else:
                self._capture(key, step, written, fused=sequences <= FEW_TOKENS)

    def _replayed(self, key: Hashable) -> bool:
        """Replay a step, if it is captured and its pages have not moved."""
        captured = self._captured.get(key)
        try:
            if captured is not None and captured.replay():
                return True
        except Exception as error:  # noqa: BLE001 - the step runs eagerly, and raises real errors
            self._end(error)
            return False
        if captured is not None:
            self._drop()
        return False

    def _end(self, error: Exception) -> None:
        """Free all captures after an error that says nothing of a single step; later steps are eager."""
        self._refused = f"{type(error).__name__} while a step of a batch was captured or replayed: {first_line(error)}"
        error.__traceback__ = None  # it holds what the step had made
        self._drop()

    def _capture(self, key: Hashable, step: Callable[[], Tensor], written: Sequence[Tensor], *, fused: bool) -> None:
        """Capture a step; it has run when this returns."""
        begun = time.perf_counter_ns()
        if len(self._captured) >= _MOST:
            self._drop()
        self._recorder = self._recorder or self._terms.new_recorder()
        try:
            captured = _Captured(step, written, self._terms, self._recorder, fused=fused)
        except (StepRefused, VBError) as error:
            self._failed[key] += _TRIES if isinstance(error, StepRefused) else 1
            self._last_error[key] = f"a step of a batch cannot be captured: {error}"
            self._steps.note(self._last_error[key])
            step()
            return
        except Exception as error:  # noqa: BLE001 - the step runs eagerly, and raises real errors
            self._end(error)
            self._steps.note(self._refused)
            step()
            return
        self._captured[key] = captured
        self._steps.causes[AGAIN] += 1
        self._steps.record_us += (time.perf_counter_ns() - begun) // 1000
        self._steps.joined.update(captured.run.report.joined)
        self._steps.unjoined.update(captured.run.report.unjoined)

    def _drop(self) -> None:
        for captured in self._captured.values():
            captured.counted.settle()
        self._captured.clear()
        if self._recorder is not None:
            self._recorder.release()
            self._recorder = None

    def release(self) -> None:
        """Free all captures; later steps are eager."""
        with self._lock:
            self._ended = True
            self._drop()


class _Captured:
    """One captured step. Attributes: run: the traced step. counted: see `Counted`."""

    def __init__(
        self, step: Callable[[], Tensor], written: Sequence[Tensor], terms: Terms, recorder: Recorder, *, fused: bool
    ) -> None:
        self.counted, effects = Counted(), Written(written)

        def counting() -> list[Tensor]:
            with self.counted.during(terms.handles()), as_captured():
                return [step()]

        how = {"same_bits": None if terms.joins else True, "program": recorder.program, "before_write": effects.note}
        if not fused:
            how |= {"without": [pattern.name for pattern in PATTERNS], "check": False}
        answer_captures()
        try:
            self.run = joined(counting, **how)
            self.run.first = None
            if self.run.report.from_host:
                raise StepRefused(self.run.report.from_host)
            self._again = terms.recorded(recorder, self.run)
        finally:
            effects.undo()
        if effects.any:
            raise StepRefused("it changes other memory of the model than its cache")

    def replay(self) -> bool:
        """Replay the step; False, with nothing run, once pages have moved."""
        if not self._again():
            return False
        self.counted.passes += 1
        if self.counted.passes >= _SETTLED:
            self.counted.settle()
        return True
