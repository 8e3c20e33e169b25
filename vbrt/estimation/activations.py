"""What `training.activations` makes of a copy of a model that is traced: blocks run as they will, on fake tensors."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vbrt.config import VBConfig
from vbrt.config.budgets import parse_activations
from vbrt.model.activations import blocks_of
from vbrt.residency.activations import KEEP, OFFLOAD, RECOMPUTE
from vbrt.training.activations import Activations
from vbrt.training.offload import Offload

__all__ = ["HeldActivations", "asked_of"]


def asked_of(config: VBConfig | None, tier: str) -> str | int:
    """Return what a config asks for, where blocks are computed in a tier: a word, or bytes."""
    if config is None:
        return KEEP
    asked = parse_activations(config.training.activations, where="training.activations")
    if isinstance(asked, str):
        return RECOMPUTE if asked == OFFLOAD and tier == "cpu" else asked
    return int(asked.amount)


class HeldActivations:
    """What holds the activations of a copy's blocks, for as long as it lives."""

    def __init__(self, model: nn.Module, asked: str) -> None:
        self._host = _Host()
        offload = Offload(_NoLink(), self._host, torch.device("cpu")) if asked == OFFLOAD else None
        self._activations = None if asked == KEEP else Activations(asked, *blocks_of(model), offload)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that wait in host memory now."""
        return self._host.held_bytes


class _Place(NamedTuple):
    """A buffer without memory: nobody reads it."""

    nbytes: int


class _Host:
    """Host memory without an end."""

    capacity_bytes = held_bytes = 0

    def reserve(self, nbytes: int) -> _Place:
        """Return a place, and count it."""
        self.held_bytes += nbytes
        return _Place(nbytes)

    def free(self, buffer: _Place, *, reuse: bool) -> None:
        """Count it no longer."""
        self.held_bytes -= buffer.nbytes


class _NoLink:
    """Copies that are not made: what is traced has no values."""

    def out(self, tensor: Tensor, buffer: _Place) -> bool:
        """Do nothing."""
        return True

    def back(self, buffer: _Place, tensor: Tensor) -> bool:
        """Do nothing."""
        return True

    def wait(self, done: bool) -> None:
        """Do nothing."""

    def drop(self, tensor: Tensor) -> None:
        """Do nothing."""

    def waited_us(self) -> int:
        """Return 0."""
        return 0
