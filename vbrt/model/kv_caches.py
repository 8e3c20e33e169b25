"""What a runtime knows of the caches of keys and values that live in its tiers."""

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from vbrt.errors import TierError
from vbrt.report.kv_counters import CacheStats
from vbrt.residency.room_division import spread

if TYPE_CHECKING:
    from vbrt.model.runtime import Runtime

__all__ = ["TieredCache", "cache_stats", "give_way"]

_PASSING_PAGES = 4  # slots for pages that stream from now on: two leased, two ahead


class TieredCache(Protocol):
    """A cache whose pages live in a runtime's tiers. `name`: in stats; `nbytes`: of its pages, in all tiers;
    `fallbacks`: what users should hear."""

    name: str
    nbytes: int
    fallbacks: list[str]

    def movable(self) -> AbstractContextManager[None]:
        """Let a budget change move its pages in a `with` block."""

    def stats(self) -> CacheStats:
        """Return its counters."""

    def close(self) -> None:
        """Free its pages."""


def cache_stats(caches: Collection[TieredCache]) -> dict[str, CacheStats]:
    """Return the counters of caches, by name."""
    return {cache.name: cache.stats() for cache in sorted(caches, key=lambda cache: cache.name)}


def give_way(runtime: "Runtime", nbytes: int) -> None:
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
