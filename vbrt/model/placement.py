"""Where the pages of models live that share a runtime: one plan for all of them."""

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

_BESIDE = "beside: "  # no key of a plan begins so
_PASSING_PAGES = 4  # slots for pages that stream beside a cache: two leased, two ahead

Pages = list[tuple[Weight, tuple[PageSpec, ...]]]
Homes = list[tuple[Registry, Pages]]


def place_beside(runtime: Runtime) -> Beside:
    """Return what a further model finds on a runtime."""
    layers = (layer for attachment in runtime.attachments for _, layer in attachment.registry.pages())
    renamed = (tuple(replace(page, key=f"{_BESIDE}{page.key}") for page in layer) for layer in layers)
    return Beside(runtime.budgets, tuple(renamed))


def current_homes(runtime: Runtime) -> Homes:
    """Return where the pages of all models live, or will, for `restore_homes`."""
    return [(attachment.registry, attachment.registry.pages()) for attachment in runtime.attachments]


def restore_homes(runtime: Runtime, homes: Homes) -> None:
    """Give pages the homes that they had."""
    for registry, pages in homes:
        registry.assign_homes(_by_key([pages]))
        registry.forget_ready()
    runtime.stack.rehome(_by_key(pages for _, pages in homes))


def place_pages(runtime: Runtime) -> None:
    """Give the pages of all models the homes that one plan for all of them gives them.

    Raises:
        ConfigError: the tiers are too small for all of them.
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
    """Where policy.kind = "auto" came to "scheduled" and a model with routed experts joins, take their policy."""
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
    """Have policies that keep room for one lease keep it for a lease of so many pages."""
    for level in runtime.stack.levels:
        if getattr(level.policy, "group", pages) < pages:
            level.policy.group = pages


def give_way(runtime: Runtime, nbytes: int) -> None:
    """Have weights leave the computing tier for a cache: evenly spread pages, of `nbytes` and of slots that they pass
    through from then on, get a home in the first tier below with room.

    Raises:
        TierError: there is too little room below, or a CUDA graph needs them where they are.
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
                f"{key}: no tier below {stack.names[0]} has room for {living[key]} more bytes, which were to give way "
                "to a KV cache; raise its budget, enable tiers.ssd, or ask for less room"
            )
        room[level] -= living[key] + level.overhead_bytes
        homes[key] = level.tier.name
    stack.rehome(homes)
    for attachment in runtime.attachments:
        attachment.registry.forget_ready()  # views would keep the memory of pages that moved


def _by_key(models: Iterable[Pages]) -> dict[str, str]:
    return {page.key: page.home for pages in models for _, layer in pages for page in layer}
