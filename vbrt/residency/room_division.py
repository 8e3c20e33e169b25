"""Division of a tier's room into pins and ring slots, prefetch depths, and budgets that follow free memory."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

__all__ = ["Division", "Room", "auto_prefetch", "auto_scan", "divide", "rebalanced", "spread"]

_SLOT_SIZES = 8  # candidate slot sizes of a ring, largest first
_LONG_COPY_BYTES = 64 << 20
_SCAN_BYTES = 32 << 20


class Division(NamedTuple):
    """Division of room: pinned pages, and bytes per ring slot (0: every page takes its own size)."""

    pins: frozenset[str]
    slot_bytes: int

    def charge(self, key: str, size: int) -> int:
        """Return the bytes charged for a page: a whole ring slot, unless it is pinned."""
        return size if key in self.pins else max(size, self.slot_bytes)


@dataclass(frozen=True, slots=True)
class Room:
    """Room to divide: bytes, pages per lease (`group`), prefetch depth, and extra slots."""

    capacity_bytes: int
    group: int
    prefetch: int
    extra: int = 0

    @property
    def window(self) -> int:
        """Target number of ring slots."""
        return self.group + self.prefetch + self.extra


def divide(order: tuple[str, ...], sizes: Mapping[str, int], room: Room) -> Division:
    """Choose the pages of one pass to pin, and the slot size of the ring that streams the others.

    If everything fits, everything is pinned. Otherwise the ring has `room.window` slots of the size that leaves the
    fewest bytes to stream; pages larger than a slot are pinned. If not even `group` + 1 slots fit, pages are streamed
    in their own sizes.

    Args:
        order: page keys in the order of a pass, repeats included.
        sizes: bytes of each page.
        room: for pins and ring.
    """
    uses, capacity_bytes = Counter(order), room.capacity_bytes
    if sum(sizes[key] for key in uses) <= capacity_bytes:
        return Division(frozenset(uses), 0)
    best, fewest = None, 0
    for slot in sorted({sizes[key] for key in uses}, reverse=True)[:_SLOT_SIZES]:
        slots = min(room.window, capacity_bytes // slot)
        large = [key for key in uses if sizes[key] > slot]
        budget = capacity_bytes - slots * slot - sum(sizes[key] for key in large)
        if capacity_bytes // slot <= room.group or budget < 0:
            continue
        pins = frozenset(large + _spread_by_use([k for k in uses if sizes[k] <= slot], uses, sizes, budget))
        streamed = sum(sizes[key] for key in order if key not in pins)
        if best is None or streamed < fewest:
            best, fewest = Division(pins, slot), streamed
    return best or Division(_pins_beside(order, sizes, capacity_bytes, window=room.window), 0)


def _pins_beside(
    order: tuple[str, ...], sizes: Mapping[str, int], capacity_bytes: int, *, window: int
) -> frozenset[str]:
    """Choose pins that leave room for any `window` consecutive pages in their own sizes."""
    uses = Counter(order)
    around = order * (1 + window // len(order)) if len(order) < window else order + order[: window - 1]
    ring = max(sum(sizes[key] for key in around[at : at + window]) for at in range(len(order)))
    return frozenset(_spread_by_use(list(uses), uses, sizes, capacity_bytes - ring))


def _spread_by_use(keys: list[str], uses: Mapping[str, int], sizes: Mapping[str, int], budget: int) -> list[str]:
    """Choose the most used pages first, since each use of a pinned page saves its bytes once; among equals evenly
    spread ones, since a pinned prefix has the same hit rate but leaves the link idle while it runs."""
    pins: list[str] = []
    for count in sorted({uses[key] for key in keys}, reverse=True):
        chosen = spread([key for key in keys if uses[key] == count], sizes, budget)
        budget -= sum(sizes[key] for key in chosen)
        pins += chosen
    return pins


def spread(keys: list[str], sizes: Mapping[str, int], budget_bytes: int) -> list[str]:
    """Choose an evenly spread share of `keys`, at most `budget_bytes` in all, by error diffusion over the bytes."""
    if budget_bytes <= 0 or not keys:
        return []
    budget_bytes -= budget_bytes % gcd(*(sizes[key] for key in keys))  # bytes that no page can use skew the share
    share, owed, left = min(1.0, budget_bytes / sum(sizes[key] for key in keys)), 0.0, budget_bytes
    chosen: dict[str, None] = {}
    for key in keys:
        owed += share * sizes[key]
        if owed >= sizes[key] * (1 - 1e-9) and sizes[key] <= left:
            owed -= sizes[key]
            left -= sizes[key]
            chosen[key] = None
    for key in keys:  # bytes that rounding left over
        if key not in chosen and sizes[key] <= left:
            left -= sizes[key]
            chosen[key] = None
    return list(chosen)


def auto_prefetch(largest_page_bytes: int, *, group: int = 1, from_drive: bool = False) -> int:
    """Return the prefetch depth, in pages, for `prefetch = "auto"`.

    One H2D copy in flight keeps the link busy. A second one evens out layers of unequal duration, at the cost of a
    slot; pages of 64 MiB or more take over 1 ms each and need one only. A drive needs several reads in flight.
    """
    if from_drive:
        return 4 * group
    return max(group, 1 if largest_page_bytes >= _LONG_COPY_BYTES else 2)


def auto_scan(expert_page_bytes: int) -> int:
    """Return the prefetch depth of a scan, in expert pages, for `prefetch = "auto"`: enough to keep the link busy for
    0.5 ms or more, while the previous lease computes and the host prepares the next one."""
    return max(2, min(64, _SCAN_BYTES // expert_page_bytes))


def rebalanced(budget_bytes: int, wanted_bytes: int, free_bytes: int, margin_bytes: int) -> int:
    """Return the budget for the present free memory, with hysteresis.

    Below half a margin of free memory the budget shrinks until the margin is free again; above one and a half margins
    it grows back towards `wanted_bytes`.
    """
    if free_bytes < margin_bytes // 2 or (free_bytes > margin_bytes * 3 // 2 and budget_bytes < wanted_bytes):
        return max(0, min(wanted_bytes, budget_bytes + free_bytes - margin_bytes))
    return budget_bytes
