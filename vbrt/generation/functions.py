"""Functions and constants of Python modules that the forwards of a model look up by name in every call.

A forward of transformers calls functions of its own file, and those call others: `rotate_half`, and whatever somebody
puts in its place. They are found by the names in the code of each class's forward, of the methods that it names, and of
the functions that are found. What is in torch, vbrt and Python's own library is told apart and not looked into. Not
seen are functions in containers, those imported within another, and methods of objects that are no modules of torch.
"""

import dis
import functools
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["PLAIN", "looked_up", "reference"]

#: types of constants, which are told by what they are
PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))
_NOT_LOOKED_INTO = frozenset((*sys.stdlib_module_names, "numpy", "torch", "triton", "vbrt")) - {"__main__"}
_GLOBAL, _ATTRIBUTE = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")


def looked_up(kinds: Iterable[type[nn.Module]], functions: Iterable[Any] = ()) -> tuple:
    """Return what tells the functions and constants that forwards of classes use from others.

    functions: that forwards find in another way.
    """
    search = _Search()
    for function in functions:
        search.add(function)
    for kind in kinds:
        classes = _own_classes(kind)
        # a forward of ours may call any method of the plain class
        ours = _package(getattr(kind.forward, "__globals__", {})) == "vbrt"
        for name in {name for of in classes for name in of.__dict__} if ours else ("forward",):
            search.add_method(name, classes)
    return search.found()


def reference(function: Any) -> Any:
    """Return what equals a function, and no other one that takes its address; it does not keep the function."""
    return id(function) if getattr(type(function), "__weakrefoffset__", 0) == 0 else weakref.ref(function)


class _Search:
    """Functions that are to be looked into, each with the classes that it is a method of."""

    def __init__(self) -> None:
        self._told: list[Any] = []
        self._seen: set[tuple[int, tuple[type, ...]]] = set()
        self._todo: list[tuple[types.FunctionType, tuple[type, ...]]] = []

    def add(self, value: Any, classes: tuple[type, ...] = ()) -> None:
        """Have what may be a function, or hold one, be told and looked into."""
        self._told.append(_told(value))
        for function in _functions_in(value):
            key = id(function), classes
            if key not in self._seen:
                self._seen.add(key)
                self._todo.append((function, classes))

    def add_method(self, name: str, classes: tuple[type, ...]) -> None:
        """Have the methods of a name be told and looked into, overridden ones too."""
        for of in classes:
            member = of.__dict__.get(name)
            if member is not None:
                self.add(member, classes)

    def found(self) -> tuple:
        """Look into all of them; return what tells them from others."""
        while self._todo:
            self._look_into(*self._todo.pop())
        return tuple(self._told)

    def _look_into(self, function: types.FunctionType, classes: tuple[type, ...]) -> None:
        named = function.__kwdefaults__ or {}
        self._told += function.__code__, *map(_told, (*(function.__defaults__ or ()), *named, *named.values()))
        for cell in function.__closure__ or ():  # of wrappers: what they wrap
            self.add(_content(cell), classes)
        if _package(function.__globals__) in _NOT_LOOKED_INTO:
            return
        names = _names(function.__code__)
        for path in names.paths:
            self.add(_value(function.__globals__, path))
        for name in names.attributes if classes else ():
            self.add_method(name, classes)


class _Names(NamedTuple):
    """What code names: paths from a global, as ("torch", "nn", "functional", "silu"), and attributes of anything."""

    paths: tuple[tuple[str, ...], ...]
    attributes: tuple[str, ...]


@functools.lru_cache(maxsize=1 << 14)
def _names(code: types.CodeType) -> _Names:
    paths: dict[tuple[str, ...], None] = {}
    attributes: dict[str, None] = {}
    path: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        is_attribute = step.opname in _ATTRIBUTE
        if path and not is_attribute:
            paths[path], path = None, ()
        if step.opname in _GLOBAL:
            path = (step.argval,)
        elif is_attribute:
            attributes[step.argval] = None
            path = (*path, step.argval) if path else ()
    for inner in (constant for constant in code.co_consts if isinstance(constant, types.CodeType)):
        named = _names(inner)
        paths |= dict.fromkeys(named.paths)
        attributes |= dict.fromkeys(named.attributes)
    return _Names(tuple(paths), tuple(attributes))


def _value(names: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """Return what a path leads to, as far as it goes through modules; None if there is nothing."""
    value = names.get(path[0])
    for name in path[1:]:
        if not isinstance(value, types.ModuleType):
            break
        value = vars(value).get(name)  # not getattr, which might import something
    return value


def _told(value: Any) -> Any:
    """Return what tells a value from another one; None for objects that are neither constants nor can be called."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return id(value), value.data_ptr() if type(value) is Tensor else 0
    return reference(value) if callable(value) or isinstance(value, (staticmethod, property)) else None


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    """The functions of Python that a function, a method or a wrapper of one consists of."""
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
        yield from _functions_in(value.__func__)
    elif isinstance(value, property):
        yield from _functions_in(value.fget)
    elif isinstance(value, functools.partial):
        yield from _functions_in(value.func)
    elif not isinstance(value, type) and isinstance(value, functools._lru_cache_wrapper):
        yield from _functions_in(value.__wrapped__)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _own_classes(kind: type) -> tuple[type, ...]:
    """Return the classes that a class is made of, but for those of torch, of vbrt and of Python."""
    return tuple(of for of in kind.__mro__ if of.__module__.partition(".")[0] not in _NOT_LOOKED_INTO)


def _package(names: Mapping[str, Any]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
