"""How many threads a kernel for CPUs takes: torch's number of them, less what its caller leaves to other threads.

A parallel region ends when all of its threads have: with as many as there are cores, one that shares its core with a
thread that launches kernels holds up the others.
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
    """Return how many threads of this one's share so many parts of work."""
    return max(1, min(torch.get_num_threads() - _left.count, parts))


@contextmanager
def leaving(count: int) -> Iterator[None]:
    """Leave some of the threads of this thread's kernels to others: at most a quarter of them."""
    before, _left.count = _left.count, min(count, torch.get_num_threads() // 4)
    try:
        yield
    finally:
        _left.count = before
