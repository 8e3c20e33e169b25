"""DecodedWeight: the temporary that `.weight` of a VB layer gives; it stands for the layer's weight while it lives.

Tied layers give the same one, and what is written into it, or into a view of it, is the layer's weight from then on.
Nobody but the temporary holds its memory until it is written to; its owner only knows where it is.

Writes are seen in three ways. Every method of a temporary, and of the views that its methods make, compares the version
counter when it is done. What goes by them, such as `out=` or a compiled function, counts in the version too: the owner
looks before it uses its planes, and the temporary as it dies. Memory that was handed out, to numpy or by address, is
written to without a count, so its content is compared by a digest from then on.

Roads not taken: `__torch_function__` would see calls of torch's functions as well, but where a tensor has it, torch
leaves its fast paths (nn.TransformerEncoder's gives other values at padded places than the slow one). A subclass that
sees the dispatcher's operators has no memory of its own that numpy could read, and every transform and tracer of torch
would have to be taught about it.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import xxhash
from torch import nn

from vbrt.host.host_memory import bytes_view
from vbrt.kernels.observers import unwatched
from vbrt.kernels.uncompiled import uncompiled
from vbrt.libraries.torch_api import disabled_torch_function, has_storage

__all__ = ["DecodedWeight", "Owner"]

_BASE = torch.Tensor
_HAND_OUT = {
    _BASE.numpy,
    _BASE.__array__,
    _BASE.__dlpack__,
    _BASE.data_ptr,
    _BASE.untyped_storage,
    _BASE.storage,
    _BASE._typed_storage,
}
_VIEWS = ("T", "mT", "H", "mH", "real", "imag")  # properties; methods are all followed
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
    """The owner of a tensor that has become a parameter."""


class Owner(Protocol):
    """Whose weight a temporary stands for."""

    def check(self, weight: torch.Tensor) -> None:
        """Raise WrapError for a weight that cannot take the place of this one."""

    def refuse(self, what: str) -> None:
        """Raise WrapError for what cannot be done to the weight."""

    def take_over(self, weight: torch.Tensor) -> None:
        """The weight is this tensor from now on. Raises WrapError where it cannot change."""

    def died_written(self, weight: torch.Tensor) -> None:
        """A temporary has died that held this. Called wherever memory is freed: neither waits nor raises."""

    def thaw(self, weight: "DecodedWeight") -> None:
        """Make the temporary a parameter that trains. Raises WrapError where it cannot."""

    def freeze(self) -> None:
        """The weight is not asked to train: whoever gets it back as a parameter gets a frozen one."""


class DecodedWeight(torch.Tensor):
    """A decoded weight, or a view of one. Results of operations that share no memory with it, its copies and its
    pickles are plain tensors; `nn.Parameter` of it is a parameter of its own."""

    __torch_function__ = disabled_torch_function
    _owner: Callable[[], "Owner | None"]
    _root: "torch.Tensor | None"  # what this is a view of, which lives as long
    _seen: int  # the version that the owner knows
    _digest: int | None = None  # of the content that the owner knows, once memory was handed out

    @classmethod
    def of(cls, owner: Callable[[], Owner | None], weight: torch.Tensor) -> "DecodedWeight":
        """`weight`, just decoded for what `owner` gives or still dense, without a copy."""
        with torch.inference_mode(False):  # tensors of inference mode count no writes
            decoded = torch.Tensor._make_subclass(cls, weight.clone() if weight.is_inference() else weight)
        decoded.lend(owner)
        return decoded

    def lend(self, owner: Callable[[], Owner | None]) -> None:
        """Stand for the weight of what `owner` gives, as it is now."""
        self._owner, self._root = owner, None
        self.settle()

    def settle_at(self, version: int) -> None:
        """The owner knows the content as it was at a version. The memory was not the temporary's alone until then, and
        others may have handed it out."""
        self._seen = version
        self.hand_out()

    def move(self, values: torch.Tensor) -> None:
        """Hold these values, which the owner knows, in their memory, and leave what was there as it is."""
        _BASE.data.__set__(self, values)
        self.settle()

    @property
    def owner(self) -> Owner | None:
        """Whose weight this is; None for a view of it, and once the owner is gone."""
        return self._owner() if self._root is None else None

    def hold(self, values: torch.Tensor) -> None:
        """Hold these values, which the owner knows."""
        with torch.inference_mode(False), torch.no_grad():
            _BASE.copy_(self, values)
        self.settle()

    def settle(self) -> None:
        """The owner knows the content."""
        self._seen = self._version
        self._digest = None if self._digest is None else _digest(self)

    def hand_out(self) -> None:
        """From now on somebody may write without a count."""
        if self._digest is None:
            self._digest = _digest(self)

    @property
    def written(self) -> bool:
        """True if the content has changed since the owner knew it."""
        known = self.__dict__.copy()  # another thread may make a parameter of it
        digest = known.get("_digest")
        return self._version != known.get("_seen", self._version) or (digest is not None and _digest(self) != digest)

    @property
    def data(self) -> torch.Tensor:
        """A view that counts as one: unlike Tensor.data, it shares the count of writes."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        """Of the values a copy is taken: later writes to them do not count."""
        if self._root is not None:
            _BASE.data.__set__(self, values)
            return
        owner = self._owner()
        if owner is not None:
            owner.check(values)
        _BASE.data.__set__(self, values if _share(values, self) else values.detach().clone())
        self._tell()

    def set_(self, *source: Any, **kwargs: Any) -> torch.Tensor:
        """Refused by the owner's name: parametrizations put another tensor into the weight so, before they take it."""
        owner = self.owner
        if owner is not None:
            owner.refuse("set_")
        return _BASE.set_(self, *source, **kwargs)

    @property
    def requires_grad(self) -> bool:
        """As any tensor's. Setting it makes a temporary a parameter, in layers that train; clearing it freezes what
        `unwrap` gives back."""
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
        """As Tensor's, see `requires_grad`."""
        self.requires_grad = requires_grad
        return self

    @uncompiled(reason="dynamo would look at the memory that is looked at here")
    def report_writes(self, *, handed_out: bool = False) -> None:
        """Tell the owner if somebody has written."""
        if handed_out:
            self.hand_out()
        if self.written:
            self._tell()

    def _tell(self) -> None:
        owner = self.__dict__.get("_owner", _nobody)()
        if owner is not None:
            self.settle()
            owner.take_over(self)

    def become_parameter(self) -> nn.Parameter:
        """This very tensor as a plain parameter that does not require grad; the owner forgets it or holds it."""
        self.__dict__.clear()
        self.__class__ = nn.Parameter
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_is_param":
            super().__setattr__(name, value)
            return
        with torch.no_grad():  # nn.Parameter(weight) marks what detach() gave it
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
    """The temporaries that an operation was given, themselves or views of them, by id."""
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
    """A method of Tensor, after which owners hear of what was written, and whose views are views of a temporary."""

    @functools.wraps(func)
    def method(*args: Any, **kwargs: Any) -> Any:
        roots = _roots((*args, *kwargs.values()))
        result = _follow(func(*args, **kwargs), roots)
        for root in roots.values():
            if type(root) is DecodedWeight:
                root.report_writes(handed_out=func in _HAND_OUT)
        return result

    return method


def _follow(result: Any, roots: dict[int, torch.Tensor]) -> Any:
    """Results that share memory with a temporary are views of it: they keep it, and show what is written to them."""
    if isinstance(result, tuple | list):
        for each in result:
            _follow(each, roots)
    elif _is_array(result) and isinstance(result.base, torch.Tensor):
        return sys.modules["numpy"].asarray(_Memory(result, tuple(roots.values())))
    elif type(result) is torch.Tensor:
        for root in roots.values():
            if _share(result, root):
                result.__class__ = DecodedWeight
                result._root = root
    return result


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # which torch does without, and so does vbrt
    return numpy is not None and isinstance(value, numpy.ndarray)


class _Memory:
    """Keeps the temporaries alive for a numpy array whose own base is another tensor on the same memory."""

    def __init__(self, array: Any, roots: tuple[torch.Tensor, ...]) -> None:
        self.__array_interface__ = array.__array_interface__
        self._kept = array, roots


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    return all(map(has_storage, (one, other))) and _storage(one)._cdata == _storage(other)._cdata


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return _BASE.untyped_storage(tensor)


def _digest(weight: torch.Tensor) -> int:
    """XXH3-64 of its memory; nothing that records a step sees the look."""
    with unwatched():
        memory = torch.empty(0, dtype=torch.uint8, device=weight.device).set_(_storage(weight)).cpu()
    return xxhash.xxh3_64_intdigest(bytes_view(memory))


def _follow_all() -> None:
    for name in dir(_BASE):
        func = getattr(_BASE, name)
        if name not in _NOT_FOLLOWED and name not in DecodedWeight.__dict__ and callable(func):
            setattr(DecodedWeight, name, _followed(func))
    for name in _VIEWS:
        setattr(DecodedWeight, name, property(_followed(getattr(_BASE, name).__get__)))


_follow_all()
