"""A thread that does something now and then for an object, until that is stopped or gone.

Ctrl-C may come in any call of the object's thread, so everything that both threads use is entered in C: a queue for the
bell, another for the end. The road not taken is threading's Event and Thread, whose locks are taken in Python code
and stay locked when Ctrl-C comes there: the thread would wait for ever. A thread may also die before its first
instruction, without memory for a frame, so its end is not something that it says: it is the end of its arguments.
"""

import weakref
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

__all__ = ["Ticker"]

Owner = TypeVar("Owner")


_LOOK_SECONDS = 0.1  # whoever waits for the end looks this often, in case Ctrl-C took the bell


def _nothing() -> None:
    pass


class _Seat:
    """Held by the thread's arguments alone: it goes when the thread is at its end, however that came."""

    __slots__ = ("__weakref__",)


class Ticker:
    """Calls `tick(owner)`, in a thread of its own, until `stop`.

    Args:
        owner: is referred to weakly: when it is gone the thread ends.
        tick: returns the seconds until it is called again, or None to end; it must not hold the owner.
        gone: is called in the thread when the owner is gone without a stop.
    """

    def __init__(
        self, owner: Owner, tick: Callable[[Owner], float | None], gone: Callable[[], object] = _nothing
    ) -> None:
        self._bell: SimpleQueue[object] = SimpleQueue()
        self._owner = weakref.ref(owner, self._bell.put)
        self._tick, self._gone = tick, gone
        self._ended: SimpleQueue[object] = SimpleQueue()
        self._seat: Callable[[], _Seat | None] = _nothing

    def start(self, first_s: float) -> None:
        """Call `tick` for the first time in so many seconds. Call it once. Raises RuntimeError: no more threads."""
        seat = _Seat()
        try:
            self._seat = weakref.ref(seat, self._ended.put)
            start_new_thread(_run, (self._owner, self._tick, self._gone, self._bell, seat, first_s))
        finally:
            del seat  # also from a frame that somebody keeps

    def stop(self) -> None:
        """Return when the thread has ended. Idempotent."""
        self._bell.put(None)
        while self.running:
            with suppress(Empty):
                self._ended.get(timeout=_LOOK_SECONDS)

    @property
    def running(self) -> bool:
        """True while the thread is there."""
        return self._seat() is not None


def _run(
    owner: "weakref.ref[Owner]",
    tick: Callable[[Owner], float | None],
    gone: Callable[[], object],
    bell: SimpleQueue[object],
    seat: _Seat,
    wait_s: float | None,
) -> None:
    try:
        while wait_s is not None and _silent(bell, wait_s):
            found = owner()
            if found is None:
                break
            wait_s = tick(found)
            del found
        if owner() is None:
            gone()
    finally:
        del seat  # also from a frame that a hook for exceptions keeps


def _silent(bell: SimpleQueue, seconds: float) -> bool:
    """Wait; False if the bell has rung."""
    try:
        bell.get(timeout=seconds)
    except Empty:
        return True
    return False
