"""EncodedWeight: protocol of a weight as products see it, without its state transitions."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

import torch

from vbrt.formats.fitted_codebook import Separation
from vbrt.formats.format import WeightPlanes
from vbrt.layers.weights.kernel_selection import Kernels
from vbrt.layers.weights.weight_spec import HandleSpec
from vbrt.tiers import Page, TierStack

__all__ = ["EncodedWeight", "HeldPlanes"]


class HeldPlanes(Protocol):
    """State of the planes, see `vbrt.layers.weights.products`."""

    @property
    def planes(self) -> WeightPlanes | None:
        """Resident planes, used without a lease; None if products lease."""

    def compute(self, weight: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """x Wᵀ + bias, computed where the page lies; None: a lease brings it."""

    def compute_rows(
        self, weight: Any, rows: Sequence[torch.Tensor], bias: torch.Tensor | None
    ) -> list[torch.Tensor] | None:
        """`compute` of each x in `rows`, alike in shape, with the bits of a call for it alone."""

    def compute_siblings(self, weights: Sequence[Any], x: torch.Tensor) -> list[torch.Tensor] | None:
        """`compute` with each of several weights, this one among them, without biases."""


class EncodedWeight(Protocol):
    """A weight in pages of a stack.

    Attributes:
        forwards, weight_reads, computed: counters, incremented by products; computed: of those by the CPU on a page in
            host memory, for a layer on a GPU.
        tokens, input_at: of the last product for which pages were leased: its rows, and the address of its input.
        held: current state of the planes.
    """

    spec: HandleSpec
    stack: TierStack
    device: torch.device
    device_name: str
    dtype: torch.dtype
    trainable: bool
    strides: tuple[int, ...] | None
    separation: Separation | None
    kernels: Kernels | None
    id: int
    generation: int
    token: torch.Tensor
    pages: tuple[Page, ...]
    fallbacks: list[str]
    forwards: int
    weight_reads: int
    computed: int
    tokens: int
    input_at: int
    held: HeldPlanes

    @property
    def coarse_kernels(self) -> Kernels:
        """The kernels for the coarse plane alone of an `exact` weight."""

    def take_kernels(self) -> Kernels:
        """Choose the kernels."""

    def lease(self, precision: str = "full") -> AbstractContextManager[Any]:
        """Lease the planes of a precision."""

    def still(self, generation: int) -> Self:
        """Return the weight. Raises WrapError if its generation has changed."""

    def token_at(self, generation: int) -> torch.Tensor:
        """Name the weight and a generation in graphs."""

    def keep_resident(self, planes: WeightPlanes, tensors: list[dict[str, torch.Tensor]]) -> None:
        """Use leased planes without a lease from now on, if their pages are at home in the computing tier."""
