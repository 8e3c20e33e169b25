"""Work on a weight that is divided among threads.

The caller works, too, and returns when no part is under way: Ctrl-C waits for that, and no thread touches the weight
afterwards. What is compiled is one call, whose threads stay in C: twelve that take Python's lock for each part halve
the speed of a main thread that launches kernels, and wait for that lock nearly as long as they work.
"""

import os
from collections.abc import Callable, Sequence

from vbrt.host.worker_threads import Crew
from vbrt.kernels.cpu.update import TeamPart, UpdateTeam
from vbrt.kernels.update import TILE, Part

__all__ = ["Helpers", "cores"]

# of a part in plain torch: what costs as much as taking it, what leaves threads waiting
_LEAST, _MOST = 64 * TILE, 1024 * TILE


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
        self._team: UpdateTeam | None = None

    def run(self, count: int, part: Part) -> None:
        """Do `part(begin, end)` for all of [0, count). Raises what a part raised, once none is under way."""
        if isinstance(part, TeamPart):
            part.by_team(self._own_team(), count)
            return
        size = min(_MOST, max(_LEAST, count // (4 * self.threads) // TILE * TILE))
        self._crew.share(-(-count // size), lambda i: part(i * size, min((i + 1) * size, count)))

    def _own_team(self) -> UpdateTeam:
        """The team in C of this process, whose threads begin with the first weight."""
        team = self._team
        if team is None or team.pid != os.getpid():
            team = self._team = UpdateTeam(self.threads)
        return team

    def each(self, works: Sequence[Callable[[], object]]) -> None:
        """Do each of the works once. Raises what one raised, once none is under way."""
        self._crew.share(len(works), lambda i: works[i]())

    def stop(self) -> None:
        """End the threads. Idempotent."""
        self._crew.stop()
        if self._team is not None:
            self._team.stop()
