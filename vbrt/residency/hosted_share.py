"""Hosted weights: the share of a pass that the CPU computes where its pages lie, instead of streaming them.

H2D copies and CPU compute overlap, so a pass takes the longer of the two. Hosted pages are spread evenly over the pass:
while the CPU computes one, the link prefetches the next streamed ones into the ring. They need no room in the computing
tier, which leaves it to pins. Pure decisions, from rates: no clock decides a result.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vbrt.residency.room_division import Room, divide, spread

__all__ = ["HostRates", "Use", "hosted_keys", "step_seconds"]

_WORTH = 0.95  # of the time of streaming all: hosted products round otherwise, which less gain does not justify
_LEAST_SIZES = 8  # candidate sizes of the smallest hosted page, largest first


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
    best, least_s = frozenset[str](), _WORTH * _seconds(uses, (), room, rates, tokens, device_s)
    for smallest in sorted(set(sizes.values()), reverse=True)[:_LEAST_SIZES]:  # `call_s` weighs more on small pages
        keys = [key for key, nbytes in sizes.items() if nbytes >= smallest]
        for hosted in _about_even(keys, moved, lambda some: _sides(uses, some, room, rates, tokens, device_s)):
            seconds = _seconds(uses, hosted, room, rates, tokens, device_s)
            if seconds < least_s:
                best, least_s = hosted, seconds
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
    """Return the seconds of a steady pass with `hosted` pages: the longer of link and CPU; see `hosted_keys`."""
    return _seconds(uses, hosted, Room(room_bytes, group, prefetch), rates, tokens, device_s)


def _about_even(
    keys: list[str], moved: dict[str, int], sides: Callable[[frozenset[str]], tuple[float, float]]
) -> list[frozenset[str]]:
    """Return spread shares of `keys` about the one where link and CPU end together, fewest bytes first."""
    total = sum(moved[key] for key in keys)

    def share(count: int) -> frozenset[str]:
        return frozenset(spread(keys, moved, total * count // len(keys)))

    def cpu_is_longer(count: int) -> bool:
        link_s, cpu_s = sides(share(count))
        return cpu_s >= link_s

    even = bisect_left(range(len(keys)), True, key=cpu_is_longer)
    return [share(count) for count in (even - 1, even) if count >= 0]


def _seconds(
    uses: Sequence[Use], hosted: Collection[str], room: Room, rates: HostRates, tokens: int, device_s: float
) -> float:
    return max(_sides(uses, hosted, room, rates, tokens, device_s))


def _sides(
    uses: Sequence[Use], hosted: Collection[str], room: Room, rates: HostRates, tokens: int, device_s: float
) -> tuple[float, float]:
    """Return the seconds of the link, and of the CPU and the device, which follow each other."""
    sizes = {use.key: use.nbytes for use in uses if use.key not in hosted}
    order = tuple(use.key for use in uses if use.key not in hosted)
    pins = divide(order, sizes, room).pins if order else frozenset()
    streamed = sum(sizes[key] for key in order if key not in pins)
    products = [use.nbytes for use in uses if use.key in hosted]
    cpu_s = sum(rates.cpu_seconds(nbytes, tokens) for nbytes in products) + rates.call_s * len(products)
    return rates.link_seconds(streamed), device_s + cpu_s
