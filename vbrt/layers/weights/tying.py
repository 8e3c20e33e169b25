"""The layers that share one weight, and the dense parameters that their handle holds until it is encoded."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vbrt.formats.fitted_codebook import identity
from vbrt.layers.swapped_layer import SwappedLayer
from vbrt.layers.weights.graph_planes import show_to_graphs
from vbrt.libraries.torch_api import has_storage

if TYPE_CHECKING:
    from vbrt.layers.weights.weight_handle import WeightHandle

__all__ = [
    "can_tie",
    "detach_moved",
    "drop_dense",
    "handle_of_parameter",
    "hold_dense",
    "holds",
    "holds_values",
    "lie_together",
    "lies_with",
    "pass_on",
    "tie",
    "twin_of",
    "untie",
]

_by_place: "weakref.WeakValueDictionary[tuple, WeightHandle]" = weakref.WeakValueDictionary()  # of dense parameters


def tie(handle: "WeightHandle", layer: SwappedLayer) -> None:
    """Add a layer to those of a weight."""
    handle.layers.add(layer)
    handle.tied = len(handle.layers) > 1
    show_to_graphs(handle, handle.graph_tiles)


def untie(handle: "WeightHandle", layer: SwappedLayer) -> None:
    """Remove a layer."""
    handle.layers.discard(layer)
    handle.tied = len(handle.layers) > 1


def hold_dense(handle: "WeightHandle", *weights: torch.Tensor) -> None:
    """Hold dense parameters, all on one storage, of which planes are made later; one for each twin."""
    for weight in weights:
        _by_place[_place(weight)] = handle
    handle.dense = weights
    if weights:
        handle.stack.shells.add(handle)


def drop_dense(handle: "WeightHandle") -> None:
    """Hold no dense parameters: the pages have their values."""
    handle.dense = ()
    handle.stack.shells.discard(handle)


def twin_of(handle: "WeightHandle", weight: torch.Tensor) -> int:
    """The index of a parameter among those on one storage that the handle holds; it is added where it is new."""
    known = next((twin for twin, own in enumerate(handle.dense) if own is weight), None)
    if known is not None:
        return known
    hold_dense(handle, *handle.dense, weight)
    return len(handle.dense) - 1


def detach_moved(handle: "WeightHandle", weight: torch.Tensor) -> None:
    """Untie layers whose parameter lies elsewhere than `weight` by now, because it was given other `.data`."""
    for layer in list(handle.layers) if len(handle.dense) > 1 else ():
        other = layer.dense
        if _place(other) != _place(weight):
            pass_on(handle, [layer], other)


def holds(handle: "WeightHandle", weight: torch.Tensor) -> bool:
    """True if the pages are those of a dense parameter as it is now."""
    return bool(handle.keys) and handle.source == identity(weight)


def holds_values(handle: "WeightHandle", weight: torch.Tensor) -> bool:
    """True if a fitted codebook has given these values already: encoded again, they would change."""
    if handle.separation is None or not handle.keys or weight.is_meta:
        return False
    return torch.equal(handle.weight(), weight.to(handle.device, handle.dtype))


def can_tie(one: "WeightHandle", other: "WeightHandle") -> bool:
    """True if layers of the other handle can be tied to this one's weight."""
    return one.stack is other.stack and one.spec.suits(other.spec) and one.dtype is other.dtype


def pass_on(handle: "WeightHandle", layers: Sequence[SwappedLayer], weight: torch.Tensor) -> "WeightHandle":
    """A handle for a new weight, which it holds dense until these layers are used.

    Other tied layers keep the old handle, and so does whoever computes with it now.
    """
    heir = handle.empty_copy()
    heir.retype(weight.dtype)
    heir.trainable = weight.requires_grad
    with handle.stack.encoding:
        hold_dense(heir, weight)
        for layer in layers:
            layer.forget_given_()
            layer.__dict__.update(_vb_handle=heir, _vb_twin=0)
            untie(handle, layer)
            tie(heir, layer)
    return heir


def handle_of_parameter(weight: torch.Tensor) -> "WeightHandle | None":
    """The handle that holds this very weight as a dense parameter, if there is one and its layers live."""
    handle = _by_place.get(_place(weight))
    return handle if handle is not None and handle.layers and lies_with(handle, weight) else None


def lies_with(handle: "WeightHandle", weight: torch.Tensor) -> bool:
    """True if a tensor lies where a dense parameter of the handle does: a write to one is a write to the other."""
    return any(lie_together(own, weight) for own in handle.dense)


def lie_together(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two weights have the same memory."""
    return _place(one) == _place(other)


def _place(weight: torch.Tensor) -> tuple[object, ...]:
    """The memory of a dense weight; its id if it has none."""
    if weight.is_meta or not has_storage(weight) or not weight.numel():
        return (id(weight),)
    address = torch.Tensor.data_ptr(weight)  # not the temporary's own, which would count as handing its memory out
    return (weight.device, address, *weight.shape, *weight.stride(), weight.dtype)
