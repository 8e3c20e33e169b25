"""Where the pages of models live that share a runtime: one plan for all of them."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vbrt.config.tier_records import TIERS
from vbrt.errors import TierError
from vbrt.layers import Weight
from vbrt.model.layer_registry import Registry
from vbrt.residency.expert_room import largest_pages
from vbrt.residency.plan import Beside, PageSpec, leased_pages, place, with_whole_pages
from vbrt.residency.room_division import auto_scan
from vbrt.residency.scheduled import ScheduledPolicy
from vbrt.residency.simulate import make_policy
from vbrt.tiers import PeerTier

if TYPE_CHECKING:
    from vbrt.model.runtime import Runtime

__all__ = ["Homes", "current_homes", "place_beside", "place_pages", "restore_homes", "use_freed_room"]

_BESIDE = "beside: "  # no key of a plan begins so

Pages = list[tuple[Weight, tuple[PageSpec, ...]]]
Homes = list[tuple[Registry, Pages]]


def place_beside(runtime: "Runtime") -> Beside:
    """Return what a further model finds on a runtime."""
    layers = (layer for attachment in runtime.attachments for _, layer in attachment.registry.pages())
    renamed = (tuple(replace(page, key=f"{_BESIDE}{page.key}") for page in layer) for layer in layers)
    return Beside(runtime.budgets, tuple(renamed))


def current_homes(runtime: "Runtime") -> Homes:
    """Return where the pages of all models live, or will, for `restore_homes`."""
    return [(attachment.registry, attachment.registry.pages()) for attachment in runtime.attachments]


def restore_homes(runtime: "Runtime", homes: Homes) -> None:
    """Give pages the homes that they had."""
    for registry, pages in homes:
        registry.assign_homes(_by_key([pages]))
        registry.forget_ready()
    runtime.stack.rehome(_by_key(pages for _, pages in homes))


def place_pages(runtime: "Runtime") -> None:
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


def _suit_policies(runtime: "Runtime", layers: Sequence[tuple[PageSpec, ...]]) -> None:
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


def _widen_leases(runtime: "Runtime", pages: int) -> None:
    """Have policies that keep room for one lease keep it for a lease of so many pages."""
    for level in runtime.stack.levels:
        if getattr(level.policy, "group", pages) < pages:
            level.policy.group = pages


def use_freed_room(runtime: "Runtime") -> None:
    """Have all pages live in the top tier, if a model that was closed has left room for them, and for those of layers
    that are yet to be encoded: these would find no room to pass through."""
    top, stack = runtime.stack.names[0], runtime.stack
    waiting = [
        layer for attachment in runtime.attachments for handle, layer in attachment.registry.pages() if not handle.keys
    ]
    to_come = sum(page.nbytes for layer in waiting for page in layer)
    if to_come and to_come + sum(page.nbytes for page in stack.pages.values()) > runtime.budgets[top]:
        return
    with contextlib.suppress(TierError):  # a page that cannot be read stays; whoever leases it is told
        runtime.stack.set_budget(top, runtime.budgets[top], runtime.largest_layer_bytes)
    for attachment in runtime.attachments:
        attachment.registry.forget_ready()


def _by_key(models: Iterable[Pages]) -> dict[str, str]:
    return {page.key: page.home for pages in models for _, layer in pages for page in layer}
