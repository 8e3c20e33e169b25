"""Threads that compute what is posted in C, and need no lock of Python's for it: `team.h`.

They are Python's, and stay in C until the team is stopped.
"""

import atexit
import contextlib
import os
import weakref
from _thread import allocate_lock, start_new_thread

from vbrt.kernels.cpu.build import library

__all__ = ["Team"]


class _Memory:
    """The team in C. Its threads hold it while they serve."""

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
        source: of the library that has the jobs.
        threads: that compute, the one that finishes a job among them.

    Attributes:
        pid: of the process that the threads are in. A forked child has none of them, and makes a team of its own.
    """

    def __init__(self, source: str, threads: int) -> None:
        self.pid, self._lock = os.getpid(), allocate_lock()
        self._places, self._started = threads, 1
        self._memory = _Memory(source, threads)
        self._stop = weakref.finalize(self, _stop, self._memory, self.pid)
        self._stop.atexit = False  # `_stop_all`: before the interpreter's own end
        _teams.add(self)

    def stop(self) -> None:
        """Finish the job that is under way, and end the threads; who posts then computes alone. Idempotent."""
        self._stop()

    def _start(self) -> None:
        """Start the threads that are not there yet. The caller holds `_lock`."""
        with contextlib.suppress(RuntimeError):  # no more threads: those that are there and who finishes it compute
            while self._started < self._places:
                start_new_thread(_serve, (self._memory, self._started, weakref.ref(self)))
                self._started += 1

    def look_after(self) -> None:
        """What a thread does, outside of C, when a job has been done for 20 ms and nobody has come for it."""


def _serve(memory: _Memory, place: int, team: "weakref.ref[Team]") -> None:
    while memory.library.vbrt_team_serve(memory.address, place):
        found = team()
        if found is not None:
            found.look_after()
        del found


def _stop(memory: _Memory, pid: int) -> None:
    if pid == os.getpid():  # a forked child has none of the threads, and perhaps half of a job
        memory.library.vbrt_team_stop(memory.address)


_teams: "weakref.WeakSet[Team]" = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Finish what is under way: memory goes while the interpreter ends."""
    for team in list(_teams):
        team.stop()
