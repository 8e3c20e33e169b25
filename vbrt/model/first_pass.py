"""Progress display of the first pass, which encodes the weights and may take a minute."""

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from vbrt.report.progress import Progress

if TYPE_CHECKING:
    from vbrt.model.layer_registry import Registry

__all__ = ["EncodingHook", "show_encoding"]


def show_encoding(model: nn.Module, registry: "Registry") -> None:
    """Show the encoded share of the dense weights until the end of the forward that begins.

    Layers count nothing: the drawing thread polls which weights are still dense.
    """
    total = registry.shell_bytes()
    if total:
        EncodingHook(model, registry, total)


def _nothing() -> "EncodingHook":
    """Return an inert instance, for an unpickled model."""
    encoding = object.__new__(EncodingHook)
    encoding._hook = encoding._work = None
    return encoding


class EncodingHook:
    """Forward hook that ends the display, and removes itself if it is the last one; else `ShellsHook` does."""

    def __init__(self, model: nn.Module, registry: "Registry", total: int) -> None:
        layers = weakref.ref(registry)

        def encoded() -> int:
            found = layers()
            return total if found is None else total - found.shell_bytes()

        self._work = Progress("encoding", total, measure=encoded)
        self._hook = model.register_forward_hook(self, always_call=True)
        self._work.__enter__()

    def __deepcopy__(self, memo: dict) -> "EncodingHook":
        return self  # left by an interrupted forward; it shows the original model

    def __reduce__(self) -> tuple:
        return _nothing, ()

    def __call__(self, model: nn.Module, *_: Any) -> None:
        """End the display."""
        if self._work is not None:
            if next(reversed(model._forward_hooks)) == self._hook.id:  # torch walks over them after an error
                self._hook.remove()
            self._work.__exit__(None, None, None)
            self._work = None
