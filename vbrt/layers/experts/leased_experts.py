"""Leased pages of some experts, in the kernels' form and as decoded weights.

On a GPU one launch for each part decodes all of them, or merges their planes, by a table of the pages' addresses, which
is made once for leases that get the same memory each time.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vbrt.formats.page import PageLayout
from vbrt.host import accelerator
from vbrt.kernels.experts import ExpertPages
from vbrt.layers.experts.expert_stack import Bank
from vbrt.layers.experts.gathered_experts import gathered_weights, gathers
from vbrt.layers.experts.protocols import ExpertsWeights
from vbrt.tiers import LeasedTensors

__all__ = ["Leased", "pages_of", "resident_pages"]


class Leased:
    """Leased pages of some experts, in their order.

    Args:
        tensors: fields of the pages, expert by expert, plane by plane; `LeasedTensors` are the same at each lease.

    Attributes:
        experts: the experts, ascending.
    """

    def __init__(
        self, handle: ExpertsWeights, experts: Sequence[int], tensors: Sequence[dict[str, Tensor]], planes: int
    ) -> None:
        self.experts, self._handle, self._tensors, self._planes = experts, handle, tensors, planes

    def fields(self, position: int) -> Sequence[dict[str, Tensor]]:
        """Return the fields of each plane of the expert at a position."""
        first = position * self._planes
        return self._tensors[first : first + self._planes]

    def matrix(self, part: str, position: int) -> Tensor:
        """Return one matrix of the expert at a position as the module keeps it, decoded; perhaps a view of a page."""
        return self._handle.coder.matrix(part, self.fields(position), self._handle.dtype)

    def pages(self) -> ExpertPages:
        """Return the coarse pages as kernels take them. The addresses are copied to the GPU without waiting."""
        return self._once("pages", self._pages)

    def _pages(self) -> ExpertPages:
        pages: list[Tensor | None] = [None] * self._handle.spec.experts
        coarse = zip(self.experts, self._tensors[:: self._planes], self._layouts()[:: self._planes], strict=True)
        for expert, fields, layout in coarse:
            pages[expert] = _bytes_of(fields, layout)
        return pages_of(self._handle, pages)

    def _addressed(self) -> ExpertPages:
        """Return the leased pages alone, by address: of `exact` experts the coarse ones, with places in both."""
        handle, layouts = self._handle, self._layouts()
        at = [_address(fields, layout) for fields, layout in zip(self._tensors, layouts, strict=True)]
        coarse = at[:: self._planes]
        places = handle.places.in_pages(self.experts, coarse, at[1::2]) if self._planes == 2 else None
        table = torch.tensor(coarse, dtype=torch.int64, device="cpu")
        pages = handle.form([None] * len(coarse), accelerator.sent(table, handle.device))
        return replace(pages, places=places)

    def _once(self, name: str, make: Callable[[], ExpertPages]) -> ExpertPages:
        """Make pages in a kernels' form, once for all leases that get the same tensors."""
        if not isinstance(self._tensors, LeasedTensors):
            return make()
        made = self._tensors.planes = self._tensors.planes or {}
        if name not in made:
            made[name] = make()
        return made[name]

    def _layouts(self) -> list[PageLayout]:
        pages, step = self._handle.pages, self._handle.planes
        return [page.layout for e in self.experts for page in pages[e * step : e * step + self._planes]]

    def parameters(self) -> dict[str, Tensor]:
        """Return the `weights` of every part, under the names of the module's parameters."""
        handle, spec = self._handle, self._handle.spec
        if self.experts and self._planes == handle.planes and gathers(handle):
            rows_n = torch.arange(len(self.experts), dtype=torch.int64, device=handle.device)
            return gathered_weights(handle, self._once("addressed", self._addressed), rows_n)
        return {name: self.weights(part) for name, part in zip(spec.parameters, spec.parts, strict=True)}

    def weights(self, part: str) -> Tensor:
        """Return the matrices of a part as the module keeps them, [n, ...], decoded: on a CPU where they lie, else a
        tensor of its own."""
        one, handle, places = self._handle.spec.parts[part], self._handle, range(len(self.experts))
        if places and handle.device.type == "cpu":
            return Bank.of([self.matrix(part, place) for place in places])
        decode = handle.coder.decoder_of_pages(part, handle.pages[0].layout, handle.dtype) if places else None
        if decode is not None:
            w_nNK = decode(self._once("addressed", self._addressed), part)
            return w_nNK.transpose(1, 2).contiguous() if one.transposed else w_nNK
        out = torch.empty((len(places), *one.site.matrix_shape), dtype=handle.dtype, device=handle.device)
        for place in places:
            out[place].copy_(self.matrix(part, place))
        return out


def _bytes_of(fields: dict[str, Tensor], layout: PageLayout) -> Tensor:
    """Return a page's bytes, uint8, from views of its fields."""
    field = layout.fields[0]
    own = fields[field.name].reshape(-1).view(torch.uint8)
    return own.as_strided((layout.nbytes,), (1,), own.storage_offset() - field.offset)


def _address(fields: dict[str, Tensor], layout: PageLayout) -> int:
    """Return where a page begins, from views of its fields."""
    field = layout.fields[0]
    view = fields[field.name]
    at = view.data_ptr() or view.untyped_storage().data_ptr() + view.storage_offset() * view.element_size()
    return at - field.offset  # an empty view has no address of its own


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
    if fine and not gathers(handle):
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
