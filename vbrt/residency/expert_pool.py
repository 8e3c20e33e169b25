"""The rule by which pages of routed experts stay resident: recency weighted by frequency, with admission.

Whole numbers only, so that this file and a kernel on a GPU decide alike. A **pool** is a set of pages that compete for
one share of the room: those of one layer and plane (scope "layer"), or of all layers (scope "model").

**Clock.** A pool counts the leases that take pages of it: `now` is 1 in the first. `epoch = now // (HALF * layers)`,
with the number of layers that share the pool (1 for scope "layer").

**Scores.** Every page has a score and the `last` lease that took it, both 0 at first and kept when it is evicted. Its
value at any time is `score >> (epoch - epoch of last)`: all pages lose half at the same moments. When a lease takes a
page, `score = value + ONE` and `last = now`, once for each lease. So a score is at most `2 * HALF * ONE * layers`.

**Places.** A resident page is in the *window*, a queue of newcomers, or in the *main* part. The window holds at most
`max(1, slots // WINDOW_PART)` pages.

**A lease** takes its pages in ascending order; all of them are busy from its beginning to its end, and busy pages are
never evicted. For a page that is missing:

1. If the pool has no free slot, one page is evicted. The candidates are W, the oldest page of the window that is not
   busy, and M, the page of the main part of least (value, last, id) that is not busy. If there is one candidate only,
   it goes. If there are two, M goes if (value, last) of M is less than (value, last) of W; else W.
2. The missing page becomes the newest of the window.
3. While the window is too long, its oldest page but for the newcomer, busy or not, is promoted to the main part.

Ids order pages of one score and age: the layer first (in the order of their first leases), then the expert.

**A scan** is a run of leases that was announced: prompts use nearly all experts of a layer once. It does not move the
clock, changes no score, and a page that it brings becomes the *oldest* of the window: so the next page of the scan
takes its slot, and what decoding has gathered stays.

Sizes may differ (the fine planes of a layer do). Slots are bytes then: "no free slot" is too few free bytes of the
pool's share, the first step is repeated until there are enough, and the window holds at most a WINDOW_PART-th of the
share's bytes, or one page. With equal sizes this is the rule above for `share // size` slots.
"""

import heapq
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["HALF", "ONE", "WINDOW_PART", "ExpertPage", "Pool"]

#: leases of a layer after which a score is worth half
HALF = 4
#: what one lease adds to a score
ONE = 1 << 12
#: one slot in so many is of the window
WINDOW_PART = 4


@dataclass(slots=True, eq=False)
class ExpertPage:
    """What a pool knows of a page, resident or not.

    Attributes:
        pool: the pool that it belongs to.
        id: the order among pages of one score and age.
        epoch: that of `last`.
        place: of a resident page "window" or "main"; "" of one that is not resident.
        unused: True if it was staged ahead and has not been used since.
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
    """The pages of one share of the room.

    Attributes:
        share: bytes that its pages may take while others need the rest.
        layers: layers that share the pool.
        resident_bytes: of its resident pages.
        window: resident newcomers, the oldest first.
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
        """Count a lease, if it is another one than that of the last call."""
        if lease == self._lease:
            return
        self._lease = lease
        self._now += 1
        self._since_epoch += 1
        if self._since_epoch >= HALF * self.layers:
            self._epoch, self._since_epoch, self._heap = self._epoch + 1, 0, None

    def touch(self, page: ExpertPage) -> None:
        """Note that the lease of this tick takes a page."""
        if page.last == self._now:
            return
        page.score = self.value(page) + ONE
        page.last, page.epoch = self._now, self._epoch
        if page.place == "main" and self._heap is not None:
            heapq.heappush(self._heap, (page.score, page.last, page.id, page.key))

    def value(self, page: ExpertPage) -> int:
        """Return what a page's score is worth now."""
        return page.score >> (self._epoch - page.epoch)

    # -- places -------------------------------------------------------------------------------------------------------

    def insert(self, page: ExpertPage, *, scanned: bool) -> None:
        """Make a page resident, in the window."""
        page.place = "window"
        self.window[page.key] = page
        if scanned:
            self.window.move_to_end(page.key, last=False)
        self._window_bytes += page.size
        self.resident_bytes += page.size
        while self._window_bytes > max(page.size, self.share // WINDOW_PART) and len(self.window) > 1:
            self._promote(next(other for other in self.window.values() if other is not page))

    def evict(self, page: ExpertPage) -> None:
        """Make a page not resident."""
        if page.place == "window":
            del self.window[page.key]
            self._window_bytes -= page.size
        else:
            del self._main[page.key]
        page.place, page.unused = "", False
        self.resident_bytes -= page.size

    def victim(self, busy: Collection[str]) -> ExpertPage | None:
        """Return the page that the rule evicts now, or None if all are busy."""
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
        if self._heap is None:  # values halve with the epoch, all at once: until the next one they only grow by touches
            self._heap = [(self.value(page), page.last, page.id, key) for key, page in self._main.items()]
            heapq.heapify(self._heap)
        passed, found = [], None
        while self._heap and found is None:
            entry = self._heap[0]
            page = self._main.get(entry[3])
            if page is None or entry[:2] != (self.value(page), page.last):
                heapq.heappop(self._heap)  # the page has gone, or was used since
            elif entry[3] in busy:
                passed.append(heapq.heappop(self._heap))
            else:
                found = page
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found
