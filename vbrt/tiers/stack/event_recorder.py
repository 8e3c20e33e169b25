"""Event recorder for `vb.timeline`: spans of compute, waits and copies. A stack has none unless one is asked for.

Nothing is synchronized while a pass runs: CUDA events with timing mark the device's spans, the host clock marks the
host's, and `stop` puts both on one axis. One moment read on both clocks, with the device idle, aligns them to some ten
microseconds.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Protocol

import torch

from vbrt.errors import WrapError
from vbrt.host import accelerator
from vbrt.report.timeline import COMPUTE, OPTIMIZER, PASS, WAIT, Span, Timeline

__all__ = ["LeaseNote", "Mark", "Recorder", "page_names"]

Mark = int | torch.Event
"""Time stamp: nanoseconds of the host's clock, or a CUDA event."""


class Recorded(Protocol):
    """Guard of a recorded stack."""

    lock: threading.RLock
    recorder: "Recorder | None"


class Recorder:
    """Recorder of spans between `start` and `stop`; thread-safe.

    Args:
        device: of the kernels.
        guard: of the recorded stack.

    Attributes:
        timeline: the recorded spans; None before `stop`.
    """

    def __init__(self, device: torch.device, guard: Recorded) -> None:
        self.timeline: Timeline | None = None
        self._guard, self._device = guard, device if accelerator.has_streams(device) else None
        self._notes: list[tuple[str, str, Mark, Mark, int]] = []  # only appended to: atomic
        self._passes: defaultdict[int, list[_Pass]] = defaultdict(list)  # open, by thread
        self._steps: defaultdict[int, list[Mark]] = defaultdict(list)  # open optimizer steps, by thread
        self._by_leases: dict[int, _Pass] = {}  # passes without a forward: as long as their leases, by thread
        self._origin_ns, self._origin = 0, None

    def __deepcopy__(self, memo: dict) -> "Recorder":
        return self  # copies of a recorded model share the recorder

    def start(self) -> None:
        """Attach this recorder to the stack.

        Raises:
            WrapError: the stack has another recorder.
        """
        self._set_origin()  # synchronizes the device
        with self._guard.lock:
            if self._guard.recorder is not None:
                raise WrapError("timeline: this model is being recorded already; leave that `with` block first")
            self._guard.recorder = self

    def _set_origin(self) -> None:
        before = time.perf_counter_ns()
        if self._device is not None:
            accelerator.synchronize(self._device)
            before = time.perf_counter_ns()
            self._origin = accelerator.Event(enable_timing=True)
            self._origin.record(accelerator.current_stream(self._device))
            self._origin.synchronize()
        self._origin_ns = (before + time.perf_counter_ns()) // 2

    def stop(self) -> Timeline:
        """Detach, synchronize the device, and return the timeline."""
        self._guard.recorder = None
        for one in list(self._by_leases.values()):
            self._note_by_leases(one)
        notes = list(self._notes)  # before the synchronization, which completes every event in it
        if self._device is not None:
            accelerator.synchronize(self._device)
        spans = [Span(row, page, self._us(start), self._us(end), nbytes) for row, page, start, end, nbytes in notes]
        self.timeline = Timeline(tuple(sorted(spans, key=lambda span: (span.start_us, span.end_us))))
        return self.timeline

    def _us(self, mark: Mark) -> float:
        if isinstance(mark, int):
            return (mark - self._origin_ns) / 1e3
        return self._origin.elapsed_time(mark) * 1e3

    # -- events of the stack and the model ----------------------------------------------------------------------------

    def mark(self) -> Mark:
        """Return a time stamp on the computing device's current stream: when it reaches the work queued next."""
        if self._device is None:
            return time.perf_counter_ns()
        return self.mark_on(accelerator.current_stream(self._device))

    def mark_on(self, stream: torch.Stream | None) -> Mark:
        """Return a time stamp on a stream; None: on the host."""
        if stream is None or accelerator.is_current_stream_capturing():  # a captured event has no time
            return time.perf_counter_ns()
        event = accelerator.Event(enable_timing=True)
        event.record(stream)
        return event

    def note(self, row: str, page: str, start: Mark, end: Mark, nbytes: int = 0) -> None:
        """Add a span; its device events may still be pending."""
        self._notes.append((row, page, start, end, nbytes))

    def lease(self, keys: Sequence[str]) -> "LeaseNote":
        """Open the spans of a lease that is being requested."""
        return LeaseNote(self, page_names(keys))

    def begin_pass(self, model: torch.nn.Module, args: tuple) -> None:
        """Forward pre-hook of the model."""
        if not torch.compiler.is_compiling():
            self._passes[threading.get_ident()].append(_Pass(self.mark()))

    def name_pass(self, phase: str) -> None:
        """Set the phase of the pass that begins. A pass without a forward, such as a backward pass, lasts as long as
        its leases."""
        thread = threading.get_ident()
        begun, one = self._passes[thread], self._by_leases.pop(thread, None)
        if one is not None:
            self._note_by_leases(one)
        if begun and begun[-1].phase == PASS:
            begun[-1].phase = phase
        elif not begun:
            self._by_leases[thread] = _Pass(self.mark(), phase)

    def end_pass(self, model: torch.nn.Module, args: tuple, output: object) -> None:
        """Forward hook of the model."""
        begun = [] if torch.compiler.is_compiling() else self._passes[threading.get_ident()]
        if begun:
            one = begun.pop()
            self.note(PASS, one.phase, one.start, self.mark())

    def lease_ended(self, end: Mark) -> None:
        """Extend this thread's pass without a forward to `end`."""
        one = self._by_leases.get(threading.get_ident())
        if one is not None:
            one.end = end

    def _note_by_leases(self, one: "_Pass") -> None:
        if one.end is not None:
            self.note(PASS, one.phase, one.start, one.end)

    def begin_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Step pre-hook of an optimizer."""
        self._steps[threading.get_ident()].append(self.mark())

    def end_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Step post-hook of an optimizer."""
        begun = self._steps[threading.get_ident()]
        if begun:
            tensors = sum(len(group["params"]) for group in optimizer.param_groups)
            name = f"{type(optimizer).__name__}, {tensors} tensor{'s' * (tensors != 1)}"
            self.note(OPTIMIZER, name, begun.pop(), self.mark())


def page_names(keys: Sequence[str]) -> str:
    """Return the keys of a lease as one text; experts of a layer as ranges, such as "experts#coarse.0-7,12"."""
    groups: dict[str, list[int]] = {}
    for key in keys:
        head, dot, last = key.rpartition(".")
        routed = "#" in head and last.isdecimal()
        groups.setdefault(head + dot if routed else key, []).extend([int(last)] if routed else [])
    return " + ".join(head + ",".join(_runs(numbers)) for head, numbers in groups.items())


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    """Yield runs of consecutive numbers."""
    for _, run in groupby(enumerate(numbers), lambda place: place[1] - place[0]):
        first, *_, last = [number for _, number in run] * 2
        yield str(first) if first == last else f"{first}-{last}"


class _Pass:
    """Open pass. `end`: of its last lease so far, for a pass without a forward."""

    __slots__ = ("end", "phase", "start")

    def __init__(self, start: Mark, phase: str = PASS) -> None:
        self.start, self.phase, self.end = start, phase, None


class LeaseNote:
    """Two spans of one lease: the wait for its pages, and the compute until its release."""

    __slots__ = ("_mark", "_nbytes", "_page", "_recorder")

    def __init__(self, recorder: Recorder, page: str) -> None:
        self._recorder, self._page, self._nbytes = recorder, page, 0
        self._mark = recorder.mark()

    def arrived(self, nbytes: int) -> None:
        """End the wait span: the pages, of `nbytes` together, have arrived."""
        self._nbytes = nbytes
        self._next(WAIT)

    def done(self) -> None:
        """End the compute span: the host has queued all its kernels."""
        self._next(COMPUTE)
        self._recorder.lease_ended(self._mark)

    def _next(self, row: str) -> None:
        now = self._recorder.mark()
        self._recorder.note(row, self._page, self._mark, now, self._nbytes)
        self._mark = now
