"""Caches of transformers as a pass sees them that begins a few tokens later.

Passes in lockstep begin at one time, but each must find the cache as it is once the passes before it have written their
tokens: masks and positions follow from its length. A shadow has that length from the beginning. When its pass writes
into a layer, the passes before it have written into it already, so the shadow hands the write on to the layer itself,
and from then on shows what that layer holds.
"""

import copy
import functools
from typing import Any

import torch

from vbrt.errors import WrapError
from vbrt.libraries import transformers_api

__all__ = ["layer_ahead", "past_refusal", "shadow_of", "shadow_refusal"]

#: layers whose masks follow from how many tokens they have seen, and from their window
_KNOWN = ("DynamicLayer", "DynamicSlidingWindowLayer", "KVLayer", "KVSlidingLayer")


def shadow_refusal(cache: Any) -> str | None:
    """Return why no pass can be shown a cache some tokens ahead, or rewound in it; None if it can."""
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
    """Return why several drafts in a row cannot be eager steps on a cache that keeps what windows leave behind, to be
    rewound; None if they can."""
    if not any(type(layer).__name__ == "DynamicSlidingWindowLayer" for layer in cache.layers) or _keeps_past():
        return None
    return "DynamicSlidingWindowLayer of this transformers gives more past keys than its masks have; a newer does not"


@functools.cache
def _keeps_past() -> bool:
    """True if windows of transformers that keep their past give as many keys as their masks have: 5.17's do not."""
    layer = transformers_api.DynamicSlidingWindowLayer(sliding_window=2)
    key = torch.zeros(1, 1, 1, 1, dtype=torch.float32, device="cpu")
    layer.activate_past_recording()
    for _ in range(3):
        wanted = layer.get_mask_sizes(1)[0]
        got = layer.update(key, key)[0].shape[-2]
    return got == wanted


def shadow_of(cache: Any, tokens: int) -> Any:
    """Return the cache as it will be once `tokens` more have been written to each of its layers."""
    shadow = object.__new__(type(cache))  # a copy.copy() that caches in the tiers do not refuse
    shadow.__dict__.update(cache.__dict__)
    shadow.layers = [layer_ahead(layer, tokens) for layer in cache.layers]
    return shadow


def layer_ahead(layer: Any, tokens: int) -> Any:
    """Return a layer of a cache as it will be once `tokens` more have been written to it."""
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
