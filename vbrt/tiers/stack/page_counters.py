"""Counters of a page, and aggregate counters of a layer's pages."""

from collections.abc import Iterable, Mapping
from typing import Protocol

__all__ = ["Counted", "Tally"]


class Counted(Protocol):
    """Counters of a page. bytes_moved: by link, such as "ssd>cpu"."""

    hits: int
    misses: int
    prefetched: int
    wait_ns: int
    bytes_moved: Mapping[str, int]


class Tally:
    """Aggregate counters of one layer's pages.

    A layer with one page per expert has a tally, so that stats need not walk thousands of pages: pages get the tally of
    the owner that they are added under, and every count goes to both. All pages of a lease share one tally, or have
    none. Code that uses such pages without a lease counts the hits in both.
    """

    __slots__ = ("bytes_moved", "hits", "misses", "prefetched", "wait_ns")

    def __init__(self, pages: Iterable[Counted] = ()) -> None:
        self.hits = self.misses = self.prefetched = self.wait_ns = 0
        self.bytes_moved: dict[str, int] = {}  # by link, such as "ssd>cpu"
        for page in pages:
            self.add(page)

    def add(self, page: Counted, sign: int = 1) -> None:
        """Add a page's counters; with sign -1, subtract them."""
        self.hits += sign * page.hits
        self.misses += sign * page.misses
        self.prefetched += sign * page.prefetched
        self.wait_ns += sign * page.wait_ns
        moved = self.bytes_moved
        for link, nbytes in page.bytes_moved.items():
            moved[link] = moved.get(link, 0) + sign * nbytes
