"""Hosted weights: the share of a pass that the CPU computes where its pages lie, instead of streaming them.

H2D copies and CPU compute overlap. Hosted pages are spread evenly over the pass: while the CPU computes one, the link
prefetches the next streamed ones into the ring. They need no room in the computing tier, which leaves it to pins. How
well both overlap is simulated, because the ring has few slots: small pages waste them, so often all small pages are
hosted, and of the large ones a share. Pure decisions, from rates: no clock decides a result.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vbrt.config.tier_records import TIERS
from vbrt.residency.plan_data import PlanData
from vbrt.residency.room_division import Division, Room, auto_prefetch, divide, spread

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
    by_size = sorted(set(sizes.values()))

    def seconds(hosted: Collection[str]) -> float:
        return step_seconds(uses, hosted, room, rates, tokens, device_s=device_s)

    best, least_s = frozenset[str](), _WORTH * seconds(())
    for smallest in sorted({*by_size[:_SIZES], *by_size[-_SIZES:]}, reverse=True):
        small = frozenset(key for key, nbytes in sizes.items() if nbytes < smallest)
        keys = [key for key, nbytes in sizes.items() if nbytes >= smallest]
        for base in (frozenset[str](), small) if small else (small,):
            found, found_s = _best_share(base, keys, moved, seconds)
            if found_s < least_s:
                best, least_s = found, found_s
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
    """Return the seconds of a steady pass with `hosted` pages, simulated; arguments as of `hosted_keys`.

    Uses follow each other; a page's copy begins when the one before has ended and its slot of the ring is free.
    """
    room = _room(room)
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


class Sides(NamedTuple):
    """Bytes of a pass that are streamed and hosted, the seconds of link and CPU, which overlap, and of the pass."""

    streamed_bytes: int
    hosted_bytes: int
    link_s: float
    cpu_s: float
    seconds: float


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
    sizes = {use.key: use.nbytes for use in uses if use.key not in hosted}
    order = tuple(use.key for use in uses if use.key not in hosted)
    pins = divide(order, sizes, _room(room)).pins if order else frozenset()
    streamed = sum(sizes[key] for key in order if key not in pins)
    products = [use.nbytes for use in uses if use.key in hosted]
    cpu_s = sum(rates.cpu_seconds(nbytes, tokens) for nbytes in products) + rates.call_s * len(products)
    seconds = step_seconds(uses, hosted, room, rates, tokens, device_s=device_s)
    return Sides(streamed, sum(products), rates.link_seconds(streamed), cpu_s, seconds)


def _room(room: Room | int) -> Room:
    return Room(room, group=1, prefetch=2) if isinstance(room, int) else room


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
