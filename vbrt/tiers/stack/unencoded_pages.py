"""Unencoded weights (shells) of a stack, and reads of them.

A layer that is never called, because other code computes with its weight, would never be encoded. So a weight read by a
forward of the model is encoded at that read, and a weight read otherwise at the end of a forward.
"""

import threading
import weakref
from typing import Any

__all__ = ["Shells"]


class Shells:
    """Handles with dense weights, the ones that were read, and the threads that are in a forward."""

    def __init__(self) -> None:
        self._held: weakref.WeakSet[Any] = weakref.WeakSet()
        self._read: dict[int, weakref.ref[Any]] = {}  # by id
        self._threads: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._held)

    def add(self, handle: Any) -> None:
        """Register a handle with a dense weight."""
        self._held.add(handle)

    def discard(self, handle: Any) -> None:
        """Unregister a handle without a dense weight."""
        self._held.discard(handle)

    @property
    def in_pass(self) -> bool:
        """True if this thread runs a forward of a model that has shells."""
        return threading.get_ident() in self._threads

    def begin(self) -> None:
        """Note that this thread begins a forward."""
        self._threads.add(threading.get_ident())

    def end(self) -> bool:
        """Note that this thread ends its forward; False while other threads still run one."""
        self._threads.discard(threading.get_ident())
        return not self._threads

    def note(self, handle: Any) -> None:
        """Note that the dense weight of a handle was read."""
        self._read[handle.id] = weakref.ref(handle)

    def taken(self) -> list[Any]:
        """Return and clear the noted handles that are alive, in the order of their first read."""
        read, self._read = self._read, {}
        return [handle for handle in (ref() for ref in read.values()) if handle is not None]
