"""Slots in host memory for pages that live on a drive, in front of a device cache: which page has one. Moves no bytes.

A page that was read keeps its slot, as *recent*, until another page needs it; least recently used ones give way first.
*Fixed* pages keep theirs: the device reads them by address. Which pages are fixed is chosen between passes, by how
often the device missed them: `choose`.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["BATCHES", "HostSlots", "Taken", "batch_pages", "reserved_bytes", "slots_wanted"]

#: batches whose slots are not fixed: one that the device copies from, and two that a prompt reads ahead
BATCHES = 3
_MOST = 32  # pages of a batch
_SHARE = 4  # at most this part of the slots is not fixed, if they are many


def slots_wanted(pages: int, planes: int) -> tuple[int, int]:
    """Return how many slots are needed, for experts of so many pages each, and with how many all pages are fixed."""
    return BATCHES * planes, pages + BATCHES * max(planes, _MOST)


def reserved_bytes(page_bytes: int, planes: int, memory_bytes: int) -> int:
    """Return the bytes of host memory that homes of pages leave to slots, if some experts live on a drive below: for
    batches of the most pages, a quarter of the memory at most, but what is needed.

    Args:
        page_bytes: of an expert's largest page.
        planes: pages of an expert.
    """
    least, most = BATCHES * planes, BATCHES * max(planes, _MOST)
    return page_bytes * max(least, min(most, memory_bytes // (_SHARE * page_bytes)))


def batch_pages(slots: int, planes: int) -> int:
    """Return the pages of a batch: few beside the fixed ones, but no fewer than an expert has."""
    return max(planes, min(_MOST, slots // (_SHARE * BATCHES)))


class Taken(NamedTuple):
    """Slots of a batch.

    Attributes:
        slots: by page.
        missing: pages whose bytes are to be read first.
    """

    slots: Mapping[int, int]
    missing: Sequence[int]


class HostSlots:
    """Bookkeeping of the slots; calls are serialized by the owner.

    Args:
        slots: their number, at least `BATCHES` times `batch`.
        batch: pages that `take` takes, at most; slots are held by `BATCHES` batches at most.
    """

    def __init__(self, slots: int, batch: int) -> None:
        self._most_fixed = slots - BATCHES * batch
        self._free = list(range(slots - 1, -1, -1))
        self._slots: dict[int, int] = {}  # by page
        self._pages: dict[int, int] = {}  # by slot
        self._recent: OrderedDict[int, None] = OrderedDict()  # slots, least recently used first
        self._fixed: set[int] = set()  # pages
        self._held: Counter[int] = Counter()  # users of slots

    def take(self, pages: Iterable[int]) -> Taken:
        """Hold a slot for each page, until `release`."""
        found, missing = {}, []
        for page in dict.fromkeys(pages):
            slot = self._slots.get(page)
            if slot is None:
                missing.append(page)
                continue
            found[page] = slot
            self._held[slot] += 1
            if slot in self._recent:
                self._recent.move_to_end(slot)
        for page in missing:
            slot = self._free.pop() if self._free else self._evicted()
            found[page] = slot
            self._held[slot] += 1
            self._recent[slot] = None  # now, not when it has landed: the order does not depend on timing
        return Taken(found, missing)

    def _evicted(self) -> int:
        slot = next(slot for slot in self._recent if not self._held[slot])
        del self._recent[slot], self._slots[self._pages.pop(slot)]
        return slot

    def landed(self, page: int, slot: int) -> None:
        """Note that a page's bytes have been read into the slot that it was given."""
        if page not in self._slots:  # else another thread has read it meanwhile
            self._slots[page], self._pages[slot] = slot, page

    def release(self, slots: Iterable[int]) -> None:
        """End the holds of a batch."""
        for slot in slots:
            self._held[slot] -= 1
            if not self._held[slot]:
                del self._held[slot]
                if slot not in self._pages:  # its page was not read, or has another slot
                    del self._recent[slot]
                    self._free.append(slot)

    def choose(self, demand: Sequence[float]) -> dict[int, int | None]:
        """Fix the pages of most demand, as many as there is room for; return the slots of those that are now, and None
        for those that no longer are.

        Args:
            demand: of each page; at equal demand what is fixed stays so.
        """
        wanted = sorted(self._slots, key=lambda page: (-demand[page], page not in self._fixed, page))
        chosen = set(wanted[: self._most_fixed])
        changes: dict[int, int | None] = dict.fromkeys(self._fixed - chosen)
        for page in changes:
            slot = self._slots[page]
            self._recent[slot] = None
            self._recent.move_to_end(slot, last=False)
        for page in chosen - self._fixed:
            changes[page] = self._slots[page]
            del self._recent[self._slots[page]]
        self._fixed = chosen
        return changes
