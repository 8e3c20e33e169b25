"""Where the pages of models live that share a runtime: one plan for all of them."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from vbrt.config.tiers import TIERS
from vbrt.errors import TierError
from vbrt.layers import WeightHandle
from vbrt.residency.plan import Beside, PageSpec, place

if TYPE_CHECKING:
    from vbrt.model.runtime import Runtime

__all__ = ["homes_kept_on_failure", "place_beside", "place_pages", "use_freed_room"]

_BESIDE = "beside: "  # no key of a plan begins so

Pages = list[tuple[WeightHandle, tuple[PageSpec, ...]]]


def place_beside(runtime: "Runtime") -> Beside:
    """Return what a further model finds on a runtime."""
    layers = (layer for attachment in runtime.attachments for _, layer in attachment.registry.pages())
    renamed = (tuple(replace(page, key=f"{_BESIDE}{page.key}") for page in layer) for layer in layers)
    return Beside(runtime.budgets, tuple(renamed))


@contextlib.contextmanager
def homes_kept_on_failure(runtime: "Runtime") -> Iterator[None]:
    """In a `with` block that fails, give all pages the homes that they had before."""
    before = {attachment.registry: attachment.registry.pages() for attachment in runtime.attachments}
    try:
        yield
    except BaseException:
        for registry, pages in before.items():
            registry.assign_homes(_homes([pages]))
        runtime.stack.rehome(_homes(before.values()))
        raise


def place_pages(runtime: "Runtime") -> None:
    """Give the pages of all models the homes that one plan for all of them gives them.

    Raises:
        ConfigError: the tiers are too small for all of them.
        TierError: a page cannot be moved; see `homes_kept_on_failure`.
    """
    found = {attachment.registry: attachment.registry.pages() for attachment in runtime.attachments}
    layers = [layer for pages in found.values() for _, layer in pages]
    homes = place(layers, runtime.budgets, source=runtime.settings.source)
    if not all(TIERS[home].memory for home in homes.values()):
        runtime.open_stores()
    for registry in found:
        registry.assign_homes(homes)
    runtime.stack.rehome(homes)
    _widen_leases(runtime, max((len(layer) for layer in layers), default=1))
    for registry in found:
        registry.forget_ready()


def _widen_leases(runtime: "Runtime", pages: int) -> None:
    """Have policies that keep room for one lease keep it for a lease of so many pages."""
    for level in runtime.stack.levels:
        if getattr(level.policy, "group", pages) < pages:
            level.policy.group = pages


def use_freed_room(runtime: "Runtime") -> None:
    """Have all pages live in the top tier, if a model that was closed has left room for them."""
    top = runtime.stack.names[0]
    with contextlib.suppress(TierError):  # a page that cannot be read stays; whoever leases it is told
        runtime.stack.set_budget(top, runtime.budgets[top])
    for attachment in runtime.attachments:
        attachment.registry.forget_ready()


def _homes(models: Iterable[Pages]) -> dict[str, str]:
    return {page.key: page.home for pages in models for _, layer in pages for page in layer}
