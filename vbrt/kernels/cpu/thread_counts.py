"""Thread counts of CPU kernels: torch's number, minus threads that the caller reserves for others.

A parallel region ends with its slowest thread: with one per core, a thread that shares its core with one that launches
kernels delays the others.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["leaving", "team"]


class _Left(threading.local):
    count = 0


_left = _Left()


def team(parts: int) -> int:
    """Return the number of threads for this many parts of work."""
    return max(1, min(torch.get_num_threads() - _left.count, parts))


@contextmanager
def leaving(count: int) -> Iterator[None]:
    """Reserve some of this thread's kernel threads for others: at most a quarter."""
    before, _left.count = _left.count, min(count, torch.get_num_threads() // 4)
    try:
        yield
    finally:
        _left.count = before
