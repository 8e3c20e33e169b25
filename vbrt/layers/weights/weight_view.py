"""Temporaries returned by `.weight`, or by a parameter of experts: a write to one changes the weight.

A temporary of an encoded layer is decoded; before encoding it shares the dense parameter's memory, so that writes are
encoded with it (`kernels/decoded_weight.py` tracks writes).
"""

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from vbrt.kernels.decoded_weight import DecodedWeight

__all__ = ["Lender", "LendingWeight", "dense_parameter", "follow_encoding", "live_temporary", "plain_dense"]


class LendingWeight(Protocol):
    """Weight with temporaries by key: index of a parameter on a shared storage, or a parameter's name."""

    def check_lent(self, key: object, weight: torch.Tensor) -> None:
        """Raise WrapError for a tensor that cannot take the place of a parameter."""

    def refuse_lent(self, key: object, what: str) -> None:
        """Raise WrapError for an operation that weights in the tiers do not support."""

    def take_over(self, key: object, weight: torch.Tensor) -> None:
        """Make a temporary that was written to the weight of the layers."""

    def note_written(self, key: object, weight: torch.Tensor) -> None:
        """Keep the content of a temporary that died after a write, until the next look. Takes no lock."""

    def thaw(self, key: object, weight: DecodedWeight) -> None:
        """Make a temporary a parameter that trains, in layers that leave the tiers for it."""

    def freeze(self) -> None:
        """Have the layers give frozen weights back."""


class Lender:
    """Owner of one temporary. A call returns itself while the weight is alive."""

    __slots__ = ("_key", "_weight")

    def __init__(self, weight: LendingWeight, key: object) -> None:
        self._weight, self._key = weakref.ref(weight), key

    def __call__(self) -> "Lender | None":
        return None if self._weight() is None else self

    @property
    def lends(self) -> LendingWeight | None:
        """The weight, if it lives."""
        return self._weight()

    def check(self, weight: torch.Tensor) -> None:
        """Raise WrapError for a tensor that cannot take the place of this one."""
        lends = self.lends
        if lends is not None:
            lends.check_lent(self._key, weight)

    def refuse(self, what: str) -> None:
        """Raise WrapError for an operation that a weight in the tiers does not support."""
        lends = self.lends
        if lends is not None:
            lends.refuse_lent(self._key, what)

    def take_over(self, weight: torch.Tensor) -> None:
        """The temporary was written to."""
        lends = self.lends
        if lends is not None:
            lends.take_over(self._key, weight)

    def died_written(self, weight: torch.Tensor) -> None:
        """Keep the content of a temporary that died after a write, until the next look. Takes no lock."""
        lends = self.lends
        if lends is not None:
            lends.note_written(self._key, weight)

    def thaw(self, weight: DecodedWeight) -> None:
        """Make the temporary a parameter that trains, in layers that leave the tiers for it."""
        lends = self.lends
        if lends is not None:
            lends.thaw(self._key, weight)

    def freeze(self) -> None:
        """Have the layers give frozen weights back."""
        lends = self.lends
        if lends is not None:
            lends.freeze()


def live_temporary(lent: weakref.ref[torch.Tensor] | None) -> DecodedWeight | None:
    """Return the temporary of a reference while it lives and stands for a weight."""
    found = None if lent is None else lent()
    return found if type(found) is DecodedWeight else None


def plain_dense(weight: torch.Tensor) -> torch.Tensor:
    """A dense weight as torch's functions take it, which share its memory and count of writes with what was lent."""
    return torch.Tensor.detach(weight) if type(weight) is DecodedWeight else weight


def dense_parameter(weight: torch.Tensor, trainable: bool) -> nn.Parameter:
    """A dense weight as a parameter in its memory: the one that the module had, unless it was written."""
    return nn.Parameter(plain_dense(weight), trainable) if type(weight) is DecodedWeight else weight


def follow_encoding(
    lent: DecodedWeight, dense: torch.Tensor, version: int, *, keeps: bool, stored: Callable[[], torch.Tensor]
) -> None:
    """Have a temporary that is out show the stored values of a weight that was dense, at a version, until now.

    It keeps the memory of the dense weight where both have the same values on one device; else others who hold that
    weight, such as a module outside of the model, would see it rounded.

    Args:
        keeps: whether the stored values are those of the dense weight, on its device.
        stored: decodes them.
    """
    lent.settle_at(version)
    if lent.written or keeps:
        return
    if lent is dense:
        lent.hold(stored())
    else:
        lent.move(stored())
