"""`generate(cache_implementation="vbrt")`: create a `vbrt.KVCache` through transformers' own argument."""

import importlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from vbrt.libraries.transformers_api import as_generate_names_it

__all__ = ["with_asked_cache"]

_NAME = "vbrt"


def with_asked_cache(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return `generate`'s arguments, with a `vbrt.KVCache` if they ask for one; its options are the dict
    `cache_config`. Both names of the cache argument, "cache" and "past_key_values", are mapped to the installed
    transformers' one."""
    if kwargs.get("cache_implementation") != _NAME:
        return as_generate_names_it(kwargs)
    rest = {name: value for name, value in kwargs.items() if name not in ("cache_implementation", "cache_config")}
    made = importlib.import_module("vbrt.generation.kv.cache")  # imports transformers, which a generating model has
    return as_generate_names_it({**rest, "cache": made.KVCache(model, **(kwargs.get("cache_config") or {}))})
