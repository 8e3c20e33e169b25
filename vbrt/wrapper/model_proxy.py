"""Facade: an nn.Module that proxies a model and delegates everything that is not its own.

Attributes are read, written and deleted on the model. Where a public name of the facade's API exists on the model too
(LlamaForCausalLM.model, SentenceTransformer.save), the model's wins: names in state dicts and walks are attribute
paths, by which torch.distributed.checkpoint, torch.export and others find parameters. `vb.vbrt` has the API under its
own names, whatever the model has. `FIXED` lists names that stay the facade's; `_attachment` and `_vb_*` are private.

Parameters, buffers and modules are the model's, under its names, in walks and state dicts, also where the wrapper is
part of a larger module: the wrapper shares the model's dicts, so that adapters and optimizers find the same as in the
model. Casts and hooks are the model's too; hooks also run in `vb.generate()`. Lookups on the class (its name, the
signature of `forward`, `len()`, indexing) need a class made for the model's: `Trainer` selects batch columns by that
signature and label smoothing by `_get_name()`, pipelines look the class's name up in lists, and `for layer in vb` needs
`__iter__` there. `isinstance` takes a wrapper for a model of its model's class as well: PEFT leaves out the head of a
PreTrainedModel for "all-linear", and `Trainer` saves a PeftModel's adapters alone.

Rejected: a subclass of the model's class, whose inherited methods would run on `self`, while only the model has the
hooks, caches and ties; and the model as a child named "model", whose names match no checkpoint: PEFT then silently
saved no adapter of a wrapped model and loaded none.
"""

import contextlib
import functools
import inspect
import types
from typing import Any

from torch import nn

from vbrt.errors import WrapError, first_line
from vbrt.host import accelerator
from vbrt.layers import SwappedLayer

__all__ = ["FIXED", "Facade", "Own", "own_names"]

#: API names that always stay the facade's: they do for the wrapped model what the model's own do for a plain one;
#: `vbrt` leads to the whole API
FIXED = ("device", "forward", "load_state_dict", "state_dict", "vbrt", "zero_grad")

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
_ABSENT = object()
_ANY_ARGUMENTS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
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


#: methods that move a model, and fail where torch has no such device
_MOVES = ("to", "cuda")


class Own:
    """`vb.vbrt`: the facade's API under its own names, whatever attributes the model has."""

    def __init__(self, facade: "Facade") -> None:
        self.__dict__["_facade"] = facade

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in dir(self):
            raise AttributeError(f"vb.vbrt has no {name!r}; it has {', '.join(dir(self))}")
        return inspect.getattr_static(self._facade._vb_base, name).__get__(self._facade, type(self._facade))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"vb.vbrt.{name} is the wrapper's; attributes of the model are set on vb, or vb.vbrt.module"
        )

    def __dir__(self) -> list[str]:
        return sorted(own_names(self._facade._vb_base))

    def __repr__(self) -> str:
        return f"<vbrt's side of a wrapped {self._facade._get_name()}: {', '.join(dir(self))}>"


class Facade(nn.Module):
    """Proxy of `model`. `own`: the facade's attributes; all others are the model's."""

    _vb_base: type["Facade"]  # of the class made for a model's class

    def __new__(cls, model: nn.Module, *args: Any, **kwargs: Any) -> "Facade":
        return _blank(cls, type(model), type(_described(model)))

    def __init__(self, model: nn.Module, **own: Any) -> None:
        super().__init__()
        del self.__dict__["training"]  # only the model has one
        self.__dict__.update(own, _vb_model=model)
        _share(self)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        _share(self)

    @property
    def __class__(self) -> type:
        """The model's class: `isinstance` takes a wrapper for its model, as PEFT, Trainer and TRL ask what they have.
        `type(vb)` is the wrapper's. A class that is set, as `fully_shard` does, is the model's."""
        model = self.__dict__.get("_vb_model")  # absent while unpickling
        return type(self) if model is None else model.__class__

    @__class__.setter
    def __class__(self, value: type) -> None:
        self._vb_model.__class__ = value

    @property
    def module(self) -> nn.Module:
        """The model itself, with VB layers in it, for `isinstance` and code that must not see a wrapper."""
        return self._vb_model

    @property
    def model(self) -> nn.Module:
        """Same as `module`, unless the model has a `model` attribute, as most transformers models do."""
        return self._vb_model

    @property
    def vbrt(self) -> Own:
        """The wrapper's API, for models that use the same names: `vb.vbrt.save(...)`."""
        return Own(self)

    # -- attributes ---------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("_vb_model")  # absent while unpickling
        if model is None or name.startswith("__"):
            return super().__getattr__(name)
        return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if _keeps(self, name, value):
            super().__setattr__(name, value)
        else:
            setattr(self._vb_model, name, value)

    def __delattr__(self, name: str) -> None:
        if _keeps(self, name):
            super().__delattr__(name)
        else:
            delattr(self._vb_model, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *self.__dict__, *dir(self._vb_model)})

    # -- state dicts --------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict:
        """Return the model's state dict: decoded weights under the dense model's names."""
        return self._vb_model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load dense weights, encoding one at a time."""
        return self._vb_model.load_state_dict(*args, **kwargs)

    # -- copies -------------------------------------------------------------------------------------------------------

    def __copy__(self) -> "Facade":
        raise WrapError(
            "copy.copy() of a wrapped model would make two owners of one model; copy.deepcopy() makes a "
            "model of its own, and `vb.module` is the model itself"
        )

    def __reduce_ex__(self, protocol: int) -> tuple:
        kinds = self._vb_base, type(self._vb_model), type(_described(self._vb_model))
        return _blank, kinds, self.__getstate__()


def _share(facade: Facade) -> None:
    facade.__dict__.update((name, facade._vb_model.__dict__[name]) for name in _SHARED)


def _keeps(facade: Facade, name: str, value: Any = None) -> bool:
    """True for attributes set on the facade, not the model: those it has already, and its own methods under another
    name, as accelerate keeps `forward`. Raises WrapError: an API name that the model does not use."""
    if isinstance(value, types.MethodType) and value.__self__ is facade:
        return True
    if name in FIXED or name not in own_names(facade._vb_base):
        return name in facade.__dict__ or hasattr(facade._vb_base, name)
    if not _has(facade._vb_model, name):
        raise WrapError(
            f"vb.{name} belongs to the wrapper and to the pages of its model, and stays: unwrap() and wrap again for "
            f"another one. To give the model an attribute of this name, set vb.vbrt.module.{name}; vb.{name} is the "
            "model's then"
        )
    return False


@functools.cache
def own_names(base: type[Facade]) -> frozenset[str]:
    """Return the public names of a facade's API: those defined by its classes."""
    kinds = (kind for kind in base.__mro__ if kind not in (nn.Module, object))
    return frozenset(name for kind in kinds for name in vars(kind) if not name.startswith("_"))


def _has(model: nn.Module, name: str) -> bool:
    return getattr(model, name, _ABSENT) is not _ABSENT


def _described(model: nn.Module) -> nn.Module:
    """Return the module whose forward declares the model's arguments; PEFT's takes any."""
    ask = getattr(model, "get_base_model", None)
    return ask() if callable(ask) else model


def _blank(base: type[Facade], model_class: type[nn.Module], described: type[nn.Module]) -> Facade:
    return nn.Module.__new__(_class_for(base, model_class, described))


@functools.cache
def _class_for(base: type[Facade], model_class: type[nn.Module], described: type[nn.Module]) -> type[Facade]:
    """Make a subclass of a facade's class, with the model class's name and its class-level members."""
    there = [name for name in (*_PROTOCOLS, *_PASSED_ON, *_overridden(model_class)) if hasattr(model_class, name)]
    members: dict[str, Any] = {
        name: _passed_on(name, getattr(model_class, name)) for name in there if not _is_own(base, name)
    }
    members |= {name: _yielding(name, base) for name in own_names(base).difference(FIXED)}
    members["forward"] = _with_signature(base.forward, described.forward)
    members |= {"__module__": base.__module__, "__qualname__": f"{base.__qualname__}.{model_class.__name__}"}
    return type(model_class.__name__, (base,), members | {"_vb_base": base})


def _overridden(model_class: type[nn.Module]) -> list[str]:
    """Return nn.Module's public names that the model's class overrides; and `generate`, a method of the facade's class
    so that `vbrt.wrap(...).generate` keeps the facade alive."""
    names = [name for name in vars(nn.Module) if not name.startswith("_")]
    names = (
        [] if issubclass(model_class, SwappedLayer) else names
    )  # what such a layer overrides is vbrt's, not a model's
    own = [name for name in names if getattr(model_class, name, None) is not getattr(nn.Module, name)]
    return [*(name for name in own if isinstance(getattr(model_class, name), types.FunctionType)), "generate"]


def _yielding(name: str, base: type[Facade]) -> property:
    """Return a class member that reads the model's attribute of its name, if the model has one, else the facade's."""
    own = inspect.getattr_static(base, name)
    read_own = own.fget if isinstance(own, property) else None  # torch.compile traces neither own.__get__ nor own.fget

    def read(self: Facade) -> Any:
        theirs = getattr(self._vb_model, name, _ABSENT)
        if theirs is not _ABSENT:
            return theirs
        return types.MethodType(getattr(base, name), self) if read_own is None else read_own(self)

    return property(read, doc=own.__doc__)


def _is_own(base: type[Facade], name: str) -> bool:
    """True for members that a facade's class overrides."""
    kinds = base.__mro__
    return any(name in kind.__dict__ for kind in kinds[: kinds.index(nn.Module)])


def _passed_on(name: str, of_class: Any) -> types.FunctionType:
    def method(self: Facade, *args: Any, **kwargs: Any) -> Any:
        try:
            result = getattr(self._vb_model, name)(*args, **kwargs)
        except (AssertionError, RuntimeError) as error:
            if name not in _MOVES or accelerator.is_used():
                raise
            raise WrapError(
                f"vb.{name}(...): {first_line(error)}. Leave it out: the model computes where its tiers are, on "
                f"{self.device}, and takes a GPU by itself where there is one"
            ) from error
        return self if result is self._vb_model else result

    method.__name__, method.__doc__ = name, of_class.__doc__
    with contextlib.suppress(TypeError, ValueError):  # C functions may have no signature
        method.__signature__ = inspect.signature(of_class)
    return method


def _with_signature(forward: types.FunctionType, other: Any) -> types.FunctionType:
    """Return a copy of `forward` with the signature of `other`, which torch.fx finds by unwrapping it."""
    copied = types.FunctionType(
        forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copied.__doc__, copied.__qualname__, copied.__module__ = forward.__doc__, forward.__qualname__, forward.__module__
    try:
        copied.__signature__ = inspect.signature(other)
    except (TypeError, ValueError):  # compiled modules have none
        copied.__annotations__ = forward.__annotations__
    innermost = inspect.unwrap(other)
    if isinstance(innermost, types.FunctionType) and not innermost.__code__.co_flags & _ANY_ARGUMENTS:
        copied.__wrapped__ = innermost  # for others, torch.fx would see wrong parameters
    return copied
