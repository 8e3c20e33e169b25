"""Hosted weights: the share of a pass that the CPU computes where its pages lie, instead of streaming them.

H2D copies and CPU compute overlap, so a pass takes the longer of the two at best. Hosted pages are spread evenly over
the pass: while the CPU computes one, the link prefetches the next streamed ones into the ring. They need no room in the
computing tier, which leaves it to pins. The ring is short, so equal sums are not enough: with three slots a choice by
sums alone takes up to 1.6 times the longer of the two, since the link waits for slots wherever the CPU has several
pages in a row. So candidates are compared in a simulated pass of link, ring, CPU and device: 1.0 to 1.1 times for an 8B
shape. Pure decisions, from rates: no clock decides a result.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vbrt.config.tier_records import TIERS
from vbrt.residency.plan_data import PlanData
from vbrt.residency.room_division import Room, auto_prefetch, divide, spread

__all__ = [
    "BETWEEN_S",
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
#: seconds of a hosted product beside its arithmetic, unless measured: on an H200 whose link is busy; flags on an idle
#: link take 5 µs
CALL_S = 30e-6
#: seconds of a step of `generate` outside of products: the head, sampling, and the host until the next step
BETWEEN_S = 1.2e-3

_WORTH = 0.95  # of the time of streaming all: hosted products round otherwise, which less gain does not justify
_LEAST_SIZES = 8  # candidate sizes of the smallest hosted page, largest first
_PARTS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)  # candidates, as parts of the share that evens out link and CPU
_STEADY_PASSES = 3  # simulated ones that count, after one from an empty ring


class Use(NamedTuple):
    """One use of a page in a pass.

    Attributes:
        key: of the page; a pass may use it more than once.
        nbytes: of the page.
        hostable: the CPU can multiply by it where it lies: a rounded format, at home in page-locked host memory.
        group: names consecutive uses with the same input, as of query, key and value: the hosted ones among them are
            one CPU call. None: a call of its own.
    """

    key: str
    nbytes: int
    hostable: bool = True
    group: str | None = None


@dataclass(frozen=True, slots=True)
class HostRates:
    """Rates of link and CPU.

    Attributes:
        link_bytes_s: H2D throughput, in page bytes/s.
        cpu_bytes_s: CPU compute throughput, in page bytes/s, with one row (token) per page.
        more: time of each further row, relative to the first.
        call_s: overhead per CPU call, in seconds; of a hosted product, the round trip of its mailbox.
        between_s: seconds between the last product of a pass and the first of the next.
    """

    link_bytes_s: float
    cpu_bytes_s: float
    more: float = 0.0
    call_s: float = 0.0
    between_s: float = 0.0

    def cpu_seconds(self, nbytes: int, rows: float = 1) -> float:
        """Return the CPU time of a product with one page, in seconds, without `call_s`."""
        return nbytes / self.cpu_bytes_s * (1 + self.more * (rows - 1))

    def link_seconds(self, nbytes: int) -> float:
        """Return the H2D time of a page, in seconds."""
        return nbytes / self.link_bytes_s

    def __str__(self) -> str:
        return f"{self.link_bytes_s / 1e9:.1f} GB/s over the link and {self.cpu_bytes_s / 1e9:.1f} GB/s on the CPU"


class Sides(NamedTuple):
    """A steady pass: bytes that are streamed and hosted, seconds of link and CPU, and of the pass, where they overlap
    as far as the ring lets them."""

    streamed_bytes: int
    hosted_bytes: int
    link_s: float
    cpu_s: float
    pass_s: float


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
        device_s: seconds of the pass on the computing device with all pages resident; CPU and device follow each other.
    """

    def sides(hosted: Collection[str]) -> Sides:
        return pass_sides(uses, hosted, room, rates, tokens, device_s=device_s)

    best, least_s = frozenset[str](), _WORTH * sides(()).pass_s
    for units in _divisions(uses):
        sizes = {name: unit.nbytes for name, unit in units.items()}
        for smallest in sorted(set(sizes.values()), reverse=True)[:_LEAST_SIZES]:  # `call_s` weighs more on small ones
            large = {name: unit for name, unit in units.items() if sizes[name] >= smallest}
            for hosted in _about_even(large, sides, device_s + rates.between_s):
                seconds = sides(hosted).pass_s
                if seconds < least_s:
                    best, least_s = hosted, seconds
    return best


class _Unit(NamedTuple):
    """Pages that are hosted together: their bytes, and those that it saves the link in a pass."""

    keys: tuple[str, ...]
    nbytes: int
    moved: int


def _divisions(uses: Sequence[Use]) -> Iterator[dict[str, _Unit]]:
    """Yield the hostable pages one by one, and, where there are groups, group by group."""
    counts = Counter(use.key for use in uses)
    pages = {use.key: use for use in uses if use.hostable}.values()
    one_by_one = {use.key: [use] for use in pages}
    by_group: dict[str, list[Use]] = {}
    for use in pages:
        by_group.setdefault(use.group or use.key, []).append(use)
    for groups in (one_by_one, by_group) if len(by_group) < len(pages) else (one_by_one,):
        yield {
            name: _Unit(
                tuple(use.key for use in group),
                sum(use.nbytes for use in group),
                sum(use.nbytes * counts[use.key] for use in group),
            )
            for name, group in groups.items()
        }


def step_seconds(
    uses: Sequence[Use],
    hosted: Collection[str],
    room: Room | int,
    rates: HostRates,
    tokens: int = 1,
    *,
    device_s: float = 0.0,
) -> float:
    """Return the seconds of a steady pass with `hosted` pages; arguments as of `hosted_keys`."""
    return pass_sides(uses, hosted, room, rates, tokens, device_s=device_s).pass_s


def pass_sides(
    uses: Sequence[Use],
    hosted: Collection[str],
    room: Room | int,
    rates: HostRates,
    tokens: int = 1,
    *,
    device_s: float = 0.0,
) -> Sides:
    """Return the bytes and seconds of a steady pass with `hosted` pages; arguments as of `hosted_keys`."""
    room = Room(room, group=1, prefetch=2) if isinstance(room, int) else room
    left = {use.key: use.nbytes for use in uses if use.key not in hosted}
    pins, slots = _pins_and_slots(tuple(use.key for use in uses if use.key in left), left, room)
    device = device_s / max(1, sum(use.nbytes for use in uses))
    hosted_bytes = streamed_bytes = 0
    cpu_s = 0.0
    called = None  # the group of the last call
    stages: list[tuple[float, float]] = []  # seconds of copy, and of compute
    for key, nbytes, _, group in uses:
        copy_s, compute_s = 0.0, device * nbytes
        if key not in left:
            hosted_bytes += nbytes
            product_s = rates.cpu_seconds(nbytes, tokens)
            if group is None or group != called:
                product_s += rates.call_s
            called = group
            cpu_s, compute_s = cpu_s + product_s, compute_s + product_s
        elif key not in pins:
            streamed_bytes += nbytes
            copy_s = rates.link_seconds(nbytes)
        stages.append((copy_s, compute_s))
    stages.append((0.0, rates.between_s))
    return Sides(streamed_bytes, hosted_bytes, rates.link_seconds(streamed_bytes), cpu_s, _steady_s(stages, slots))


def _pins_and_slots(order: tuple[str, ...], sizes: Mapping[str, int], room: Room) -> tuple[frozenset[str], int]:
    """Return the pinned pages of a pass, and the number of ring slots for the others."""
    if not order:
        return frozenset(), 1
    pins, slot_bytes = divide(order, sizes, room)
    slot_bytes = slot_bytes or max((sizes[key] for key in order if key not in pins), default=1)
    return pins, max(1, min(room.window, (room.capacity_bytes - sum(sizes[key] for key in pins)) // slot_bytes))


def _steady_s(stages: Sequence[tuple[float, float]], slots: int) -> float:
    """Return the seconds of a pass between others: one computes after the other, and each copy takes a ring slot from
    its start to the end of its compute."""
    free, linked, clock, ends = deque([0.0] * slots), 0.0, 0.0, []
    for _ in range(1 + _STEADY_PASSES):
        for copy_s, compute_s in stages:
            if copy_s:
                linked = max(linked, free.popleft()) + copy_s
                clock = max(clock, linked) + compute_s
                free.append(clock)
            else:
                clock += compute_s
        ends.append(clock)
    return (ends[-1] - ends[0]) / _STEADY_PASSES


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
    return hosted, pass_sides(uses, hosted, room, rates, tokens, device_s=device_s)


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
    units: Mapping[str, _Unit], sides: Callable[[frozenset[str]], Sides], others_s: float
) -> Iterator[frozenset[str]]:
    """Yield the pages of spread shares of `units`: all, and those about the one where link and CPU end together, fewer
    bytes too since the ring may hold up the link. others_s: seconds of a pass in which the CPU does not compute."""
    names, moved = list(units), {name: unit.moved for name, unit in units.items()}
    total = sum(moved.values())

    def share(count: float) -> frozenset[str]:
        return frozenset(
            key for name in spread(names, moved, int(total * count / len(names))) for key in units[name].keys
        )

    def cpu_is_longer(count: int) -> bool:
        found = sides(share(count))
        return others_s + found.cpu_s >= found.link_s

    even = bisect_left(range(len(names)), True, key=cpu_is_longer)
    yield from map(share, sorted({max(0, even - 1), *(min(len(names), part * even) for part in _PARTS), len(names)}))
