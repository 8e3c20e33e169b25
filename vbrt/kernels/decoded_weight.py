"""DecodedWeight: the temporary returned by `.weight` of a VB layer; a write to it updates the layer.

Tied layers return the same temporary. Only the temporary holds its memory until it is written to; the owner has a weak
reference. A write to it or to a view of it becomes the layer's weight.

Writes are detected by torch's version counter. Every method of a temporary, and of the views that its methods return
(`.data` is one), compares it afterwards. Writes outside of methods, such as those of a compiled function, bump it too:
the owner checks it before using its planes, and so does the temporary's `__del__`. Memory outside of torch has no
counter: numpy arrays are read-only, and DLPack is refused. Addresses serve for reading only.

Roads not taken: `__torch_function__` would intercept torch functions as well, but torch disables its fast paths for
such tensors (nn.TransformerEncoder's has other values at padded positions than the slow one). A `__torch_dispatch__`
subclass has no memory of its own for numpy, and every transform and tracer of torch would need support for it.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from vbrt.kernels.uncompiled import uncompiled
from vbrt.libraries.torch_api import disabled_torch_function, has_storage

__all__ = ["DecodedWeight", "Owner"]

_BASE = torch.Tensor
_VIEWS = ("T", "mT", "H", "mH", "real", "imag")  # properties; all methods are wrapped
_NOT_FOLLOWED = {
    "__new__",
    "__init__",
    "__init_subclass__",
    "__subclasshook__",
    "__class__",
    "__getattribute__",
    "__delattr__",
    "__dir__",
    "__hash__",
    "__sizeof__",
    "__torch_dispatch__",
    "__reduce__",
    "as_subclass",
    "_make_subclass",
    "_make_wrapper_subclass",
}


def _nobody() -> None:
    """Owner of a tensor that has become a parameter: none."""


class Owner(Protocol):
    """The layer side of a temporary."""

    def check(self, weight: torch.Tensor) -> None:
        """Raise WrapError for a tensor that cannot replace the weight."""

    def refuse(self, what: str) -> None:
        """Raise WrapError for an unsupported operation on the weight."""

    def take_over(self, weight: torch.Tensor) -> None:
        """Adopt this tensor as the weight. Raises WrapError if the weight cannot change."""

    def died_written(self, weight: torch.Tensor) -> None:
        """Adopt the content of a deleted temporary. Called from `__del__`: must neither block nor raise."""

    def thaw(self, weight: "DecodedWeight") -> None:
        """Turn the temporary into a trainable parameter. Raises WrapError if that is not possible."""

    def freeze(self) -> None:
        """Mark the weight as frozen: later conversions back to a parameter set requires_grad=False."""


class DecodedWeight(torch.Tensor):
    """A decoded weight, or a view of one. Results that share no memory with it, copies and pickles are plain tensors;
    `nn.Parameter` of it is an independent parameter."""

    __torch_function__ = disabled_torch_function
    _owner: Callable[[], "Owner | None"]
    _root: "torch.Tensor | None"  # base of a view, which it keeps alive
    _seen: int  # version known to the owner

    @classmethod
    def of(cls, owner: Callable[[], Owner | None], weight: torch.Tensor) -> "DecodedWeight":
        """Wrap `weight`, just decoded or still dense, for the owner that `owner()` returns; no copy."""
        with torch.inference_mode(False):  # inference tensors have no version counter
            decoded = torch.Tensor._make_subclass(cls, weight.clone() if weight.is_inference() else weight)
        decoded.lend(owner)
        return decoded

    def lend(self, owner: Callable[[], Owner | None]) -> None:
        """Represent the current weight of the owner that `owner()` returns."""
        self._owner, self._root = owner, None
        self.settle()

    def settle_at(self, version: int) -> None:
        """Set the version known to the owner."""
        self._seen = version

    def move(self, values: torch.Tensor) -> None:
        """Rebind to these values, known to the owner, without a copy; the old memory is left as it is."""
        _BASE.data.__set__(self, values)
        self.settle()

    @property
    def owner(self) -> Owner | None:
        """The owner; None for a view, and once the owner is gone."""
        return self._owner() if self._root is None else None

    def hold(self, values: torch.Tensor) -> None:
        """Copy these values, known to the owner, into the temporary."""
        with torch.inference_mode(False), torch.no_grad():
            _BASE.copy_(self, values)
        self.settle()

    def settle(self) -> None:
        """Mark the current content as known to the owner."""
        self._seen = self._version

    @property
    def written(self) -> bool:
        """True if torch counted a write that the owner does not know."""
        return self._version != self.__dict__.get("_seen", self._version)  # another thread may make it a parameter

    @property
    def data(self) -> torch.Tensor:
        """A view that, unlike Tensor.data, shares the version counter."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        """Copies the values: later writes to them have no effect."""
        if self._root is not None:
            _BASE.data.__set__(self, values)
            return
        owner = self._owner()
        if owner is not None:
            owner.check(values)
        _BASE.data.__set__(self, values if _share(values, self) else values.detach().clone())
        self._tell()

    def set_(self, *source: Any, **kwargs: Any) -> torch.Tensor:
        """Refused through the owner: parametrizations swap the weight's tensor this way before they register it."""
        owner = self.owner
        if owner is not None:
            owner.refuse("set_")
        return _BASE.set_(self, *source, **kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        """A read-only array, which shares the memory of a tensor on the CPU: numpy refuses writes."""
        array = _BASE.numpy(self, force=force)
        array.setflags(write=array.flags.writeable and self.device.type != "cpu")
        return array

    def __dlpack__(self, **kwargs: Any) -> Any:
        """Refused through the owner: who takes the memory could write it."""
        root = self if self._root is None else self._root
        owner = root.owner if isinstance(root, DecodedWeight) else None  # else it has become a parameter
        if owner is not None:
            owner.refuse("__dlpack__ (of its memory; clone() has its own)")
        return _BASE.__dlpack__(self, **kwargs)

    @property
    def requires_grad(self) -> bool:
        """As of any tensor. Setting it turns a temporary into a parameter, in layers that train; clearing it freezes
        what `unwrap` restores."""
        return _BASE.requires_grad.__get__(self)

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        owner = self.owner
        if owner is not None:
            if requires_grad:
                owner.thaw(self)
            else:
                owner.freeze()
        _BASE.requires_grad.__set__(self, requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> torch.Tensor:
        """As Tensor.requires_grad_, see `requires_grad`."""
        self.requires_grad = requires_grad
        return self

    @uncompiled(reason="dynamo does not trace version counters")
    def report_writes(self) -> None:
        """Notify the owner of writes."""
        if self.written:
            self._tell()

    def _tell(self) -> None:
        owner = self.__dict__.get("_owner", _nobody)()
        if owner is not None:
            self.settle()
            owner.take_over(self)

    def become_parameter(self) -> nn.Parameter:
        """Turn this tensor itself into a plain parameter with requires_grad=False, detached from its owner."""
        self.__dict__.clear()
        self.__class__ = nn.Parameter
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_is_param":
            super().__setattr__(name, value)
            return
        with torch.no_grad():  # nn.Parameter(weight) sets it on the result of detach()
            _BASE.data.__set__(self, _BASE.clone(self))
        self.become_parameter()

    def __del__(self) -> None:
        if self.__dict__.get("_root", self) is not None or not self.written:
            return
        owner = self._owner()
        if owner is not None:
            owner.died_written(_BASE.detach(self))

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return _BASE.detach(self).clone()

    def __reduce_ex__(self, protocol: int):
        return _BASE.detach(self).clone().__reduce_ex__(protocol)


def _roots(values: Iterable[Any]) -> dict[int, torch.Tensor]:
    """Temporaries among the arguments of an operation, or the bases of views, by id."""
    found: dict[int, torch.Tensor] = {}
    for value in values:
        if isinstance(value, DecodedWeight):
            root = value.__dict__.get("_root")
            root = value if root is None else root
            found[id(root)] = root
        elif isinstance(value, tuple | list):
            found |= _roots(value)
    return found


def _followed(func: Callable) -> Callable:
    """Wrap a Tensor method: notify owners of writes, and track results that are views of a temporary."""

    @functools.wraps(func)
    def method(*args: Any, **kwargs: Any) -> Any:
        roots = _roots((*args, *kwargs.values()))
        result = _follow(func(*args, **kwargs), roots)
        for root in roots.values():
            if type(root) is DecodedWeight:
                root.report_writes()
        return result

    return method


def _follow(result: Any, roots: dict[int, torch.Tensor]) -> Any:
    """Make results that share memory with a temporary its views: they keep it alive and are tracked."""
    if isinstance(result, tuple | list):
        for each in result:
            _follow(each, roots)
    elif type(result) is torch.Tensor:
        for root in roots.values():
            if _share(result, root):
                result.__class__ = DecodedWeight
                result._root = root
    return result


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    return all(map(has_storage, (one, other))) and _storage(one)._cdata == _storage(other)._cdata


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return _BASE.untyped_storage(tensor)


def _follow_all() -> None:
    for name in dir(_BASE):
        func = getattr(_BASE, name)
        if name not in _NOT_FOLLOWED and name not in DecodedWeight.__dict__ and callable(func):
            setattr(DecodedWeight, name, _followed(func))
    for name in _VIEWS:
        setattr(DecodedWeight, name, property(_followed(getattr(_BASE, name).__get__)))


_follow_all()
