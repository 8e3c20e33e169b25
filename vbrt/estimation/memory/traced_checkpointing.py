"""`training.activations` on a traced copy: its blocks checkpoint and offload as configured, on fake tensors."""

import torch
from torch import Tensor, nn

from vbrt.config import VBConfig
from vbrt.config.parse_budgets import parse_activations
from vbrt.model.activation_settings import blocks_of
from vbrt.model.recorded_blocks import TURNS
from vbrt.residency.activation_plan import KEEP, OFFLOAD, RECOMPUTE
from vbrt.tiers import Buffer
from vbrt.tiers.protocols.tier import Holder
from vbrt.training.activations.activation_offload import Offload
from vbrt.training.activations.checkpointing import Activations

__all__ = ["asked_of", "hold_"]

_OF_STREAM = 4  # tensors of the size of a block's input: it, the result, and the gradients of both


def asked_of(config: VBConfig | None, tier: str) -> str | int:
    """Return the activation mode of a config for blocks computed in a tier: a word, or a budget in bytes."""
    if config is None:
        return KEEP
    asked = parse_activations(config.training.activations, where="training.activations")
    if isinstance(asked, str):
        return RECOMPUTE if asked == OFFLOAD and tier == "cpu" else asked
    return int(asked.amount)


def hold_(model: nn.Module, asked: str, *, recorded: bool = False) -> object:
    """Install the activation mode on a copy's blocks, in place, while the returned object lives. recorded: blocks that
    compute again take the memory of recordings of weights that train from the tiers."""
    if asked == KEEP:
        return None
    offload = Offload(_NoLink(), _Endless(), torch.device("cpu")) if asked == OFFLOAD else None
    activations = Activations(asked, *blocks_of(model), offload)
    if recorded:
        activations.replay = _Shared()
    return activations


class _Shared:
    """Memory that all recorded blocks share: a block's input, its result, the gradients of both, and the gradients of
    two blocks' weights. Blocks run eagerly."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []

    def __call__(self, block: nn.Module, function: object, args: tuple) -> None:
        """Allocate it at the first block."""
        stream = next((each for each in args if isinstance(each, Tensor) and each.is_floating_point()), None)
        if self._held or stream is None:
            return
        streamed = [weight for weight in block.parameters() if not weight.requires_grad and weight.dim() > 1]
        self._held = [torch.empty_like(each.detach()) for each in (stream,) * _OF_STREAM + (*streamed,) * TURNS]


class _Endless:
    """Host memory without accounting."""

    capacity_bytes = 0

    def reserve(self, nbytes: int, holder: Holder) -> bool:
        """Reserve a dummy buffer."""
        holder.room = Buffer(torch.empty(0, dtype=torch.uint8, device="cpu"))
        return True

    def free(self, buffer: Buffer, *, reuse: bool) -> None:
        """Do nothing."""


class _NoLink:
    """Copies without effect: fake tensors have no values."""

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
