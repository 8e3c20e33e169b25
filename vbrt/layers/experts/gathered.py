"""Experts held dense, all on the GPU: the device gathers those that tokens are sent to; nothing waits to hear which.

A module's implementation reads its weights as one tensor [n, ...], and pages lie apart. So the pages of as many experts
as there are pairs are copied together, ascending and each once; what is left over repeats and has no rows. That is what
a lease of the touched experts gives, in shapes that do not depend on them: a CUDA graph can record it.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vbrt.formats.experts import part_fields
from vbrt.formats.page import PageLayout, unpack
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.experts.residency import gather_pages
from vbrt.layers.experts.library import ExpertsView, implementation_of

if TYPE_CHECKING:
    from vbrt.kernels.experts import ExpertPages
    from vbrt.layers.experts.compute import Routed
    from vbrt.layers.experts.handle import ExpertsHandle
    from vbrt.layers.experts.layer import VBExperts

__all__ = ["fits_gathered", "gathered", "may_gather", "ranked"]

_IMPLEMENTATIONS = ("batched_mm", "grouped_mm")  # of transformers: none of them waits
_MOST_BYTES = 256 << 20  # of gathered pages, which are outside of the budgets


def may_gather(handle: "ExpertsHandle") -> bool:
    """True if the device may gather a layer's experts, where there are few enough tokens."""
    if (
        not (handle.spec.dense and handle.keys)
        or handle.streams
        or handle.device.type != "cuda"
        or handle.dtype is not handle.spec.dtype
    ):
        return False
    named = all(implementation_of(layer)[0] in _IMPLEMENTATIONS for layer in handle.layers)
    return named and devices.available() and handle.spec.top_k * handle.pages[0].nbytes <= _MOST_BYTES


def fits_gathered(handle: "ExpertsHandle", ids_Tk: Tensor) -> bool:
    """True if so many ids name few of the experts, and these take little room."""
    pairs = ids_Tk.numel()
    return pairs < handle.spec.experts and pairs * handle.pages[0].nbytes <= _MOST_BYTES


def gathered(layer: "VBExperts", routed: "Routed", pages: "ExpertPages") -> Tensor:
    """Return the output of a layer of which `may_gather` and `fits_gathered` hold. pages: of all experts."""
    spec, layout = layer.handle.spec, pages.layout
    experts_P, local_Tk = ranked(routed.ids, spec.experts)
    memory = gather_pages(pages.addresses, experts_P, layer.handle.pages[0].nbytes)
    weights = {
        parameter: _stacked(memory, layout, part) for parameter, part in zip(spec.parameters, spec.parts, strict=True)
    }
    _, forward = implementation_of(layer)
    return forward(ExpertsView(layer, weights, experts_P), routed.x, local_Tk, routed.weights)


def ranked(ids_Tk: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the experts that ids name, ascending, int64 [T k], the rest of it any; and the place of each id's expert
    among them, int64 [T, k]: T k for an id of no expert."""
    ids_P = ids_Tk.reshape(-1).long()
    outside = (ids_P < 0) | (ids_P >= experts)
    sorted_P, order_P = ids_P.masked_fill(outside, experts).sort()
    changes = (sorted_P[1:] != sorted_P[:-1]).long()
    rank_P = torch.nn.functional.pad(changes.cumsum(0), (1, 0))
    experts_P = torch.zeros_like(ids_P).scatter_(0, rank_P, sorted_P.clamp(max=experts - 1))
    local_P = torch.empty_like(ids_P).scatter_(0, order_P, rank_P).masked_fill(outside, len(ids_P))
    return experts_P, local_P.view(ids_Tk.shape)


def _stacked(memory: Tensor, layout: PageLayout, part: str) -> Tensor:
    """One part of gathered pages, uint8 [n, bytes of a page]: a view [n, ...] of the matrices."""
    first = part_fields(unpack(memory[0], layout), part)["weight"]
    size, start = first.element_size(), first.data_ptr() - memory.data_ptr()
    strides = (memory.stride(0) // size, *first.stride())
    return memory.view(-1).view(first.dtype).as_strided((len(memory), *first.shape), strides, start // size)
