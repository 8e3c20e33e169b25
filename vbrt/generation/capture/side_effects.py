"""Side effects of a captured step: snapshot and restore mutated buffers, besides the cache and the inputs.

Capture and checks run a step more often than the caller asked for; the model's state must not show it.
"""

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor

from vbrt.generation.static.static_cache import Undo
from vbrt.host.host_memory import storage_of

__all__ = ["Written"]


class Written:
    """Tensors that a step mutates, with their contents before it."""

    def __init__(self, apart: Iterable[Tensor]) -> None:
        """apart: tensors excluded because the caller snapshots them (the cache, the inputs)."""
        self._apart = {storage_of(tensor) for tensor in apart}
        self._before: list[tuple[Tensor, Tensor]] = []
        self._tensors: list[Tensor] = []

    def note(self, tensor: Tensor) -> None:
        """Snapshot a tensor that existed before the step and is about to be written to."""
        if storage_of(tensor) not in self._apart:
            self._before.append((tensor, tensor.clone()))

    def undo(self) -> None:
        """Restore all snapshots and drop them; remember the tensors."""
        before, self._before = self._before, []
        for tensor, held in reversed(before):
            tensor.copy_(held)
        self._tensors = list({id(tensor): tensor for tensor, _ in before}.values())

    @property
    def any(self) -> bool:
        """True if there are such tensors."""
        return bool(self._tensors)

    @contextlib.contextmanager
    def undone(self, undo: Undo | None = None) -> Iterator[None]:
        """Restore the tensors on exit, unless `undo.wanted` is False by then."""
        held = [tensor.clone() for tensor in self._tensors]
        try:
            yield
        finally:
            for tensor, before in zip(self._tensors, held, strict=True) if undo is None or undo.wanted else ():
                tensor.copy_(before)
