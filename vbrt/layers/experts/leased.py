"""The pages of some experts while they are leased: as kernels take them, and as decoded weights."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vbrt.kernels.experts import ExpertPages
from vbrt.layers.experts.bank import Bank
from vbrt.tiers import Lease

if TYPE_CHECKING:
    from vbrt.layers.experts.handle import ExpertsHandle

__all__ = ["Leased"]


class Leased:
    """The leased pages of some experts, in their order.

    Attributes:
        experts: the experts, ascending.
    """

    def __init__(self, handle: "ExpertsHandle", experts: Sequence[int], lease: Lease, planes: int) -> None:
        self.experts, self._handle, self._lease, self._planes = experts, handle, lease, planes

    def fields(self, position: int) -> list[dict[str, torch.Tensor]]:
        """Return the fields of each plane of the expert at a position."""
        first = position * self._planes
        return [slot.tensors for slot in self._lease.slots[first : first + self._planes]]

    def pages(self) -> ExpertPages:
        """Return the coarse pages as kernels take them. The addresses are copied to the GPU without waiting."""
        handle, spec = self._handle, self._handle.spec
        pages: list[torch.Tensor | None] = [None] * spec.experts
        for position, expert in enumerate(self.experts):
            pages[expert] = self._lease.slots[position * self._planes].view
        return handle.pages_of(pages)

    def weights(self, part: str) -> torch.Tensor:
        """Return the matrices of a part as the module keeps them, [n, ...], decoded: on a CPU where they lie, else a
        tensor of its own."""
        one, handle, places = self._handle.spec.parts[part], self._handle, range(len(self.experts))
        if places and handle.device.type == "cpu":
            return Bank.of([handle.matrix(part, self.fields(place)) for place in places])
        out = torch.empty((len(places), *one.site.matrix_shape), dtype=handle.dtype, device=handle.device)
        for place in places:
            out[place].copy_(handle.matrix(part, self.fields(place)))
        return out
