"""Waiting in tests: for a condition, not for a time; only what never comes runs into a limit."""

import time
from collections.abc import Callable

__all__ = ["LONG_S", "eventually"]

LONG_S = 240.0  # a limit that a busy machine does not reach, below pytest's faulthandler_timeout


def eventually(condition: Callable[[], object], what: str) -> None:
    """Return once the condition holds. Raises AssertionError: `what` has not come."""
    until = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < until, f"{what}: not within {LONG_S:.0f} s"
        time.sleep(0.005)
