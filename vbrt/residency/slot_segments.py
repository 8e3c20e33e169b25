"""Segments of a device cache's slots, in which memory comes and goes: a few allocations instead of one. Moves no bytes.

A segment has some slots of every pool, so that pools keep equal numbers of slots, as `ExpertRoom` divides them. The
first segments are in use; the last one gives way first.
"""

from bisect import bisect_right
from collections.abc import Sequence

__all__ = ["SEGMENTS", "SlotSegments"]

#: at most, so that a segment is a thirty-second of the cache, or one slot of each pool
SEGMENTS = 32


class SlotSegments:
    """Division of pools' slots into segments.

    Args:
        slots: of each pool, at least one.
        page_bytes: of a slot of each pool.
        most: segments.

    Attributes:
        ends: of each segment, the slots of each pool up to its end.
        nbytes: of all segments up to each one's end.
    """

    def __init__(self, slots: Sequence[int], page_bytes: Sequence[int], most: int = SEGMENTS) -> None:
        step = -(-max(slots) // most)
        self.ends = [tuple(min(end, n) for n in slots) for end in range(step, max(slots) + step, step)]
        self.nbytes = [sum(n * size for n, size in zip(end, page_bytes, strict=True)) for end in self.ends]

    def begin(self, number: int) -> tuple[int, ...]:
        """Return the slots of each pool before a segment."""
        return self.ends[number - 1] if number else (0,) * len(self.ends[0])

    def own_bytes(self, number: int) -> int:
        """Return the bytes of a segment alone."""
        return self.nbytes[number] - (self.nbytes[number - 1] if number else 0)

    def within(self, room_bytes: int) -> int:
        """Return how many segments fit into a room."""
        return bisect_right(self.nbytes, room_bytes)

    def least(self, needed: Sequence[int]) -> int:
        """Return how many segments give each pool so many slots, or all that it has."""
        last = self.ends[-1]
        return next(
            number
            for number, end in enumerate(self.ends, 1)
            if all(has >= min(n, most) for has, n, most in zip(end, needed, last, strict=True))
        )
