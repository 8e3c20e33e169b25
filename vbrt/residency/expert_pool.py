"""Eviction rule for pages of routed experts: frequency with exponential decay, and a window for newcomers.

Integer arithmetic only, so that this file and a GPU kernel decide identically. A **pool** is a set of pages that
compete for one share of the room: the pages of one layer and plane (scope "layer"), or of all layers (scope "model").

**Clock.** A pool counts the leases of its pages: `now` is 1 in the first. `epoch = now // (HALF * layers)`, with
`layers` the number of layers that share the pool (1 for scope "layer").

**Scores.** Every page has a score and its `last` lease, both 0 at first and kept across evictions. Its value at any
time is `score >> (epoch - epoch of last)`: all pages decay by half at the same moments. When a lease takes a page,
`score = value + ONE` and `last = now`, once per lease. So a score is at most `2 * HALF * ONE * layers`.

**Places.** A resident page is in the *window*, a queue of newcomers, or in the *main* part. The window holds at most
`max(1, slots // WINDOW_PART)` pages.

**A lease** takes its pages in ascending order; all of them are busy for its duration, and busy pages are never evicted.
For each missing page:

1. If the pool has no free slot, one page is evicted. The candidates are W, the oldest page of the window that is not
   busy, and M, the page of the main part of least (value, last, id) that is not busy. A single candidate is evicted. Of
   two, M is evicted if (value, last) of M is less than (value, last) of W; else W.
2. The missing page becomes the newest of the window.
3. While the window is too long, its oldest page other than the newcomer, busy or not, is promoted to the main part.

Ids break ties of equal score and age: first by layer (in the order of their first leases), then by expert.

**A scan** is an announced run of leases: prompts use nearly all experts of a layer once. It neither advances the clock
nor changes scores, and a page that it loads becomes the *oldest* of the window: the next page of the scan evicts it,
and the working set of decoding stays resident (scan resistance).

Sizes may differ (the fine planes of a layer do). Slots are bytes then: "no free slot" means too few free bytes in the
pool's share, the first step repeats until there are enough, and the window holds at most a WINDOW_PART-th of the
share's bytes, or one page. With equal sizes this is the rule above for `share // size` slots.
"""

import heapq
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["HALF", "ONE", "WINDOW_PART", "ExpertPage", "Pool"]

#: half-life of a score, in leases of a layer
HALF = 4
#: increment of a score per lease
ONE = 1 << 12
#: the window has 1/WINDOW_PART of the slots
WINDOW_PART = 4


@dataclass(slots=True, eq=False)
class ExpertPage:
    """State of a page in a pool, resident or not.

    Attributes:
        pool: its pool.
        id: tie-breaker among pages of equal score and age.
        epoch: of the `last` lease.
        place: "window" or "main" if resident; else "".
        unused: True if it was prefetched and has not been used since.
    """

    key: str
    pool: "Pool"
    id: tuple[int, int]
    size: int
    score: int = 0
    last: int = 0
    epoch: int = 0
    place: str = ""
    unused: bool = False


class Pool:
    """Pool of pages that compete for one share of the room.

    Attributes:
        share: bytes that its pages may take while other pools need the rest.
        layers: number of layers in the pool.
        resident_bytes: of its resident pages.
        window: resident newcomers, oldest first.
    """

    def __init__(self) -> None:
        self.share, self.layers, self.resident_bytes = 0, 1, 0
        self.window: OrderedDict[str, ExpertPage] = OrderedDict()
        self._window_bytes = 0
        self._main: dict[str, ExpertPage] = {}
        self._heap: list[tuple[int, int, tuple[int, int], str]] | None = None  # of this epoch; may hold stale entries
        self._now = self._epoch = self._since_epoch = self._lease = 0

    # -- clock and scores ---------------------------------------------------------------------------------------------

    def tick(self, lease: int) -> None:
        """Advance the clock, unless the last call had the same lease."""
        if lease == self._lease:
            return
        self._lease = lease
        self._now += 1
        self._since_epoch += 1
        if self._since_epoch >= HALF * self.layers:
            self._epoch, self._since_epoch, self._heap = self._epoch + 1, 0, None

    def touch(self, page: ExpertPage) -> None:
        """Credit a page with the lease of this tick."""
        if page.last == self._now:
            return
        page.score = self.value(page) + ONE
        page.last, page.epoch = self._now, self._epoch
        if page.place == "main" and self._heap is not None:
            heapq.heappush(self._heap, (page.score, page.last, page.id, page.key))

    def value(self, page: ExpertPage) -> int:
        """Return the present, decayed value of a page's score."""
        return page.score >> (self._epoch - page.epoch)

    # -- places -------------------------------------------------------------------------------------------------------

    def insert(self, page: ExpertPage, *, scanned: bool) -> None:
        """Insert a page into the window."""
        page.place = "window"
        self.window[page.key] = page
        if scanned:
            self.window.move_to_end(page.key, last=False)
        self._window_bytes += page.size
        self.resident_bytes += page.size
        while self._window_bytes > max(page.size, self.share // WINDOW_PART) and len(self.window) > 1:
            self._promote(next(other for other in self.window.values() if other is not page))

    def evict(self, page: ExpertPage) -> None:
        """Remove a page from the resident ones."""
        if page.place == "window":
            del self.window[page.key]
            self._window_bytes -= page.size
        else:
            del self._main[page.key]
        page.place, page.unused = "", False
        self.resident_bytes -= page.size

    def victim(self, busy: Collection[str]) -> ExpertPage | None:
        """Return the next victim by the rule; None if all pages are busy."""
        oldest = next((page for key, page in self.window.items() if key not in busy), None)
        least = self._least(busy)
        if oldest is None or least is None:
            return oldest or least
        return least if (self.value(least), least.last) < (self.value(oldest), oldest.last) else oldest

    def _promote(self, page: ExpertPage) -> None:
        del self.window[page.key]
        self._window_bytes -= page.size
        page.place = "main"
        self._main[page.key] = page
        if self._heap is not None:
            heapq.heappush(self._heap, (self.value(page), page.last, page.id, page.key))

    def _least(self, busy: Collection[str]) -> ExpertPage | None:
        """Return the page of the main part of least (value, last, id) that is not busy."""
        if self._heap is None:  # valid for one epoch: all values halve with it, and only touches raise them
            self._heap = [(self.value(page), page.last, page.id, key) for key, page in self._main.items()]
            heapq.heapify(self._heap)
        passed, found = [], None
        while self._heap and found is None:
            entry = self._heap[0]
            page = self._main.get(entry[3])
            if page is None or entry[:2] != (self.value(page), page.last):
                heapq.heappop(self._heap)  # stale: the page was evicted, or used since
            elif entry[3] in busy:
                passed.append(heapq.heappop(self._heap))
            else:
                found = page
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found
