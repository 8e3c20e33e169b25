"""Work on a weight that is divided among threads.

The caller works, too, and returns when all parts are done: Ctrl-C then waits for the parts that are under way, and no
thread touches the weight afterwards.
"""

import os
from collections.abc import Callable, Sequence

from vbrt.host.crew import Crew
from vbrt.kernels.update import TILE, Part

__all__ = ["Helpers", "cores"]

_LEAST, _MOST = 64 * TILE, 1024 * TILE  # of a part: what costs as much as taking it, what leaves threads waiting


def cores() -> int:
    """Return how many CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Helpers:
    """Threads that share the parts of a weight with the caller's.

    Args:
        threads: the caller's included.
    """

    def __init__(self, threads: int) -> None:
        self.threads = max(1, threads)
        self._crew = Crew(self.threads - 1)

    def run(self, count: int, part: Part) -> None:
        """Do `part(begin, end)` for all of [0, count). Raises what a part raised, once none is under way."""
        size = min(_MOST, max(_LEAST, count // (4 * self.threads) // TILE * TILE))
        self._crew.share(-(-count // size), lambda i: part(i * size, min((i + 1) * size, count)))

    def each(self, works: Sequence[Callable[[], object]]) -> None:
        """Do each of the works once. Raises what one raised, once none is under way."""
        self._crew.share(len(works), lambda i: works[i]())

    def stop(self) -> None:
        """End the threads. Idempotent."""
        self._crew.stop()
