"""Where the bytes of files go: into fresh host memory, or straight to the GPU that puts them into their order.

A GPU takes them through a relay's page-locked chunks. Fresh host memory would cost a page fault for each of its pages
and then a copy at a sixth of the link's speed, which together take longer than the drive.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from vbrt.layers.encoding import Encoder
from vbrt.tiers import TierStack
from vbrt.tiers.relay import Read

__all__ = ["HOST", "Fill", "Landing", "for_encoder", "fresh", "on_device"]

Fill = Callable[[int, Read], torch.Tensor]
"""Returns memory uint8 of so many bytes that it has had filled, part by part."""


def fresh(nbytes: int, read: Read) -> torch.Tensor:
    """Return CPU memory, filled at once; a `Fill`."""
    out = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    read(out, 0)
    return out


@dataclass(frozen=True, slots=True)
class Landing:
    """A device, and how bytes of files get there."""

    device: torch.device
    fill: Fill


HOST = Landing(torch.device("cpu"), fresh)


def on_device(stack: TierStack) -> Landing:
    """Return the way to the device that a stack computes on."""
    if stack.device.type != "cuda":
        return HOST
    return Landing(stack.device, partial(stack.levels[0].relay.filled, device=stack.device))


def for_encoder(encoder: Encoder, stack: TierStack) -> Fill:
    """Return where planes are wanted that an encoder stores as they are: on the device if that puts them in order."""
    return fresh if encoder.packing is None else on_device(stack).fill
