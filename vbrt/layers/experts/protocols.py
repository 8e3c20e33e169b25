"""Protocols of routed experts for compute code: weights, module, leased pages."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vbrt.formats.page import PageLayout
from vbrt.kernels.experts import ExpertPages
from vbrt.layers.experts.exact_places import ExactPlaces
from vbrt.layers.experts.experts_coder import ExpertsCoder
from vbrt.layers.experts.experts_spec import ExpertsSpec
from vbrt.layers.experts.residency_owner import Deciding
from vbrt.residency.access_counts import RoutingCounts
from vbrt.tiers import Owner, Page, TierStack

__all__ = ["ExpertsModule", "ExpertsWeights", "LeasedExperts"]


class LeasedExperts(Protocol):
    """Leased pages of some experts.

    Attributes:
        experts: the experts, ascending.
    """

    experts: Sequence[int]

    def fields(self, position: int) -> Sequence[dict[str, Tensor]]:
        """Return the fields of each plane of the expert at a position."""

    def matrix(self, part: str, position: int) -> Tensor:
        """Return one decoded matrix of the expert at a position, as the module keeps it; perhaps a view of a page."""

    def pages(self) -> ExpertPages:
        """Return the coarse pages as kernels take them."""

    def parameters(self) -> dict[str, Tensor]:
        """Return the decoded weights of every part, by the names of the module's parameters."""


class ExpertsWeights(Protocol):
    """Weights of a layer's experts, in pages of a stack; for attributes see `ExpertsHandle`."""

    spec: ExpertsSpec
    stack: TierStack
    device: torch.device
    device_name: str
    dtype: torch.dtype
    coder: ExpertsCoder
    deciding: Deciding
    routing: RoutingCounts
    keys: tuple[str, ...]
    pages: tuple[Page, ...]
    owner: Owner | None
    id: int
    generation: int
    forwards: int
    layers: Any
    ready: ExpertPages | None

    @property
    def places(self) -> ExactPlaces:
        """The places of fields in the pages of `exact` experts."""

    @property
    def planes(self) -> int:
        """The number of planes of an expert."""

    @property
    def streams(self) -> bool:
        """True if any page lives below the computing tier."""

    @property
    def at_home(self) -> bool:
        """True if all pages are at home in the computing tier and none is leaving."""

    def token_at(self, generation: int) -> Tensor:
        """Name the weights and a generation in graphs."""

    def check_pages(self) -> None:
        """Raise TierError if there are no pages any more."""

    def own_pages(self, keys: tuple[str, ...], owner: Owner) -> None:
        """Hold pages that `owner` owns."""

    def keep_ready(self, pages: ExpertPages) -> None:
        """Use the pages of all experts, which never move, without a lease from now on."""

    def layouts_of(self, expert: int) -> list[PageLayout]:
        """Return the layouts of an expert's pages, as they are stored."""

    def keys_of(self, experts: Sequence[int], precision: str) -> tuple[str, ...]:
        """Return the keys of the planes that a precision takes of some experts."""

    def lease(self, experts: Sequence[int], precision: str = "full") -> AbstractContextManager[LeasedExperts]:
        """Lease the planes of some experts, ascending."""

    def form(self, pages: list[Tensor | None], addresses: Tensor | None = None) -> ExpertPages:
        """Return pages by expert, as kernels take them."""


class ExpertsModule(Protocol):
    """A module of routed experts whose weights are in the tiers; the rest are the attributes of its own class."""

    _parameters: Mapping[str, nn.Parameter | None]
    has_bias: bool

    @property
    def handle(self) -> ExpertsWeights:
        """The weights."""

    def _is_given(self) -> bool:
        """True if a parameter is given: another tensor has its entry."""

    def post_expert_norm(self, rows: Tensor) -> Tensor:
        """Normalize the rows of experts, where the module has such a norm."""
