"""BlockWeights: a block's weights that train from the tiers, while the block is replayed as graphs.

A graph computes gradients into fixed memory, and runs no Python: what an eager layer does around its kernels is done
here, for all weights of the block at once.

    weights = BlockWeights(handles)
    with weights.uncounted(), collecting(place):   # capture: gradients go where `place` says, and nowhere else
        ...
    weights.settle(); graph.replay(); weights.hand_on(gradients, wanted)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vbrt.training.full.full_layers import check_version, wanted
from vbrt.training.full.full_weight import FullWeight
from vbrt.training.full.streamed_parameter import StreamedParameter

__all__ = ["BlockWeights"]


class BlockWeights:
    """Weights of one block, each used once in its forward.

    Attributes:
        trained: those that get gradients.
    """

    def __init__(self, weights: Sequence[FullWeight]) -> None:
        self._weights = tuple(weights)
        self.trained = tuple(weight for weight in weights if weight.trainable)

    @property
    def parameters(self) -> list[StreamedParameter]:
        """Parameters of the trained weights: inputs of an autograd function, which they anchor in its graph."""
        return [weight.parameter for weight in self.trained]

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context whose forwards announce no gradients."""
        expected = [weight.gradient.expected for weight in self._weights]
        try:
            yield
        finally:
            for weight, before in zip(self._weights, expected, strict=True):
                weight.gradient.expected = before

    def settle(self) -> None:
        """Wait for pending updates. Raises their errors."""
        for weight in self._weights:
            weight.settle()

    def begin_forward(self) -> list[tuple[int, int]]:
        """Announce gradients of a forward; return the versions of the weights that it computes with."""
        for weight in self._weights:
            weight.gradient.expected += 1
        return [weight.state.version for weight in self._weights]

    def check(self, versions: Sequence[tuple[int, int]]) -> None:
        """Raise WrapError if a weight was updated or loaded since its forward."""
        for weight, version in zip(self._weights, versions, strict=True):
            check_version(weight, version)

    def wanted(self, ctx: Any, first: int) -> list[bool]:
        """Return which trained weights get gradients of the running backward pass.

        Args:
            first: index of the first one's parameter among the inputs of the function of `ctx`.
        """
        return [wanted(ctx, weight, first + at) for at, weight in enumerate(self.trained)]

    def hand_on(self, gradients: Sequence[Tensor], asked: Sequence[bool]) -> torch.Event | None:
        """Accumulate gradients (bf16) of the trained weights that are asked for; return the event after which their
        memory may be overwritten, None: now. Call it in autograd's thread."""
        sent = [(weight.gradient, dw) for weight, dw, asks in zip(self.trained, gradients, asked, strict=True) if asks]
        return self.trained[0].outlet.send_computed(sent) if sent else None
