"""Prepared calls: computations on static tensors whose arguments are set up once."""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Call", "Empty", "Prepared", "c_call"]

#: allocates a static result of a form
Empty = Callable[[Any], Tensor]


class Call(ctypes.Structure):
    """`Call` of step.c: a function of one structure, and the structure."""

    _fields_ = (("function", ctypes.c_void_p), ("given", ctypes.c_void_p))


class Prepared(NamedTuple):
    """A computation on fixed addresses.

    Attributes:
        run: executes it.
        results: tensors that it writes.
        held: tensors and structures whose addresses it uses.
        call: what `run` calls, for programs; None if that is more than one C function.
        failure: what it means that the function returns 0.
    """

    run: Callable[[], Any]
    results: tuple[Tensor, ...]
    held: tuple[Any, ...]
    call: Call | None = None
    failure: str = ""


def c_call(function: Any, given: ctypes.Structure) -> Call:
    """Return the call of a C function that takes a structure's address and returns int."""
    return Call(ctypes.cast(function, ctypes.c_void_p).value, ctypes.addressof(given))
