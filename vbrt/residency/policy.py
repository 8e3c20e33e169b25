"""Policy protocol: pure residency decisions, which pages are cached above their home. No bytes are moved here.

A policy sees accesses and returns decisions; the tier stack applies them. A **hit** moves no bytes: the page was kept
resident. A prefetched page counts as a miss that was `prefetched`, however early its copy finished, so counts never
depend on timing and `simulate` gives exactly the counts of the live stack.

`Policy` declares every member that the stack and the wrapper use. A policy may also have a method
`announce(pages: Mapping[str, int])`: it receives the pages of the next leases, each once and in this order, with their
bytes, and its next `ahead()` may prefetch the first of them. `PolicyBase` has the bookkeeping that most policies
share; inheriting from it is optional.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

__all__ = ["FORWARD", "Decision", "Policy", "PolicyBase"]

FORWARD = "forward"
"""Default phase, of unnamed passes."""


class Decision(NamedTuple):
    """Result of one access or one look ahead: first the pages in `evict` are evicted, then `key` is loaded unless it is
    resident.

    `charge` is the room that a loaded page takes, in bytes: at least its own size; 0 means exactly its own size.
    """

    key: str
    hit: bool
    evict: tuple[str, ...] = ()
    prefetched: bool = False
    charge: int = 0


@runtime_checkable
class Policy(Protocol):
    """Residency policy of one memory tier, within `capacity_bytes`.

    The stack calls every method under its lock, in access order.

    Attributes:
        kind: name in `stats()`.
        capacity_bytes: room for resident pages; `resize` changes it.
        prefetch: most pages prefetched; the number of worker threads follows it.
    """

    kind: str
    capacity_bytes: int
    prefetch: int

    def reset(self) -> None:
        """Return to the initial state: nothing resident, nothing learned."""

    def begin_pass(self, phase: str = FORWARD) -> None:
        """Note that the next access starts a new pass over the model, of the named phase."""

    def access(self, key: str, size: int, busy: Collection[str] = ()) -> Decision | None:
        """Decide on a demanded page of `size` bytes. Pages in `busy` are in use and must not be evicted.

        Return None, with nothing changed, if there is no room besides the busy pages.
        """

    def ahead(self, busy: Collection[str] = ()) -> Sequence[Decision]:
        """Return the pages to prefetch now."""

    def remove(self, key: str) -> None:
        """Remove a page (retired, or its load failed): it is not resident, and must not be prefetched until its next
        access."""

    def resize(self, capacity_bytes: int) -> tuple[str, ...]:
        """Set the room; return the evicted pages."""


class PolicyBase(ABC):
    """Bookkeeping that policies share: keeps the charges of resident pages within `capacity_bytes`."""

    kind = ""
    prefetch = 0

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.reset()

    def reset(self) -> None:
        """Return to the initial state."""
        self.resident_bytes = 0

    def begin_pass(self, phase: str = FORWARD) -> None:  # noqa: B027 - most policies ignore passes
        """Note that the next access starts a new pass over the model."""

    @abstractmethod
    def access(self, key: str, size: int, busy: Collection[str] = ()) -> Decision | None:
        """Decide on a demanded page: see `Policy.access`."""

    def ahead(self, busy: Collection[str] = ()) -> Sequence[Decision]:
        """Return the pages to prefetch now: none."""
        return ()

    def remove(self, key: str) -> None:
        """Remove a page: see `Policy.remove`."""
        self._evict(key)

    @abstractmethod
    def resident(self) -> tuple[str, ...]:
        """Return the keys of resident pages, in unspecified order."""

    def busy_bytes(self, busy: Collection[str]) -> int:
        """Return the bytes charged for resident busy pages."""
        return sum(charge for key, charge in self._candidates() if key in busy)

    def resize(self, capacity_bytes: int, busy: Collection[str] = ()) -> tuple[str, ...]:
        """Set the room; return the evicted pages, none of them busy."""
        self.capacity_bytes = capacity_bytes
        return self._make_room(0, busy) or ()

    @abstractmethod
    def _candidates(self) -> Iterable[tuple[str, int]]:
        """Return (key, charge) of resident pages, in order of eviction."""

    @abstractmethod
    def _evict(self, key: str) -> None:
        """Drop the page, if resident."""

    def _make_room(
        self, size: int, busy: Collection[str], candidates: Iterable[tuple[str, int]] | None = None
    ) -> tuple[str, ...] | None:
        """Evict the first candidates until `size` bytes are free; None, with nothing changed, if that fails."""
        free = self.capacity_bytes - self.resident_bytes
        victims: list[str] = []
        for key, nbytes in self._candidates() if candidates is None else candidates:
            if free >= size:
                break
            if key not in busy:
                victims.append(key)
                free += nbytes
        if free < size:
            return None
        for key in victims:
            self._evict(key)
        return tuple(victims)
