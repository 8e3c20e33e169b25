"""Thread team: threads that run jobs posted in C without the GIL: `team.h`.

They are Python threads that stay in C until the team is stopped.
"""

import atexit
import contextlib
import os
import weakref
from _thread import allocate_lock, start_new_thread

from vbrt.kernels.cpu.build import library

__all__ = ["Team"]


class _Memory:
    """The team's C structure, kept alive by its threads while they serve."""

    def __init__(self, source: str, places: int) -> None:
        self.library = library(source)
        self.address = self.library.vbrt_team_new(places)
        if not self.address:
            raise MemoryError(f"{source}: no memory for a team of threads")

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self.library.vbrt_team_free(self.address)


class Team:
    """Threads of a library, started with the first job. They end with `stop`, with the team, or with the process.

    Args:
        source: library with the jobs.
        threads: number of computing threads, including the one that finishes a job.

    Attributes:
        pid: process of the threads. A forked child has none of them, and makes its own team.
    """

    def __init__(self, source: str, threads: int) -> None:
        self.pid, self._lock = os.getpid(), allocate_lock()
        self._places, self._started = threads, 1
        self._memory = _Memory(source, threads)
        self._stop = weakref.finalize(self, _stop, self._memory, self.pid)
        self._stop.atexit = False  # `_stop_all` does it, before interpreter shutdown
        _teams.add(self)

    def stop(self) -> None:
        """Finish the current job and end the threads; later jobs run in the posting thread alone. Idempotent."""
        self._stop()

    def _start(self) -> None:
        """Start missing threads. The caller holds `_lock`."""
        with contextlib.suppress(RuntimeError):  # no more threads: the existing ones and the caller compute
            while self._started < self._places:
                start_new_thread(_serve, (self._memory, self._started, weakref.ref(self)))
                self._started += 1

    def look_after(self) -> None:
        """Called in a team thread when a job has been done for 20 ms and nobody has finished it."""


def _serve(memory: _Memory, place: int, team: "weakref.ref[Team]") -> None:
    while memory.library.vbrt_team_serve(memory.address, place):
        found = team()
        if found is not None:
            found.look_after()
        del found


def _stop(memory: _Memory, pid: int) -> None:
    if pid == os.getpid():  # a forked child has no threads, and maybe an incomplete job
        memory.library.vbrt_team_stop(memory.address)


_teams: "weakref.WeakSet[Team]" = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Finish jobs at exit, before interpreter shutdown frees memory."""
    for team in list(_teams):
        team.stop()
