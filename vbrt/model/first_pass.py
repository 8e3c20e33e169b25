"""The first pass of a wrapped model encodes its weights, which may take a minute: it shows how far it is."""

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from vbrt.report.progress import Progress

if TYPE_CHECKING:
    from vbrt.model.layer_registry import Registry

__all__ = ["show_encoding"]


def show_encoding(model: nn.Module, registry: "Registry") -> None:
    """Show, from now to the end of the forward that begins, how much of the dense weights is encoded.

    Nobody counts in the layers: what is still dense is looked up by the thread that draws.
    """
    total = registry.shell_bytes()
    if total:
        _Encoding(model, registry, total)


def _nothing() -> "_Encoding":
    """Return what is left of it in a model that is unpickled."""
    encoding = object.__new__(_Encoding)
    encoding._hook = encoding._work = None
    return encoding


class _Encoding:
    """A hook behind one forward, which it ends with."""

    def __init__(self, model: nn.Module, registry: "Registry", total: int) -> None:
        layers = weakref.ref(registry)

        def encoded() -> int:
            found = layers()
            return total if found is None else total - found.shell_bytes()

        self._work = Progress("encoding", total, measure=encoded)
        self._hook = model.register_forward_hook(self._end, always_call=True)
        self._work.__enter__()

    def __deepcopy__(self, memo: dict) -> "_Encoding":
        return self  # a forward that was interrupted has left it: what it shows is the other model's

    def __reduce__(self) -> tuple:
        return _nothing, ()

    def _end(self, *_: Any) -> None:
        if self._work is not None:
            self._hook.remove()
            self._work.__exit__(None, None, None)
