"""Placement of pages of all models on a shared runtime, by one joint plan."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from vbrt.config.tier_records import TIERS
from vbrt.errors import TierError
from vbrt.layers import Weight
from vbrt.model.layer_registry import Registry
from vbrt.model.runtime import Runtime
from vbrt.residency.expert_room import largest_pages
from vbrt.residency.plan import Beside, PageSpec, leased_pages, place, with_whole_pages
from vbrt.residency.room_division import auto_scan, spread
from vbrt.residency.scheduled import ScheduledPolicy
from vbrt.residency.simulate import make_policy
from vbrt.tiers import PeerTier

__all__ = ["Homes", "current_homes", "give_way", "place_beside", "place_pages", "restore_homes"]

_BESIDE = "beside: "  # prefix that no plan's keys have
_PASSING_PAGES = 4  # slots for streamed pages next to a KV cache: two leased, two prefetched

Pages = list[tuple[Weight, tuple[PageSpec, ...]]]
Homes = list[tuple[Registry, Pages]]


def place_beside(runtime: Runtime) -> Beside:
    """Return the budgets and pages on a runtime, for the plan of a further model."""
    layers = (layer for attachment in runtime.attachments for _, layer in attachment.registry.pages())
    renamed = (tuple(replace(page, key=f"{_BESIDE}{page.key}") for page in layer) for layer in layers)
    return Beside(runtime.budgets, tuple(renamed))


def current_homes(runtime: Runtime) -> Homes:
    """Snapshot the homes of all models' pages, stored or planned, for `restore_homes`."""
    return [(attachment.registry, attachment.registry.pages()) for attachment in runtime.attachments]


def restore_homes(runtime: Runtime, homes: Homes) -> None:
    """Rehome pages as in a snapshot."""
    for registry, pages in homes:
        registry.assign_homes(_by_key([pages]))
        registry.forget_ready()
    runtime.stack.rehome(_by_key(pages for _, pages in homes))


def place_pages(runtime: Runtime) -> None:
    """Rehome the pages of all models by one joint placement.

    Raises:
        ConfigError: the tiers are too small for all models.
        TierError: a page cannot be moved; see `homes_kept_on_failure`.
    """
    found = {attachment.registry: attachment.registry.pages() for attachment in runtime.attachments}
    layers = [layer for pages in found.values() for _, layer in pages]
    peers = max(
        (len(level.tier.parts) for level in runtime.stack.levels if isinstance(level.tier, PeerTier)), default=1
    )
    homes = place(layers, with_whole_pages(runtime.budgets, layers, peers), source=runtime.settings.source)
    if not all(TIERS[home].memory for home in homes.values()):
        runtime.open_stores()
    for registry in found:
        registry.assign_homes(homes)
    runtime.stack.rehome(homes)
    _suit_policies(runtime, layers)
    _widen_leases(runtime, max((len(leased_pages(layer)) for layer in layers), default=1))
    for registry in found:
        registry.forget_ready()


def _suit_policies(runtime: Runtime, layers: Sequence[tuple[PageSpec, ...]]) -> None:
    """Switch policy.kind = "auto" from "scheduled" to "experts" when a model with routed experts joins."""
    experts = {page.key: page.nbytes for layer in layers for page in layer if page.top_k}
    if runtime.settings.policy.kind != "auto" or not experts:
        return
    for level in runtime.stack.levels:
        old = level.policy
        if isinstance(old, ScheduledPolicy):
            options = {"prefetch": old.prefetch, "group": old.group, "layers": largest_pages(experts)}
            scan = auto_scan(max(experts.values()))
            runtime.stack.ledger.replace_policy(level, make_policy("experts", old.capacity_bytes, scan=scan, **options))


def _widen_leases(runtime: Runtime, pages: int) -> None:
    """Widen the policies' room for one lease to at least `pages` pages."""
    for level in runtime.stack.levels:
        if getattr(level.policy, "group", pages) < pages:
            level.policy.group = pages


def give_way(runtime: Runtime, nbytes: int) -> None:
    """Rehome weights out of the computing tier to make room for a KV cache: evenly spread pages, of `nbytes` plus the
    slots that they are streamed through from then on, move to the first lower tier with room.

    Raises:
        TierError: too little room below, or a CUDA graph holds the pages' addresses.
    """
    stack = runtime.stack
    living = {page.key: page.nbytes for page in stack.pages.values() if not page.home and page.passes and not page.put}
    leaving = nbytes + _PASSING_PAGES * max(living.values(), default=0)
    stay = set(spread(list(living), living, sum(living.values()) - leaving))
    room = {level: level.free_bytes for level in stack.levels[1:]}
    homes: dict[str, str] = {}
    for key in living.keys() - stay:
        level = next((level for level, free in room.items() if living[key] + level.overhead_bytes <= free), None)
        if level is None:
            raise TierError(
                f"{key}: no tier below {stack.names[0]} has room for {living[key]} more bytes, evicted for "
                "a KV cache; raise its budget, enable tiers.ssd, or ask for less room"
            )
        room[level] -= living[key] + level.overhead_bytes
        homes[key] = level.tier.name
    stack.rehome(homes)
    for attachment in runtime.attachments:
        attachment.registry.forget_ready()  # views would keep moved pages' memory alive


def _by_key(models: Iterable[Pages]) -> dict[str, str]:
    return {page.key: page.home for pages in models for _, layer in pages for page in layer}
