"""Planes of pages that never move, which forwards use without a lease."""

from typing import TYPE_CHECKING

import torch

from vbrt.config import FORMATS
from vbrt.formats.format import WeightPlanes
from vbrt.kernels import TILES, page_of
from vbrt.layers.weights.graph_planes import GraphForm, GraphTiles, graph_planes, mark_static, show_to_graphs
from vbrt.layers.weights.small_batch import ShortWay
from vbrt.layers.weights.weight_view import temporary_of

if TYPE_CHECKING:
    from vbrt.layers.weights.weight_handle import WeightHandle

__all__ = ["keep", "keep_ready", "requiring_grad"]


def keep_ready(handle: "WeightHandle", planes: WeightPlanes, tensors: list[dict[str, torch.Tensor]]) -> None:
    """Keep leased planes for use without a lease, if their pages are at home in the top tier and none is lent."""
    if not _is_at_home(handle, tensors):
        return
    keep(handle, planes)
    if not _is_at_home(handle, tensors):  # another thread has stored, moved or lent the weight meanwhile
        handle.forget_ready()


def _is_at_home(handle: "WeightHandle", tensors: list[dict[str, torch.Tensor]]) -> bool:
    """True if these are the weight's pages, in their home in the top tier, and nobody else may write to the weight."""
    if any(page.home for page in handle.pages) or temporary_of(handle) is not None or handle.written is not None:
        return False
    slots = handle.stack.levels[0].slots
    held = [slots.get(key) for key in handle.keys]
    return len(held) == len(tensors) and all(
        slot is not None and slot.tensors is plane for slot, plane in zip(held, tensors, strict=True)
    )


def keep(handle: "WeightHandle", planes: WeightPlanes) -> None:
    """Keep planes of pages that never move, and show them to compiled graphs where kernels compute with them."""
    if FORMATS[planes.format].lossless:
        weight = planes.coarse["weight"]
        if handle.trainable:
            planes = WeightPlanes(planes.format, planes.shape, planes.dtype, {"weight": requiring_grad(weight)})
        handle.ready = planes
        handle.page = handle.pages[0]
        handle.resident = None if handle.spec.transposed else planes.coarse["weight"]
        return
    handle.ready = planes
    handle.short = _short_way(handle, planes)
    if graph_planes(handle) is None:
        return
    for tensor in planes.coarse.values():
        mark_static(tensor)
    tiles = planes.coarse.get(TILES)
    shown = handle.graph_tiles
    # a layer's dict stays as it is where it holds these tiles already: dynamo would check it again
    if tiles is not None and not (shown and shown.page.data_ptr() == tiles.data_ptr()):
        page = page_of(tiles, planes.coarse["tensor_scale"])
        form = GraphForm(planes.format, *planes.shape, planes.dtype, str(page.device))
        show_to_graphs(handle, GraphTiles(mark_static(page), form.encode()))


def _short_way(handle: "WeightHandle", planes: WeightPlanes) -> ShortWay | None:
    """The short way of planes that never move; None where there is none, or a forward does more than multiply."""
    kernels = handle.kernels
    if kernels is None or kernels.kernel.few is None or handle.separation is not None or handle.spec.fine:
        return None
    few = kernels.kernel.few(planes)
    return None if few is None else ShortWay(few)


def requiring_grad(weight: torch.Tensor) -> torch.Tensor:
    """An alias that requires grad, for use under no_grad; `weight` itself stays as it is.

    torch.matmul looks at that, under no_grad too: it folds the leading dimensions of x for a weight that requires
    grad and may call a batched matmul, with other rounding, for one that does not.
    """
    if weight.requires_grad:
        return weight
    if weight.is_inference():  # views of such a tensor forget requires_grad, and linear() takes one
        with torch.inference_mode(False):
            alias = torch.empty(0, dtype=weight.dtype, device=weight.device)
            weight = alias.set_(weight.untyped_storage(), weight.storage_offset(), weight.shape, weight.stride())
    with torch.no_grad():
        return weight.detach().requires_grad_().view_as(weight)  # a view, because autocast keeps its casts of leaves
