"""Refusals of caches: drafts need one that can be rewound, and whose masks follow from its length."""

import functools
from typing import Any

import torch

from vbrt.libraries import transformers_api

__all__ = ["cache_refusal", "past_refusal"]

#: layer classes whose masks depend only on the number of tokens and the window, as `rowwise_pass.py` makes them
_KNOWN = ("DynamicLayer", "DynamicSlidingWindowLayer", "KVLayer", "KVSlidingLayer")


def cache_refusal(cache: Any) -> str | None:
    """Return why rows on a cache can be neither verified nor taken back; None if they can."""
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
