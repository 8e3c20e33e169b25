"""Bypassed experts: missing pages that are not fetched, because the CPU computes their experts in host memory.

A bypass counts as a use in the page's score. The page is then prefetched for later leases (admission), if there is a
free slot, or if its score now exceeds that of the page that it would evict. Measured on published reuse with room for
10 % of the experts: hit rate 57 %, against 63 % if all such pages are fetched, with half as many copies again, and
49 % if admission used the score before this use.
"""

from collections.abc import Collection

from vbrt.residency.expert_pool import ExpertPage
from vbrt.residency.expert_room import ExpertRoom
from vbrt.residency.policy import Decision

__all__ = ["Passed"]


class Passed:
    """Bypassed pages of the next lease.

    Attributes:
        lease: number of that lease, counted by the policy.
    """

    def __init__(self, room: ExpertRoom) -> None:
        self.lease, self._room = 1, room
        self._pages: dict[str, ExpertPage] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def worth(self, key: str, size: int) -> int:
        """Return the present value of an expert page's score; 0 for other pages."""
        page = self._room.page(key, size)
        return 0 if page is None else page.pool.value(page)

    def note(self, key: str, size: int) -> None:
        """Note that the lease uses an expert's page in host memory."""
        page = self._room.page(key, size)
        if page is not None:
            page.pool.tick(self.lease)
            page.pool.touch(page)
            self._pages[key] = page

    def forget(self, key: str) -> None:
        """Drop a removed page."""
        self._pages.pop(key, None)

    def admit(self, busy: Collection[str]) -> list[Decision]:
        """Admit the pages whose score earns a slot, besides busy ones; return the decisions and clear the notes."""
        room, decisions, stay = self._room, [], set(busy)
        for key, page in self._pages.items():
            if page.place or room.lacks(page.size, stay) or not self._earned(page, stay):
                continue
            victims = room.load(page, stay, scanned=False)
            page.unused = True
            stay.add(key)
            decisions.append(Decision(key, hit=False, evict=victims, prefetched=True, charge=page.size))
        self._pages.clear()
        return decisions

    def _earned(self, page: ExpertPage, busy: Collection[str]) -> bool:
        pool, room = page.pool, self._room
        if page.size <= min(pool.share - pool.resident_bytes, room.capacity_bytes - room.resident_bytes):
            return True
        victim = pool.victim(busy)
        return victim is not None and pool.value(page) > pool.value(victim)
