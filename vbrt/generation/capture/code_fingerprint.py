"""Functions and constants of Python modules that the forwards of a model look up by name in every call.

A forward of transformers calls functions of its own file, and those call others: `rotate_half`, and whatever somebody
puts in its place. They are found by the names in the code of each class's forward, of the methods that it names, and of
the functions that are found: names of globals, also of what they hold (dispatch tables, attributes of objects, methods
of classes), and of what is imported within a function. What is in torch, vbrt and Python's own library is told apart
and not looked into; what somebody has put there in the place of torch's own is told by `replaced_in_torch`. Not seen
are methods of objects that are neither modules of torch nor reached by a name, and what a name leads to that is put
together as text (`getattr`, `importlib`).
"""

import dis
import functools
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["PLAIN", "looked_up", "reference", "replaced_in_torch"]

#: types of constants, which are told by what they are
PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))
_NOT_LOOKED_INTO = frozenset((*sys.stdlib_module_names, "numpy", "torch", "triton", "vbrt")) - {"__main__"}
_GLOBAL, _ATTRIBUTE = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_MOST_ITEMS = 1024  # of a container that is looked through
#: what tools replace in torch, each with what it held when vbrt was imported
_TORCH = tuple((of, dict(vars(of))) for of in (torch, F, Tensor, nn.Module))


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


def replaced_in_torch() -> tuple:
    """Return what tells the functions and methods that are others in torch than when vbrt was imported."""
    return tuple(
        (name, reference(value))
        for of, before in _TORCH
        for name, value in vars(of).items()
        if before.get(name) is not value and callable(value)
    )


class _Search:
    """Functions that are to be looked into, each with the classes that it is a method of."""

    def __init__(self) -> None:
        self._told: list[Any] = []
        self._seen: set[tuple[int, tuple[type, ...]]] = set()
        self._todo: list[tuple[types.FunctionType, tuple[type, ...]]] = []

    def add(self, value: Any, classes: tuple[type, ...] = ()) -> None:
        """Have what may be a function, or hold some, be told and looked into."""
        if type(value) in PLAIN:
            self._told.append(value)
            return
        key = id(value), classes
        if key not in self._seen:
            self._seen.add(key)
            self._told.append(_told(value))
            self._todo += ((function, classes) for function in _functions_in(value))

    def add_method(self, name: str, classes: tuple[type, ...]) -> None:
        """Have the methods of a name be told and looked into, overridden ones too."""
        for of in classes:
            member = of.__dict__.get(name)
            if member is not None:
                self.add(member, classes)

    def found(self) -> tuple:
        """Look into all of them; return what tells them from others."""
        done: set[tuple[int, tuple[type, ...]]] = set()
        while self._todo:
            function, classes = self._todo.pop()
            if (id(function), classes) not in done:
                done.add((id(function), classes))
                self._look_into(function, classes)
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
            for value, of in _along(function.__globals__, path):
                self.add(value, of)
        for imported in names.imports:
            for value in _imported(imported, function.__globals__, names.attributes):
                self.add(value)
        for name in names.attributes if classes else ():
            self.add_method(name, classes)


class _Import(NamedTuple):
    """An import within a function: of a module, with `level` dots before its name, or of `names` in it."""

    module: str
    level: int
    names: tuple[str, ...]


class _Names(NamedTuple):
    """What code names: paths from a global, as ("torch", "nn", "functional", "silu"), attributes of anything, and what
    it imports."""

    paths: tuple[tuple[str, ...], ...]
    attributes: tuple[str, ...]
    imports: tuple[_Import, ...]


@functools.lru_cache(maxsize=1 << 14)
def _names(code: types.CodeType) -> _Names:
    paths: dict[tuple[str, ...], None] = {}
    attributes: dict[str, None] = {}
    imports: dict[_Import, None] = {}
    path: tuple[str, ...] = ()
    before: tuple[Any, Any] = (0, None)  # constants in front of an import: its level, and the names
    for step in dis.get_instructions(code):
        if step.opname == "EXTENDED_ARG":  # a part of the next one, where code names many things
            continue
        is_attribute = step.opname in _ATTRIBUTE
        if path and not is_attribute:
            paths[path], path = None, ()
        if step.opname in _GLOBAL:
            path = (step.argval,)
        elif is_attribute:
            attributes[step.argval] = None
            path = (*path, step.argval) if path else ()
        elif step.opname == "IMPORT_NAME":
            imports[_Import(step.argval, before[0], before[1] or ())] = None
        before = before[1], step.argval
    for inner in (constant for constant in code.co_consts if isinstance(constant, types.CodeType)):
        named = _names(inner)
        paths |= dict.fromkeys(named.paths)
        attributes |= dict.fromkeys(named.attributes)
        imports |= dict.fromkeys(named.imports)
    return _Names(tuple(paths), tuple(attributes), tuple(imports))


def _along(names: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[Any, tuple[type, ...]]]:
    """Yield what a path leads to behind modules, and each part further on, with the classes that a method is of."""
    value, classes = names.get(path[0]), ()
    for name in path[1:]:
        if not isinstance(value, types.ModuleType):
            yield value, classes
            kind = value if isinstance(value, type) else type(value)
            if value is None or _is_foreign(kind):
                return
            classes = _own_classes(kind)
        value = _attribute(value, name)
    yield value, classes


def _attribute(value: Any, name: str) -> Any:
    """Return what an object, a class or a module holds by a name; None if nothing does. Calls nothing."""
    if isinstance(value, types.ModuleType):
        return vars(value).get(name)  # not getattr, which might import something
    kinds = (value if isinstance(value, type) else type(value)).__mro__
    held = () if isinstance(value, type) else (getattr(value, "__dict__", {}),)
    return next((of[name] for of in (*held, *map(vars, kinds)) if name in of), None)


def _imported(of: _Import, names: Mapping[str, Any], attributes: Iterable[str]) -> Iterator[Any]:
    """Yield what an import within a function gives it; of modules what the function names."""
    package = str(names.get("__package__") or "").split(".")
    above = package[: len(package) - of.level + 1] if of.level else []
    module = sys.modules.get(".".join((*above, of.module) if of.module else above))
    if module is None or _package(vars(module)) in _NOT_LOOKED_INTO:
        return
    for value in (vars(module).get(name) for name in of.names) if of.names else (module,):
        if isinstance(value, types.ModuleType):
            yield from (vars(value)[name] for name in attributes if name in vars(value))
        else:
            yield value


def _told(value: Any, depth: int = 3) -> Any:
    """Return what tells a value from another one, a container by its items; None for objects that cannot be called."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return id(value), value.data_ptr() if type(value) is Tensor else 0
    items = _items(value) if depth else None
    if items is not None:
        return tuple(_told(item, depth - 1) for item in items)
    return reference(value) if callable(value) or isinstance(value, (staticmethod, property)) else None


def _items(value: Any) -> list[Any] | None:
    """Return what a container, or an object of the model's own packages, holds, and by which names; None for others."""
    if isinstance(value, dict):
        items = [*dict.keys(value), *dict.values(value)]  # not its own methods, which might import something
    elif type(value) in (list, tuple):
        items = list(value)
    elif callable(value) or isinstance(value, types.ModuleType) or _is_foreign(type(value)):
        return None
    else:
        items = list(getattr(value, "__dict__", {}).values())
    return items if len(items) <= _MOST_ITEMS else None


def _functions_in(value: Any, depth: int = 3) -> Iterator[types.FunctionType]:
    """The functions of Python that a function, a method, a wrapper of one or a container consists of."""
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
        yield from _functions_in(value.__func__)
    elif isinstance(value, property):
        yield from _functions_in(value.fget)
    elif isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _functions_in(part)
    elif isinstance(value, type):
        if issubclass(value, torch.autograd.Function):
            yield from _functions_in(value.forward)
    elif isinstance(value, functools._lru_cache_wrapper):
        yield from _functions_in(value.__wrapped__)
    elif type(value) not in PLAIN and depth:
        for item in _items(value) or ():
            yield from _functions_in(item, depth - 1)
        if callable(value) and not _is_foreign(type(value)):
            yield from _functions_in(_attribute(type(value), "__call__"), 0)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _is_foreign(kind: type) -> bool:
    """True for a class of torch, of vbrt or of Python."""
    return kind.__module__.partition(".")[0] in _NOT_LOOKED_INTO


def _own_classes(kind: type) -> tuple[type, ...]:
    """Return the classes that a class is made of, but for those of torch, of vbrt and of Python."""
    return tuple(of for of in kind.__mro__ if not _is_foreign(of))


def _package(names: Mapping[str, Any]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
