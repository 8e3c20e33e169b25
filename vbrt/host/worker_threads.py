"""Worker threads, Ctrl-C-safe.

A task is handed over in one C call, so that Ctrl-C comes before or after it. Rejected: concurrent.futures, whose
`submit` takes locks in Python code and leaves them locked after Ctrl-C there.
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
    """Pool of at most `size` threads, started on demand. They end with `stop`, with the pool, or with the process.

    Attributes:
        pid: process of the threads. A forked child starts its own.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._begin()
        _crews.add(self)

    def _begin(self) -> None:
        self.pid, self._started = os.getpid(), 0
        self._tasks: SimpleQueue[tuple[Callable, tuple] | None] = SimpleQueue()
        self._working: list[LockType] = []  # one lock per thread, held while it lives
        weakref.finalize(self, self._tasks.put, None).atexit = False

    def share(self, parts: int, do: Callable[[int], object]) -> None:
        """Run `do(part)` for each part, in the caller's thread and in free threads of the pool.

        Returns when no part is running and none will start, also on Ctrl-C. Raises a part's error.
        """
        shared = _Shared(parts, do, max(0, min(self._size, parts - 1)))
        try:
            for seat in shared.seats:
                self.give(shared.help, seat)
            shared.work()
            shared.close()
        except BaseException:
            shared.close()  # repeated in case Ctrl-C interrupted it: parts' data must be the caller's alone
            raise
        if shared.error is not None:
            raise shared.error

    def give(self, work: Callable[..., object], *args: Any) -> None:
        """Run `work(*args)` in a thread; it handles its own errors."""
        if self.pid != os.getpid():
            self._begin()
        self._tasks.put((work, args))
        if self._started < self._size:
            with contextlib.suppress(RuntimeError):  # no more threads: an existing one takes the task
                start_new_thread(_work, (self._tasks, self._working))
                self._started += 1

    def stop(self) -> None:
        """Discard queued tasks; return when none is running. Idempotent."""
        with contextlib.suppress(Empty):
            while True:
                self._tasks.get_nowait()
        self._tasks.put(None)
        for working in list(self._working) if self.pid == os.getpid() else ():
            working.acquire()  # never released: the thread has ended


class _Shared:
    """Parts of one `share` call, taken by any thread."""

    def __init__(self, parts: int, do: Callable[[int], object], helpers: int) -> None:
        self.seats = [threading.RLock() for _ in range(helpers)]  # each held while its helper works
        self.error: Exception | None = None
        self._parts, self._do, self._closed = parts, do, False
        self._next = itertools.count()

    def help(self, seat: threading.RLock) -> None:
        """Helper's turn, unless the caller is closing; the caller raises its error."""
        if not seat.acquire(blocking=False):
            return
        try:
            self.work()
        except Exception as error:  # noqa: BLE001 - raised in share()
            self.error = error
        finally:
            seat.release()

    def work(self) -> None:
        """Take parts until none is left."""
        for part in self._next:
            if part >= self._parts or self._closed:
                break
            self._do(part)

    def close(self) -> None:
        """Return when no helper is working; none starts after that. Idempotent."""
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
            del task, work, args  # an idle thread keeps nothing alive
        tasks.put(None)  # wakes the next thread
    finally:
        crew.remove(working)
        working.release()


_crews: "weakref.WeakSet[Crew]" = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop pools at exit: a thread that computes during interpreter shutdown would crash it."""
    for crew in list(_crews):
        crew.stop()
