"""EncodedWeight: protocol of a weight as products see it, without its state transitions."""

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


class EncodedWeight(Protocol):
    """A weight in pages of a stack.

    Attributes:
        forwards, weight_reads, computed: counters, incremented by products.
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
