"""Leased pages of some experts, in the kernels' form and as decoded weights."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from vbrt.host import accelerator
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.experts.residency import NEEDS
from vbrt.kernels.experts import ExpertPages
from vbrt.layers.experts.exact_places import why_not_merged
from vbrt.layers.experts.expert_stack import Bank
from vbrt.layers.experts.protocols import ExpertsWeights
from vbrt.tiers import Lease

__all__ = ["Leased", "pages_of", "resident_pages"]


class Leased:
    """Leased pages of some experts, in their order.

    Attributes:
        experts: the experts, ascending.
    """

    def __init__(self, handle: ExpertsWeights, experts: Sequence[int], lease: Lease, planes: int) -> None:
        self.experts, self._handle, self._lease, self._planes = experts, handle, lease, planes

    def fields(self, position: int) -> list[dict[str, torch.Tensor]]:
        """Return the fields of each plane of the expert at a position."""
        first = position * self._planes
        return [slot.tensors for slot in self._lease.slots[first : first + self._planes]]

    def matrix(self, part: str, position: int) -> torch.Tensor:
        """Return one matrix of the expert at a position as the module keeps it, decoded; perhaps a view of a page."""
        return self._handle.coder.matrix(part, self.fields(position), self._handle.dtype)

    def pages(self) -> ExpertPages:
        """Return the coarse pages as kernels take them. The addresses are copied to the GPU without waiting."""
        handle, spec = self._handle, self._handle.spec
        pages: list[torch.Tensor | None] = [None] * spec.experts
        for position, expert in enumerate(self.experts):
            pages[expert] = self._lease.slots[position * self._planes].view
        return pages_of(handle, pages)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the `weights` of every part, under the names of the module's parameters."""
        handle, spec = self._handle, self._handle.spec
        if self._planes == 2 and self.experts and _merges(handle):
            places_nF = _places_in(handle, self.experts, [slot.view for slot in self._lease.slots])
            rows_n = torch.arange(len(self.experts), dtype=torch.int64, device=handle.device)
            return handle.places.parameters(places_nF, rows_n)
        return {name: self.weights(part) for name, part in zip(spec.parameters, spec.parts, strict=True)}

    def weights(self, part: str) -> torch.Tensor:
        """Return the matrices of a part as the module keeps them, [n, ...], decoded: on a CPU where they lie, else a
        tensor of its own."""
        one, handle, places = self._handle.spec.parts[part], self._handle, range(len(self.experts))
        if places and handle.device.type == "cpu":
            return Bank.of([self.matrix(part, place) for place in places])
        out = torch.empty((len(places), *one.site.matrix_shape), dtype=handle.dtype, device=handle.device)
        for place in places:
            out[place].copy_(self.matrix(part, place))
        return out


def _merges(handle: ExpertsWeights) -> bool:
    """True if a kernel merges the planes of many `exact` experts at once."""
    if handle.device.type != accelerator.TYPE or handle.dtype is not handle.spec.dtype:
        return False
    return not (why_not_merged(handle.spec) or devices.refusal(handle.device, NEEDS))


def _places_in(handle: ExpertsWeights, experts: Sequence[int], views: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return where the fields of `exact` experts lie, given views of their pages: coarse, fine, coarse, ..."""
    coarse, fine = ([view.data_ptr() for view in views[plane::2]] for plane in range(2))
    return handle.places.in_pages(experts, coarse, fine)


def pages_of(handle: ExpertsWeights, pages: list[torch.Tensor | None]) -> ExpertPages:
    """Return pages by expert, in the kernels' form."""
    addresses = None
    if handle.device.type == accelerator.TYPE:
        table = torch.tensor([0 if p is None else p.data_ptr() for p in pages], dtype=torch.int64, device="cpu")
        addresses = accelerator.sent(table, handle.device)
    return handle.form(pages, addresses)


def resident_pages(handle: ExpertsWeights, device: torch.device) -> ExpertPages | None:
    """Return the pages of all experts if all are at home on the computing GPU and none is moving, for use without a
    lease and without knowing the touched experts; of `exact` ones the coarse pages, and places in both. Else None."""
    if device.type != accelerator.TYPE or not handle.stack.at_rest or device != handle.device:
        return None
    fine = handle.spec.fine
    if fine and not _merges(handle):
        return None
    handle.stack.capturing()
    ready = handle.ready
    if ready is None:
        handle.check_pages()
        slots = handle.stack.levels[0].slots
        pages = [slots[key].view for key in handle.keys if key in slots]
        if len(pages) < len(handle.keys) or any(page.home for page in handle.pages):
            return None
        ready = pages_of(handle, pages[:: handle.planes])
        if fine:
            ready = replace(ready, places=_places_in(handle, range(handle.spec.experts), pages))
        if handle.stack.at_rest:
            handle.keep_ready(ready)
    return ready
