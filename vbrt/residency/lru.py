"""LRU policy: evicts the least recently used page; no prefetch.

On a cyclic scan larger than its room LRU hits 0 %: it evicts each page just before its next use. It is optimal for
palindromes (forward + backward) and shines under skewed access.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable

from vbrt.residency.policy import Decision, PolicyBase

__all__ = ["LRUPolicy"]


class LRUPolicy(PolicyBase):
    """LRU policy without prefetch."""

    kind = "lru"

    def reset(self) -> None:
        """Return to the initial state."""
        super().reset()
        self._pages: OrderedDict[str, int] = OrderedDict()

    def access(self, key: str, size: int, busy: Collection[str] = ()) -> Decision | None:
        """Decide on a demanded page: see `Policy.access`."""
        if key in self._pages:
            self._pages.move_to_end(key)
            return Decision(key, hit=True)
        victims = self._make_room(size, busy)
        if victims is None:
            return None
        self._pages[key] = size
        self.resident_bytes += size
        return Decision(key, hit=False, evict=victims, charge=size)

    def resident(self) -> tuple[str, ...]:
        """Return the keys of resident pages."""
        return tuple(self._pages)

    def _candidates(self) -> Iterable[tuple[str, int]]:
        return self._pages.items()

    def _evict(self, key: str) -> None:
        self.resident_bytes -= self._pages.pop(key, 0)
