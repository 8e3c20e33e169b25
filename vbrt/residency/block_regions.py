"""Regions for blocks that run one after the other: which pages stay, where the others stream through, and when.

    places = divide_room([{"0.q": 4096, "0.up": 8192}, {"1.q": 4096, "1.up": 8192}], room_bytes=32768)
    order = RegionOrder()
    for load in order.visit(block, "backward"):   # this block, unless it is there, and the one that comes next
        ...                                       # copy its pages into region load % REGIONS

A training step runs blocks 0 to n - 1, then n - 1 to 0. While one block computes from its region, the next one is
copied into the other, so a block takes as long as the slower of both, and each page is copied at most twice a step.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from vbrt.residency.room_division import spread

__all__ = ["REGIONS", "Places", "RegionOrder", "divide_room"]

#: two: the link and the kernels alternate. A third would hold bytes that may as well stay
REGIONS = 2


class Places(NamedTuple):
    """Byte offsets of pages in one piece of memory.

    Attributes:
        staying: of each page that stays.
        streamed: of each other page, by block, from the begin of the block's region.
        regions: of each region.
        nbytes: of all.
    """

    staying: Mapping[str, int]
    streamed: Sequence[Mapping[str, int]]
    regions: Sequence[int]
    nbytes: int


def divide_room(blocks: Sequence[Mapping[str, int]], room_bytes: int, *, stay: bool = True) -> Places | None:
    """Divide room among pages that stay and `REGIONS` regions as large as what the most streamed block streams.

    Staying pages are spread over the blocks, since one block that streams more than the others waits for the link. Of
    all such divisions this is the one that streams the fewest bytes.

    Args:
        blocks: bytes of each block's pages, by key.
        room_bytes: for all of them.
        stay: False: all pages stream, and room beside the regions is left.

    Returns:
        None if the room is too small for two regions.
    """
    sizes = {key: size for block in blocks for key, size in block.items()}
    if not stay:
        return _laid_out(blocks, [], sizes) if _used_bytes(blocks, set(), sizes) <= room_bytes else None
    ranked = [sorted(block, key=block.__getitem__) for block in blocks]  # small ones stay: they fill room best
    rests = {sum(sizes[key] for key in keys[stay:]) for keys in ranked for stay in range(len(keys) + 1)}
    best, fewest = None, 0
    for region in rests:
        staying = {key for keys in ranked for key in keys[: _least_staying(keys, sizes, region)]}
        used = _used_bytes(blocks, staying, sizes)
        streamed = _streamed_bytes(blocks, staying)
        if used <= room_bytes and (best is None or streamed < fewest):
            best, fewest = staying, streamed
    if best is None:
        return None
    left = room_bytes - _used_bytes(blocks, best, sizes)
    for rank in range(max(map(len, ranked), default=0)):
        keys = list(dict.fromkeys(keys[rank] for keys in ranked if rank < len(keys) and keys[rank] not in best))
        chosen = spread(keys, sizes, left)
        best |= set(chosen)
        left -= sum(sizes[key] for key in chosen)
    return _laid_out(blocks, [key for key in sizes if key in best], sizes)


def _least_staying(keys: Sequence[str], sizes: Mapping[str, int], region: int) -> int:
    """Return how many of a block's pages must stay, the first ones, so that the others fit into a region."""
    rest, count = sum(sizes[key] for key in keys), 0
    while rest > region:
        rest -= sizes[keys[count]]
        count += 1
    return count


def _streamed_bytes(blocks: Sequence[Mapping[str, int]], staying: set[str]) -> int:
    return sum(size for block in blocks for key, size in block.items() if key not in staying)


def _used_bytes(blocks: Sequence[Mapping[str, int]], staying: set[str], sizes: Mapping[str, int]) -> int:
    largest = max((_streamed_bytes([block], staying) for block in blocks), default=0)
    return REGIONS * largest + sum(sizes[key] for key in staying)


def _laid_out(blocks: Sequence[Mapping[str, int]], staying: Sequence[str], sizes: Mapping[str, int]) -> Places:
    offsets, end = {}, 0
    for key in staying:
        offsets[key] = end
        end += sizes[key]
    streamed, largest = [], 0
    for block in blocks:
        places, at = {}, 0
        for key, size in block.items():
            if key not in offsets:
                places[key] = at
                at += size
        streamed.append(places)
        largest = max(largest, at)
    regions = [end + region * largest for region in range(REGIONS)]
    return Places(offsets, streamed, regions, end + REGIONS * largest)


class RegionOrder:
    """Contents of the regions, and prefetch by the order in which blocks came before.

    Streamed block i has region i % `REGIONS`. Any order is right; one that recurs is prefetched.
    """

    def __init__(self) -> None:
        self._held: list[int | None] = [None] * REGIONS
        self._ahead: set[int] = set()  # prefetched, not visited yet
        self._next: dict[tuple[int, Hashable], int] = {}
        self._last: tuple[int, Hashable] | None = None

    @property
    def held(self) -> list[int]:
        """Blocks in the regions."""
        return [block for block in self._held if block is not None]

    def holds(self, block: int) -> bool:
        """True if a block is in its region."""
        return self._held[block % REGIONS] == block

    def visit(self, block: int, kind: Hashable) -> list[int]:
        """Note a visit; return the blocks to load, in order: this one unless it is there, and the next one if it has
        another region.

        Args:
            kind: of the visit, such as "backward": what comes next depends on it.
        """
        if self._last is not None:
            self._next[self._last] = block
        self._last = block, kind
        following = self._next.get(self._last, block)
        wanted = [block, following] if following % REGIONS != block % REGIONS else [block]
        return [each for each in wanted if not self.holds(each)]

    def empty(self, block: int) -> None:
        """Note that a block's region is about to be overwritten."""
        held = self._held[block % REGIONS]
        self._held[block % REGIONS] = None
        self._ahead.discard(held)

    def fill(self, block: int, *, ahead: bool) -> None:
        """Note that a block's copies are queued; `ahead`: before its visit."""
        self._held[block % REGIONS] = block
        if ahead:
            self._ahead.add(block)

    def take_ahead(self, block: int) -> bool:
        """True at the first visit of a block that was prefetched."""
        ahead = block in self._ahead
        self._ahead.discard(block)
        return ahead
