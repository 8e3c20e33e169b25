"""Counters of a cache of keys and values whose pages live in the tiers."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CacheStats"]


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A cache of keys and values in the tiers. Bytes are by tier or by link; what it wrote is on links downwards, such
    as "gpu>cpu". An extent of pages is a hit where it lives on the computing device, a miss where it came up."""

    bits: int
    layers: int
    tokens: int
    tier_bytes: Mapping[str, int]
    hits: int
    misses: int
    prefetched: int
    bytes_moved: Mapping[str, int]
    wait_us: int
