"""Counters of a KV cache whose pages live in the tiers."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CacheStats"]


@dataclass(frozen=True, slots=True)
class CacheStats:
    """KV cache in the tiers. Bytes are by tier or by link; writes count on links downwards, such as "gpu>cpu". An
    extent of pages is a hit if it is resident on the computing device, and a miss if it was copied there."""

    bits: int
    layers: int
    tokens: int
    tier_bytes: Mapping[str, int]
    hits: int
    misses: int
    prefetched: int
    bytes_moved: Mapping[str, int]
    wait_us: int
