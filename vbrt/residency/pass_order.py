"""The order of a pass: one that was learned, and the record of the pass under way."""

from bisect import bisect_left
from collections.abc import Collection

__all__ = ["Order", "PassRecord"]

_LONGEST_SHORT = 4096  # accesses that any pass may have
_LONGEST_PASS = 16  # accesses more per distinct page: then an unmarked pass is cut, so that its record stays bounded


class Order:
    """The learned order of a phase.

    Attributes:
        keys: page keys, repeats included.
        places: by key, its positions in `keys`, ascending.
        streamed: positions of the pages that are not pinned, ascending.
        stopped: length of the phase's last pass, if it stopped before the order's end; else 0.
    """

    __slots__ = ("keys", "places", "stopped", "streamed")

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        self.keys, self.stopped = keys, 0
        self.streamed: list[int] = []
        self.places: dict[str, list[int]] = {}
        for place, key in enumerate(keys):
            self.places.setdefault(key, []).append(place)

    def distance(self, key: str, cursor: int) -> int:
        """Return the number of positions from the cursor to the next use of a page of this order, around its end."""
        places = self.places[key]
        at = bisect_left(places, cursor)
        place = places[at] if at < len(places) else places[0]
        return (place - cursor) % len(self.keys)

    def stream(self, pinned: Collection[str]) -> None:
        """Note which pages are pinned. Pins that are not loaded yet are streamed like the rest."""
        self.streamed = [place for place, key in enumerate(self.keys) if key not in pinned]


class PassRecord:
    """The pass under way, and where it ends if nothing marks its end.

    Attributes:
        keys, distinct: its accesses so far, in order and as a set; to be added to.
    """

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.distinct: set[str] = set()
        self._marked = False
        self._since_mark = self._interval = 0  # accesses since the last mark, and between that and the one before

    def mark(self, *, interval: int | None = None) -> None:
        """Note that a pass is marked here. `interval` overrides the number of accesses since the last mark."""
        since = self._since_mark if interval is None else interval
        whole = since <= _LONGEST_SHORT or since <= self._longest()  # else marks had stopped
        self._interval, self._since_mark = since if whole else 0, 0
        self._marked = True

    def add_all(self, order: Order) -> None:
        """Add the accesses of a whole order."""
        self._since_mark += len(order.keys)
        self.keys += order.keys
        self.distinct.update(order.places)

    def take(self) -> tuple[str, ...]:
        """Return the accesses and begin an empty record."""
        keys, self.keys = tuple(self.keys), []
        self.distinct.clear()
        return keys

    def begins_again(self, key: str, order: tuple[str, ...]) -> bool:
        """True if an unmarked pass begins with this access; to be called once for each access, before it is added."""
        self._since_mark += 1
        keys = self.keys
        if not keys or key != keys[0]:
            return len(keys) > _LONGEST_SHORT and len(keys) > self._longest()
        if not self._marked:
            known = tuple(keys) == order[: len(keys)] != order
            return not (known and order[len(keys)] == key)
        half = len(keys) // 2
        if self._since_mark > self._interval and keys[:half] == keys[half:]:  # marks have stopped
            del keys[half:]
            self._marked = False
        return not self._marked or len(keys) > self._longest()

    def _longest(self) -> int:
        return _LONGEST_PASS * len(self.distinct) + _LONGEST_SHORT
