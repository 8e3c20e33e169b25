"""A façade: a module that stands for a model and passes on everything that is not its own.

Attributes are read from, written to and deleted from the model unless the façade has them itself. Parameters, buffers
and modules are the model's, under the model's names, in walks as in state dicts, also where the wrapper is a part of
something larger: the wrapper shares the dicts that hold them, so that adapters and optimizers find what they would
find in the model. Casts are the model's, and so are hooks, which run in `vb.generate()` too. What Python and libraries
look up on the class (the signature of `forward`, `len()`, indexing) is put on a class made for the model's: `Trainer`
chooses the columns of a batch by that signature and how labels are smoothed by `_get_name()`, and `for layer in vb`
must find `__iter__` there.

The roads not taken: a subclass of the model's own class, on which everything that is defined there and calls `self`
would run, with hooks, caches and ties that only the model has; and the model as a child called "model", whose names
are those of no checkpoint: PEFT then saved no adapter of a wrapped model and loaded none, in silence.
"""

import functools
import inspect
import types
from typing import Any

from torch import nn

from vbrt.errors import WrapError

__all__ = ["Facade"]

_PROTOCOLS = (
    "__len__",
    "__bool__",
    "__iter__",
    "__reversed__",
    "__contains__",
    "__getitem__",
    "__setitem__",
    "__delitem__",
    "__add__",
    "__iadd__",
    "__mul__",
    "__imul__",
    "__rmul__",
    "__or__",
    "__ior__",
    "__ror__",
)
_FIXED = ("model", "plan", "runtime", "settings", "stack")
_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_load_state_dict_post_hooks")
_PASSED_ON = (
    "add_module",
    "register_buffer",
    "register_parameter",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
    "_load_from_state_dict",
    "get_extra_state",
    "set_extra_state",
    "named_modules",
    "get_submodule",
    "set_submodule",
    "get_parameter",
    "get_buffer",
    "apply",
    "train",
    "eval",
    "_apply",
    "to",
    "to_empty",
    "type",
    "cpu",
    "cuda",
    "half",
    "float",
    "double",
    "bfloat16",
    "share_memory",
    "zero_grad",
    "extra_repr",
    "_get_name",
)


class Facade(nn.Module):
    """A module that stands for `model`. `own`: the façade's attributes; all others are the model's."""

    def __new__(cls, model: nn.Module, *args: Any, **kwargs: Any) -> "Facade":
        return _blank(cls, type(model), type(_described(model)))

    def __init__(self, model: nn.Module, **own: Any) -> None:
        super().__init__()
        del self.__dict__["training"]  # the model's is the only one
        self.__dict__.update(own, model=model)
        self._share()

    def _share(self) -> None:
        self.__dict__.update((name, self.model.__dict__[name]) for name in _SHARED)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._share()

    # -- attributes ---------------------------------------------------------------------------------------------------

    def _owns(self, name: str, value: Any = None) -> bool:
        """True for the façade's own attributes, and for its own methods under another name, as accelerate keeps
        `forward`."""
        of_self = isinstance(value, types.MethodType) and value.__self__ is self
        return of_self or name in self.__dict__ or hasattr(type(self), name)

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("model")  # absent in one that is being unpickled
        if model is None or name.startswith("__"):
            return super().__getattr__(name)
        return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse_fixed(name)
        if self._owns(name, value):
            super().__setattr__(name, value)
        else:
            setattr(self.model, name, value)

    def __delattr__(self, name: str) -> None:
        _refuse_fixed(name)
        if self._owns(name):
            super().__delattr__(name)
        else:
            delattr(self.model, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.model)})

    # -- state dicts --------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict:
        """Return the model's state dict: decoded weights under the dense model's names."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load dense weights; one at a time is encoded."""
        return self.model.load_state_dict(*args, **kwargs)

    # -- copies -------------------------------------------------------------------------------------------------------

    def __copy__(self) -> "Facade":
        raise WrapError(
            "copy.copy() of a wrapped model would make two owners of one model; copy.deepcopy() makes a "
            "model of its own, and `vb.model` is the model itself"
        )

    def __reduce_ex__(self, protocol: int) -> tuple:
        kinds = type(self).__bases__[0], type(self.model), type(_described(self.model))
        return _blank, kinds, self.__getstate__()


def _refuse_fixed(name: str) -> None:
    if name in _FIXED:
        raise WrapError(
            f"vb.{name} belongs to the wrapper and to the pages of its model, and stays: unwrap() and wrap "
            f"again for another one. A model's own attribute of this name is vb.model.{name}"
        )


def _described(model: nn.Module) -> nn.Module:
    """Return the module whose forward declares the model's arguments: PEFT's own takes anything."""
    ask = getattr(model, "get_base_model", None)
    return ask() if callable(ask) else model


def _blank(base: type[Facade], model_class: type[nn.Module], described: type[nn.Module]) -> Facade:
    return nn.Module.__new__(_class_for(base, model_class, described))


@functools.cache
def _class_for(base: type[Facade], model_class: type[nn.Module], described: type[nn.Module]) -> type[Facade]:
    """Make a subclass of a façade's class with the members that are looked up on a model's class."""
    passed_on = [name for name in (*_PROTOCOLS, *_PASSED_ON) if hasattr(model_class, name) and not _is_own(base, name)]
    members = {name: _passed_on(name) for name in passed_on}
    members["forward"] = _with_signature(base.forward, described.forward)
    members["__module__"] = base.__module__
    return type(f"Wrapped{model_class.__name__}", (base,), members)


def _is_own(base: type[Facade], name: str) -> bool:
    """True for what a façade's class does otherwise than the model."""
    kinds = base.__mro__
    return any(name in kind.__dict__ for kind in kinds[: kinds.index(nn.Module)])


def _passed_on(name: str) -> types.FunctionType:
    def method(self: Facade, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.model, name)(*args, **kwargs)
        return self if result is self.model else result

    method.__name__, method.__doc__ = name, "The model's."
    return method


def _with_signature(forward: types.FunctionType, other: Any) -> types.FunctionType:
    """Return a copy of `forward` with the signature of `other`."""
    copied = types.FunctionType(
        forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copied.__doc__, copied.__qualname__, copied.__module__ = forward.__doc__, forward.__qualname__, forward.__module__
    try:
        copied.__signature__ = inspect.signature(other)
    except (TypeError, ValueError):  # compiled modules have none
        copied.__annotations__ = forward.__annotations__
    return copied
