"""Recorders: run a function, keep what it launches, launch that again.

    tape = recorder.record(step, within)   # `step` reads and writes tensors that stay where they are
    tape.replay()                          # the same kernels on the same addresses; none of step's Python runs

`CudaRecorder` keeps a CUDA graph. `CpuRecorder` keeps the step itself, which a `Tape` computes. Whatever has the
members of `Recorder` may take their place.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from vbrt.generation.fusion.cpu_tape import Tape
from vbrt.generation.fusion.step_graph import Program, StepGraph
from vbrt.libraries.torch_api import end_allocate_to_pool

__all__ = ["CpuRecorder", "CudaRecorder", "Recorded", "Recorder", "recorder_for", "without_collections"]


class Recorded(Protocol):
    """What was launched."""

    def replay(self) -> None:
        """Launch it again, on the current stream."""


class Recorder(Protocol):
    """Keeps what a function launches on the device.

    Attributes:
        lossless: True if it records steps of models whose weights lose no bits, too.
    """

    lossless: bool

    def program(self, step: StepGraph, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return what runs the graph of a step in the function to be recorded, on these very inputs."""

    def record(self, step: Callable[[], None], within: Callable[[], AbstractContextManager]) -> Recorded:
        """Record a function.

        Args:
            step: may run more than once; it is not certain to have run when this returns.
            within: gives a context manager, entered once, for the run that is recorded.

        Raises:
            Exception: whatever they raise, or the device, where the function waits for it; nothing is kept then.
        """

    def release(self) -> None:
        """Free what the tapes hold. Idempotent; they must not be replayed any more."""


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory: they never run at one time, and results are copied out."""

    program, lossless = Program, True

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream | None = None
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def record(self, step: Callable[[], None], within: Callable[[], AbstractContextManager]) -> torch.cuda.CUDAGraph:
        """Run `step` once on a stream beside the current one, which compiles kernels and makes handles; capture it."""
        stream = self._stream = self._stream or torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                step()
                with within():
                    graph = self._capture(step)
        finally:
            current.wait_stream(stream)
        self._graphs.append(graph)
        return graph

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with without_collections():  # a tensor that is collected meanwhile would be freed within the capture
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            except BaseException:
                self._give_up(graph)
                raise
            try:
                graph.capture_end()
            except BaseException:
                self._recover()
                raise
        return graph

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture whose function has raised; the device may refuse to, since it waits for nothing meanwhile."""
        try:
            graph.capture_end()
        except RuntimeError:
            self._recover()

    def _recover(self) -> None:
        """Undo what a capture that did not end leaves: torch's allocator and random numbers take it for running."""
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):
            end_allocate_to_pool(index, self._pool)
        empty = torch.cuda.CUDAGraph()
        empty.capture_begin(capture_error_mode="thread_local")
        empty.capture_end()

    def release(self) -> None:
        """Free the graphs and their pool, once the device has finished with them."""
        if self._graphs:
            torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


class _Again:
    def __init__(self, step: Callable[[], None]) -> None:
        self.replay = step


class CpuRecorder:
    """Records steps that are computed by tapes: a replay is one more run of what little Python is left."""

    program, lossless = Tape, False

    def record(self, step: Callable[[], None], within: Callable[[], AbstractContextManager]) -> _Again:
        """Keep the function; it does not run now."""
        with within():
            return _Again(step)

    def release(self) -> None:
        """Nothing is held: tapes go with their recordings."""


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Put off collections of cyclic garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def recorder_for(device: torch.device) -> Recorder | None:
    """Return the recorder of a device; None where there is none."""
    if device.type == "cuda":
        return CudaRecorder(device)
    return CpuRecorder() if device.type == "cpu" else None
