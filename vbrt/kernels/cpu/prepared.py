"""Computations on tensors that stay where they are, with everything but the call worked out once."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Empty", "Prepared"]

#: makes a result of a form, at an address of its own
Empty = Callable[[Any], Tensor]


class Prepared(NamedTuple):
    """A computation on fixed addresses.

    Attributes:
        run: computes it.
        results: what it writes.
        held: tensors and structures whose addresses it has.
    """

    run: Callable[[], Any]
    results: tuple[Tensor, ...]
    held: tuple[Any, ...]
