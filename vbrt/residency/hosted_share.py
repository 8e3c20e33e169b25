"""Hosted weights: the share of a pass that the CPU computes where its pages lie, instead of streaming them.

H2D copies and CPU compute overlap, so a pass takes the longer of the two. Hosted pages are spread evenly over the pass:
while the CPU computes one, the link prefetches the next streamed ones into the ring. They need no room in the computing
tier, which leaves it to pins. Pure decisions, from rates: no clock decides a result.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vbrt.config.tier_records import TIERS
from vbrt.residency.plan_data import PlanData
from vbrt.residency.room_division import Room, auto_prefetch, divide, spread

__all__ = [
    "CALL_S",
    "MORE",
    "HostRates",
    "Sides",
    "Use",
    "hosted_keys",
    "pass_sides",
    "plan_uses",
    "planned_sides",
    "step_seconds",
]

#: time of each further token relative to the first, unless measured: two AVX-512 cores, nvfp4 in a GPU's tile order;
#: less where the memory and not the cores limit
MORE = 0.3
#: round trip of a hosted product in seconds, unless measured: flags take 4.7 µs on an H100, inputs and outputs the rest
CALL_S = 10e-6

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
    uses: Sequence[Use], room: Room | int, rates: HostRates, tokens: int = 1, *, device_s: float = 0.0
) -> frozenset[str]:
    """Choose the pages that the CPU computes in each pass, so that link and CPU end together.

    Empty if everything fits, or if that saves less than 5 % of the time of streaming.

    Args:
        uses: of the pages at home below the computing tier, in the order of a pass.
        room: of the computing tier for these pages, pins and ring; bytes alone stand for leases of one page and two
            prefetched ones.
        tokens: rows per product.
        device_s: seconds of the pass on the computing device with all pages resident; hosted products add to it.
    """
    counts = Counter(use.key for use in uses)
    moved = {use.key: use.nbytes * counts[use.key] for use in uses if use.hostable}  # bytes that hosting a page saves
    sizes = {use.key: use.nbytes for use in uses if use.hostable}

    def sides(hosted: Collection[str]) -> Sides:
        return pass_sides(uses, hosted, room, rates, tokens)

    best, least_s = frozenset[str](), _WORTH * sides(()).seconds(device_s)
    for smallest in sorted(set(sizes.values()), reverse=True)[:_LEAST_SIZES]:  # `call_s` weighs more on small pages
        keys = [key for key, nbytes in sizes.items() if nbytes >= smallest]
        for hosted in _about_even(keys, moved, sides, device_s):
            seconds = sides(hosted).seconds(device_s)
            if seconds < least_s:
                best, least_s = hosted, seconds
    return best


def step_seconds(
    uses: Sequence[Use],
    hosted: Collection[str],
    room: Room | int,
    rates: HostRates,
    tokens: int = 1,
    *,
    device_s: float = 0.0,
) -> float:
    """Return the seconds of a steady pass with `hosted` pages: the longer of link and CPU; see `hosted_keys`."""
    return pass_sides(uses, hosted, room, rates, tokens).seconds(device_s)


class Sides(NamedTuple):
    """Bytes of a pass that are streamed and hosted, and the seconds of link and CPU, which overlap."""

    streamed_bytes: int
    hosted_bytes: int
    link_s: float
    cpu_s: float

    def seconds(self, device_s: float = 0.0) -> float:
        """Return the seconds of the pass; CPU and computing device follow each other."""
        return max(self.link_s, device_s + self.cpu_s)


def pass_sides(
    uses: Sequence[Use], hosted: Collection[str], room: Room | int, rates: HostRates, tokens: int = 1
) -> Sides:
    """Return the bytes and seconds of a steady pass with `hosted` pages; arguments as of `hosted_keys`."""
    room = Room(room, group=1, prefetch=2) if isinstance(room, int) else room
    sizes = {use.key: use.nbytes for use in uses if use.key not in hosted}
    order = tuple(use.key for use in uses if use.key not in hosted)
    pins = divide(order, sizes, room).pins if order else frozenset()
    streamed = sum(sizes[key] for key in order if key not in pins)
    products = [use.nbytes for use in uses if use.key in hosted]
    cpu_s = sum(rates.cpu_seconds(nbytes, tokens) for nbytes in products) + rates.call_s * len(products)
    return Sides(streamed, sum(products), rates.link_seconds(streamed), cpu_s)


def planned_sides(
    plan: PlanData,
    rates: HostRates,
    tokens: int = 1,
    *,
    where: str,
    prefetch: int | Literal["auto"] = "auto",
    device_s: float = 0.0,
) -> tuple[frozenset[str], Sides]:
    """Return the pages of a plan that the CPU computes in a token's pass, and the bytes and seconds of the pass.

    Args:
        where, prefetch: `compute.where` and `policy.prefetch` of the config.
        device_s: see `hosted_keys`.
    """
    uses, top, group = plan_uses(plan, where), plan.compute_tier, plan.group
    ahead = auto_prefetch(plan.largest_page_bytes, group=group) if prefetch == "auto" else prefetch
    room = Room(plan.budgets[top] - plan.home_bytes(top), group, ahead)
    hosted = hosted_keys(uses, room, rates, tokens, device_s=device_s)
    return hosted, pass_sides(uses, hosted, room, rates, tokens)


def plan_uses(plan: PlanData, where: str) -> list[Use]:
    """Return the uses of a plan's pages at home below the computing tier, in a token's pass. `where`: as
    `compute.where` says, whether the CPU computes any."""
    top, uses = plan.compute_tier, []
    for swap in plan.swaps:
        hostable = where == "auto" and plan.mode == "infer" and not (swap.lossless or swap.experts)
        hostable &= not TIERS[top].hosts  # else the CPU is the computing device
        pages = [page for page in swap.leased if page.home != top]
        uses += [Use(page.key, page.nbytes, hostable and TIERS[page.home].hosts) for page in pages]
    return uses


def _about_even(
    keys: list[str], moved: dict[str, int], sides: Callable[[frozenset[str]], Sides], device_s: float
) -> list[frozenset[str]]:
    """Return spread shares of `keys` about the one where link and CPU end together, fewest bytes first."""
    total = sum(moved[key] for key in keys)

    def share(count: int) -> frozenset[str]:
        return frozenset(spread(keys, moved, total * count // len(keys)))

    def cpu_is_longer(count: int) -> bool:
        found = sides(share(count))
        return device_s + found.cpu_s >= found.link_s

    even = bisect_left(range(len(keys)), True, key=cpu_is_longer)
    return [share(count) for count in (even - 1, even) if count >= 0]
