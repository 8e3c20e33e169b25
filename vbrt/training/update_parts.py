"""Work on a weight that is divided among threads.

The caller works, too, and returns when all parts are done: Ctrl-C then waits for the parts that are under way, and no
thread touches the weight afterwards.
"""

import itertools
import os
import threading
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
        self._run(_Parts(count, part, size, self.threads))

    def each(self, works: Sequence[Callable[[], object]]) -> None:
        """Do each of the works once. Raises what one raised, once none is under way."""
        self._run(_Parts(len(works), lambda begin, end: works[begin](), 1, self.threads))

    def _run(self, parts: "_Parts") -> None:
        try:
            for seat in parts.seats:
                self._crew_here().give(parts.help, seat)
            parts.work()
        finally:
            parts.close()
        if parts.error is not None:
            raise parts.error

    def _crew_here(self) -> Crew:
        if self._crew.pid != os.getpid():  # a forked child has no threads
            self._crew = Crew(self.threads - 1)
        return self._crew

    def stop(self) -> None:
        """End the threads. Idempotent."""
        self._crew.stop()


class _Parts:
    """The parts of one weight, which any thread may take."""

    def __init__(self, count: int, part: Part, size: int, threads: int) -> None:
        self.count, self.size, self.part = count, size, part
        helpers = max(0, min(threads - 1, -(-count // size) - 1))
        self.seats = [threading.RLock() for _ in range(helpers)]  # each held while its helper works
        self.error: Exception | None = None
        self._closed = False
        self._next = itertools.count(0, size)

    def help(self, seat: threading.RLock) -> None:
        """A helper's turn, unless the caller is closing."""
        if not seat.acquire(blocking=False):
            return
        try:
            self.work()
        except Exception as error:  # noqa: BLE001 - raised in run()
            self.error = error
        finally:
            seat.release()

    def work(self) -> None:
        """Take parts until there are none left."""
        for begin in self._next:
            if begin >= self.count or self._closed:
                break
            self.part(begin, min(begin + self.size, self.count))

    def close(self) -> None:
        """Return when no helper is at work; none begins after that."""
        self._closed = True
        for seat in self.seats:
            with seat:
                pass
