"""Validators of single config values, and their error messages.

A check takes (value, where) and returns the value to store, or raises ConfigError; `where` reads "my.toml:
weights.format".
"""

import difflib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vbrt.errors import ConfigError

__all__ = [
    "MAX_INT",
    "auto_or",
    "choice",
    "did_you_mean",
    "directory",
    "file",
    "flag",
    "gpus",
    "gpus_or",
    "pattern_table",
    "patterns",
    "quoted",
    "shown",
    "text",
    "whole",
    "wrong",
]

MAX_INT = 2**63 - 1  # largest integer that TOML guarantees; far above any memory


def shown(value: object) -> str:
    """Return `value` as the user wrote it in TOML or Python, short enough for one line."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
    elif isinstance(value, tuple):
        text = repr(list(value))
    elif isinstance(value, int) and value.bit_length() > 256:
        text = f"a number of {value.bit_length()} bits"  # repr() of a far longer one raises
    else:
        text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def quoted(names: Iterable[str]) -> str:
    """Return names as `"a", "b" or "c"`."""
    *head, last = [f'"{name}"' for name in names]
    return f"{', '.join(head)} or {last}" if head else last


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean "format"?`, or "" without a close match."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f'; did you mean "{near[0]}"?' if near else ""


def wrong(where: str, value: object, expected: str) -> ConfigError:
    """Return the error for a value: key, value, accepted values."""
    return ConfigError(f"{where} = {shown(value)}; {expected}")


def flag(value: object, where: str) -> bool:
    """Check for true or false."""
    if not isinstance(value, bool):
        raise wrong(where, value, "expected true or false")
    return value


def choice(*names: str) -> Callable[[object, str], str]:
    """Return a check for one of the names."""

    def check(value: object, where: str) -> str:
        if not isinstance(value, str) or value not in names:
            hint = did_you_mean(value, names) if isinstance(value, str) else ""
            raise wrong(where, value, f"expected {quoted(names)}{hint}")
        return value

    return check


def whole(low: int, high: int = MAX_INT) -> Callable[[object, str], int]:
    """Return a check for a whole number in a range, ends included."""
    span = f"a whole number from {low} to {high}" if high != MAX_INT else f"a whole number, {low} or more"

    def check(value: object, where: str) -> int:
        # bool is an int in Python; `levels = true` is a mistake, not 1
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise wrong(where, value, f"expected {span}")
        return value

    return check


def gpus(value: object, where: str) -> tuple[int, ...]:
    """Check for a list of distinct GPU indices."""
    good = isinstance(value, list | tuple) and all(type(index) is int and 0 <= index < 1024 for index in value)
    if not good or not value or len(set(value)) < len(value):
        raise wrong(where, value, "expected a list of different GPUs by their numbers, e.g. [0, 1]")
    return tuple(value)


def gpus_or(*names: str) -> Callable[[object, str], Any]:
    """Return a check for one of the names or a list of GPUs."""
    return lambda value, where: choice(*names)(value, where) if isinstance(value, str) else gpus(value, where)


def auto_or(check: Callable[[object, str], Any]) -> Callable[[object, str], Any]:
    """Return a check for "auto" or a value that `check` accepts."""

    def check_both(value: object, where: str) -> Any:
        if value == "auto":
            return value
        try:
            return check(value, where)
        except ConfigError as error:
            raise ConfigError(f'{error}, or "auto"') from None

    return check_both


def patterns(value: object, where: str) -> tuple[str, ...]:
    """Check for a list of module name patterns."""
    expected = 'expected a list of module name patterns, e.g. ["model.layers.*", "*.mlp.*"]'
    if not isinstance(value, list | tuple):
        raise wrong(where, value, expected)
    for pattern in value:
        if not isinstance(pattern, str) or not pattern:
            raise wrong(where, value, f"{expected}, not {shown(pattern)} in it")
    return tuple(value)


def pattern_table(*names: str) -> Callable[[object, str], tuple[tuple[str, str], ...]]:
    """Return a check for a table, or a tuple of pairs, from module name patterns to the names; keeps the order."""
    check_name = choice(*names)

    def check(value: object, where: str) -> tuple[tuple[str, str], ...]:
        pairs = tuple(value.items()) if isinstance(value, Mapping) else value
        if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            example = f'{{"*.mlp.*" = "{names[0]}"}}'
            raise wrong(where, value, f"expected a table of module name patterns, e.g. {example}")
        patterns([pattern for pattern, _ in pairs], where)
        return tuple((pattern, check_name(name, f"{where}.{json.dumps(pattern)}")) for pattern, name in pairs)

    return check


def directory(value: object, where: str) -> str | None:
    """Check for a directory or None; expand "~"."""
    return _path(value, where, 'a directory, e.g. "~/.cache/vbrt/pages"')


def file(value: object, where: str) -> str | None:
    """Check for the path of a file or None; expand "~"."""
    return _path(value, where, 'a file, e.g. "~/qwen.routing"')


def text(value: object, where: str) -> str | None:
    """Check for the path of a text file, "samples", or None; expand "~"."""
    return _path(value, where, 'a file of text or token ids, e.g. "notes.txt", or "samples"')


def _path(value: object, where: str, what: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise wrong(where, value, f"expected {what}")
    expanded = os.path.expanduser(value)
    if expanded.startswith("~"):  # unknown user: "~name" would become a folder of that name
        noun = what.split(",")[0]
        raise wrong(where, value, f'expected {noun} whose "~" names a user of this machine')
    return expanded
