"""The layers that share one weight, and the dense parameters that they hold until it is encoded."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from vbrt.formats.separation import identity
from vbrt.layers.graphs import show_to_graphs
from vbrt.layers.swapped import SwappedLayer
from vbrt.libraries.torch_api import has_storage

if TYPE_CHECKING:
    from vbrt.layers.weight import WeightHandle

__all__ = [
    "adopt",
    "can_tie",
    "detach_moved",
    "handle_of_parameter",
    "holds",
    "holds_values",
    "own_weight",
    "owns",
    "pass_on",
    "tie",
    "twin_of",
    "untie",
]

_by_place: "weakref.WeakValueDictionary[tuple, WeightHandle]" = weakref.WeakValueDictionary()  # of dense parameters


def tie(handle: "WeightHandle", layer: SwappedLayer) -> None:
    """Add a layer to those of a weight; its dense parameter, where it has one, is the weight's own."""
    handle.layers.add(layer)
    handle.tied = len(handle.layers) > 1
    show_to_graphs(handle, handle.graph_tiles)
    weight = layer.dense
    if weight is not None:
        handle.own_weights = (*handle.own_weights, weakref.ref(weight))
        _by_place[_place(weight)] = handle


def untie(handle: "WeightHandle", layer: SwappedLayer) -> None:
    """Remove a layer."""
    handle.layers.discard(layer)
    handle.tied = len(handle.layers) > 1


def adopt(handle: "WeightHandle", weight: torch.Tensor) -> None:
    """Make a dense parameter that all layers hold the weight's own: planes may be made of it."""
    handle.own_weights = (weakref.ref(weight),)


def owns(handle: "WeightHandle", weight: torch.Tensor) -> bool:
    """True if a dense parameter is the layers' own, and not one that was put in its place for a call."""
    return any(own() is weight for own in handle.own_weights)


def own_weight(handle: "WeightHandle") -> torch.Tensor | None:
    """The dense parameter of the layers, if it lives."""
    return next((own() for own in handle.own_weights if own() is not None), None)


def twin_of(handle: "WeightHandle", weight: torch.Tensor) -> int:
    """The index of a parameter among those on one storage that the layers hold."""
    return next(i for i, own in enumerate(handle.own_weights) if own() is weight)


def detach_moved(handle: "WeightHandle", weight: torch.Tensor) -> None:
    """Untie layers whose parameter lies elsewhere than `weight` by now, because it was given other `.data`."""
    for layer in list(handle.layers) if handle.tied else ():
        other = layer.dense
        if other is not None and owns(handle, other) and _place(other) != _place(weight):
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


def pass_on(handle: "WeightHandle", layers: Sequence[SwappedLayer], weight: nn.Parameter) -> "WeightHandle":
    """A handle for a new weight, which these layers hold dense until they are used.

    Other tied layers keep the old handle, and so does whoever computes with it now.
    """
    heir = handle.empty_copy()
    heir.retype(weight.dtype)
    heir.trainable = weight.requires_grad
    with handle.stack.encoding:
        for layer in layers:  # the weight before the handle: a forward in another thread reads the handle first
            layer.hold_(weight)
            layer.__dict__.update(_vb_handle=heir, _vb_twin=0)
            untie(handle, layer)
            tie(heir, layer)
    return heir


def handle_of_parameter(weight: torch.Tensor) -> "WeightHandle | None":
    """The handle of the layers that hold this very weight as a dense parameter, if there are any."""
    handle = _by_place.get(_place(weight))
    held = [] if handle is None else [layer.dense for layer in handle.layers]
    return handle if any(dense is not None and _place(dense) == _place(weight) for dense in held) else None


def _place(weight: torch.Tensor) -> tuple[object, ...]:
    """The memory of a dense weight; its id if it has none."""
    if weight.is_meta or not has_storage(weight) or not weight.numel():
        return (id(weight),)
    return (weight.device, weight.data_ptr(), *weight.shape, *weight.stride(), weight.dtype)
