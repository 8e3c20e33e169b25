"""Read targets: file bytes go to fresh host memory, or to the GPU that packs them into pages.

A GPU is filled through a relay's pinned chunks. Going through fresh host memory costs page faults and a pageable H2D
copy at a sixth of the link's rate, which together take longer than the drive.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from vbrt.host import accelerator
from vbrt.host.worker_threads import Crew
from vbrt.layers.weights.weight_encoding import Encoder
from vbrt.tiers import TierStack
from vbrt.tiers.storage.pinned_staging import Read

__all__ = ["HOST", "Fill", "Landing", "for_encoder", "fresh", "into", "on_device"]

_ALONE_BYTES = 1 << 20  # read by one thread before another could start
_PART_BYTES = 2 << 20  # a huge page

Fill = Callable[[int, Read], torch.Tensor]
"""Returns uint8 memory of so many bytes, filled part by part through the given reader."""


def fresh(nbytes: int, read: Read) -> torch.Tensor:
    """`Fill` with fresh CPU memory, read at once."""
    out = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    read(out, 0)
    return out


def into(out: torch.Tensor, crew: Crew) -> Fill:
    """Return a `Fill` into a contiguous CPU tensor of exactly the wanted size.

    The crew's threads fill parts in parallel with the caller: first-touch page faults take longer than the copy.
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
    """Target device, and the `Fill` that reads file bytes there."""

    device: torch.device
    fill: Fill


HOST = Landing(torch.device("cpu"), fresh)


def on_device(stack: TierStack) -> Landing:
    """Return the landing on a stack's compute device."""
    if not accelerator.has_streams(stack.device):
        return HOST
    return Landing(stack.device, partial(stack.levels[0].relay.filled, device=stack.device))


def for_encoder(encoder: Encoder, stack: TierStack) -> Fill:
    """Return the `Fill` for planes stored as encoded: on the device if the encoder packs them there, else fresh
    memory."""
    return fresh if encoder.packing is None else on_device(stack).fill
