"""Low-rank adapters on routed experts: terms that are added to decoded weights of leased experts.

The sum is PEFT's own, `baddbmm` in the weights' dtype, expert by expert, so that lossless experts give its bits. Only
weights of one lease are dense at a time.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from vbrt.host import accelerator
from vbrt.layers.experts.protocols import LeasedExperts
from vbrt.libraries.peft_api import Factors

__all__ = ["AdaptedLease", "Adapters", "adapters_of", "adapting", "with_adapters"]

#: terms of each parameter of a layer
Adapters = Mapping[str, Sequence[Factors]]


class _Thread(threading.local):
    """What this thread's forwards add, by layer and parameter."""

    def __init__(self) -> None:
        self.of_layers: weakref.WeakKeyDictionary[nn.Module, dict[str, Sequence[Factors]]] = weakref.WeakKeyDictionary()


_thread = _Thread()


def adapters_of(layer: nn.Module) -> Adapters:
    """Return the terms that this thread's forwards add to a layer's parameters."""
    return _thread.of_layers.get(layer, {})


@contextlib.contextmanager
def adapting(layer: nn.Module, name: str, factors: Sequence[Factors]) -> Iterator[None]:
    """Context in which this thread's forwards of a layer add terms to a parameter."""
    before = adapters_of(layer)
    _thread.of_layers[layer] = {**before, name: [*before.get(name, ()), *factors]}
    try:
        yield
    finally:
        _thread.of_layers[layer] = before


def with_adapters(
    weights: Mapping[str, Tensor], adapters: Adapters, experts: Sequence[int] | None
) -> dict[str, Tensor]:
    """Return the weights [n, a, b] of some experts (None: of all) with their terms, by parameter."""
    summed = dict(weights)
    for name, terms in adapters.items():
        weight = weights[name]
        for left, right, scale in terms:
            if experts is not None and len(experts) < len(left):
                index_n = accelerator.sent(torch.tensor(experts, dtype=torch.int64, device="cpu"), left.device)
                left, right = left[index_n], right[index_n]
            with torch.autocast(weight.device.type, enabled=False):
                weight = torch.baddbmm(weight, left, right, alpha=scale)
        summed[name] = weight
    return summed


class AdaptedLease:
    """Leased experts whose decoded weights have terms of adapters."""

    def __init__(self, leased: LeasedExperts, adapters: Adapters) -> None:
        self.experts, self._leased, self._adapters = leased.experts, leased, adapters

    def parameters(self) -> dict[str, Tensor]:
        """Return the decoded weights of every part with their terms, by the names of the module's parameters."""
        held = self._leased.parameters()
        return with_adapters(held, self._adapters, self.experts) if self.experts else held
