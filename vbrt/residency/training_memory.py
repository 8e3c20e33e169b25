"""Placement of training state in the tiers: gradients, and state that only the update reads (low halves of the weights,
bits of ties, the optimizer's moments), in addition to the bf16 halves that forwards lease.

The leased halves are placed first, like all pages, then gradients, then the rest: more frequently used state is nearer.
Gradients and update state are never on a GPU.
"""

from collections.abc import Mapping, Sequence

from vbrt.config.budgets import Machine
from vbrt.config.parse_budgets import parse_ahead
from vbrt.config.schema import VBConfig
from vbrt.config.tier_records import TIERS
from vbrt.errors import ConfigError
from vbrt.residency.byte_text import format_bytes
from vbrt.residency.plan import PageSpec, Plan, Swap
from vbrt.residency.room_division import spread

__all__ = ["GRADIENT", "STATE", "ahead_bytes", "with_state"]

GRADIENT, STATE = "gradient", "state"  # planes
_MOMENTS = {"fp32": 8, "8bit": 2 + 8 / 256}  # bytes per weight for both, with a scale per 256
_PASSING = 3  # leased pages that host memory has room for, if some are at home below it
_REPLACED = 2  # pages of a store that exist twice during a rewrite
_STAGED = 4  # state pages of a store in host memory at a time: one being read, one updated, two written

Homes = dict[str, str]


def with_state(
    swaps: Sequence[Swap],
    layers: Sequence[tuple[PageSpec, ...]],
    homes: Mapping[str, str],
    budgets: Mapping[str, int],
    config: VBConfig,
) -> tuple[list[tuple[PageSpec, ...]], Homes]:
    """Return each weight's pages including its state's, and the home of each.

    Args:
        layers: leased pages, by weight.
        homes: of the leased pages.
        budgets: of the host's tiers.
        config: for `training.moments`.

    Raises:
        ConfigError: the tiers are too small.
    """
    page = {page.key: page for layer in layers for page in layer}
    each = {GRADIENT: 2, STATE: 2 + 1 / 8 + 1 / 1024 + _MOMENTS[config.training.moments]}  # bf16
    state = {plane: [_page(swap, plane, nbytes) for swap in swaps] for plane, nbytes in each.items()}
    left = {tier: room - sum(_cost(page[k], tier) for k in page if homes[k] == tier) for tier, room in budgets.items()}
    largest = max((p.nbytes for p in page.values()), default=0)
    first, last = next(iter(budgets)), list(budgets)[-1]
    if first != last:
        left[first] -= _PASSING * largest * any(homes[key] != first for key in page)
        staged = max((p.nbytes for p in state[STATE]), default=0)
        left[last] -= _REPLACED * staged
        if sum(p.nbytes for pages in state.values() for p in pages) > left[first]:
            left[first] -= _STAGED * staged
    homes = dict(homes)
    for pages in state.values():
        homes |= _placed(pages, left, config.source)
    return [(*layer, *(state[plane][at] for plane in state)) for at, layer in enumerate(layers)], homes


def ahead_bytes(plan: Plan, config: VBConfig, machine: Machine) -> int:
    """Return the bytes of host memory for updates ahead of the optimizer's step, as training takes them after its first
    step (`training.full.update_ahead`): for the first weights, as many as there is room for."""
    asked = parse_ahead(config.training.ahead, where="training.ahead")
    auto, pages = asked.kind == "auto", [page for swap in plan.swaps for page in swap.pages]
    if plan.mode != "full" or (auto and (plan.compute_tier != "gpu" or any(page.home == "ssd" for page in pages))):
        return 0
    held = sum(page.nbytes for page in pages if page.home == "cpu")
    sums = sum(4 * swap.site.parameters for swap in plan.swaps if swap.dtype == "float32")
    left = machine.cpu_available_bytes - held
    limit = asked.amount if asked.kind == "bytes" else asked.amount * machine.cpu_total_bytes / machine.ranks_here
    room = min(left // 2 if auto else limit, left, plan.budgets.get("cpu", 0) - held - sums)
    taken = 0
    for swap in plan.swaps:
        own = [page for page in swap.pages if page.plane != GRADIENT]
        nbytes = sum(page.nbytes for page in own)
        if any(page.home != "cpu" for page in own):
            continue
        if taken + nbytes > room:
            break
        taken += nbytes
    return taken


def _page(swap: Swap, plane: str, each: float) -> PageSpec:
    nbytes = -(-int(swap.site.parameters * each) // 4096) * 4096
    return PageSpec(swap.site.page_key(plane), plane, nbytes, by_rows=True)


def _placed(pages: Sequence[PageSpec], left: dict[str, int], source: str) -> Homes:
    """Place pages of one plane: each tier in turn takes what fits, evenly spread; deduct it from `left`."""
    homes: Homes = {}
    waiting = {page.key: page for page in pages}
    for tier in left:
        sizes = {key: _cost(page, tier) for key, page in waiting.items()}
        for key in spread(list(sizes), sizes, max(0, left[tier])):
            homes[key] = tier
            left[tier] -= sizes[key]
            del waiting[key]
    if waiting:
        short = sum(page.nbytes for page in waiting.values())
        raise ConfigError(
            f"{source}: {format_bytes(short)} of {pages[0].plane} pages of weights in training find no room in "
            f"{' + '.join(left)}; raise tiers.cpu.budget, enable tiers.ssd with a path, or train fewer layers "
            "(requires_grad_(False))"
        )
    return homes


def _cost(page: PageSpec, tier: str) -> int:
    return page.nbytes + TIERS[tier].overhead_bytes
