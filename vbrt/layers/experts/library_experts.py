"""Interface to transformers' experts implementations: lookup by config, and the module view that they read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.libraries.transformers_api import experts_function, experts_implementation

__all__ = ["UNHEARD", "ExpertsView", "implementation_of"]

#: implementations of transformers that never wait for the device, and of which an id of no expert gets no row
UNHEARD = ("batched_mm", "grouped_mm")


class ExpertsView:
    """View of an experts module for its implementation, restricted to some experts."""

    def __init__(self, layer: nn.Module, weights: Mapping[str, Tensor], experts: Sequence[int] | Tensor | None) -> None:
        self.__dict__.update(weights)
        self._layer = layer
        if experts is None:
            return
        self.num_experts = len(experts)
        for name, parameter in layer._parameters.items():  # biases: one row an expert
            if parameter is not None and name not in weights:
                if not isinstance(experts, Tensor):
                    if len(experts) == len(parameter):  # all, as they are ascending
                        continue
                    experts = torch.tensor(experts, dtype=torch.int64, device="cpu").to(parameter.device)
                self.__dict__[name] = parameter[experts]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def implementation_of(layer: nn.Module) -> tuple[str | None, Callable[..., Tensor]]:
    """The function that the module's forward would call, and its name in transformers' table; None: the module's own,
    which adds experts to the sum in their order."""
    plain, own = type(layer).plain_class(), getattr(type(layer), "own_rows", None)
    if own is not None:
        return getattr(type(layer), "own_name", "rows"), own
    name = experts_implementation(getattr(layer, "config", None))
    function = experts_function(name)
    if function is not None and hasattr(plain.forward, "__wrapped__"):
        return name, function
    return None, plain.forward
