"""Lends the temporary that `.weight` gives, and takes over what was written to it (`decoded.py` sees the writes)."""

import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

from vbrt.kernels.decoded import DecodedWeight
from vbrt.layers.ties import handle_of_parameter, pass_on

if TYPE_CHECKING:
    from vbrt.layers.weight import WeightHandle

__all__ = [
    "Lender",
    "handle_with",
    "is_lent",
    "lend",
    "lend_again",
    "notice_writes",
    "released_parameter",
    "show_stored",
    "take_over",
    "temporary_of",
]


class Lender:
    """The owner of a temporary, by the handle whose weight it is. Called, it gives itself while that handle lives."""

    __slots__ = ("_handle",)

    def __init__(self, handle: "WeightHandle") -> None:
        self._handle = weakref.ref(handle)

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
            take_over(handle, weight)

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


def lend(handle: "WeightHandle") -> DecodedWeight:
    """The decoded weight, to be written to as well; one for all who ask while somebody holds it."""
    lent = temporary_of(handle)
    if lent is None:
        with torch.inference_mode(False), torch.no_grad():
            decoded = DecodedWeight.of(Lender(handle), handle.weight())
        with handle.stack.encoding:
            lent = temporary_of(handle)  # another thread's, meanwhile
            if lent is None:
                lent, handle.lent = decoded, weakref.ref(decoded)
                handle.ready = handle.resident = handle.short = None  # a use without a lease would not see a write
    return lent


def temporary_of(handle: "WeightHandle") -> DecodedWeight | None:
    """The temporary that is out, if one is."""
    lent = handle.lent() if handle.lent is not None else None
    return lent if type(lent) is DecodedWeight else None


def is_lent(handle: "WeightHandle", weight: torch.Tensor | None) -> bool:
    """True if the layers' dense parameter was a temporary that somebody has written to."""
    return handle.lent is not None and handle.lent() is weight


def notice_writes(handle: "WeightHandle") -> None:
    """Take over writes to the temporary that no method of it has reported."""
    if handle.written is not None:
        take_over(handle, handle.written)
    lent = temporary_of(handle)
    if lent is not None:
        lent.report_writes()
    elif handle.lent is not None and handle.lent() is None:
        handle.lent = None


def take_over(handle: "WeightHandle", weight: torch.Tensor) -> None:
    """Make a temporary that was written to the weight of all tied layers, dense until they are used.

    Raises:
        WrapError: it has another shape or dtype than a weight of these layers.
    """
    with handle.stack.encoding:
        layers = list(handle.layers)
        lent = type(weight) is DecodedWeight
        if not layers or not (lent or weight is handle.written):  # they have another one, or it is theirs by now
            return
        handle.written = None
        handle.spec.check(weight)
        weight = weight.become_parameter() if lent else nn.Parameter(weight, requires_grad=False)
        heir = pass_on(handle, layers, weight)
        heir.trainable, heir.lent, handle.lent = handle.trainable, weakref.ref(weight), None
        heir.forwards, heir.weight_reads = handle.forwards, handle.weight_reads


def lend_again(handle: "WeightHandle", version: int) -> None:
    """Make a tensor a temporary again that was one, and then the layers' dense parameter, if somebody still holds it.

    The handle stores this version of it now; the temporary shows the stored values.
    """
    lent = handle.lent() if handle.lent is not None else None
    if lent is None or type(lent) is DecodedWeight:
        return
    lent.__class__ = DecodedWeight
    lent.lend(Lender(handle), version)
    handle.ready = handle.resident = handle.short = None
    if not handle.spec.lossless:
        show_stored(handle)


def show_stored(handle: "WeightHandle") -> None:
    """Have the temporary, if one is out, hold the stored values."""
    lent = temporary_of(handle)
    values = None if lent is None else handle.weight()  # before the test: another thread may write meanwhile
    if lent is not None and not lent.written:
        lent.hold(values)


def released_parameter(handle: "WeightHandle", twin: int, made: nn.Parameter | None) -> nn.Parameter:
    """The weight as a parameter of layers that leave the tiers; one for each twin, all on one storage.

    It is the temporary, if one is out, so that whoever holds that holds the weight.

    Args:
        made: the parameter that another layer on the same storage has been given, if one has.
    """
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
    return handle if handle is not None and is_lent(handle, weight) and handle.layers else None
