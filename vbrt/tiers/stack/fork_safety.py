"""Fork safety: in a forked child all locks are free, and no page waits for a thread of the parent."""

import os
import threading
import weakref
from typing import Protocol

from vbrt.tiers.stack.stack_lock import Guard

__all__ = ["follow"]


class _Forked(Protocol):
    guard: Guard

    def after_fork(self) -> None: ...


_followed: "weakref.WeakSet[_Forked]" = weakref.WeakSet()
_forking: list[_Forked] = []
_fork = threading.Lock()


def follow(stack: _Forked) -> None:
    """Call `stack.after_fork` in each forked child, and hold its lock while the process forks."""
    _followed.add(stack)


def _before() -> None:
    _fork.acquire()
    _forking.extend(_followed)
    for stack in _forking:
        stack.guard.lock.acquire()


def _in_parent() -> None:
    while _forking:
        _forking.pop().guard.lock.release()
    _fork.release()


def _in_child() -> None:
    while _forking:
        _forking.pop().after_fork()
    _fork.release()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
