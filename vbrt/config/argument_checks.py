"""Argument checks of public functions: raised before any side effect, with the accepted values."""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from vbrt.config.value_checks import shown
from vbrt.errors import ArgumentError

__all__ = ["check_instance", "check_number", "check_one_of", "check_whole"]


def check_instance(value: Any, kind: Any, where: str, expected: str) -> None:
    """Raise ArgumentError if a value is not a `kind`. `where` is named in the error: "make_plan(): model"."""
    if not isinstance(value, kind):
        raise _wrong(value, where, expected)


def check_one_of(value: Any, known: Iterable[str], where: str) -> None:
    """Raise ArgumentError if a value is not a known name."""
    known = tuple(known)
    if not isinstance(value, str) or value not in known:
        raise _wrong(value, where, f"one of {', '.join(map(repr, known))}")


def check_whole(value: Any, where: str, *, least: int = 1, most: int = 1 << 40) -> None:
    """Raise ArgumentError if a value is not a whole number within bounds."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= value <= most:
        raise _wrong(value, where, f"a whole number of at least {least}, and at most {most}")


def check_number(value: Any, where: str, *, least: float = 0.0) -> None:
    """Raise ArgumentError if a value is not a finite number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= value < math.inf:
        raise _wrong(value, where, f"a finite number of at least {least:g}")


def _wrong(value: Any, where: str, expected: str) -> ArgumentError:
    if isinstance(value, str | bytes):
        text = repr(value[:80])
    else:
        text = shown(value) if value is None or isinstance(value, int | float) else type(value).__name__
    return ArgumentError(f"{where} = {text}; expected {expected}")
