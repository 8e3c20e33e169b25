"""Rebinding of instance-level forward() overrides (transformers' tensor parallel plans) after a class swap.

transformers replaces `module.forward` with a function that moves inputs and outputs between ranks and calls the bound
method that it saved, of the module's class at that time. After the class was changed in place, the saved method must
be that of the new class.
"""

from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

__all__ = ["is_wrapped_by_plan", "rebind_"]

_PACKAGE = "transformers.distributed"
_DEPTH = 4  # a forward of experts holds an implementation, which holds others, which hold the forward


class _Place(NamedTuple):
    """Slot (closure cell or attribute) that holds a bound forward."""

    put: Callable[[MethodType], None]


def is_wrapped_by_plan(module: nn.Module) -> bool:
    """True if the instance's forward is a parallel plan's override that calls the module's own."""
    forward = module.__dict__.get("forward")
    ours = isinstance(forward, FunctionType) and forward.__module__.startswith(_PACKAGE)
    return ours and next(_places(forward, module, _DEPTH), None) is not None


def rebind_(module: nn.Module, cls: type[nn.Module]) -> None:
    """Rebind a parallel plan's override, if there is one, to the forward of `cls`."""
    forward = module.__dict__.get("forward")
    for place in list(_places(forward, module, _DEPTH)) if isinstance(forward, FunctionType) else ():
        place.put(MethodType(cls.forward, module))


def _places(holder: Any, module: nn.Module, depth: int) -> Iterator[_Place]:
    """Yield the slots in which `holder` keeps forwards bound to the module."""
    if not depth:
        return
    if isinstance(holder, FunctionType):
        for cell in holder.__closure__ or ():
            if _is_filled(cell):
                yield from _found(cell.cell_contents, lambda method, cell=cell: _fill(cell, method), module, depth)
    elif type(holder).__module__.startswith(_PACKAGE):
        for name, value in list(vars(holder).items()):
            yield from _found(value, lambda method, name=name: setattr(holder, name, method), module, depth)


def _found(value: Any, put: Callable[[MethodType], None], module: nn.Module, depth: int) -> Iterator[_Place]:
    if isinstance(value, MethodType) and value.__self__ is module:
        yield _Place(put)
    elif value is not module:
        yield from _places(value, module, depth - 1)


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _fill(cell: CellType, method: MethodType) -> None:
    cell.cell_contents = method
