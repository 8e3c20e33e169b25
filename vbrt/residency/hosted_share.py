"""Hosted weights: the share of a pass that the CPU computes where its pages lie, instead of streaming them.

H2D copies and CPU compute overlap. Hosted pages are spread evenly over the pass: while the CPU computes one, the link
prefetches the next streamed ones into the ring. They need no room in the computing tier, which leaves it to pins. How
well both overlap is simulated, because the ring has few slots: small pages waste them, so often all small pages are
hosted, and of the large ones a share. Pure decisions, from rates: no clock decides a result.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vbrt.residency.room_division import Division, Room, divide, spread

__all__ = ["HostRates", "Use", "hosted_keys", "pipeline_seconds", "step_seconds"]

_WORTH = 0.95  # of the time of streaming all: hosted products round otherwise, which less gain does not justify
_SIZES = 4  # candidate sizes at which hosted pages begin: calls weigh more on small ones, which also waste slots
_COARSE, _ROUNDS = 12, 3


class Use(NamedTuple):
    """One use of a page in a pass.

    Attributes:
        key: of the page; a pass may use it more than once.
        nbytes: of the page.
        hostable: the CPU can multiply by it where it lies: a rounded format, at home in page-locked host memory.
    """

    key: str
    nbytes: int
    hostable: bool = True


@dataclass(frozen=True, slots=True)
class HostRates:
    """Rates of link and CPU.

    Attributes:
        link_bytes_s: H2D throughput, in page bytes/s.
        cpu_bytes_s: CPU compute throughput, in page bytes/s, with one row (token) per page.
        more: time of each further row, relative to the first.
        call_s: overhead per CPU call, in seconds; of a hosted product, the round trip of its mailbox.
    """

    link_bytes_s: float
    cpu_bytes_s: float
    more: float = 0.0
    call_s: float = 0.0

    def cpu_seconds(self, nbytes: int, rows: int = 1) -> float:
        """Return the CPU time of a product with one page, in seconds, without `call_s`."""
        return nbytes / self.cpu_bytes_s * (1 + self.more * (rows - 1))

    def link_seconds(self, nbytes: int) -> float:
        """Return the H2D time of a page, in seconds."""
        return nbytes / self.link_bytes_s

    def __str__(self) -> str:
        return f"{self.link_bytes_s / 1e9:.1f} GB/s over the link and {self.cpu_bytes_s / 1e9:.1f} GB/s on the CPU"


def hosted_keys(
    uses: Sequence[Use],
    room_bytes: int,
    rates: HostRates,
    tokens: int = 1,
    *,
    device_s: float = 0.0,
    prefetch: int = 2,
    group: int = 1,
) -> frozenset[str]:
    """Choose the pages that the CPU computes in each pass, so that link and CPU end together.

    Empty if everything fits, or if that saves less than 5 % of the time of streaming.

    Args:
        uses: of the pages at home below the computing tier, in the order of a pass.
        room_bytes: of the computing tier for these pages: pins and ring.
        tokens: rows per product.
        device_s: seconds of the pass on the computing device with all pages resident; hosted products add to it.
        prefetch, group: of the policy, see `Room`.
    """
    room = Room(room_bytes, group, prefetch)
    counts = Counter(use.key for use in uses)
    moved = {use.key: use.nbytes * counts[use.key] for use in uses if use.hostable}  # bytes that hosting a page saves
    sizes = {use.key: use.nbytes for use in uses if use.hostable}
    by_size = sorted(set(sizes.values()))
    best, least_s = frozenset[str](), _WORTH * pipeline_seconds(uses, (), room, rates, tokens, device_s=device_s)
    for smallest in [*by_size[:_SIZES], *by_size[-_SIZES:]]:
        small = frozenset(key for key, nbytes in sizes.items() if nbytes < smallest)
        keys = [key for key, nbytes in sizes.items() if nbytes >= smallest]
        for base in {small, frozenset[str]()}:
            found = _best_share(
                base, keys, moved, lambda some: pipeline_seconds(uses, some, room, rates, tokens, device_s=device_s)
            )
            best, least_s = min((best, least_s), found, key=lambda one: one[1])
    return best


def step_seconds(
    uses: Sequence[Use],
    hosted: Collection[str],
    room_bytes: int,
    rates: HostRates,
    tokens: int = 1,
    *,
    device_s: float = 0.0,
    prefetch: int = 2,
    group: int = 1,
) -> float:
    """Return the seconds of a steady pass with `hosted` pages; see `hosted_keys`."""
    room = Room(room_bytes, group, prefetch)
    return pipeline_seconds(uses, hosted, room, rates, tokens, device_s=device_s)


def pipeline_seconds(
    uses: Sequence[Use],
    hosted: Collection[str],
    room: Room,
    rates: HostRates,
    tokens: int = 1,
    *,
    device_s: float = 0.0,
) -> float:
    """Return the seconds of a steady pass, simulated: uses follow each other, and a page's copy begins when the one
    before has ended and its slot of the ring is free."""
    left = {use.key: use.nbytes for use in uses if use.key not in hosted}
    order = tuple(use.key for use in uses if use.key in left)
    division = divide(order, left, room) if order else None
    pins, slots = _ring(division, left, room)
    each, now_s, link_s, begun_s, released_s = device_s / max(1, len(uses)), 0.0, 0.0, 0.0, list[float]()
    for _ in range(_ROUNDS):
        begun_s = now_s
        for key, nbytes, _ in uses:
            if key in hosted:
                now_s += rates.cpu_seconds(nbytes, tokens) + rates.call_s
                continue
            if key not in pins:
                free_s = released_s[-slots] if len(released_s) >= slots else 0.0
                link_s = max(link_s, free_s) + rates.link_seconds(nbytes)
                now_s = max(now_s, link_s)
            now_s += each
            if key not in pins:
                released_s.append(now_s)
    return now_s - begun_s


def _ring(division: Division | None, sizes: Mapping[str, int], room: Room) -> tuple[Collection[str], int]:
    """Return the pinned pages, and the slots of the ring."""
    if division is None:
        return (), 1
    if not division.slot_bytes:
        return division.pins, room.window
    free = room.capacity_bytes - sum(sizes[key] for key in division.pins)
    return division.pins, max(1, min(room.window, free // division.slot_bytes))


def _best_share(
    base: frozenset[str], keys: list[str], moved: Mapping[str, int], seconds: Callable[[frozenset[str]], float]
) -> tuple[frozenset[str], float]:
    """Return the best of `base` with a spread share of `keys`, and its time: a coarse search, then a fine one."""
    total, known = sum(moved[key] for key in keys), dict[int, tuple[frozenset[str], float]]()

    def tried(count: int) -> float:
        if count not in known:
            hosted = base | frozenset(spread(keys, moved, total * count // len(keys)))
            known[count] = hosted, seconds(hosted)
        return known[count][1]

    step = max(1, len(keys) // _COARSE)
    best = min(range(0, len(keys) + 1, step), key=tried)
    while step > 1:
        step = (step + 1) // 2
        best = min((count for count in (best - step, best, best + step) if 0 <= count <= len(keys)), key=tried)
    return known[best]
