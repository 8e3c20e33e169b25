"""What a step writes to beside its cache and its inputs: states that a model keeps in buffers and other tensors.

A step that is recorded runs, and one that is checked runs more than once; a model's states must not notice.
"""

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor

from vbrt.generation.static.static_cache import Undo
from vbrt.host.host_memory import storage_of

__all__ = ["Written"]


class Written:
    """Tensors that a step has written to, and what was in them before."""

    def __init__(self, apart: Iterable[Tensor]) -> None:
        """apart: tensors whose memory somebody else looks after."""
        self._apart = {storage_of(tensor) for tensor in apart}
        self._before: list[tuple[Tensor, Tensor]] = []
        self._tensors: list[Tensor] = []

    def note(self, tensor: Tensor) -> None:
        """Copy what is in a tensor that was there before the step, which is about to write to it."""
        if storage_of(tensor) not in self._apart:
            self._before.append((tensor, tensor.clone()))

    def undo(self) -> None:
        """Put back what was there before all that was noted, and keep no copies."""
        before, self._before = self._before, []
        for tensor, held in reversed(before):
            tensor.copy_(held)
        self._tensors = list({id(tensor): tensor for tensor, _ in before}.values())

    @contextlib.contextmanager
    def undone(self, undo: Undo | None = None) -> Iterator[None]:
        """Undo, on leaving, what a step in the block has done to these tensors, unless `undo` says not to."""
        held = [tensor.clone() for tensor in self._tensors]
        try:
            yield
        finally:
            for tensor, before in zip(self._tensors, held, strict=True) if undo is None or undo.wanted else ():
                tensor.copy_(before)
