"""Where the bytes of files go: into fresh host memory, or straight to the GPU that puts them into their order.

A GPU takes them through a relay's page-locked chunks. Fresh host memory would cost a page fault for each of its pages
and then a copy at a sixth of the link's speed, which together take longer than the drive.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from vbrt.host.worker_threads import Crew
from vbrt.layers.weights.weight_encoding import Encoder
from vbrt.tiers import TierStack
from vbrt.tiers.storage.pinned_staging import Read

__all__ = ["HOST", "Fill", "Landing", "for_encoder", "fresh", "into", "on_device"]

_ALONE_BYTES = 1 << 20  # that one thread has read by the time another begins
_PART_BYTES = 2 << 20  # a huge page

Fill = Callable[[int, Read], torch.Tensor]
"""Returns memory uint8 of so many bytes that it has had filled, part by part."""


def fresh(nbytes: int, read: Read) -> torch.Tensor:
    """Return CPU memory, filled at once; a `Fill`."""
    out = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    read(out, 0)
    return out


def into(out: torch.Tensor, crew: Crew) -> Fill:
    """Return the `Fill` of a contiguous tensor in CPU memory, which has as many bytes as are wanted.

    The crew's threads fill parts of it beside the caller: memory that nobody has touched takes longer than the copy.
    """
    memory = out.view(-1).view(torch.uint8)

    def fill(nbytes: int, read: Read) -> torch.Tensor:
        if nbytes <= _ALONE_BYTES:
            read(memory, 0)
        else:
            crew.share(
                -(-nbytes // _PART_BYTES),
                lambda part: read(memory[part * _PART_BYTES : (part + 1) * _PART_BYTES], part * _PART_BYTES),
            )
        return memory

    return fill


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
