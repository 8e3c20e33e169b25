"""Memory check for recorded blocks: their graphs and the rest of a step have to fit on the GPU together.

CUDA graphs keep the memory between their inputs and their results. Blocks share it, but nothing else can use it,
whereas logits and the head's gradient lie where eager blocks have computed. A card that is just large enough for eager
blocks would run out of memory in the step behind the capture.

So an eager step frees all cached memory behind its last block. The bytes reserved when its backward pass has come back
to that block are those of the rest of a step. Recordings stay if both fit.
"""

from typing import Any

import torch
from torch import Tensor

from vbrt.host import accelerator
from vbrt.libraries.torch_api import tree_leaves

__all__ = ["RecordingRoom"]

_GB = 1e9


class RecordingRoom:
    """Bytes of steps and of their recordings, by the shape of a block's first input."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._measures = accelerator.has_streams(device)
        self._rest: dict[torch.Size, int] = {}  # bytes that a step reserves outside of blocks
        self._before: dict[torch.Size, int] = {}  # bytes reserved before the first capture
        self._fitting: set[torch.Size] = set()
        self._least = 0  # elements of the smallest input whose recordings did not fit; 0: all have

    def measure_rest(self, shape: torch.Size, outputs: Any) -> None:
        """Measure what the pass takes from here, behind the model's last block, until its backward pass is back. Frees
        cached memory. outputs: of that block."""
        if not self._measures:
            return

        def came_back(gradient: Tensor) -> None:
            self._rest[shape] = accelerator.memory_reserved(self._device)

        accelerator.empty_cache()
        for each in tree_leaves(outputs):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(came_back)
                return

    def refuses(self, shape: torch.Size) -> bool:
        """True if recordings of this shape, or of a smaller one, did not fit."""
        return bool(self._least) and shape.numel() >= self._least

    def begin(self, shape: torch.Size) -> int | None:
        """Return the bytes reserved before the first capture of a shape, with cached memory freed. None: nothing to
        measure."""
        if not self._measures or shape in self._fitting:
            return None
        if shape not in self._before:  # once: blocks that cannot be recorded come here, too
            self._rest.setdefault(shape, accelerator.memory_reserved(self._device))  # not measured: with blocks' own
            accelerator.empty_cache()
            self._before[shape] = accelerator.memory_reserved(self._device)
        return self._before[shape]

    def lacks(self, shape: torch.Size, before: int | None, *, captured: bool) -> str:
        """Return why recordings of a shape do not fit; "" if they do. before: by `begin`. captured: the first block has
        been captured; else it has run eagerly, which takes about as much."""
        if before is None:
            return ""
        if captured:
            accelerator.empty_cache()
        grown = accelerator.memory_reserved(self._device) - before
        rest, limit = self._rest[shape], accelerator.memory_limit(self._device)
        if rest + grown <= limit:
            if captured:
                self._fitting.add(shape)
            return ""
        self._least = min(self._least or shape.numel(), shape.numel())
        sizes = (f"{each / _GB:.1f}" for each in (grown, rest, limit))
        return "their graphs would keep {} GB, and the rest of a step takes {} of {} GB".format(*sizes)
