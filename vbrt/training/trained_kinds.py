"""Trained classes of every layer kind, generated from the kind's record (`vbrt/layers/modules/layer_kinds.py`).

`TrainedConv1D` and the like (weights stay parameters) and `FullConv1D` and the like (weights live in the tiers) are
created lazily as module attributes, so that pickles find them and the packages of their plain classes stay optional.
"""

import functools
import inspect
from typing import Any

from torch import Tensor

from vbrt.layers.modules.layer_kinds import KINDS, Kind
from vbrt.training.full.full_embedding import FullEmbedding
from vbrt.training.full.full_experts import FullExperts
from vbrt.training.full.full_layers import FullLayer, FullLinear
from vbrt.training.qat.qat_experts import TrainedExperts
from vbrt.training.qat.qat_layers import TrainedLayer, TrainedLinear

__all__ = ["full_class", "trained_class"]

_PREFIX, _FULL_PREFIX = "Trained", "Full"


@functools.cache
def trained_class(kind: Kind) -> type[TrainedLayer] | type[TrainedExperts]:
    """Return the class that replaces a kind's own in training; for experts, the mixin."""
    if kind.routed:
        return TrainedExperts
    plain = kind.layer_class().plain_class()
    if plain is TrainedLinear.plain_class():
        return TrainedLinear
    base = TrainedLinear if issubclass(plain, TrainedLinear.plain_class()) else TrainedLayer
    return _made(kind, base, _PREFIX, f"{kind.name} that trains through 4 bits.", "_trained_forward")


@functools.cache
def full_class(kind: Kind) -> type[FullLayer]:
    """Return the class that replaces a kind's own for training from the tiers; for experts, the mixin."""
    if kind.routed:
        return FullExperts
    plain = kind.layer_class().plain_class()
    for made in (FullLinear, FullEmbedding):
        if plain is made.plain_class():
            return made
    base = FullLinear if issubclass(plain, FullLinear.plain_class()) else FullLayer
    return _made(kind, base, _FULL_PREFIX, f"{kind.name} that trains from the tiers.", "_full_forward")


def _made(kind: Kind, base: type, prefix: str, doc: str, does: str) -> Any:
    """Return a class of a kind on a base, whose forward is the base's method `does`."""
    plain = kind.layer_class().plain_class()
    members = {
        "__module__": __name__,
        "__doc__": doc,
        "forward": _forward_like(plain, does),
        "_rounds_before_bias": kind.rounds_before_bias,
    }
    return type(f"{prefix}{kind.name}", (base, plain), members)


def _forward_like(plain: type, does: str) -> Any:
    """Return a forward with the plain class's signature."""
    signature = inspect.signature(plain.forward)
    name = list(signature.parameters)[1]

    def forward(self: TrainedLayer | FullLayer, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs or len(args) != 1:
            args = (signature.bind(self, *args, **kwargs).arguments[name],)
        return getattr(self, does)(*args)

    forward.__signature__ = signature  # type: ignore[attr-defined]  # functions take attributes
    return forward


def __getattr__(name: str) -> type[TrainedLayer] | type[FullLayer]:
    for prefix, class_of in ((_PREFIX, trained_class), (_FULL_PREFIX, full_class)):
        kind = KINDS.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if kind is not None:
            return class_of(kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
