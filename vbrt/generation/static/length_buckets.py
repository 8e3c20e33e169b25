"""Length buckets: one captured graph per bucket of cache lengths."""

from typing import NamedTuple

__all__ = ["BLOCK", "Span", "room_for", "span_of"]

#: bucket size in tokens: minimum (an eighth of the length from there on), and maximum
BLOCK, MOST = 256, 1024


class Span(NamedTuple):
    """Length bucket: caches with `start` to `end` - 1 tokens before a step share one graph.

    The step attends to the first `end` slots, with unfilled ones masked.
    """

    start: int
    end: int

    def first(self, window: int | None) -> int:
        """Return the first position that a layer with this sliding window stores; 0 without one."""
        if window is None:
            return 0
        step = self.end - self.start
        return max(0, (self.start - window + 1) // step * step)


def span_of(length: int, *, wide: bool = False) -> Span:
    """Return a length's bucket: BLOCK tokens, or an eighth of the length as a power of two, up to MOST.

    wide: at least 4 * BLOCK, for attention that skips masked slots.
    """
    step = max(BLOCK, min(MOST, 1 << max(0, length.bit_length() - 4)))
    step = max(step, 4 * BLOCK) if wide else step
    start = length // step * step
    return Span(start, start + step)


def room_for(length: int, limit: int | None) -> int:
    """Return the token capacity to allocate for a cache with `length` tokens.

    Args:
        limit: maximum sequence length, if known.
    """
    wanted = max(2 * length, 4 * BLOCK)
    if limit is not None and limit > length:
        wanted = min(wanted, limit)
    return span_of(max(wanted - 1, length)).end
