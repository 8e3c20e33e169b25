"""`num_parameters` and `get_memory_footprint` of transformers' and diffusers' models, with weights in the tiers.

Their classes count `parameters()`, which swapped weights have left.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from vbrt.model.layer_registry import Registry

__all__ = ["COUNTS", "drop_counts", "set_counts"]


class _Count:
    """Override of one of a model's methods on the instance: the class's result, and that of the registry's weights."""

    def __init__(self, model: nn.Module, name: str, registry: Registry | None) -> None:
        self._model, self._name = weakref.ref(model), name
        self._registry = None if registry is None else weakref.ref(registry)
        functools.update_wrapper(self, getattr(type(model), name))

    def __call__(self, *args: Any, **kwargs: Any) -> int:
        model, registry = self._model(), None if self._registry is None else self._registry()
        plain = getattr(type(model), self._name).__get__(model)(*args, **kwargs)
        return plain + (0 if registry is None else COUNTS[self._name](model, registry, *args, **kwargs))

    # a copy of the model is attached anew, which sets its own

    def __reduce__(self) -> tuple:
        return _Count, (self._model(), self._name, None)

    def __deepcopy__(self, memo: dict) -> "_Count":
        model = self._model()
        return _Count(memo.get(id(model), model), self._name, None)


def _parameters(
    model: nn.Module, registry: Registry, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """Number of weights in the tiers; none of them trains."""
    return 0 if only_trainable else sum(_sizes(model, registry, exclude_embeddings=exclude_embeddings))


def _sizes(model: nn.Module, registry: Registry, *, exclude_embeddings: bool) -> Iterator[int]:
    for _, swap, _ in registry.swapped():
        tables = (isinstance(model.get_submodule(site.module), nn.Embedding) for site in swap.sites)
        if not (exclude_embeddings and any(tables)):
            yield from (site.parameters for site in (swap.site, *swap.parts))


def _footprint(_model: nn.Module, registry: Registry, return_buffers: bool = True) -> int:
    """Bytes of pages, each counted once whatever tiers hold copies, and of dense weights not encoded yet."""
    return registry.held_bytes()


#: methods of a model's class that count parameters, and what to add to each
COUNTS: dict[str, Callable[..., int]] = {"num_parameters": _parameters, "get_memory_footprint": _footprint}


def set_counts(model: nn.Module, registry: Registry) -> None:
    """Override the counting methods that the model's class has, until `drop_counts`."""
    for name in COUNTS:
        if callable(getattr(type(model), name, None)):
            model.__dict__[name] = _Count(model, name, registry)


def drop_counts(model: nn.Module) -> None:
    """Restore the class's methods. Idempotent."""
    for name in COUNTS:
        if isinstance(model.__dict__.get(name), _Count):
            del model.__dict__[name]
