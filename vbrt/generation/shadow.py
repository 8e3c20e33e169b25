"""Caches of transformers as a pass sees them that begins a few tokens later.

Passes in lockstep begin at one time, but each must find the cache as it is once the passes before it have written their
tokens: masks and positions follow from its length. A shadow has that length from the beginning, without contents. When
its pass writes into a layer, the passes before it have written into it already, so the shadow hands the write on to the
layer itself, and from then on shows what that layer holds.
"""

import copy
import functools
from typing import Any

import torch

from vbrt.errors import WrapError

__all__ = ["layer_ahead", "shadow_of", "shadow_refusal"]

#: layers of transformers whose whole state is keys, values and what `update` computes from their shapes
_KNOWN = ("DynamicLayer", "DynamicSlidingWindowLayer")


def shadow_refusal(cache: Any) -> str | None:
    """Return why no pass can be shown a cache some tokens ahead, or rewound in it; None if it can."""
    if cache is None or not hasattr(cache, "layers") or not hasattr(cache, "crop"):
        return f"its cache is {type(cache).__name__}; expected DynamicCache"
    if not getattr(cache, "is_croppable", False):
        kinds = sorted({type(layer).__name__ for layer in cache.layers if not getattr(layer, "is_croppable", False)})
        return f"its cache cannot be rewound: {type(cache).__name__} of {', '.join(kinds) or 'nothing'}"
    unknown = sorted({type(layer).__name__ for layer in cache.layers if type(layer).__name__ not in _KNOWN})
    if unknown or not cache.layers:
        return f"its cache has layers of {', '.join(unknown) or 'no kind'}; expected {' or '.join(_KNOWN)}"
    return None


def shadow_of(cache: Any, tokens: int) -> Any:
    """Return the cache as it will be once `tokens` more have been written to each of its layers."""
    shadow = copy.copy(cache)
    shadow.layers = [layer_ahead(layer, tokens) for layer in cache.layers]
    return shadow


def layer_ahead(layer: Any, tokens: int) -> Any:
    """Return a layer of a cache as it will be once `tokens` more have been written to it."""
    ahead = copy.copy(layer)
    ahead.keys, ahead.values = (_without_contents(tensor) for tensor in (layer.keys, layer.values))
    keys, values = (tensor[:, :, :1].expand(-1, -1, tokens, -1) for tensor in (ahead.keys, ahead.values))
    type(layer).update(ahead, keys, values)
    ahead.__class__ = _shadow_class(type(layer))
    ahead._vb_layer, ahead._vb_length = layer, ahead.get_seq_length()
    return ahead


def _without_contents(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@functools.cache
def _shadow_class(kind: type) -> type:
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        layer = self._vb_layer
        if layer.get_seq_length() != self._vb_length:
            raise WrapError(
                f"speculation: {kind.__name__} holds {layer.get_seq_length()} tokens where a row expects "
                f"{self._vb_length}: the model's layers do not come in one order; use speculate=False"
            )
        states = layer.update(*args, **kwargs)
        for name, value in layer.__dict__.items():
            self.__dict__[name] = value
        self._vb_length = layer.get_seq_length()
        return states

    return type(kind.__name__, (kind,), {"update": update, "__module__": kind.__module__})
