"""Worker threads for one weight's update.

One weight at a time: callers take turns. The caller works too, and returns only when no part is running, also on
Ctrl-C, so that no thread touches the weight afterwards. Compiled kernels run as one call whose threads stay in C:
twelve threads that take the GIL per part halve the speed of a main thread that launches kernels, and wait for the GIL
nearly as long as they work.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence

from vbrt.host.worker_threads import Crew
from vbrt.kernels.cpu.update import TeamPart, UpdateTeam
from vbrt.kernels.update import TILE, Part

__all__ = ["Helpers", "cores"]

# elements per part in plain torch: below, overhead dominates; above, threads idle
_LEAST, _MOST = 64 * TILE, 1024 * TILE


def cores() -> int:
    """Return the number of CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Helpers:
    """Threads that share a weight's parts with the caller.

    Args:
        threads: including the caller.

    Attributes:
        busy_ns: time of all calls of `run`.
    """

    def __init__(self, threads: int) -> None:
        self.threads, self.busy_ns = max(1, threads), 0
        self._crew, self._turn = Crew(self.threads - 1), threading.Lock()
        self._team: UpdateTeam | None = None

    def run(self, count: int, part: Part) -> None:
        """Run `part(begin, end)` over [0, count), after the runs of other callers. Raises a part's error, once none is
        running."""
        with self._turn:
            start = time.perf_counter_ns()
            try:
                self._run(count, part)
            finally:
                self.busy_ns += time.perf_counter_ns() - start

    def _run(self, count: int, part: Part) -> None:
        if isinstance(part, TeamPart):
            part.by_team(self._own_team(), count)
            return
        size = min(_MOST, max(_LEAST, count // (4 * self.threads) // TILE * TILE))
        self._crew.share(-(-count // size), lambda i: part(i * size, min((i + 1) * size, count)))

    def _own_team(self) -> UpdateTeam:
        """Return this process's C thread team, created with the first weight."""
        team = self._team
        if team is None or team.pid != os.getpid():
            team = self._team = UpdateTeam(self.threads)
        return team

    def each(self, works: Sequence[Callable[[], object]]) -> None:
        """Run each of the works once. Raises an error of one, once none is running."""
        self._crew.share(len(works), lambda i: works[i]())

    def begin(self, work: Callable[..., object], *args: object) -> None:
        """Run `work(*args)` in a thread of its own, concurrently; errors are printed."""
        self._crew.give(work, *args)

    def stop(self) -> None:
        """End the threads. Idempotent."""
        self._crew.stop()
        if self._team is not None:
            self._team.stop()
