"""Resident pages of a policy: pinned, evictable, and prefetched, with their sizes."""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import NamedTuple

__all__ = ["ResidentPages", "Residents"]


class Residents(NamedTuple):
    """The pages that a policy holds resident beside its pins, with the room that each takes.

    Attributes:
        staged, fresh: evictable ones, and those staged ahead; in the policy's order.
        unused: those of them that were staged ahead and have not been used since.
        resident_bytes: of all resident pages, pins included.
    """

    staged: tuple[tuple[str, int], ...]
    fresh: tuple[tuple[str, int], ...]
    unused: frozenset[str]
    resident_bytes: int

    @property
    def keys(self) -> tuple[str, ...]:
        """The pages."""
        return tuple(key for key, _ in (*self.staged, *self.fresh))


class ResidentPages:
    """Resident pages by class, with the room that each takes.

    pinned: stay. staged: evictable, the first to go in front. fresh: staged ahead and not used yet, nearest first.
    unused: those of all classes that were staged ahead and have not been used since.
    """

    __slots__ = ("classes", "fresh", "pinned", "staged", "unused")

    def __init__(self) -> None:
        self.pinned: OrderedDict[str, int] = OrderedDict()
        self.staged: OrderedDict[str, int] = OrderedDict()
        self.fresh: OrderedDict[str, int] = OrderedDict()
        self.unused: set[str] = set()
        self.classes = (self.pinned, self.staged, self.fresh)

    def evict(self, key: str) -> int:
        """Remove the page; return the room that it took."""
        self.unused.discard(key)
        return sum(pages.pop(key, 0) for pages in self.classes)

    def demote(self, pages: OrderedDict[str, int], keys: Iterable[str]) -> None:
        """Make pages of another class the first to be evicted."""
        for key in keys:
            self.staged[key] = pages.pop(key)
            self.staged.move_to_end(key, last=False)

    def pin(self, pins: Collection[str], sizes: dict[str, int]) -> None:
        """Change classes for another set of pins; pages in slots of a ring stay as they are."""
        self.demote(self.pinned, [key for key in self.pinned if key not in pins])
        self.demote(self.fresh, [key for key in self.fresh if key not in sizes])
        for pages in (self.staged, self.fresh):
            for key in [key for key in pages if key in pins and pages[key] == sizes[key]]:
                self.pinned[key] = pages.pop(key)

    def snapshot(self, resident_bytes: int) -> Residents:
        """Return the pages beside the pins; `resident_bytes`: of all pages."""
        return Residents(tuple(self.staged.items()), tuple(self.fresh.items()), frozenset(self.unused), resident_bytes)

    def restore(self, residents: Residents) -> None:
        """Take the pages of a snapshot, in the place of those beside the pins."""
        for known, now in ((self.staged, residents.staged), (self.fresh, residents.fresh)):
            known.clear()
            known.update(now)
        self.unused.clear()
        self.unused.update(residents.unused)
