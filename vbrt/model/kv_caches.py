"""Protocol of KV caches in a runtime's tiers, and their counters."""

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Protocol

from vbrt.report.kv_counters import CacheStats

__all__ = ["TieredCache", "cache_stats"]


class TieredCache(Protocol):
    """KV cache with pages in a runtime's tiers. `name`: in stats; `nbytes`: of its pages, in all tiers; `fallbacks`:
    messages for users."""

    name: str
    nbytes: int
    fallbacks: list[str]

    def movable(self) -> AbstractContextManager[None]:
        """Allow a budget change to move its pages, in a `with` block."""

    def stats(self) -> CacheStats:
        """Return its counters."""

    def close(self) -> None:
        """Free its pages."""


def cache_stats(caches: Collection[TieredCache]) -> dict[str, CacheStats]:
    """Return the counters of caches, by name."""
    return {cache.name: cache.stats() for cache in sorted(caches, key=lambda cache: cache.name)}
