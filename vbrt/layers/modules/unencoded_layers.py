"""Shells: VB layers whose handle holds a dense parameter, from there to planes and back."""

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from vbrt.formats.fitted_codebook import identity
from vbrt.host.mapped_weights import page_out
from vbrt.kernels.observers import unwatched
from vbrt.layers.weights.tying import detach_moved, drop_dense, hold_dense, holds, holds_values, pass_on, tie, untie
from vbrt.layers.weights.weight_handle import WeightHandle
from vbrt.layers.weights.weight_view import dense_parameter, follow_encoding, plain_dense, show_stored
from vbrt.libraries.torch_api import is_fake

if TYPE_CHECKING:
    from vbrt.layers.modules.vb_layer import VBLayer

__all__ = [
    "become_shell",
    "dense_shown",
    "empty_weight",
    "given_weight",
    "join",
    "load_weight",
    "materialize",
    "restore_entry",
    "warn_of_thawing",
    "warn_of_training",
]


def materialize(layer: "VBLayer") -> nn.Module:
    """Encode a layer's weight, unless that is done, and drop the dense parameters of all layers tied to it.

    A weight that functional_call has put in its place stays there.

    Raises:
        FormatError, TierError: the weight cannot be held; the layer stays as it was.
    """
    layer.notice_writes()
    with unwatched(), layer._vb_handle.stack.encoding:
        handle, dense = layer._vb_handle, layer.dense
        if dense is None:
            return layer
        detach_moved(handle, dense)
        weight = plain_dense(dense)
        version = 0 if weight.is_inference() else weight._version
        if not holds(handle, weight):
            handle.store(handle.split(weight))
            handle.source = identity(weight)
        drop_dense(handle)
        page_out(weight)
        follow_encoding(handle, dense, version)
        del weight, dense  # unless somebody else holds it, it goes now
    if layer.training and handle.trainable and torch.is_grad_enabled():
        warn_of_training(stacklevel=5)
    return layer


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
        hold_dense(handle, *[shell] * (1 + max(other._vb_twin for other in handle.layers)))
        handle.store(planes)
        drop_dense(handle)
    show_stored(handle)


def given_weight(layer: "VBLayer") -> torch.Tensor | None:
    """A weight in the parameter's place, as functional_call puts there, or None.

    The layer computes with it as the plain layer would, and never stores it. A weight that is given to one of several
    tied layers is given to all, as functional_call does where it can see the tie. So is a fake one.
    """
    handle = layer._vb_handle
    for holder in (layer, *handle.layers) if handle.tied else (layer,):
        weight = holder._parameters["weight"]
        if weight is not None:
            return weight
    dense = handle.dense
    return dense[0] if dense and is_fake(dense[0]) else None


def become_shell(layer: "VBLayer", weight: nn.Parameter) -> None:
    """Have a layer hold a new dense weight until the next forward; layers that were tied to the old one keep theirs."""
    layer._vb_handle.spec.check(weight)
    pass_on(layer._vb_handle, [layer], weight)


@contextlib.contextmanager
def dense_shown(layer: "VBLayer") -> Iterator[None]:
    """Have a shell's dense parameter stand among the module's parameters for a block, for walks of nn.Module that fill
    or replace it; what then stands there is the layer's."""
    handle, twin = layer._vb_handle, layer._vb_twin
    layer._parameters["weight"] = shown = dense_parameter(handle, twin)
    try:
        yield
    finally:
        held, layer._parameters["weight"] = layer._parameters["weight"], None
        if held is not None and held is not shown and layer._vb_handle is handle:
            hold_dense(handle, *handle.dense[:twin], held, *handle.dense[twin + 1 :])


def empty_weight(handle: WeightHandle) -> nn.Parameter:
    """A dense parameter to draw a new weight into."""
    return nn.Parameter(torch.empty(handle.spec.weight_shape, dtype=handle.dtype, device=handle.stack.device))


def join(layer: "VBLayer", handle: WeightHandle) -> None:
    """Tie a layer to the layers of another handle."""
    if handle is layer._vb_handle:
        return
    with handle.stack.encoding:
        layer.forget_given_()
        untie(layer._vb_handle, layer)
        layer.__dict__.update(_vb_handle=handle, _vb_twin=next(iter(handle.layers))._vb_twin)
        tie(handle, layer)


def restore_entry(layer: "VBLayer") -> None:
    """Undo `del layer._parameters["weight"]`."""
    if "weight" not in layer._parameters:
        rest = dict(layer._parameters)
        layer._parameters.clear()
        layer._parameters.update(weight=None, **rest)


def warn_of_thawing(layers: Sequence["VBLayer"]) -> None:
    """Name the first of the layers, and what they take from now on."""
    nbytes = sum(math.prod(handle.spec.shape) * handle.dtype.itemsize for handle in {x.handle for x in layers})
    named = f"{layers[0].handle.spec.name} and {len(layers) - 1} more" if layers[1:] else layers[0].handle.spec.name
    warnings.warn(
        f"requires_grad_(True): {named} left the tiers to train: plain layers with "
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
