"""Counters of pages: what one has counted, and those of a layer together."""

from collections.abc import Iterable, Mapping
from typing import Protocol

__all__ = ["Counted", "Tally"]


class Counted(Protocol):
    """What a page counts. bytes_moved: by link, such as "ssd>cpu"."""

    hits: int
    misses: int
    prefetched: int
    wait_ns: int
    bytes_moved: Mapping[str, int]


class Tally:
    """Counters of the pages of one layer together.

    A layer that has a page for each of its experts keeps one beside them, so that nobody has to walk thousands of
    pages: its pages belong to the tally of the owner that they are added under, and what they count it counts, too.
    One lease has pages of one tally, or pages without any. Whoever uses such pages without a lease counts the hits in
    both.
    """

    __slots__ = ("bytes_moved", "hits", "misses", "prefetched", "wait_ns")

    def __init__(self, pages: Iterable[Counted] = ()) -> None:
        self.hits = self.misses = self.prefetched = self.wait_ns = 0
        self.bytes_moved: dict[str, int] = {}  # by link, such as "ssd>cpu"
        for page in pages:
            self.add(page)

    def add(self, page: Counted, sign: int = 1) -> None:
        """Add what a page has counted, or, with sign -1, take it away again."""
        self.hits += sign * page.hits
        self.misses += sign * page.misses
        self.prefetched += sign * page.prefetched
        self.wait_ns += sign * page.wait_ns
        moved = self.bytes_moved
        for link, nbytes in page.bytes_moved.items():
            moved[link] = moved.get(link, 0) + sign * nbytes
