"""Methods of transformers' and diffusers' models that look among `parameters()`, which swapped weights have left:
`num_parameters`, `get_memory_footprint`, `tie_weights`.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from vbrt.model.layer_registry import Registry

__all__ = ["METHODS", "drop_methods", "set_methods"]

_Plain = Callable[..., Any]


class _Method:
    """Override of one of a model's methods on the instance: what the class's does, with the registry's weights."""

    def __init__(self, model: nn.Module, name: str, registry: Registry | None) -> None:
        self._model, self._name = weakref.ref(model), name
        self._registry = None if registry is None else weakref.ref(registry)
        functools.update_wrapper(self, getattr(type(model), name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model, registry = self._model(), None if self._registry is None else self._registry()
        plain = getattr(type(model), self._name).__get__(model)
        if registry is None:
            return plain(*args, **kwargs)
        return METHODS[self._name](plain, model, registry, *args, **kwargs)

    # a copy of the model is attached anew, which sets its own

    def __reduce__(self) -> tuple:
        return _Method, (self._model(), self._name, None)

    def __deepcopy__(self, memo: dict) -> "_Method":
        model = self._model()
        return _Method(memo.get(id(model), model), self._name, None)


def _parameters(
    plain: _Plain, model: nn.Module, registry: Registry, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """Add the number of weights in the tiers; none of them trains."""
    sizes = () if only_trainable else _sizes(model, registry, exclude_embeddings=exclude_embeddings)
    return plain(only_trainable, exclude_embeddings) + sum(sizes)


def _sizes(model: nn.Module, registry: Registry, *, exclude_embeddings: bool) -> Iterator[int]:
    for _, swap, _ in registry.swapped():
        tables = (isinstance(model.get_submodule(site.module), nn.Embedding) for site in swap.sites)
        if not (exclude_embeddings and any(tables)):
            yield from (site.parameters for site in (swap.site, *swap.parts))


def _footprint(plain: _Plain, _model: nn.Module, registry: Registry, *args: Any, **kwargs: Any) -> int:
    """Add the bytes of pages, each counted once whatever tiers hold copies, and of dense weights not encoded yet."""
    return plain(*args, **kwargs) + registry.held_bytes()


def _tie(plain: _Plain, model: nn.Module, registry: Registry, *args: Any, **kwargs: Any) -> Any:
    """Leave ties as they are where a tied weight is in the tiers, of which all its layers are; but while loading."""
    modules = {site.module for _, swap, _ in registry.swapped() for site in swap.sites}
    tied = (name for pair in getattr(model, "all_tied_weights_keys", {}).items() for name in pair)
    if not args and kwargs.get("missing_keys") is None and any(name.rpartition(".")[0] in modules for name in tied):
        return None
    return plain(*args, **kwargs)


#: methods of a model's class, and what an instance does instead: each gets the class's own first
METHODS: dict[str, Callable[..., Any]] = {
    "num_parameters": _parameters,
    "get_memory_footprint": _footprint,
    "tie_weights": _tie,
}


def set_methods(model: nn.Module, registry: Registry) -> None:
    """Override the methods that the model's class has, until `drop_methods`."""
    for name in METHODS:
        if callable(getattr(type(model), name, None)):
            model.__dict__[name] = _Method(model, name, registry)


def drop_methods(model: nn.Module) -> None:
    """Restore the class's methods. Idempotent."""
    for name in METHODS:
        if isinstance(model.__dict__.get(name), _Method):
            del model.__dict__[name]
