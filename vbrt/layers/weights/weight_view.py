"""Lends the temporary that `.weight` gives, and takes over what was written to it (`decoded.py` sees the writes).

It is decoded once a layer is encoded; before that it lies where the dense parameter does, so what is written to it is
in what the layer encodes. A temporary of an encoded layer that was written to is what the handle holds dense from then
on.
"""

import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

from vbrt.kernels.decoded_weight import DecodedWeight
from vbrt.layers.weights.tying import handle_of_parameter, hold_dense, lies_with, pass_on
from vbrt.libraries.torch_api import is_fake

if TYPE_CHECKING:
    from vbrt.layers.weights.weight_handle import WeightHandle

__all__ = [
    "Lender",
    "dense_parameter",
    "follow_encoding",
    "follow_retyping",
    "handle_with",
    "lend",
    "notice_writes",
    "plain_dense",
    "released_parameter",
    "show_stored",
    "take_over",
    "temporary_of",
]


class Lender:
    """The owner of a temporary, by the handle whose weight it is, and the twin that it was read of. Called, it gives
    itself while that handle lives."""

    __slots__ = ("_handle", "_twin")

    def __init__(self, handle: "WeightHandle", twin: int = 0) -> None:
        self._handle, self._twin = weakref.ref(handle), twin

    def __call__(self) -> "Lender | None":
        return None if self._handle() is None else self

    @property
    def handle(self) -> "WeightHandle | None":
        """The handle, if it lives."""
        return self._handle()

    def check(self, weight: torch.Tensor) -> None:
        """Raise WrapError for a weight that cannot take the place of this one."""
        handle = self.handle
        if handle is not None:
            handle.spec.check(weight)

    def refuse(self, what: str) -> None:
        """Raise WrapError for an operation that a weight in the tiers does not support."""
        handle = self.handle
        if handle is not None:
            handle.spec.refuse(what)

    def take_over(self, weight: torch.Tensor) -> None:
        """The temporary was written to."""
        handle = self.handle
        if handle is not None:
            take_over(handle, weight, self._twin)

    def died_written(self, weight: torch.Tensor) -> None:
        """Keep the content of a temporary that died after a write, until the next look. Takes no lock."""
        handle = self.handle
        if handle is not None:
            handle.written = weight

    def thaw(self, weight: DecodedWeight) -> None:
        """Make the temporary a parameter that trains, in layers that leave the tiers for it."""
        handle = self.handle
        layer = None if handle is None else next(iter(handle.layers), None)
        if layer is not None:
            layer.train_(weight.become_parameter())

    def freeze(self) -> None:
        """Have the layers give a frozen weight back."""
        handle = self.handle
        layer = None if handle is None else next(iter(handle.layers), None)
        if layer is not None:
            layer.freeze_()


def lend(handle: "WeightHandle", twin: int) -> torch.Tensor:
    """The weight, to be written to as well; one for all who ask while somebody holds it.

    Args:
        twin: which of the parameters on one storage the layer has that it is read of.
    """
    while True:
        lent, dense = temporary_of(handle), handle.dense
        if lent is not None:
            return lent
        if dense and is_fake(dense[twin]):
            return dense[twin]
        with torch.inference_mode(False), torch.no_grad():
            made = DecodedWeight.of(Lender(handle, twin), dense[twin] if dense else handle.weight())
        with handle.stack.encoding:
            if handle.dense is dense and temporary_of(handle) is None:  # else another thread has encoded or lent it
                handle.lent = weakref.ref(made)
                handle.ready = handle.resident = handle.short = None  # a use without a lease would not see a write
                return made


def temporary_of(handle: "WeightHandle") -> DecodedWeight | None:
    """The temporary that is out, if one is."""
    lent = handle.lent() if handle.lent is not None else None
    return lent if type(lent) is DecodedWeight else None


def notice_writes(handle: "WeightHandle") -> None:
    """Take over writes to the temporary that no method of it has reported."""
    if handle.written is not None:
        take_over(handle, handle.written)
    lent = temporary_of(handle)
    if lent is not None:
        lent.report_writes()
    elif handle.lent is not None and handle.lent() is None:
        handle.lent = None


def take_over(handle: "WeightHandle", weight: torch.Tensor, twin: int = 0) -> None:
    """Make a temporary that was written to the weight of all tied layers, dense until they are used; where it is a
    shell's and was given other `.data`, of those that have this twin, as in torch.

    Raises:
        WrapError: it has another shape or dtype than a weight of these layers.
    """
    with handle.stack.encoding:
        layers = list(handle.layers)
        lent = type(weight) is DecodedWeight
        if not layers or not (lent or weight is handle.written):  # they have another one, or it is theirs by now
            return
        handle.written = None
        if lies_with(handle, weight):  # it is not encoded yet
            return
        handle.spec.check(weight)
        if len(handle.dense) > 1:
            layers = [layer for layer in layers if layer._vb_twin == twin]
        heir = pass_on(handle, layers, weight if lent else nn.Parameter(weight, requires_grad=False))
        heir.trainable, handle.lent = handle.trainable, None
        heir.forwards, heir.weight_reads = handle.forwards, handle.weight_reads
        if lent:
            heir.lent = weakref.ref(weight)
            weight.lend(Lender(heir))


# -- dense weights ----------------------------------------------------------------------------------------------------


def plain_dense(weight: torch.Tensor) -> torch.Tensor:
    """A dense weight as torch's functions take it, which share its memory and count of writes with what was lent."""
    return torch.Tensor.detach(weight) if type(weight) is DecodedWeight else weight


def dense_parameter(handle: "WeightHandle", twin: int) -> nn.Parameter:
    """The dense weight of a handle as a parameter in its memory: the one that the module had, unless it was written."""
    weight = handle.dense[twin]
    return nn.Parameter(plain_dense(weight), handle.trainable) if type(weight) is DecodedWeight else weight


def follow_encoding(handle: "WeightHandle", dense: torch.Tensor, version: int) -> None:
    """Have the temporary, if one is out, show the stored values of a weight that was dense at a version until now.

    It keeps the memory of the dense weight where both have the same values on one device; else others who hold that
    weight, such as a module outside of the model, would see it rounded.
    """
    lent = temporary_of(handle)
    if lent is None:
        return
    handle.ready = handle.resident = handle.short = None
    lent.settle_at(version)
    if lent.written or (handle.spec.lossless and lent.device.type == handle.device.type):
        return
    if lent is dense:
        lent.hold(handle.weight())
    else:
        lent.move(handle.weight())


def follow_retyping(handle: "WeightHandle", dtype: torch.dtype) -> None:
    """Cast dense weights, the same objects, and the temporary that lies where they do."""
    set_data, lent = torch.Tensor.data.__set__, temporary_of(handle)
    for weight in handle.dense:
        if weight.dtype != dtype:
            set_data(weight, torch.Tensor.detach(weight).to(dtype))
    hold_dense(handle, *handle.dense)
    if lent is not None and handle.dense and lent is not handle.dense[0]:
        lent.move(torch.Tensor.detach(handle.dense[0]))
    elif lent is not None:
        lent.settle()


def show_stored(handle: "WeightHandle") -> None:
    """Have the temporary, if one is out, hold the stored values."""
    lent = temporary_of(handle)
    values = None if lent is None else handle.weight()  # before the test: another thread may write meanwhile
    if lent is not None and not lent.written:
        lent.hold(values)


def released_parameter(handle: "WeightHandle", twin: int, made: nn.Parameter | None) -> nn.Parameter:
    """The weight as a parameter of layers that leave the tiers; one for each twin, all on one storage.

    It is the dense parameter where there is one, else the temporary, if one is out, so that whoever holds that holds
    the weight.

    Args:
        made: the parameter that another layer on the same storage has been given, if one has.
    """
    if handle.dense:
        weight = handle.dense[twin]
        if type(weight) is not DecodedWeight:
            return weight
        return weight.become_parameter().requires_grad_(handle.trainable)
    known = handle.released.get(twin)
    if known is None:
        if handle.released:
            known = nn.Parameter(next(handle.released.values()).detach())
        elif made is not None:
            known = made
        else:
            lent = temporary_of(handle)
            known = nn.Parameter(handle.weight()) if lent is None else lent.become_parameter()
        handle.released[twin] = known.requires_grad_(handle.trainable)
    return known


def handle_with(weight: torch.Tensor) -> "WeightHandle | None":
    """The handle of the layers that hold this very weight, dense or as a temporary, if there are any."""
    if type(weight) is not DecodedWeight:
        return handle_of_parameter(weight) if isinstance(weight, nn.Parameter) else None
    handle = weight.owner.handle if isinstance(weight.owner, Lender) else None
    return handle if handle is not None and temporary_of(handle) is weight and handle.layers else None
