"""Lengths of a static cache: a graph is recorded for a block of them."""

from typing import NamedTuple

__all__ = ["BLOCK", "Span", "room_for", "span_of"]

#: tokens of a block, until an eighth of the length is more; and at most
BLOCK, MOST = 256, 1024


class Span(NamedTuple):
    """The lengths that one graph serves: caches that hold `start` to `end` - 1 tokens before a step.

    The step attends to the first `end` places; those that are not filled are masked.
    """

    start: int
    end: int

    def first(self, window: int | None) -> int:
        """Return the first position that a layer with this sliding window keeps; 0 without one."""
        if window is None:
            return 0
        step = self.end - self.start
        return max(0, (self.start - window + 1) // step * step)


def span_of(length: int, *, wide: bool = False) -> Span:
    """Return the block that a length lies in, of BLOCK tokens, or of an eighth of the length between BLOCK and MOST.

    wide: blocks of four times BLOCK at least, for steps that pass over masked places.
    """
    step = max(BLOCK, min(MOST, 1 << max(0, length.bit_length() - 4)))
    step = max(step, 4 * BLOCK) if wide else step
    start = length // step * step
    return Span(start, start + step)


def room_for(length: int, limit: int | None) -> int:
    """Return for how many tokens a cache takes memory that holds `length` now.

    Args:
        limit: the length at which the caller will stop, if that is known.
    """
    wanted = max(2 * length, 4 * BLOCK)
    if limit is not None and limit > length:
        wanted = min(wanted, limit)
    return span_of(max(wanted - 1, length)).end
