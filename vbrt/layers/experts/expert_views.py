"""Lends the temporaries that reading `.gate_up_proj` or `.down_proj` gives, and takes over what is written to them."""

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from vbrt.kernels.decoded_weight import DecodedWeight
from vbrt.layers.weights.tying import lie_together
from vbrt.layers.weights.weight_view import plain_dense
from vbrt.libraries.torch_api import is_fake

if TYPE_CHECKING:
    from vbrt.layers.experts.experts_handle import ExpertsHandle

__all__ = ["dense_parameters", "follow_encoding", "follow_retyping", "lend", "notice_writes", "temporary_of"]


class _Lender:
    """The owner of one temporary. Called, it gives itself while the handle lives."""

    __slots__ = ("_handle", "_parameter")

    def __init__(self, handle: "ExpertsHandle", parameter: str) -> None:
        self._handle, self._parameter = weakref.ref(handle), parameter

    def __call__(self) -> "_Lender | None":
        return None if self._handle() is None else self

    def check(self, weight: torch.Tensor) -> None:
        """Raise WrapError for a tensor that cannot take the place of this one."""
        handle = self._handle()
        if handle is not None:
            handle.spec.check(self._parameter, weight)

    def refuse(self, what: str) -> None:
        """Raise WrapError for an operation that weights in the tiers do not support."""
        handle = self._handle()
        if handle is not None:
            handle.spec.refuse(self._parameter, what)

    def take_over(self, weight: torch.Tensor) -> None:
        """The temporary was written to."""
        handle = self._handle()
        if handle is not None:
            _take_over(handle, self._parameter, weight)

    def died_written(self, weight: torch.Tensor) -> None:
        """Keep the content of a temporary that died after a write, until the next look. Takes no lock."""
        handle = self._handle()
        if handle is not None:
            handle.written[self._parameter] = weight

    def thaw(self, weight: DecodedWeight) -> None:
        """Make the temporary a parameter that trains, in a layer that leaves the tiers for it."""
        handle = self._handle()
        layer = None if handle is None else next(iter(handle.layers), None)
        if layer is not None:
            layer.train_({self._parameter: weight.become_parameter()})

    def freeze(self) -> None:
        """Have the layer give frozen weights back."""
        handle = self._handle()
        layer = None if handle is None else next(iter(handle.layers), None)
        if layer is not None:
            layer.freeze_()


def lend(handle: "ExpertsHandle", parameter: str) -> torch.Tensor:
    """A parameter, to be written to as well; one for all who ask while somebody holds it. It is decoded, or lies where
    the dense one does."""
    while True:
        lent, held = temporary_of(handle, parameter), handle.dense
        dense = held.get(parameter)
        if lent is not None:
            return lent
        if dense is not None and is_fake(dense):
            return dense
        with torch.inference_mode(False), torch.no_grad():
            weight = handle.weight(parameter) if dense is None else dense
            made = DecodedWeight.of(_Lender(handle, parameter), weight)
        with handle.stack.encoding:
            if handle.dense is held and temporary_of(handle, parameter) is None:  # else another thread was here
                handle.lent[parameter] = weakref.ref(made)
                return made


def temporary_of(handle: "ExpertsHandle", parameter: str) -> DecodedWeight | None:
    """The temporary of a parameter that is out, if one is."""
    ref = handle.lent.get(parameter)
    lent = None if ref is None else ref()
    return lent if type(lent) is DecodedWeight else None


def notice_writes(handle: "ExpertsHandle") -> None:
    """Take over writes to temporaries that no method of theirs has reported."""
    for parameter, content in list(handle.written.items()):
        _take_over(handle, parameter, content)
    for parameter in list(handle.lent):
        lent = temporary_of(handle, parameter)
        if lent is not None:
            lent.report_writes()
        elif handle.lent[parameter]() is None:
            handle.lent.pop(parameter, None)


def _take_over(handle: "ExpertsHandle", parameter: str, weight: torch.Tensor) -> None:
    """Make a temporary that was written to the layer's parameter, dense until the next forward.

    Raises:
        WrapError: it has another shape or dtype than the parameter.
    """
    with handle.stack.encoding:
        layer = next(iter(handle.layers), None)
        lent = type(weight) is DecodedWeight
        if layer is None or not (lent or weight is handle.written.get(parameter)):
            return
        handle.written.pop(parameter, None)
        dense = handle.dense.get(parameter)
        if dense is not None and lie_together(dense, weight):  # it is not encoded yet
            return
        handle.spec.check(parameter, weight)
        handle.lent.pop(parameter, None)
        heir = layer.become_shell_({parameter: weight if lent else nn.Parameter(weight, requires_grad=False)})
        if lent:
            heir.lent[parameter] = weakref.ref(weight)
            weight.lend(_Lender(heir, parameter))


# -- dense weights ----------------------------------------------------------------------------------------------------


def dense_parameters(handle: "ExpertsHandle") -> dict[str, nn.Parameter]:
    """The dense weights of a handle as parameters in their memory: those that the module had, unless they were
    written."""
    return {
        name: nn.Parameter(plain_dense(weight), handle.trainable) if type(weight) is DecodedWeight else weight
        for name, weight in handle.dense.items()
    }


def follow_encoding(handle: "ExpertsHandle", dense: Mapping[str, torch.Tensor], versions: Mapping[str, int]) -> None:
    """Have temporaries that are out show the stored values of weights that were dense at these versions until now; see
    `vbrt.layers.weights.weight_view.follow_encoding`."""
    for name, weight in dense.items():
        lent = temporary_of(handle, name)
        if lent is None:
            continue
        lent.settle_at(versions[name])
        if lent.written or (handle.spec.lossless and lent.device.type == handle.device.type):
            continue
        if lent is weight:
            lent.hold(handle.weight(name))
        else:
            lent.move(handle.weight(name))


def follow_retyping(handle: "ExpertsHandle", dtype: torch.dtype) -> None:
    """Cast dense weights, the same objects, and the temporaries that lie where they do."""
    for name, weight in handle.dense.items():
        if weight.dtype != dtype:
            torch.Tensor.data.__set__(weight, torch.Tensor.detach(weight).to(dtype))
        lent = temporary_of(handle, name)
        if lent is weight:
            lent.settle()
        elif lent is not None:
            lent.move(torch.Tensor.detach(weight))
