"""Lends the temporaries that reading `.gate_up_proj` or `.down_proj` gives, and takes over what is written to them."""

import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

from vbrt.kernels.decoded import DecodedWeight

if TYPE_CHECKING:
    from vbrt.layers.experts.handle import ExpertsHandle

__all__ = ["lend", "notice_writes", "temporary_of"]


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


def lend(handle: "ExpertsHandle", parameter: str) -> DecodedWeight:
    """A decoded parameter, to be written to as well; one for all who ask while somebody holds it."""
    lent = temporary_of(handle, parameter)
    if lent is None:
        with torch.inference_mode(False), torch.no_grad():
            decoded = DecodedWeight.of(_Lender(handle, parameter), handle.weight(parameter))
        with handle.stack.encoding:
            lent = temporary_of(handle, parameter)  # another thread's, meanwhile
            if lent is None:
                lent = decoded
                handle.lent[parameter] = weakref.ref(decoded)
    return lent


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
        handle.spec.check(parameter, weight)
        weight = weight.become_parameter() if lent else nn.Parameter(weight, requires_grad=False)
        handle.lent.pop(parameter, None)
        layer.become_shell_({parameter: weight})
