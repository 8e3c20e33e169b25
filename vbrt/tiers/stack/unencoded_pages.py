"""Weights of a stack that are not encoded yet, and which of them are read.

A layer whose weight other code computes with, and which nobody calls, would never be encoded. So a weight that a
forward of the model reads is encoded at that read, and one that was read otherwise when a forward ends.
"""

import threading
import weakref
from typing import Any

__all__ = ["Shells"]


class Shells:
    """Handles that hold dense weights, those of them that were read, and threads that run a forward meanwhile."""

    def __init__(self) -> None:
        self._held: weakref.WeakSet[Any] = weakref.WeakSet()
        self._read: dict[int, weakref.ref[Any]] = {}  # by id
        self._threads: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._held)

    def add(self, handle: Any) -> None:
        """Know a handle that holds a dense weight."""
        self._held.add(handle)

    def discard(self, handle: Any) -> None:
        """Forget a handle that holds none any more."""
        self._held.discard(handle)

    @property
    def in_pass(self) -> bool:
        """True if this thread runs a forward of a model that has shells."""
        return threading.get_ident() in self._threads

    def begin(self) -> None:
        """Note that this thread begins a forward."""
        self._threads.add(threading.get_ident())

    def end(self) -> bool:
        """Note that this thread ends it; False if others still run one."""
        self._threads.discard(threading.get_ident())
        return not self._threads

    def note(self, handle: Any) -> None:
        """Note that the dense weight of a handle was read."""
        self._read[handle.id] = weakref.ref(handle)

    def taken(self) -> list[Any]:
        """Take the live handles that were noted, in the order of their first read; they are forgotten here."""
        read, self._read = self._read, {}
        return [handle for handle in (ref() for ref in read.values()) if handle is not None]
