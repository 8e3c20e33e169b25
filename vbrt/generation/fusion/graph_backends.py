"""Recorders: capture what a function launches, and replay it.

    tape = recorder.record(step, within)   # `step` reads and writes tensors at static addresses
    tape.replay()                          # the same kernels on the same addresses, without step's Python

`CudaRecorder` captures a CUDA graph. `CpuRecorder` keeps the step itself, which runs a `Tape`. Any
object with the members of `Recorder` can be used in their place.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from vbrt.generation.fusion.cpu_tape import RowsTape, Tape
from vbrt.generation.fusion.step_graph import Program, StepGraph
from vbrt.generation.fusion.step_rows import Given, RowsProgram
from vbrt.host import accelerator
from vbrt.tiers.schedule.graph_recorder import GraphRecorder, Recorded

__all__ = ["CpuRecorder", "CudaRecorder", "Recorder", "recorder_for"]


class Recorder(Protocol):
    """Captures a function's launches on a device.

    Attributes:
        lossless: True if it may also capture steps of models with lossless weights.
    """

    lossless: bool

    def program(self, step: StepGraph, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return a runner of a step graph, on exactly these inputs."""

    def rows(self, step: StepGraph, rows: Sequence[Given]) -> Callable[[], list[Any]]:
        """Return a runner of a step graph for several rows, each with other tensors in place of some of its own."""

    def record(self, step: Callable[[], None], within: Callable[[], AbstractContextManager]) -> Recorded:
        """Capture a function.

        Args:
            step: may run more than once; may not have run when this returns.
            within: gives a context manager, entered once, around the captured run.

        Raises:
            Exception: whatever they raise, or the device's error if the function synchronizes; nothing is captured
                then.
        """

    def release(self) -> None:
        """Free what captures hold. Idempotent; they must not be replayed afterwards."""


class CudaRecorder(GraphRecorder):
    """Captures CUDA graphs of step graphs, lossless weights included."""

    program, rows, lossless = Program, RowsProgram, True


class _Again:
    def __init__(self, step: Callable[[], None]) -> None:
        self.replay = step


class CpuRecorder:
    """Captures steps that run CPU tapes: a replay calls the function, with little Python left in it."""

    program, rows, lossless = Tape, RowsTape, False

    def record(self, step: Callable[[], None], within: Callable[[], AbstractContextManager]) -> _Again:
        """Keep the function without running it."""
        with within():
            return _Again(step)

    def release(self) -> None:
        """No-op: tapes are freed with their captures."""


def recorder_for(device: torch.device) -> Recorder | None:
    """Return the recorder for a device; None if it has none."""
    if device.type == accelerator.TYPE and "graphs" not in accelerator.LACKS:
        return CudaRecorder(device)
    return CpuRecorder() if device.type == "cpu" else None
