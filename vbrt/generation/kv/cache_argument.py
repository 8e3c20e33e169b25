"""`generate(cache_implementation="vbrt")`: a cache in the tiers, by the argument that transformers has for its own."""

import importlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from vbrt.libraries.transformers_api import as_generate_names_it

__all__ = ["with_asked_cache"]

_NAME = "vbrt"


def with_asked_cache(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `generate`, with a `vbrt.KVCache` where they ask for one; `cache_config`, a dict, has its
    options. A cache may be named "cache" or "past_key_values", whatever the installed transformers calls it."""
    if kwargs.get("cache_implementation") != _NAME:
        return as_generate_names_it(kwargs)
    rest = {name: value for name, value in kwargs.items() if name not in ("cache_implementation", "cache_config")}
    made = importlib.import_module("vbrt.generation.kv.cache")  # needs transformers, which a model that generates is of
    return as_generate_names_it({**rest, "cache": made.KVCache(model, **(kwargs.get("cache_config") or {}))})
