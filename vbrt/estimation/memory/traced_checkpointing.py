"""What `training.activations` makes of a copy of a model that is traced: blocks run as they will, on fake tensors."""

import torch
from torch import Tensor, nn

from vbrt.config import VBConfig
from vbrt.config.budgets import parse_activations
from vbrt.model.activation_settings import blocks_of
from vbrt.residency.activation_plan import KEEP, OFFLOAD, RECOMPUTE
from vbrt.tiers import Buffer
from vbrt.tiers.protocols.tier import Holder
from vbrt.training.activations.activation_offload import Offload
from vbrt.training.activations.checkpointing import Activations

__all__ = ["asked_of", "hold_"]


def asked_of(config: VBConfig | None, tier: str) -> str | int:
    """Return what a config asks for, where blocks are computed in a tier: a word, or bytes."""
    if config is None:
        return KEEP
    asked = parse_activations(config.training.activations, where="training.activations")
    if isinstance(asked, str):
        return RECOMPUTE if asked == OFFLOAD and tier == "cpu" else asked
    return int(asked.amount)


def hold_(model: nn.Module, asked: str) -> object:
    """Have the blocks of a copy keep what is asked for, in place, for as long as what is returned lives."""
    if asked == KEEP:
        return None
    offload = Offload(_NoLink(), _Endless(), torch.device("cpu")) if asked == OFFLOAD else None
    return Activations(asked, *blocks_of(model), offload)


class _Endless:
    """Host memory that nobody counts."""

    capacity_bytes = 0

    def reserve(self, nbytes: int, holder: Holder) -> bool:
        """Reserve nothing that anybody reads."""
        holder.room = Buffer(torch.empty(0, dtype=torch.uint8, device="cpu"))
        return True

    def free(self, buffer: Buffer, *, reuse: bool) -> None:
        """Do nothing."""


class _NoLink:
    """Copies that are not made: what is traced has no values."""

    def out(self, tensor: Tensor, buffer: Buffer) -> bool:
        """Do nothing."""
        return True

    def back(self, buffer: Buffer, tensor: Tensor) -> bool:
        """Do nothing."""
        return True

    def wait(self, done: bool) -> None:
        """Do nothing."""

    def drop(self, tensor: Tensor) -> None:
        """Do nothing."""

    def waited_us(self) -> int:
        """Return 0."""
        return 0
