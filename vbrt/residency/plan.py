"""Plan of a wrapped model: swaps, skips, homes of pages, and cost in bytes, decided before anything moves.

`vbrt plan` prints it and the runtime follows it, so the two cannot drift. Pure data and pure functions: `vbrt.model`
reads the model (`weight_choice.py`, `planner.py`), `place` assigns pages to tiers.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from vbrt.config.argument_checks import check_whole
from vbrt.config.tier_records import TIERS
from vbrt.errors import NoRoomError
from vbrt.host.terminal import text_width
from vbrt.residency.byte_text import format_bytes
from vbrt.residency.plan_data import Beside, GpuRoom, PageSpec, PlanData, Skip, Swap, lease_bytes, leased_pages
from vbrt.residency.plan_text import plan_lines
from vbrt.residency.room_division import spread

__all__ = [
    "Beside",
    "GpuRoom",
    "PageSpec",
    "Plan",
    "Skip",
    "Swap",
    "format_bytes",
    "leased_pages",
    "place",
    "with_whole_pages",
]


@dataclass(frozen=True, slots=True)
class Plan(PlanData):
    """Plan: every swap, every skip with its reason, every page's home.

    `budgets`: resolved bytes of each tier in use, the computing tier first. With mode "train" there are no pages: the
    computing tier's budget is 0, and the swapped weights stay in its memory. `warnings`: messages shown even to users
    who do not print the plan. `fallbacks`: weights not held in their files' format, for `stats()`.
    """

    def __str__(self) -> str:
        """Return a bar chart of bytes per tier, and a line per kind of layer."""
        return self.table(width=text_width(80))

    def table(self, *, width: int = 80, each: bool = False) -> str:
        """Return the plan as text. `each`: one line per layer instead of per kind."""
        check_whole(width, "table(): width")
        return "\n".join(plan_lines(self, width, each=each))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.table(width=120))}</pre>"

    def to_dict(self) -> dict:
        """Return JSON-serializable data, with the totals."""
        totals = {
            name: getattr(self, name)
            for name in ("compute_tier", "dense_bytes", "swapped_bytes", "kept_bytes", "page_bytes")
        }
        return {
            "mode": self.mode,
            **totals,
            "budgets": dict(self.budgets),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "swaps": [swap.to_dict() for swap in self.swaps],
            "skipped": {name: asdict(skip) for name, skip in self.skipped.items()},
        }


#: pages that must fit besides resident ones, to be streamed: the one in use, and prefetched ones
_PASSING = 4


def with_whole_pages(budgets: Mapping[str, int], layers: Sequence[Sequence[PageSpec]], peers: int) -> dict[str, int]:
    """Return budgets less the peer tier's fragmentation: up to a page per GPU, since pages are not split."""
    largest = max((page.nbytes for layer in layers for page in layer), default=0)
    lost = {"peer": peers * largest if peers > 1 else 0}
    return {tier: max(0, nbytes - lost.get(tier, 0)) for tier, nbytes in budgets.items()}


def place(layers: Sequence[Sequence[PageSpec]], budgets: Mapping[str, int], *, source: str) -> dict[str, str]:
    """Return the home of each page: the first tier, from the computing one down, that holds them all.

    If no single tier does, the last tier takes what fits, evenly spread, and the tiers above take the rest, each
    leaving room for one layer to pass through. A tier that `fills` (the peer tier) has priority: it takes what fits,
    evenly spread, the computing tier what it holds besides some streamed layers, and only the rest goes further down.

    If not everything fits into the computing tier and there are routed experts, the pages that every pass needs are
    placed in that tier, provided that they fit besides one token's experts, and only the others are placed as above.
    Without experts, the coarse planes of exact weights are placed there, if they fit besides some streamed layers: a
    draft reads only them, so it moves nothing.

    Tables that are read by rows make room for pages that move: if not everything fits into the computing tier, they go
    to the first tier with room where nothing passes through.

    Args:
        layers: the pages of each layer, in the order of the model.
        budgets: bytes by tier, the computing tier first; an ssd comes last.
        source: config file or preset, for error messages.

    Raises:
        NoRoomError: a tier is smaller than the largest layer that must pass through it, or all tiers together are too
            small.
    """
    pages = {page.key: page for layer in layers for page in layer}
    sizes = {key: page.nbytes for key, page in pages.items()}
    tables = {key: size for key, size in sizes.items() if pages[key].by_rows}
    if tables and len(budgets) > 1 and sum(sizes.values()) > next(iter(budgets.values())):
        moving = [layer for layer in layers if not any(page.by_rows for page in layer)]
        homes = place(moving, budgets, source=source)
        return homes | _place_tables(tables, {key: sizes[key] for key in homes}, homes, budgets, source)
    every = {key: size for key, size in sizes.items() if not (pages[key].top_k or pages[key].by_rows)}
    routed = max((lease_bytes(layer) for layer in layers if any(page.top_k for page in layer)), default=0)
    tiers = list(budgets)
    top = tiers[0] if tiers else ""
    homes: dict[str, str] = {}
    beside = routed
    if not routed:  # exact weights: fine planes are streamed
        every = _coarse_of_exact(layers, top)
        beside = _PASSING * max((page.nbytes for page in pages.values()), default=0)
    if every and beside and len(tiers) > 1 and sum(every.values()) + beside <= budgets[top] < sum(sizes.values()):
        homes = dict.fromkeys(every, top)  # what is left of the tier is the experts' cache, or the ring
        budgets = {**budgets, top: budgets[top] - sum(every.values())}
        sizes = {key: size for key, size in sizes.items() if key not in homes}
        layers = [[page for page in layer if page.key not in homes] for layer in layers]
    return homes | _place_filling(sizes, [layer for layer in layers if layer], budgets, source)


def _place_tables(
    tables: Mapping[str, int],
    sizes: Mapping[str, int],
    homes: Mapping[str, str],
    budgets: Mapping[str, int],
    source: str,
) -> dict[str, str]:
    """Place tables, given the homes of pages of other sizes: in or below the lowest of these tiers."""
    deepest = max((list(budgets).index(tier) for tier in homes.values()), default=0)
    rooms = {tier: budgets[tier] for tier in list(budgets)[deepest:] if not TIERS[tier].fills}
    for key, tier in homes.items():
        if tier in rooms:
            rooms[tier] -= _cost(sizes[key], tier)
    found = {}
    for key, size in tables.items():
        tier = next((tier for tier, room in rooms.items() if _cost(size, tier) <= room), None)
        if tier is None:
            raise _too_small({**sizes, **tables}, budgets, source)
        found[key], rooms[tier] = tier, rooms[tier] - _cost(size, tier)
    return found


def _coarse_of_exact(layers: Sequence[Sequence[PageSpec]], top: str) -> dict[str, int]:
    """Return the bytes that coarse pages of exact weights take in the tier `top`, by key."""
    exact = [layer for layer in layers if len({page.plane for page in layer}) > 1]
    first = [layer[0] for layer in exact if not layer[0].by_rows]
    return {page.key: _cost(page.nbytes, top) for page in first}


def _place_filling(
    sizes: Mapping[str, int], layers: Sequence[Sequence[PageSpec]], budgets: Mapping[str, int], source: str
) -> dict[str, str]:
    """Place pages as `_place`, but fill tiers that `fills`, and the computing tier, before those below."""
    filling = [tier for tier in budgets if TIERS[tier].fills]
    top, *below = [tier for tier in budgets if tier not in filling] or [""]
    if not filling or sum(_cost(size, top) for size in sizes.values()) <= budgets[top]:
        return _place(sizes, layers, {tier: budgets[tier] for tier in budgets if tier not in filling}, source)
    lease = max(map(lease_bytes, layers), default=0)
    _check_passage([top], budgets, lease, layers, source)
    cached = below and any(page.top_k for layer in layers for page in layer)  # the computing tier is the experts' cache
    passing = max(lease, min(_PASSING * max(sizes.values()), budgets[top] // 2)) if below else lease
    rooms = {tier: budgets[tier] for tier in filling} | ({} if cached else {top: budgets[top] - passing})
    homes: dict[str, str] = {}
    for tier, room in rooms.items():
        left = {key: _cost(size, tier) for key, size in sizes.items() if key not in homes}
        homes |= dict.fromkeys(spread(list(left), left, room), tier)
    left = {key: size for key, size in sizes.items() if key not in homes}
    if left and not below:
        raise _too_small(sizes, budgets, source)
    passed = [tuple(page for page in layer if page.key in left) for layer in layers]
    return homes | _place(left, [layer for layer in passed if layer], {tier: budgets[tier] for tier in below}, source)


def _place(
    sizes: Mapping[str, int], layers: Sequence[Sequence[PageSpec]], budgets: Mapping[str, int], source: str
) -> dict[str, str]:
    """Place pages without regard to experts or planes; see `place`."""
    lease = max(map(lease_bytes, layers), default=0)
    tiers = list(budgets)
    for depth, tier in enumerate(tiers):
        if sum(_cost(size, tier) for size in sizes.values()) <= budgets[tier]:
            _check_passage(tiers[:depth], budgets, lease, layers, source)
            return dict.fromkeys(sizes, tier)
    _check_passage(tiers[:-1], budgets, lease, layers, source)
    homes: dict[str, str] = {}
    left = list(sizes)
    for tier in reversed(tiers):
        room = budgets[tier] - (lease if tier != tiers[-1] else 0)
        for key in spread(left, {key: _cost(sizes[key], tier) for key in left}, room):
            homes[key] = tier
        left = [key for key in left if key not in homes]
    if left:
        raise _too_small(sizes, budgets, source)
    return homes


def _too_small(sizes: Mapping[str, int], budgets: Mapping[str, int], source: str) -> NoRoomError:
    have = " + ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in budgets.items())
    return NoRoomError(
        f"{source}: the pages take {format_bytes(sum(sizes.values()))}, the tiers hold {have}; raise tiers.*.budget, "
        "enable a further tier (tiers.ssd with a path), or choose a smaller weights.format"
    )


def _cost(nbytes: int, tier: str) -> int:
    return nbytes + TIERS[tier].overhead_bytes


def _check_passage(
    tiers: Sequence[str], budgets: Mapping[str, int], lease: int, layers: Sequence[Sequence[PageSpec]], source: str
) -> None:
    for tier in tiers:
        if budgets[tier] < lease:
            largest = leased_pages(max(layers, key=lease_bytes))
            token = f", those of the {largest[0].top_k} experts that one token goes to" if largest[0].top_k else ""
            raise NoRoomError(
                f"{source}: tiers.{tier}.budget = {budgets[tier]} bytes is smaller than the largest "
                f"layer's pages ({largest[0].key}{token}: {lease} bytes); give it at least that, better "
                f"three times that, or exclude the layer in weights.exclude"
            )
