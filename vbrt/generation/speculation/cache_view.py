"""Cache view with a length offset, for verification passes that start some tokens later.

Passes in lockstep start together, but each needs the cache as it is after the passes before it: masks and positions
follow from its length. A shadow reports that length from the start. When its pass writes to a layer, earlier passes
have written to it already, so the shadow forwards the write to the real layer and mirrors its state from then on.
"""

import copy
import functools
from typing import Any

import torch

from vbrt.errors import WrapError
from vbrt.libraries import transformers_api

__all__ = ["layer_ahead", "past_refusal", "shadow_of", "shadow_refusal"]

#: layer classes whose masks depend only on the number of tokens and the window
_KNOWN = ("DynamicLayer", "DynamicSlidingWindowLayer", "KVLayer", "KVSlidingLayer")


def shadow_refusal(cache: Any) -> str | None:
    """Return why a cache cannot be shadowed or rewound; None if it can."""
    if cache is None or not hasattr(cache, "layers") or not hasattr(cache, "crop"):
        return f"its cache is {type(cache).__name__}; expected DynamicCache or KVCache"
    if not getattr(cache, "is_croppable", False):
        kinds = sorted({type(layer).__name__ for layer in cache.layers if not getattr(layer, "is_croppable", False)})
        return f"its cache cannot be rewound: {type(cache).__name__} of {', '.join(kinds) or 'nothing'}"
    unknown = sorted({type(layer).__name__ for layer in cache.layers if type(layer).__name__ not in _KNOWN})
    if unknown or not cache.layers:
        return f"its cache has layers of {', '.join(unknown) or 'no kind'}; expected {', '.join(_KNOWN)}"
    if getattr(cache, "bits", 16) != 16:
        return f"its cache rounds to {cache.bits} bits what it holds, and drafts beside it"
    return None


def past_refusal(cache: Any) -> str | None:
    """Return why drafts cannot be eager steps on a window cache that records its past; None if they can."""
    if not any(type(layer).__name__ == "DynamicSlidingWindowLayer" for layer in cache.layers) or _keeps_past():
        return None
    return "DynamicSlidingWindowLayer of this transformers gives more past keys than its masks have; a newer does not"


@functools.cache
def _keeps_past() -> bool:
    """Feature probe: window layers that record their past return as many keys as their masks have (not in 5.17)."""
    layer = transformers_api.DynamicSlidingWindowLayer(sliding_window=2)
    key = torch.zeros(1, 1, 1, 1, dtype=torch.float32, device="cpu")
    layer.activate_past_recording()
    for _ in range(3):
        wanted = layer.get_mask_sizes(1)[0]
        got = layer.update(key, key)[0].shape[-2]
    return got == wanted


def shadow_of(cache: Any, tokens: int) -> Any:
    """Return a view of the cache as of `tokens` more tokens in each layer."""
    shadow = object.__new__(type(cache))  # not copy.copy(), which caches in the tiers refuse
    shadow.__dict__.update(cache.__dict__)
    shadow.layers = [layer_ahead(layer, tokens) for layer in cache.layers]
    return shadow


def layer_ahead(layer: Any, tokens: int) -> Any:
    """Return a view of a cache layer as of `tokens` more tokens."""
    ahead = copy.copy(layer)
    ahead.__dict__.update(_vb_layer=layer, _vb_length=layer.get_seq_length() + tokens)
    ahead.__class__ = _shadow_class(type(layer))
    return ahead


@functools.cache
def _shadow_class(kind: type) -> type:
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        layer, length = self._vb_layer, self._vb_length
        if length is not None and layer.get_seq_length() != length:
            raise WrapError(
                f"speculation: {kind.__name__} holds {layer.get_seq_length()} tokens where a row expects {length}: the "
                "model's layers do not come in one order; use speculate=False"
            )
        states = layer.update(*args, **kwargs)
        self.__dict__.update(layer.__dict__, _vb_length=None)
        return states

    def get_seq_length(self: Any) -> int:
        return kind.get_seq_length(self) if self._vb_length is None else self._vb_length

    def get_mask_sizes(self: Any, query_length: int) -> tuple[int, int]:
        if self._vb_length is None:
            return kind.get_mask_sizes(self, query_length)
        length, window = self._vb_length, self.sliding_window if self.is_sliding else None
        past = length if window is None else min(length, window - 1)
        return past + query_length, length - past

    members = {"update": update, "get_seq_length": get_seq_length, "get_mask_sizes": get_mask_sizes}
    return type(kind.__name__, (kind,), {**members, "__module__": kind.__module__})
