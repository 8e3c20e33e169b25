"""Threads that work beside the caller's.

A task is handed over in one call into C, so Ctrl-C comes before it or after it. The road not taken is
concurrent.futures: its `submit` enters locks in Python code, and Ctrl-C there leaves them locked.
"""

import atexit
import contextlib
import os
import weakref
from _thread import LockType, allocate_lock, start_new_thread
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

__all__ = ["Crew"]


class Crew:
    """At most `size` threads, started as tasks come. They end with `stop`, with the crew, or with the process.

    Attributes:
        pid: the process that started them; a forked child has none of them.
    """

    def __init__(self, size: int) -> None:
        self.pid = os.getpid()
        self._size, self._started = size, 0
        self._tasks: SimpleQueue[tuple[Callable, tuple] | None] = SimpleQueue()
        self._working: list[LockType] = []  # one for each thread, held while it lives
        weakref.finalize(self, self._tasks.put, None).atexit = False
        _crews.add(self)

    def give(self, work: Callable[..., object], *args: Any) -> None:
        """Have a thread call `work(*args)`, which handles its own failures."""
        self._tasks.put((work, args))
        if self._started < self._size:
            with contextlib.suppress(RuntimeError):  # no more threads: the task stays for one that is there
                start_new_thread(_work, (self._tasks, self._working))
                self._started += 1

    def stop(self) -> None:
        """Stop beginning tasks; return when none is under way. Idempotent."""
        with contextlib.suppress(Empty):
            while True:
                self._tasks.get_nowait()
        self._tasks.put(None)
        for working in list(self._working) if self.pid == os.getpid() else ():
            working.acquire()  # and nobody needs it any more


def _work(tasks: SimpleQueue, crew: list[LockType]) -> None:
    working = allocate_lock()
    working.acquire()
    crew.append(working)
    try:
        while (task := tasks.get()) is not None:
            work, args = task
            work(*args)
            del task, work, args  # while the thread waits for a task it keeps nothing alive
        tasks.put(None)  # for the next one
    finally:
        crew.remove(working)
        working.release()


_crews: "weakref.WeakSet[Crew]" = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that computes while the interpreter ends would end it badly."""
    for crew in list(_crews):
        crew.stop()
