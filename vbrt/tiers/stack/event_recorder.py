"""Notes when a stack computes, waits and moves bytes, for `vb.timeline`; a stack has none unless one is asked for.

Nothing is synchronized while a pass runs: what happens on the device is marked by CUDA events with timing, what happens
on the host by its clock, and both are put on one axis when the recording ends. A moment of which both clocks are known,
taken while the device was idle, aligns them to some ten microseconds.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Protocol

import torch

from vbrt.errors import WrapError
from vbrt.report.timeline import COMPUTE, OPTIMIZER, PASS, WAIT, Span, Timeline

__all__ = ["LeaseNote", "Mark", "Recorder", "page_names"]

Mark = int | torch.cuda.Event
"""A moment: nanoseconds of the host's clock, or an event of the device."""


class Recorded(Protocol):
    """The guard of a stack that is recorded."""

    lock: threading.RLock
    recorder: "Recorder | None"


class Recorder:
    """Records from `start` to `stop`; any number of threads may note spans meanwhile.

    Args:
        device: where kernels compute.
        guard: of the stack that is recorded.

    Attributes:
        timeline: the recorded spans; None before `stop`.
    """

    def __init__(self, device: torch.device, guard: Recorded) -> None:
        self.timeline: Timeline | None = None
        self._guard, self._device = guard, device if device.type == "cuda" else None
        self._notes: list[tuple[str, str, Mark, Mark, int]] = []  # only appended to: one step for threads
        self._passes: defaultdict[int, list[_Pass]] = defaultdict(list)  # that have begun, by thread
        self._steps: defaultdict[int, list[Mark]] = defaultdict(list)  # of optimizers, by thread
        self._by_leases: dict[int, _Pass] = {}  # passes without a forward: they last as long as their leases, by thread
        self._origin_ns, self._origin = 0, None

    def __deepcopy__(self, memo: dict) -> "Recorder":
        return self  # a model that is copied while it is recorded

    def start(self) -> None:
        """Have the stack tell this recorder what it does.

        Raises:
            WrapError: it has another one.
        """
        self._set_origin()  # waits for the device
        with self._guard.lock:
            if self._guard.recorder is not None:
                raise WrapError("timeline: this model is being recorded already; leave that `with` block first")
            self._guard.recorder = self

    def _set_origin(self) -> None:
        before = time.perf_counter_ns()
        if self._device is not None:
            torch.cuda.synchronize(self._device)
            before = time.perf_counter_ns()
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record(torch.cuda.current_stream(self._device))
            self._origin.synchronize()
        self._origin_ns = (before + time.perf_counter_ns()) // 2

    def stop(self) -> Timeline:
        """Stop, wait for the device, and work out all times."""
        self._guard.recorder = None
        for one in list(self._by_leases.values()):
            self._note_by_leases(one)
        notes = list(self._notes)  # before the synchronization: every event in it has passed then
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        spans = [Span(row, page, self._us(start), self._us(end), nbytes) for row, page, start, end, nbytes in notes]
        self.timeline = Timeline(tuple(sorted(spans, key=lambda span: (span.start_us, span.end_us))))
        return self.timeline

    def _us(self, mark: Mark) -> float:
        if isinstance(mark, int):
            return (mark - self._origin_ns) / 1e3
        return self._origin.elapsed_time(mark) * 1e3

    # -- what the stack and the model tell ----------------------------------------------------------------------------

    def mark(self) -> Mark:
        """Return this moment on the computing device: when it gets to what its current stream is given next."""
        if self._device is None:
            return time.perf_counter_ns()
        return self.mark_on(torch.cuda.current_stream(self._device))

    def mark_on(self, stream: torch.cuda.Stream | None) -> Mark:
        """Return this moment on a stream, or on the host."""
        if stream is None or torch.cuda.is_current_stream_capturing():  # an event of a graph has no time
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def note(self, row: str, page: str, start: Mark, end: Mark, nbytes: int = 0) -> None:
        """Note a span that has ended, or will when the device gets there."""
        self._notes.append((row, page, start, end, nbytes))

    def lease(self, keys: Sequence[str]) -> "LeaseNote":
        """Note that a lease is being asked for."""
        return LeaseNote(self, page_names(keys))

    def begin_pass(self, model: torch.nn.Module, args: tuple) -> None:
        """A forward pre-hook of the model."""
        if not torch.compiler.is_compiling():
            self._passes[threading.get_ident()].append(_Pass(self.mark()))

    def name_pass(self, phase: str) -> None:
        """Take the phase of the pass that begins; one without a forward, such as a backward pass, lasts as long as its
        leases."""
        thread = threading.get_ident()
        begun, one = self._passes[thread], self._by_leases.pop(thread, None)
        if one is not None:
            self._note_by_leases(one)
        if begun and begun[-1].phase == PASS:
            begun[-1].phase = phase
        elif not begun:
            self._by_leases[thread] = _Pass(self.mark(), phase)

    def end_pass(self, model: torch.nn.Module, args: tuple, output: object) -> None:
        """A forward hook of the model."""
        begun = [] if torch.compiler.is_compiling() else self._passes[threading.get_ident()]
        if begun:
            one = begun.pop()
            self.note(PASS, one.phase, one.start, self.mark())

    def lease_ended(self, end: Mark) -> None:
        """Extend the pass of this thread that has no forward."""
        one = self._by_leases.get(threading.get_ident())
        if one is not None:
            one.end = end

    def _note_by_leases(self, one: "_Pass") -> None:
        if one.end is not None:
            self.note(PASS, one.phase, one.start, one.end)

    def begin_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """A hook before each step of an optimizer."""
        self._steps[threading.get_ident()].append(self.mark())

    def end_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """A hook after each step of an optimizer."""
        begun = self._steps[threading.get_ident()]
        if begun:
            tensors = sum(len(group["params"]) for group in optimizer.param_groups)
            name = f"{type(optimizer).__name__}, {tensors} tensor{'s' * (tensors != 1)}"
            self.note(OPTIMIZER, name, begun.pop(), self.mark())


def page_names(keys: Sequence[str]) -> str:
    """Return the keys of a lease as one text; those of a layer's experts, which differ in a number, by the numbers,
    such as "experts#coarse.0-7,12"."""
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
    """A pass that has begun; `end`: of its last lease so far, where it has no forward."""

    __slots__ = ("end", "phase", "start")

    def __init__(self, start: Mark, phase: str = PASS) -> None:
        self.start, self.phase, self.end = start, phase, None


class LeaseNote:
    """The two spans of one lease: until its pages are there, and until it is released."""

    __slots__ = ("_mark", "_nbytes", "_page", "_recorder")

    def __init__(self, recorder: Recorder, page: str) -> None:
        self._recorder, self._page, self._nbytes = recorder, page, 0
        self._mark = recorder.mark()

    def arrived(self, nbytes: int) -> None:
        """End the wait: the pages are there, of so many bytes together."""
        self._nbytes = nbytes
        self._next(WAIT)

    def done(self) -> None:
        """End the computing: the host has asked for all of it."""
        self._next(COMPUTE)
        self._recorder.lease_ended(self._mark)

    def _next(self, row: str) -> None:
        now = self._recorder.mark()
        self._recorder.note(row, self._page, self._mark, now, self._nbytes)
        self._mark = now
