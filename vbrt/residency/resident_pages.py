"""Resident pages of a policy: pinned, evictable, and prefetched, with their charges."""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import NamedTuple

__all__ = ["ResidentPages", "Residents"]


class Residents(NamedTuple):
    """Snapshot of a policy's unpinned resident pages, each with its charge in bytes.

    Attributes:
        staged, fresh: evictable and prefetched pages, in the policy's order.
        unused: prefetched pages without a use since.
        resident_bytes: charge of all resident pages, pins included.
    """

    staged: tuple[tuple[str, int], ...]
    fresh: tuple[tuple[str, int], ...]
    unused: frozenset[str]
    resident_bytes: int

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the pages."""
        return tuple(key for key, _ in (*self.staged, *self.fresh))


class ResidentPages:
    """Resident pages by class, each with its charge in bytes.

    pinned: evicted last. staged: evictable, next victim first. fresh: prefetched and not used yet, nearest use first.
    unused: prefetched pages of all classes without a use since.
    """

    __slots__ = ("classes", "fresh", "pinned", "staged", "unused")

    def __init__(self) -> None:
        self.pinned: OrderedDict[str, int] = OrderedDict()
        self.staged: OrderedDict[str, int] = OrderedDict()
        self.fresh: OrderedDict[str, int] = OrderedDict()
        self.unused: set[str] = set()
        self.classes = (self.pinned, self.staged, self.fresh)

    def evict(self, key: str) -> int:
        """Remove a page; return its charge."""
        self.unused.discard(key)
        return sum(pages.pop(key, 0) for pages in self.classes)

    def demote(self, pages: OrderedDict[str, int], keys: Iterable[str]) -> None:
        """Move pages of another class to the front of the eviction order."""
        for key in keys:
            self.staged[key] = pages.pop(key)
            self.staged.move_to_end(key, last=False)

    def pin(self, pins: Collection[str], sizes: dict[str, int]) -> None:
        """Reclassify pages for a new set of pins; pages charged a whole ring slot stay unpinned."""
        self.demote(self.pinned, [key for key in self.pinned if key not in pins])
        self.demote(self.fresh, [key for key in self.fresh if key not in sizes])
        for pages in (self.staged, self.fresh):
            for key in [key for key in pages if key in pins and pages[key] == sizes[key]]:
                self.pinned[key] = pages.pop(key)

    def snapshot(self, resident_bytes: int) -> Residents:
        """Return the unpinned pages. `resident_bytes`: charge of all pages."""
        return Residents(tuple(self.staged.items()), tuple(self.fresh.items()), frozenset(self.unused), resident_bytes)

    def restore(self, residents: Residents) -> None:
        """Replace the unpinned pages by a snapshot's."""
        for known, now in ((self.staged, residents.staged), (self.fresh, residents.fresh)):
            known.clear()
            known.update(now)
        self.unused.clear()
        self.unused.update(residents.unused)
