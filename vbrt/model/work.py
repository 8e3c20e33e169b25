"""What a model has computed, in the units of people: tokens, images, steps. Plain integers, counted as passes begin."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from vbrt.model.phase import first_input

__all__ = ["Work"]


class Work:
    """Counts what passes of one model compute, by the shape of their inputs; nothing waits for the device.

    Attributes:
        part: what the model does in a pipeline: "step", "image" or another phase; "" outside of one.
        written: new tokens, of passes without gradients with one token a sequence.
        read: tokens of prompts.
        trained: tokens of passes with gradients.
        images: inputs [N, C, H, W], or what a pipeline's decoder makes.
        steps: of a pipeline's denoiser.
    """

    __slots__ = ("_elsewhere", "images", "part", "read", "steps", "trained", "written")

    def __init__(self) -> None:
        self.part, self._elsewhere = "", False
        self.written = self.read = self.trained = self.images = self.steps = 0

    def note(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Count a pass that begins with these arguments."""
        if self._elsewhere:
            return
        ids = kwargs.get("input_ids")
        if ids is not None and "decoder_input_ids" not in kwargs and not self.part:  # decode steps: in a microsecond
            shape = ids.shape
            self._note_tokens(ids.numel(), shape[-1] if len(shape) > 1 else 1)
            return
        first = first_input(args, kwargs)
        if first is None or not first.ndim:
            return
        if self.part == "step":
            self.steps += 1
        elif self.part == "image" or (first.ndim == 4 and first.is_floating_point()):
            self.images += first.size(0)
        elif not first.is_floating_point():
            self._note_tokens(first.numel(), first.size(-1) if first.ndim > 1 else 1)
        elif first is kwargs.get("inputs_embeds"):
            self._note_tokens(first.size(0) * first.size(1), first.size(1))

    def _note_tokens(self, tokens: int, a_sequence: int) -> None:
        if torch.is_grad_enabled():
            self.trained += tokens
        elif a_sequence == 1:
            self.written += tokens
        else:
            self.read += tokens

    @contextlib.contextmanager
    def counted_elsewhere(self) -> Iterator[None]:
        """Count no passes in a `with` block: drafts and verifications, whose tokens speculation counts."""
        self._elsewhere = True
        try:
            yield
        finally:
            self._elsewhere = False
