"""Block sizes of torch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp)."""

import bisect

__all__ = ["Blocks", "allocated_bytes"]

_GRANULE = 512
_SMALL, _SMALL_SEGMENT = 1 << 20, 2 << 20
_OWN, _SEGMENT, _ROUND = 10 << 20, 20 << 20, 2 << 20


def allocated_bytes(nbytes: int) -> int:
    """Return the block size for a tensor allocated by itself.

    Multiples of 512 bytes; from 10 MiB on a segment of its own, a multiple of 2 MiB, whose remainder is split off only
    if it is larger than 1 MiB.
    """
    return Blocks().take(nbytes)


class Blocks:
    """Best-fit allocation of tensors that live together, starting from an empty allocator.

    Tensors up to 1 MiB share segments of 2 MiB, others below 10 MiB segments of 20 MiB. A tensor gets the smallest free
    block that fits; for one larger than 1 MiB, a remainder of 1 MiB or less stays with it.
    """

    def __init__(self) -> None:
        self._free: dict[bool, list[int]] = {True: [], False: []}

    def take(self, nbytes: int) -> int:
        """Allocate a further tensor; return its block's bytes."""
        size = -(-nbytes // _GRANULE) * _GRANULE
        small = size <= _SMALL
        free = self._free[small]
        at = bisect.bisect_left(free, size)
        block = free.pop(at) if at < len(free) else _segment(size)
        rest = block - size
        if rest <= (0 if small else _SMALL):
            return block
        bisect.insort(free, rest)
        return size


def _segment(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _SEGMENT if size < _OWN else -(-size // _ROUND) * _ROUND
