"""Base class of config sections: every key is validated on construction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

__all__ = ["Section", "opt"]


def opt(default: Any, check: Callable[[object, str], Any]) -> Any:
    """Return a dataclass field with a default and a check."""
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True, slots=True)
class Section:
    """Config section: each key is checked on construction, and `_rule` checks constraints between keys."""

    _key: ClassVar[str] = ""

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in self._checked(values, f"{type(self).__name__}(...)").items():
            object.__setattr__(self, name, value)  # normalized: list -> tuple, "~" expanded

    @classmethod
    def _checked(cls, values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Check and normalize `values`, some or all fields; raise ConfigError that names `source` and the key."""
        checks = {f.name: f.metadata["check"] for f in fields(cls)}
        checked = {name: checks[name](value, f"{source}: {cls._key}.{name}") for name, value in values.items()}
        defaults = {f.name: f.default for f in fields(cls)}
        cls._rule(defaults | checked, f"{source}: {cls._key}")
        return checked

    @classmethod
    def _rule(cls, values: Mapping[str, Any], where: str) -> None:
        """Check constraints between keys; raise ConfigError."""
