"""Drafts by the coarse planes of `exact` weights, on the call's own cache: self-speculation.

The coarse planes are at home on the computing device if they fit besides four of the largest pages, so a draft moves no
bytes, and its steps are captured and fused like a 4-bit model's.
"""

import functools
from typing import Any, Protocol

import torch

from vbrt.generation.speculation.sequences import Sequences
from vbrt.generation.speculation.verification import Decoding
from vbrt.generation.static.cache_kinds import NotRecordable
from vbrt.host import accelerator
from vbrt.libraries.transformers_api import cache_of

__all__ = ["CoarsePlanes"]

_DRAFT = "draft"


class _Call(Protocol):
    kwargs: dict[str, Any]


class CoarsePlanes:
    """Drafter of a model with coarse planes."""

    name, free = "coarse", False

    def __init__(self) -> None:
        self.placed = False  # the cache is in static memory

    @property
    def one_time(self) -> int:
        """None of its own: captures are counted by those who make them."""
        return 0

    def close(self) -> None:
        """Nothing is held."""

    def bind(self, decoding: Decoding, call: _Call) -> None:
        """Draft for a call: `call.kwargs` are always those of its next pass."""
        self._decoding, self._call = decoding, call
        cache = cache_of(call.kwargs)
        if any(getattr(layer, "is_sliding", False) for layer in cache.layers):
            self.place(cache)  # in memory of its own, it keeps its past, and cannot be moved then
        with decoding.attachment.phase(_DRAFT, "coarse"):
            if decoding.attachment.stack.device.type == accelerator.TYPE and decoding.passes.captures:
                decoding.pace.will_capture(self.name)

    def place(self, cache: Any) -> bool:
        """Move the cache into static memory, if drafts on it can be captured; return whether it is there.

        Plain steps that run eagerly then read keys of other strides, for which cuDNN plans each length anew.
        """
        try:
            with self._decoding.attachment.phase(_DRAFT, "coarse"):
                self._decoding.passes.placed(cache)
            self.placed = True
        except NotRecordable:
            self.placed = False
        return self.placed

    def propose(self, sequences: Sequences, k: int) -> torch.Tensor:
        """Draft k tokens int64 [B, k], and rewind the cache. Raises NotRecordable: its memory cannot be had again."""
        decoding = self._decoding
        captures = decoding.pace.captures(self.name)  # before that, drafts run eagerly
        with decoding.attachment.phase(_DRAFT, "coarse"):
            proposed = functools.partial(self._proposed, sequences, k)
            return decoding.passes.run(proposed) if captures else proposed()

    def _proposed(self, sequences: Sequences, k: int) -> torch.Tensor:
        decoding, ids, kwargs = self._decoding, sequences.ids, self._call.kwargs
        cache = cache_of(kwargs)
        for _ in range(k):
            outputs = decoding.step(ids, 1, kwargs)
            ids = torch.cat([ids, sequences.propose(ids, outputs.logits[:, -1])[:, None]], dim=-1)
            kwargs = decoding.after(outputs, kwargs, cache)
        if self.placed:  # drafts may have run eagerly, on layers of the cache's own
            decoding.passes.placed(cache)
        cache.crop(-k)
        return ids[:, sequences.length :]
