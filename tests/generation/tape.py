"""A recorder for machines without a GPU: operations are kept with the tensors that they ran on, and run again on these.

As a CUDA graph does, a tape runs none of the recorded Python, keeps every number that Python knew, reads and writes the
same memory each time, and cannot record what waits for a result (`item`, `nonzero`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vbrt.generation.step_graph import Program

__all__ = ["TapeRecorder"]

WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::unique_dim", "aten::_unique2", "aten::masked_select")


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in WAITING or func._schema.name == "aten::equal":
            raise RuntimeError(f"operation not permitted when stream is capturing: {func._schema.name}")
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.operations:
            if not func.is_view:
                now = func(*args, **kwargs)
                for kept, tensor in zip(tree_leaves(out), tree_leaves(now), strict=True):
                    if isinstance(kept, torch.Tensor) and kept.data_ptr() != tensor.data_ptr():
                        kept.copy_(tensor)


class TapeRecorder:
    """See `vbrt.generation.recorders.Recorder`. `made`: tapes that are held."""

    program, saves_us = Program, 0.0

    def __init__(self) -> None:
        self.made: list[Tape] = []

    def record(self, step: Callable[[], None], within: Callable[[], AbstractContextManager]) -> Tape:
        tape = Tape()
        with within(), tape:
            step()
        self.made.append(tape)
        return tape

    def release(self) -> None:
        for tape in self.made:
            tape.operations.clear()
        self.made.clear()
