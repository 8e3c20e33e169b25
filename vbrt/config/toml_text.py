"""Serialization of a config to TOML text, the inverse of `VBConfig.from_toml`."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from vbrt.config.schema import VBConfig

__all__ = ["toml_text"]

_BARE = re.compile("[A-Za-z0-9_-]+")


def toml_text(config: VBConfig) -> str:
    """Return the whole config as TOML text; `VBConfig.from_toml` of it gives an equal config."""
    return "\n".join(_tables(config.to_dict(), "")).lstrip("\n") + "\n"


def _tables(table: Mapping[str, Any], name: str) -> Iterable[str]:
    values = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if values and name:
        yield f"\n[{name}]"
    for key, value in values.items():
        if value is not None:  # TOML has no null: an absent key is the default, None
            yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _tables(value, f"{name}.{key}" if name else key)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    # JSON literals are TOML literals, except that TOML requires DEL to be escaped
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
