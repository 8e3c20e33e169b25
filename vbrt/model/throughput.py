"""Throughput counters: tokens, images, steps. Plain integers, counted at the start of each pass."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from vbrt.model.phase import first_input

__all__ = ["Work"]


class Work:
    """Throughput counters of one model, by the shapes of its inputs; no device synchronization.

    Attributes:
        part: role of the model in a pipeline: "step", "image" or another phase; "" outside of one.
        written: new tokens, of passes without gradients with one token per sequence.
        read: prompt tokens.
        trained: tokens of passes with gradients.
        images: images in inputs [N, C, H, W].
        steps, decodes: passes of a pipeline's denoiser and of its decoder, whose inputs libraries do not show.
    """

    __slots__ = ("_elsewhere", "decodes", "images", "part", "read", "steps", "trained", "written")

    def __init__(self) -> None:
        self.part, self._elsewhere = "", False
        self.written = self.read = self.trained = self.images = self.steps = self.decodes = 0

    def note(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Count a pass that begins with these arguments."""
        if self._elsewhere:
            return
        if self.part in ("step", "image"):
            self.steps += self.part == "step"
            self.decodes += self.part == "image"
            return
        ids = kwargs.get("input_ids")
        is_given = isinstance(ids, torch.Tensor) and "decoder_input_ids" not in kwargs
        first = ids if is_given else first_input(args, kwargs)  # most passes are decode steps
        shape = () if first is None else first.shape
        if len(shape) < 2:
            return
        if is_given or not first.is_floating_point():
            self._note_tokens(first.numel(), shape[-1])
        elif first is kwargs.get("inputs_embeds"):
            self._note_tokens(shape[0] * shape[1], shape[1])
        elif len(shape) == 4:
            self.images += shape[0]

    def _note_tokens(self, tokens: int, a_sequence: int) -> None:
        if torch.is_grad_enabled():
            self.trained += tokens
        elif a_sequence == 1:
            self.written += tokens
        else:
            self.read += tokens

    @contextlib.contextmanager
    def counted_elsewhere(self) -> Iterator[None]:
        """Suspend counting in a `with` block: for drafts and verifications, whose tokens speculation counts."""
        self._elsewhere = True
        try:
            yield
        finally:
            self._elsewhere = False
