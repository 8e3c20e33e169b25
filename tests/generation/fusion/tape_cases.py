"""A recorder for machines without a GPU: operations are kept with the tensors that they ran on, and run again on these.

As a CUDA graph does, a tape runs none of the recorded Python, keeps every number that Python knew, reads and writes the
same memory each time, and cannot record what waits for a result (`item`, `nonzero`). What the graph of a step calls
that is no operator of torch is kept as one operation, as a kernel is whose C code torch does not see: 4-bit layers,
attention, norms.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from vbrt.generation.fusion.step_graph import Program
from vbrt.generation.fusion.step_rows import RowsProgram

__all__ = ["TapeRecorder"]

WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::unique_dim", "aten::_unique2", "aten::masked_select")


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in WAITING or func._schema.name == "aten::equal":
            raise RuntimeError(f"operation not permitted when stream is capturing: {func._schema.name}")
        return self.kept(func, args, kwargs or {})

    def kept(self, func, args: tuple, kwargs: dict) -> Any:
        """Run an operation now, and in each replay."""
        with _disable_current_modes():
            out = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.operations:
            if not getattr(func, "is_view", False):
                now = func(*args, **kwargs)
                for kept, tensor in zip(tree_leaves(out), tree_leaves(now), strict=True):
                    if isinstance(kept, torch.Tensor) and kept.data_ptr() != tensor.data_ptr():
                        kept.copy_(tensor)


class TapedProgram(Program):
    """A program whose calls of Python functions a tape keeps, where it records one."""

    def __init__(self, step, inputs) -> None:
        super().__init__(step, inputs)
        for node in self._steps:
            if not isinstance(node.target, torch._ops.OpOverload) and _gives_tensors(node):
                node.target = _Kept(node.target)


class _Kept:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.__name__ = function, getattr(function, "__name__", "")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tape = _get_current_dispatch_mode()
        if isinstance(tape, Tape):
            return tape.kept(self._function, args, kwargs)
        return self._function(*args, **kwargs)


def _gives_tensors(node) -> bool:
    is_part = getattr(node.target, "__name__", "") in ("getitem", "_item")
    return node.meta.get("val") is not None and not is_part


class TapeRecorder:
    """See `vbrt.generation.fusion.graph_backends.Recorder`. `made`: tapes that are held."""

    program, rows, lossless = TapedProgram, RowsProgram, True

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
