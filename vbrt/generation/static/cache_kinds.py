"""Kinds of transformers' cache layers: their tensors, and which of them can be captured."""

import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from vbrt.errors import VBError
from vbrt.generation.static.length_buckets import room_for
from vbrt.libraries import transformers_api
from vbrt.libraries.transformers_api import CACHES, cache_kinds

__all__ = [
    "EMPTY",
    "OWN",
    "NotRecordable",
    "cache_form",
    "fills",
    "grows",
    "is_empty",
    "layers_of",
    "length_of",
    "linear_layer",
    "memory_of",
    "read",
    "room_bytes",
    "room_wanted",
    "tensors_of",
    "why_not",
    "write_to",
]

_MODULE = "transformers.cache_utils"
EMPTY = "the cache is empty"
#: tensors of growing layers; the last one is a constant
OWN = ("keys", "values", "_sliding_window_tensor")


class NotRecordable(VBError):
    """A decode step cannot be captured; the message gives the reason."""


def _halves(cache: Any) -> tuple[Any, ...]:
    """Return the self- and cross-attention caches, or the only one."""
    return (cache.self_attention_cache, cache.cross_attention_cache) if _is_pair(cache) else (cache,)


def _is_pair(cache: Any) -> bool:
    return hasattr(cache, "cross_attention_cache")


def layers_of(cache: Any) -> list[Any]:
    return [layer for half in _halves(cache) for layer in half.layers]


def is_empty(layer: Any) -> bool:
    return not getattr(layer, "is_initialized", True)


@functools.cache
def linear_layer() -> type:
    return transformers_api.LinearAttentionLayer


@functools.cache
def _known_kinds() -> tuple[frozenset[type], frozenset[type]]:
    """Return transformers' layer classes that append tokens, and those of fixed size."""
    mixed = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
    growing = cache_kinds("DynamicLayer", "DynamicSlidingWindowLayer", *mixed)
    return growing, cache_kinds("LinearAttentionLayer", "DummyLayer")


def _plain(layer: Any) -> type:
    return getattr(type(layer), "_vb_plain", type(layer))


def grows(cache: Any, layer: Any) -> bool:
    """True for a layer that a step appends keys and values to: initialized, and not cross attention."""
    return not _crosses(cache, layer) and _plain(layer) in _known_kinds()[0] and not is_empty(layer)


def fills(cache: Any, layer: Any) -> bool:
    """True for an empty layer that will append all keys and values of a prompt."""
    return type(layer) in cache_kinds("DynamicLayer") and is_empty(layer) and not _crosses(cache, layer)


def _crosses(cache: Any, layer: Any) -> bool:
    return _is_pair(cache) and any(layer is other for other in cache.cross_attention_cache.layers)


def why_not(cache: Any) -> str:
    """Return why steps on a cache cannot be captured; "" if they can."""
    if missing := CACHES.refusal():
        return missing
    if any(getattr(half, "offloading", False) for half in _halves(cache)):
        return "the cache moves its layers to host memory"
    for half in _halves(cache):
        if type(half).__module__ != _MODULE:
            return f"the cache is a {type(half).__name__}, which may hold more than its layers"
    for name in _replaced((cache, *_halves(cache), *layers_of(cache))):
        return f"{name} of the cache is not transformers' own, and captured steps might not call it"
    for layer in layers_of(cache):
        if _plain(layer) not in frozenset.union(*_known_kinds()):
            return f"layers of the cache are {type(layer).__name__}"
        if getattr(layer, "record_past", False):
            return "the cache keeps past states, to be cropped"
    return "" if any(True for _ in memory_of(cache)) else EMPTY


def _replaced(objects: tuple[Any, ...]) -> Iterator[str]:
    """Yield names of monkeypatched methods of caches or their layers."""
    for kind in dict.fromkeys(of for each in objects for of in _plain(each).__mro__ if of.__module__ == _MODULE):
        for name, value in vars(kind).items():
            is_method = callable(value) and not isinstance(value, type)
            module = str(getattr(value, "__globals__", {}).get("__name__"))
            if is_method and module.partition(".")[0] != "transformers":  # decorators keep their own module
                yield f"{kind.__name__}.{name}"
    for each in objects:
        yield from (name for name in vars(each) if callable(getattr(_plain(each), name, None)))


def length_of(cache: Any) -> int | None:
    """Return the number of tokens in a cache; None if none of its layers counts them."""
    half = _halves(cache)[0]
    lengths = {layer.get_seq_length() for layer in half.layers if grows(cache, layer)}
    if len(lengths) > 1:
        raise NotRecordable("layers of the cache have seen different numbers of tokens")
    return lengths.pop() if lengths else None


def cache_form(cache: Any) -> tuple:
    """Return a cache's signature: caches of equal signature can use the same static memory."""
    form = []
    for layer in layers_of(cache):
        growing = grows(cache, layer)
        rows = []
        for name in tensors_of(layer):
            tensor = read(layer, name)
            shape = (*tensor.shape[:2], -1, tensor.shape[3]) if growing and name[0] in OWN[:2] else tuple(tensor.shape)
            rows.append((name, shape, tensor.dtype, tensor.device))
        form.append((_plain(layer), growing, layer.__dict__.get("sliding_window"), tuple(rows)))
    return tuple(form)


def memory_of(cache: Any) -> Iterator[Tensor]:
    """Yield the non-empty tensors of a cache."""
    for layer in layers_of(cache):
        for name in tensors_of(layer):
            if name[0] != OWN[2] and read(layer, name).numel():
                yield read(layer, name)


def room_wanted(cache: Any, limit: int | None) -> int:
    """Return the token capacity for `Statics` of a cache."""
    return room_for(length_of(cache) or 0, limit)


def room_bytes(cache: Any, limit: int | None) -> int:
    """Return the bytes of `Statics` of a cache, at most: layers with a sliding window take less."""
    room = room_wanted(cache, limit)
    held = (
        read(layer, name)
        for layer in layers_of(cache)
        if grows(cache, layer)
        for name in tensors_of(layer)
        if name[0] in OWN[:2]
    )
    return sum(tensor.nbytes // max(1, tensor.shape[2]) * room for tensor in held)


def read(layer: Any, name: tuple[str, Any]) -> Tensor:
    value = layer.__dict__[name[0]]
    return value if name[1] is None else value[name[1]]


def write_to(layer: Any, name: tuple[str, Any], tensor: Tensor) -> None:
    if name[1] is None:
        layer.__dict__[name[0]] = tensor
    else:
        layer.__dict__[name[0]][name[1]] = tensor


def tensors_of(layer: Any) -> tuple[tuple[str, Any], ...]:
    """Return names of a layer's tensors: attributes, and items of dict attributes."""
    found = []
    for name, value in layer.__dict__.items():
        if isinstance(value, Tensor):
            found.append((name, None))
        elif isinstance(value, dict):
            found += [(name, key) for key, item in value.items() if isinstance(item, Tensor)]
    return tuple(found)
