"""Recorder of CUDA graphs: captures what a function launches, and replays it.

    recorder = GraphRecorder(device)
    graph = recorder.record(step, within)   # `step` reads and writes tensors at static addresses
    graph.replay()                          # the same kernels on the same addresses, without step's Python

Where the step calls `outside(function)`, one graph is captured before and one after it, and replays call the function
between them.
"""

import contextlib
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from vbrt.host import accelerator
from vbrt.libraries.torch_api import end_allocate_to_pool

__all__ = ["GraphRecorder", "Recorded", "outside", "waits_noticed", "without_collections"]


class Recorded(Protocol):
    """Captured launches."""

    def replay(self) -> None:
        """Launch them again, on the current stream."""


class _Here(threading.local):
    pieces: "_Pieces | None" = None


_here = _Here()


def outside(function: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Call a function outside of CUDA graphs: now, and again at each replay if a step is being captured.

    Its result has the same shape and dtype at each call; under capture the tensor that is returned has a fixed address.
    """
    return function() if _here.pieces is None else _here.pieces.outside(function)


class _Pieces:
    """A step under capture, and its replay: CUDA graphs, and calls between them, in order."""

    def __init__(self, pool: Any) -> None:
        self._pool, self._calls = pool, list[Callable[[], object]]()
        self.graphs: list[accelerator.Graph] = []
        self.open: accelerator.Graph | None = None

    def begin(self) -> None:
        """Begin to capture a graph."""
        self.open = accelerator.Graph()
        self.open.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        """End the graph."""
        self.open.capture_end()
        self._calls.append(self.open.replay)
        self.graphs.append(self.open)
        self.open = None

    def outside(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call a function between two graphs."""
        self.end()
        result = torch.empty_like(function())  # its values are those of a step that has not run
        self._calls.append(lambda: result.copy_(function()))
        self.begin()
        return result

    def replay(self) -> None:
        """Launch the graphs and call the functions, on the current stream."""
        for call in self._calls:
            call()


class GraphRecorder:
    """Captures CUDA graphs in one memory pool: they never run concurrently, and results are copied out."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, accelerator.graph_pool_handle()
        self._stream: torch.Stream | None = None
        self._graphs: list[accelerator.Graph] = []

    def record(self, step: Callable[[], None], within: Callable[[], AbstractContextManager]) -> Recorded:
        """Warm up `step` on a side stream (compiles kernels, creates handles), then capture it."""
        stream = self._stream = self._stream or accelerator.Stream(self._device)
        current = accelerator.current_stream(self._device)
        stream.wait_stream(current)
        try:
            with accelerator.stream(stream):
                step()
                with within():
                    try:
                        pieces = self._capture(step)
                    except torch.OutOfMemoryError:  # in a capture, torch does not free the blocks that it caches
                        accelerator.empty_cache()
                        pieces = self._capture(step)
        finally:
            current.wait_stream(stream)
        self._graphs += pieces.graphs
        return pieces.graphs[0] if len(pieces.graphs) == 1 else pieces

    def _capture(self, step: Callable[[], None]) -> _Pieces:
        pieces = _here.pieces = _Pieces(self._pool)
        try:
            with without_collections():  # a tensor collected during capture would be freed within it
                try:
                    pieces.begin()
                    step()
                except BaseException:
                    self._give_up(pieces.open)
                    raise
                try:
                    pieces.end()
                except BaseException:
                    self._recover()
                    raise
        finally:
            _here.pieces = None
        return pieces

    def _give_up(self, graph: accelerator.Graph | None) -> None:
        """End the capture of a function that has raised; capture_end may fail, for example after a synchronization."""
        try:
            if graph is not None:
                graph.capture_end()
        except RuntimeError:
            self._recover()

    def _recover(self) -> None:
        """Reset torch's allocator and RNG state after a failed capture, which they take for active."""
        index = self._device.index if self._device.index is not None else accelerator.current_device()
        with contextlib.suppress(RuntimeError):
            end_allocate_to_pool(index, self._pool)
        empty = accelerator.Graph()
        empty.capture_begin(capture_error_mode="thread_local")
        empty.capture_end()
        _renew(torch.get_device_module(self._device).default_generators[index], self._device)

    def release(self) -> None:
        """Synchronize, then free the graphs and their pool."""
        if self._graphs:
            accelerator.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


@contextlib.contextmanager
def waits_noticed(device: torch.device) -> Iterator[Callable[[], str]]:
    """Yield what tells which line of Python has had torch wait for the GPU in the block, "" if none: such a one cannot
    be captured. Torch's mode for that is the process's, so that another thread's wait counts, too."""
    if device.type != accelerator.TYPE:
        yield lambda: ""
        return
    before = accelerator.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accelerator.set_sync_debug_mode("warn")
        try:
            yield lambda: next((f"{w.filename}:{w.lineno}" for w in said if "synchronizing" in str(w.message)), "")
        finally:
            accelerator.set_sync_debug_mode(before)


def _renew(generator: torch.Generator, device: torch.device) -> None:
    """Have a device's generator draw outside of captures again, with the numbers that it would have drawn."""
    state = generator.get_state()
    try:
        torch.empty(1, dtype=torch.float32, device=device).uniform_()
        generator.set_state(state)
    except RuntimeError:  # it takes the failed capture for active still
        generator.graphsafe_set_state(generator.clone_state())


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Suspend cyclic garbage collection."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
