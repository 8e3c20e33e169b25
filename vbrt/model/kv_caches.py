"""KV caches in the tiers of a runtime: their protocol, as the runtime sees it, and their counters."""

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Protocol

from vbrt.report.kv_counters import CacheStats

__all__ = ["TieredCache", "cache_stats"]


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
