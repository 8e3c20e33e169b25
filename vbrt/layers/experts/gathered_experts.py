"""Device-side gather of lossless experts, for passes whose touched experts only the device knows: no sync.

A module's implementation reads its weights as one tensor [n, ...], but pages are separate, both if all are resident on
the GPU and in the slots of a device-managed cache. So the pages of the touched experts are copied into one tensor, or,
of `exact` ones, their two planes are merged into it: ascending, padded to as many experts as there are pairs; padding
has no rows. The result equals a lease of the touched experts, with shapes independent of routing: a CUDA graph can
capture it.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.formats.joint_planes import part_fields
from vbrt.formats.page import PageLayout, unpack
from vbrt.host import accelerator
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.experts.residency import NEEDS, gather_pages
from vbrt.kernels.experts import ExpertPages
from vbrt.layers.experts.exact_places import why_not_merged
from vbrt.layers.experts.library_experts import UNHEARD, ExpertsView, implementation_of
from vbrt.layers.experts.protocols import ExpertsModule, ExpertsWeights
from vbrt.layers.experts.touched_experts import Routed
from vbrt.residency.expert_leases import gathered_at_once

__all__ = [
    "Heard",
    "HeardPart",
    "batched",
    "fits_gathered",
    "gathered",
    "gathered_weights",
    "gathers",
    "may_gather",
    "most_gathered",
    "ranked",
    "why_not_gathered",
]


def may_gather(handle: ExpertsWeights) -> bool:
    """True if the device may gather a layer's experts, given few enough tokens."""
    if handle.streams or handle.device.type != accelerator.TYPE or why_not_gathered(handle):
        return False
    return handle.spec.top_k <= most_gathered(handle)


def most_gathered(handle: ExpertsWeights) -> int:
    """Return the maximum number of experts that the device gathers at once."""
    return gathered_at_once(handle.spec.weight_bytes // handle.spec.experts)


def why_not_gathered(handle: ExpertsWeights) -> str:
    """Return why the device cannot gather a layer's experts; "" if it can."""
    spec, waits = handle.spec, "the host leases the experts that tokens are sent to"
    name = f"{spec.name}: held as {spec.label}"
    if not (spec.lossless and handle.keys):
        return f"{name}: {waits}"
    if spec.fine and (why := why_not_merged(spec)):
        return f"{name}: {why}: {waits}"
    if handle.dtype is not spec.dtype:
        return f"{name} in {spec.dtype}, and cast to {handle.dtype}: {waits}"
    others = {implementation_of(layer)[0] or "eager" for layer in handle.layers} - set(UNHEARD)
    if others:
        return f"{name}: the implementation {min(others)} asks which experts are touched: {waits}"
    if why := devices.refusal(handle.device, NEEDS):
        return f"{name}: kernels: {why}: {waits}"
    return ""


def fits_gathered(handle: ExpertsWeights, ids_Tk: Tensor) -> bool:
    """True if this many ids name few of the experts, whose pages take little memory."""
    pairs = ids_Tk.numel()
    return 0 < pairs < handle.spec.experts and pairs <= most_gathered(handle)


class Heard:
    """Pairs of a pass sorted by expert, with counts per expert on the host: one sync.

    Attributes:
        touched: the experts that ids name, ascending.
        local_Tk: the place of each id's expert among them; their number for an id of no expert.
    """

    def __init__(self, ids_Tk: Tensor, experts: int) -> None:
        ids_P = ids_Tk.reshape(-1)
        _, local_Tk = ranked(ids_Tk, experts)
        self._perm_P = torch.sort(ids_P).indices  # which is not stable: the very one of "grouped_mm"
        counts = torch.bincount(ids_P.long().clamp(-1, experts) + 1, minlength=experts + 2)
        numbers = counts.tolist()
        self._ends = list(accumulate(numbers))
        self.touched = [expert for expert, pairs in enumerate(numbers[1:-1]) if pairs]
        self.local_Tk = local_Tk.clamp(max=len(self.touched))

    def part(self, experts: Sequence[int]) -> "HeardPart":
        """Return some of the touched experts, ascending."""
        spans, ends = [(self._ends[expert], self._ends[expert + 1]) for expert in experts], []
        for first, end in spans:
            ends.append((ends[-1] if ends else 0) + end - first)
        device, of_pairs = self.local_Tk.device, _merged(spans)
        ends_n = accelerator.sent(torch.tensor(ends, dtype=torch.int32, device="cpu"), device)
        experts_n = accelerator.sent(torch.tensor(experts, dtype=torch.int64, device="cpu"), device)
        places_P = torch.cat([torch.arange(*span, dtype=torch.int64, device=device) for span in of_pairs])
        pairs_P = torch.cat([self._perm_P[first:end] for first, end in of_pairs])
        own_P = torch.arange(len(pairs_P), dtype=torch.int32, device=device)
        return HeardPart(experts, experts_n, ends_n, places_P, pairs_P, torch.searchsorted(ends_n, own_P, right=True))


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ascending spans with adjacent ones joined, at least one."""
    joined: list[tuple[int, int]] = []
    for first, end in spans:
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((first, end))
    return joined or [(0, 0)]


class HeardPart(NamedTuple):
    """Some experts of a pass, ascending, and their pairs in the order of the experts.

    Attributes:
        experts, experts_n: the experts, and the same on the device.
        ends_n: where each one's pairs end among those of the part, int32.
        places_P: of the pairs among all in this order.
        pairs_P: their numbers.
        ids_P: the places of their experts in the part.
    """

    experts: Sequence[int]
    experts_n: Tensor
    ends_n: Tensor
    places_P: Tensor
    pairs_P: Tensor
    ids_P: Tensor


def gathered(layer: ExpertsModule, routed: Routed, pages: ExpertPages) -> Tensor:
    """Return the output of a layer of which `why_not_gathered` and `fits_gathered` hold.

    Args:
        pages: of all experts that are touched; the addresses of others may be of any pages.
    """
    experts_P, local_Tk = ranked(routed.ids, layer.handle.spec.experts)
    weights = gathered_weights(layer.handle, pages, experts_P)
    _, forward = implementation_of(layer)
    return forward(ExpertsView(layer, weights, experts_P), routed.x, local_Tk, routed.weights)


def batched(layer: ExpertsModule, routed: Routed, slots_Tk: Tensor, memory: Tensor) -> Tensor:
    """Return the output of a dense layer without biases by "batched_mm", which copies each pair's weights: from slots.

    Args:
        slots_Tk: of the pages of each id's expert; their number for an id of no expert.
        memory: the slots, uint8 [slots, bytes of a page].
    """
    spec, layout = layer.handle.spec, layer.handle.pages[0].layout
    weights = {name: _stacked(memory, layout, part) for name, part in zip(spec.parameters, spec.parts, strict=True)}
    view = ExpertsView(layer, weights, None)
    view.num_experts = len(memory)
    _, forward = implementation_of(layer)
    return forward(view, routed.x, slots_Tk, routed.weights)


def gathers(handle: ExpertsWeights) -> bool:
    """True if a kernel copies the pages of many lossless experts together, or merges their planes."""
    spec = handle.spec
    if not spec.lossless or handle.device.type != accelerator.TYPE or handle.dtype is not spec.dtype:
        return False
    return not ((spec.fine and why_not_merged(spec)) or devices.refusal(handle.device, NEEDS))


def gathered_weights(handle: ExpertsWeights, pages: ExpertPages, experts_P: Tensor) -> dict[str, Tensor]:
    """Return the weights of every part of some experts, [P, ...], by parameter, from pages that are copied together, or
    planes that are merged; of expert -1 any finite numbers."""
    spec = handle.spec
    if spec.fine:
        return handle.places.parameters(pages.places, experts_P)
    memory = gather_pages(pages.addresses, experts_P, handle.pages[0].nbytes)
    names = zip(spec.parameters, spec.parts, strict=True)
    return {name: _stacked(memory, pages.layout, part) for name, part in names}


def ranked(ids_Tk: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the experts that ids name, ascending, int64 [T k], then -1; and the place of each id's expert among them,
    int64 [T, k]: T k for an id of no expert."""
    ids_P = ids_Tk.reshape(-1).long()
    outside = (ids_P < 0) | (ids_P >= experts)
    sorted_P, order_P = ids_P.masked_fill(outside, experts).sort()
    changes = (sorted_P[1:] != sorted_P[:-1]).long()
    rank_P = torch.nn.functional.pad(changes.cumsum(0), (1, 0))
    experts_P = torch.full_like(ids_P, -1).scatter_(0, rank_P, sorted_P.masked_fill(sorted_P == experts, -1))
    local_P = torch.empty_like(ids_P).scatter_(0, order_P, rank_P).masked_fill(outside, len(ids_P))
    return experts_P, local_P.view(ids_Tk.shape)


def _stacked(memory: Tensor, layout: PageLayout, part: str) -> Tensor:
    """One part of gathered pages, uint8 [n, bytes of a page]: a view [n, ...] of the matrices."""
    first = part_fields(unpack(memory[0], layout), part)["weight"]
    size, start = first.element_size(), first.data_ptr() - memory.data_ptr()
    strides = (memory.stride(0) // size, *first.stride())
    items = memory.view(-1).view(first.dtype)
    return items.as_strided((len(memory), *first.shape), strides, items.storage_offset() + start // size)
