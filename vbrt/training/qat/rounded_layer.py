"""RoundedLayer: nn.Module protocol of layers whose dense parameters train while forwards see them rounded.

The parameters stay the module's own. State dicts also hold the engine state of each one's scales, so that a resumed run
rounds as the original would have.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from vbrt.errors import FormatError
from vbrt.layers.swapped_layer import SwappedLayer

__all__ = ["HISTORY", "Rounded", "RoundedLayer"]

HISTORY = "separation"  # key of the engine state in state dicts, next to "weight"


class Rounded(NamedTuple):
    """Parameter that forwards round.

    Attributes:
        name: of the parameter.
        engine: its scales and their state; None for format "dense".
        shape: [N, K] of its matrices.
    """

    name: str
    engine: Any
    shape: tuple[int, ...]


class RoundedLayer(SwappedLayer):
    """Mixin for modules whose parameters train and are rounded in forwards, in front of the module's class."""

    def _rounded_parameters(self) -> Mapping[str, Rounded]:
        """Return the parameters that forwards round, by the key of their engine state in state dicts."""
        raise NotImplementedError

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._vb_handle.layers.add(self)

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        weight: nn.Parameter | None = self._parameters.get(self.trained_parameters[0])
        if weight is not None:  # else it is computed by pruning, a norm or a parametrization
            self._vb_handle.retype(weight.dtype)
        return self

    def _save_to_state_dict(self, destination, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key, one in self._rounded_parameters().items():
            state = one.engine.state(self._parameters[one.name]) if one.engine else None
            if state is not None:
                destination[prefix + key] = state

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        """A state dict without engine state, such as a dense model's, starts a new one and is not incomplete."""
        parameters = {prefix + key: one for key, one in self._rounded_parameters().items()}
        rest = {name: value for name, value in state_dict.items() if name not in parameters}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        for key, one in parameters.items():
            if one.engine is None:  # dense: scales of another format are useless
                continue
            if key in state_dict:
                try:
                    one.engine.load(state_dict[key], one.shape)
                except FormatError as error:
                    error_msgs.append(f"{key}: {error}")
            elif prefix + one.name in state_dict:
                one.engine.reset()
