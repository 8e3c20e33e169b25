"""Threads that work beside the caller's.

A task is handed over in one call into C, so Ctrl-C comes before it or after it. The road not taken is
concurrent.futures: its `submit` enters locks in Python code, and Ctrl-C there leaves them locked.
"""

import atexit
import contextlib
import itertools
import os
import threading
import weakref
from _thread import LockType, allocate_lock, start_new_thread
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

__all__ = ["Crew"]


class Crew:
    """At most `size` threads, started as tasks come. They end with `stop`, with the crew, or with the process.

    Attributes:
        pid: the process that started them. A forked child has none of them, and starts its own.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._begin()
        _crews.add(self)

    def _begin(self) -> None:
        self.pid, self._started = os.getpid(), 0
        self._tasks: SimpleQueue[tuple[Callable, tuple] | None] = SimpleQueue()
        self._working: list[LockType] = []  # one for each thread, held while it lives
        weakref.finalize(self, self._tasks.put, None).atexit = False

    def share(self, parts: int, do: Callable[[int], object]) -> None:
        """Do `do(part)` for each part, in the caller's thread and in those of the crew that are free.

        Returns when no part is under way and none will begin, also where Ctrl-C comes. Raises what a part raised.
        """
        shared = _Shared(parts, do, max(0, min(self._size, parts - 1)))
        try:
            for seat in shared.seats:
                self.give(shared.help, seat)
            shared.work()
            shared.close()
        except BaseException:
            shared.close()  # again, if Ctrl-C came in the first: what parts touch must be the caller's alone
            raise
        if shared.error is not None:
            raise shared.error

    def give(self, work: Callable[..., object], *args: Any) -> None:
        """Have a thread call `work(*args)`, which handles its own failures."""
        if self.pid != os.getpid():
            self._begin()
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


class _Shared:
    """Parts that any thread may take."""

    def __init__(self, parts: int, do: Callable[[int], object], helpers: int) -> None:
        self.seats = [threading.RLock() for _ in range(helpers)]  # each held while its helper works
        self.error: Exception | None = None
        self._parts, self._do, self._closed = parts, do, False
        self._next = itertools.count()

    def help(self, seat: threading.RLock) -> None:
        """A helper's turn, unless the caller is closing; its failure is the caller's to raise."""
        if not seat.acquire(blocking=False):
            return
        try:
            self.work()
        except Exception as error:  # noqa: BLE001 - raised in share()
            self.error = error
        finally:
            seat.release()

    def work(self) -> None:
        """Take parts until there are none left."""
        for part in self._next:
            if part >= self._parts or self._closed:
                break
            self._do(part)

    def close(self) -> None:
        """Return when no helper is at work; none begins after that. Idempotent."""
        self._closed = True
        for seat in self.seats:
            with seat:
                pass


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
