"""Progress display of the first pass, which encodes the weights and may take a minute."""

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from vbrt.report.progress import Progress

if TYPE_CHECKING:
    from vbrt.model.layer_registry import Registry

__all__ = ["show_encoding"]


def show_encoding(model: nn.Module, registry: "Registry") -> None:
    """Show the encoded share of the dense weights until the end of the forward that begins.

    Layers count nothing: the drawing thread polls which weights are still dense.
    """
    total = registry.shell_bytes()
    if total:
        _Encoding(model, registry, total)


def _nothing() -> "_Encoding":
    """Return an inert instance, for an unpickled model."""
    encoding = object.__new__(_Encoding)
    encoding._hook = encoding._work = None
    return encoding


class _Encoding:
    """Forward hook that ends the display and removes itself."""

    def __init__(self, model: nn.Module, registry: "Registry", total: int) -> None:
        layers = weakref.ref(registry)

        def encoded() -> int:
            found = layers()
            return total if found is None else total - found.shell_bytes()

        self._work = Progress("encoding", total, measure=encoded)
        self._hook = model.register_forward_hook(self._end, always_call=True)
        self._work.__enter__()

    def __deepcopy__(self, memo: dict) -> "_Encoding":
        return self  # left by an interrupted forward; it shows the original model

    def __reduce__(self) -> tuple:
        return _nothing, ()

    def _end(self, *_: Any) -> None:
        if self._work is not None:
            self._hook.remove()
            self._work.__exit__(None, None, None)
