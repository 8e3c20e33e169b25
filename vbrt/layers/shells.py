"""Shells: VB layers that hold a dense parameter, from there to planes and back."""

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from vbrt.formats.separation import identity
from vbrt.host.mapped import page_out
from vbrt.kernels.watched import unwatched
from vbrt.layers.lending import is_lent, lend_again, show_stored
from vbrt.layers.ties import adopt, detach_moved, holds, holds_values, own_weight, owns, pass_on, tie, untie
from vbrt.layers.weight import WeightHandle
from vbrt.libraries.torch_api import is_fake

if TYPE_CHECKING:
    from vbrt.layers.base import VBLayer

__all__ = [
    "become_shell",
    "empty_weight",
    "given_weight",
    "hold_dense",
    "join",
    "load_weight",
    "materialize",
    "restore_entry",
    "warn_of_thawing",
    "warn_of_training",
]


def materialize(layer: "VBLayer") -> nn.Module:
    """Encode a layer's weight, unless that is done, and remove the dense parameter from all layers tied to it.

    Nothing is encoded of a weight that is not the layer's own, as functional_call puts in its place.

    Raises:
        FormatError, TierError: the weight cannot be held; the layer stays as it was.
    """
    layer.notice_writes()
    with unwatched(), layer._vb_handle.stack.encoding:
        handle, weight = layer._vb_handle, layer.dense
        if weight is None or not owns(handle, weight):
            return layer
        if weight.requires_grad and (is_lent(handle, weight) or not handle.trainable):  # since it was put there
            return layer.thaw_()
        detach_moved(handle, weight)
        version = 0 if weight.is_inference() else weight._version
        if not holds(handle, weight):
            handle.store(handle.split(weight))
            handle.source = identity(weight)
        hold_dense(handle, None)
        page_out(weight)
        trained = weight.requires_grad
        del weight  # unless somebody else holds it, it goes now
        lend_again(handle, version)
    if layer.training and trained and torch.is_grad_enabled():
        warn_of_training(stacklevel=5)
    return layer


def hold_dense(handle: WeightHandle, dense: nn.Parameter | None) -> None:
    """Have all layers of a handle hold a dense parameter, or none."""
    for layer in list(handle.layers):
        old = layer.dense
        if dense is None and old is not None and not is_lent(handle, old):
            handle.trainable = old.requires_grad
        layer.hold_(dense)
    if dense is not None:
        adopt(handle, dense)


def load_weight(layer: "VBLayer", weight: torch.Tensor) -> None:
    """Store a new weight for all tied layers; the planes before it are retired first, to make room.

    Raises:
        FormatError: the weight cannot be encoded; the old one is still in place.
        TierError: the pages cannot be stored; the layer is a shell of the new weight.
    """
    layer.notice_writes()
    handle = layer._vb_handle
    with torch.no_grad(), handle.stack.encoding:
        if holds_values(handle, weight):
            return
        shell = nn.Parameter(weight.detach().to(handle.dtype), requires_grad=handle.trainable)
        strides = handle.strides
        planes = handle.split(shell)
        handle.strides = strides  # those of the weight whose place it takes
        hold_dense(handle, shell)
        handle.store(planes)
        hold_dense(handle, None)
    show_stored(handle)


def given_weight(layer: "VBLayer") -> torch.Tensor | None:
    """A weight in the parameter's place that is not the layer's own, as functional_call puts there, or None.

    The layer computes with it as the plain layer would, and never stores it. A weight that is given to one of several
    tied layers is given to all, as functional_call does where it can see the tie.
    """
    handle = layer._vb_handle
    for holder in (layer, *handle.layers) if handle.tied else (layer,):
        weight = holder.dense
        if weight is not None and (not owns(handle, weight) or is_fake(weight)):
            return weight
    return None


def become_shell(layer: "VBLayer", weight: nn.Parameter) -> None:
    """Have a layer hold a new dense weight until the next forward; layers that were tied to the old one keep theirs."""
    layer._vb_handle.spec.check(weight)
    pass_on(layer._vb_handle, [layer], weight)


def empty_weight(handle: WeightHandle) -> nn.Parameter:
    """A dense parameter to draw a new weight into."""
    return nn.Parameter(torch.empty(handle.spec.weight_shape, dtype=handle.dtype, device=handle.stack.device))


def join(layer: "VBLayer", handle: WeightHandle) -> None:
    """Tie a layer to the layers of another handle."""
    if handle is layer._vb_handle:
        return
    with handle.stack.encoding:
        layer.hold_(next(iter(handle.layers)).dense)
        untie(layer._vb_handle, layer)
        layer.__dict__.update(_vb_handle=handle, _vb_twin=next(iter(handle.layers))._vb_twin)
        tie(handle, layer)


def restore_entry(layer: "VBLayer") -> None:
    """Undo `del layer._parameters["weight"]`."""
    if "weight" not in layer._parameters:
        weight = None if layer._vb_handle.keys else own_weight(layer._vb_handle)
        rest = dict(layer._parameters)
        layer._parameters.clear()
        layer._parameters.update(weight=weight, **rest)


def warn_of_thawing(layers: Sequence["VBLayer"]) -> None:
    """Name the first of the layers, and what they take from now on."""
    nbytes = sum(math.prod(handle.spec.shape) * handle.dtype.itemsize for handle in {x.handle for x in layers})
    named = f"{layers[0].handle.spec.name} and {len(layers) - 1} more" if layers[1:] else layers[0].handle.spec.name
    warnings.warn(
        f"requires_grad_(True) or a parametrization: {named} left the tiers to train: plain layers with "
        f"{nbytes} bytes of dense weights, outside of all budgets. To train through 4 bits, wrap with "
        'mode="train"',
        stacklevel=4,
    )


def warn_of_training(stacklevel: int) -> None:
    """One text for all layers, so that Python's filter shows it once."""
    warnings.warn(
        "this model is in training mode and its VB layers hold frozen planes: their weights no longer train "
        '(gradients still flow through them). Call model.eval(), wrap with mode="train", or exclude what '
        "should train in weights.exclude",
        stacklevel=stacklevel + 1,
    )
