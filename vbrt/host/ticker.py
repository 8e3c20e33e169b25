"""Periodic thread for an object, until it is stopped or the object is collected.

Ctrl-C may interrupt any call of the owner's thread, so both threads synchronize only through C-level calls: one queue
for wake-ups, another for the end. Rejected: threading's Event and Thread, whose locks are taken in Python code and stay
locked after Ctrl-C there, which would block the thread for ever. A thread may also die before its first instruction,
without memory for a frame, so its end is signalled by the collection of its arguments.
"""

import weakref
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

__all__ = ["Ticker"]

Owner = TypeVar("Owner")


_LOOK_SECONDS = 0.1  # polling interval while waiting for the end, in case Ctrl-C took the wake-up


def _nothing() -> None:
    pass


class _Seat:
    """Token held only by the thread's arguments: collected when the thread ends, however it ends."""

    __slots__ = ("__weakref__",)


class Ticker:
    """Calls `tick(owner)` from its own thread until `stop`.

    Args:
        owner: referenced weakly: when it is collected, the thread ends.
        tick: returns the seconds until its next call, or None to end; it must not keep the owner alive.
        gone: called in the thread when the owner was collected without a stop.
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
        """Start the thread; first `tick` after so many seconds. Call once. Raises RuntimeError: no more threads."""
        seat = _Seat()
        try:
            self._seat = weakref.ref(seat, self._ended.put)
            start_new_thread(_run, (self._owner, self._tick, self._gone, self._bell, seat, first_s))
        finally:
            del seat  # a traceback may keep this frame alive

    def stop(self) -> None:
        """Stop, and wait until the thread has ended. Idempotent."""
        self._bell.put(None)
        while self.running:
            with suppress(Empty):
                self._ended.get(timeout=_LOOK_SECONDS)

    @property
    def running(self) -> bool:
        """True while the thread lives."""
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
        del seat  # an exception hook may keep this frame alive


def _silent(bell: SimpleQueue, seconds: float) -> bool:
    """Wait; False if woken up."""
    try:
        bell.get(timeout=seconds)
    except Empty:
        return True
    return False
