"""Code fingerprint: functions and constants that a model's forwards look up by name at each call.

A forward of transformers calls functions of its module, which call others: `rotate_half`, say, or a monkeypatch of it.
The search starts at the code of each class's forward, follows the methods it names and the functions it finds: global
names, their contents (dispatch tables, attributes of objects, methods of classes), and imports within functions.
Functions in torch, vbrt and the standard library are fingerprinted by identity and not searched; patches of torch
itself are found by `replaced_in_torch`. Not seen: methods of objects that are neither torch modules nor reachable by a
name, and names built as text (`getattr`, `importlib`).
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

#: constant types, fingerprinted by value
PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))
_NOT_LOOKED_INTO = frozenset((*sys.stdlib_module_names, "numpy", "torch", "triton", "vbrt")) - {"__main__"}
_GLOBAL, _ATTRIBUTE = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_MOST_ITEMS = 1024  # containers with more items are not searched
#: torch namespaces that tools monkeypatch, with their contents when vbrt was imported
_TORCH = tuple((of, dict(vars(of))) for of in (torch, F, Tensor, nn.Module))


def looked_up(kinds: Iterable[type[nn.Module]], functions: Iterable[Any] = ()) -> tuple:
    """Return a fingerprint of the functions and constants that the classes' forwards use.

    functions: further roots, which forwards reach without a name.
    """
    search = _Search()
    for function in functions:
        search.add(function)
    for kind in kinds:
        classes = _own_classes(kind)
        # a VB class's forward may call any method of the plain class
        ours = _package(getattr(kind.forward, "__globals__", {})) == "vbrt"
        for name in {name for of in classes for name in of.__dict__} if ours else ("forward",):
            search.add_method(name, classes)
    return search.found()


def reference(function: Any) -> Any:
    """Return a stand-in that equals only this function, even if its address is reused; it does not keep it alive."""
    return id(function) if getattr(type(function), "__weakrefoffset__", 0) == 0 else weakref.ref(function)


def replaced_in_torch() -> tuple:
    """Return a fingerprint of torch's functions and methods replaced since vbrt was imported."""
    return tuple(
        (name, reference(value))
        for of, before in _TORCH
        for name, value in vars(of).items()
        if before.get(name) is not value and callable(value)
    )


class _Search:
    """Worklist of functions to search, each with the classes that it is a method of."""

    def __init__(self) -> None:
        self._told: list[Any] = []
        self._seen: set[tuple[int, tuple[type, ...]]] = set()
        self._todo: list[tuple[types.FunctionType, tuple[type, ...]]] = []

    def add(self, value: Any, classes: tuple[type, ...] = ()) -> None:
        """Fingerprint a value and queue the functions in it."""
        if type(value) in PLAIN:
            self._told.append(value)
            return
        key = id(value), classes
        if key not in self._seen:
            self._seen.add(key)
            self._told.append(_told(value))
            self._todo += ((function, classes) for function in _functions_in(value))

    def add_method(self, name: str, classes: tuple[type, ...]) -> None:
        """Fingerprint and queue all methods of a name, overridden ones included."""
        for of in classes:
            member = of.__dict__.get(name)
            if member is not None:
                self.add(member, classes)

    def found(self) -> tuple:
        """Search the whole queue; return the fingerprint."""
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
        for cell in function.__closure__ or ():  # wrappers: the function they wrap
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
    """Names in a code object: paths from a global, as ("torch", "nn", "silu"), attribute names, imports."""

    paths: tuple[tuple[str, ...], ...]
    attributes: tuple[str, ...]
    imports: tuple[_Import, ...]


@functools.lru_cache(maxsize=1 << 14)
def _names(code: types.CodeType) -> _Names:
    paths: dict[tuple[str, ...], None] = {}
    attributes: dict[str, None] = {}
    imports: dict[_Import, None] = {}
    path: tuple[str, ...] = ()
    before: tuple[Any, Any] = (0, None)  # constants before an import: level and names
    for step in dis.get_instructions(code):
        if step.opname == "EXTENDED_ARG":  # prefix of the next instruction, for large arguments
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
    """Yield the value behind a dotted path's modules and each further attribute, with the classes it is a method of."""
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
    """Return an attribute of an object, a class or a module; None if missing. Runs no code (no descriptors)."""
    if isinstance(value, types.ModuleType):
        return vars(value).get(name)  # getattr may trigger a lazy import
    kinds = (value if isinstance(value, type) else type(value)).__mro__
    held = () if isinstance(value, type) else (getattr(value, "__dict__", {}),)
    return next((of[name] for of in (*held, *map(vars, kinds)) if name in of), None)


def _imported(of: _Import, names: Mapping[str, Any], attributes: Iterable[str]) -> Iterator[Any]:
    """Yield the values that an import within a function binds; for modules, the attributes that the function names."""
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
    """Return a fingerprint of a value, of a container by its items; None for objects that are not callable."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return id(value), value.data_ptr() if type(value) is Tensor else 0
    items = _items(value) if depth else None
    if items is not None:
        return tuple(_told(item, depth - 1) for item in items)
    return reference(value) if callable(value) or isinstance(value, (staticmethod, property)) else None


def _items(value: Any) -> list[Any] | None:
    """Return a container's keys and values, or the attributes of an object of the model's packages; else None."""
    if isinstance(value, dict):
        items = [*dict.keys(value), *dict.values(value)]  # a subclass's methods may trigger lazy imports
    elif type(value) in (list, tuple):
        items = list(value)
    elif callable(value) or isinstance(value, types.ModuleType) or _is_foreign(type(value)):
        return None
    else:
        items = list(getattr(value, "__dict__", {}).values())
    return items if len(items) <= _MOST_ITEMS else None


def _functions_in(value: Any, depth: int = 3) -> Iterator[types.FunctionType]:
    """Yield the Python functions in a function, a method, a wrapper or a container."""
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
    """True for a class of torch, vbrt or the standard library."""
    return kind.__module__.partition(".")[0] in _NOT_LOOKED_INTO


def _own_classes(kind: type) -> tuple[type, ...]:
    """Return a class's MRO without classes of torch, vbrt and the standard library."""
    return tuple(of for of in kind.__mro__ if not _is_foreign(of))


def _package(names: Mapping[str, Any]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
