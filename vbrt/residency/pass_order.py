"""Access order of a pass: learned orders, and the record of the current pass."""

from bisect import bisect_left
from collections.abc import Collection

__all__ = ["Order", "PassRecord"]

_LONGEST_SHORT = 4096  # accesses after which an unmarked pass is cut, to bound its record: so many,
_LONGEST_PASS = 16  # and so many per distinct page


class Order:
    """Learned access order of a phase.

    Attributes:
        keys: page keys, repeats included.
        places: positions in `keys` by key, ascending.
        streamed: positions of unpinned pages, ascending.
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
        """Return the number of positions from the cursor to the next use of a page; wraps around the end."""
        places = self.places[key]
        at = bisect_left(places, cursor)
        place = places[at] if at < len(places) else places[0]
        return (place - cursor) % len(self.keys)

    def stream(self, pinned: Collection[str]) -> None:
        """Set the pinned pages; all others are streamed, pins that are not loaded yet included."""
        self.streamed = [place for place, key in enumerate(self.keys) if key not in pinned]


class PassRecord:
    """Record of the current pass, with detection of its end where passes are not marked.

    Attributes:
        keys, distinct: accesses so far, in order and as a set; the caller adds to both.
    """

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.distinct: set[str] = set()
        self._marked = False
        self._since_mark = self._interval = 0  # accesses since the last mark, and between the last two

    def mark(self, *, interval: int | None = None) -> None:
        """Mark the start of a pass. `interval` overrides the number of accesses since the last mark."""
        since = self._since_mark if interval is None else interval
        whole = since <= _LONGEST_SHORT or since <= self._longest()  # else marks had ceased
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
        """True if an unmarked pass begins with this access; call once per access, before adding it."""
        self._since_mark += 1
        keys = self.keys
        if not keys or key != keys[0]:
            return len(keys) > _LONGEST_SHORT and len(keys) > self._longest()
        if not self._marked:
            known = tuple(keys) == order[: len(keys)] != order
            return not (known and order[len(keys)] == key)
        half = len(keys) // 2
        if self._since_mark > self._interval and keys[:half] == keys[half:]:  # marks have ceased
            del keys[half:]
            self._marked = False
        return not self._marked or len(keys) > self._longest()

    def _longest(self) -> int:
        return _LONGEST_PASS * len(self.distinct) + _LONGEST_SHORT
