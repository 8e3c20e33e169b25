"""Prepared calls: computations on static tensors whose arguments are set up once."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Empty", "Prepared"]

#: allocates a static result of a form
Empty = Callable[[Any], Tensor]


class Prepared(NamedTuple):
    """A computation on fixed addresses.

    Attributes:
        run: executes it.
        results: tensors that it writes.
        held: tensors and structures whose addresses it uses.
    """

    run: Callable[[], Any]
    results: tuple[Tensor, ...]
    held: tuple[Any, ...]
