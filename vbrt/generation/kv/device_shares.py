"""Split of a KV cache's room on the computing device: tails (open pages), ring slots, and each layer's share."""

from dataclasses import dataclass

__all__ = ["Needs", "Sizes", "whole"]

_EXTENT_BYTES = 16 << 20  # copies of this size reach the link's full bandwidth
_FEWEST_SLOTS, _MOST_SLOTS = 8, 32
_RING_PART = 8  # denominator: at most an eighth of the room
_UNIT = 4096


@dataclass(frozen=True, slots=True)
class Sizes:
    """Per-layer bytes for extents, number of ring slots, and bytes of the largest extent."""

    share: int
    slots: int
    extent: int


@dataclass(frozen=True, slots=True)
class Needs:
    """Fixed needs of a cache: a tail per layer, pages of this size, and a ring if there are lower tiers."""

    layers: int
    tail_bytes: int
    page_bytes: int
    ring: bool

    def divide(self, room: int, held: int = 0) -> Sizes:
        """Split the room. The share is negative if the room is too small.

        Args:
            held: bytes of the largest existing extent, which a slot must hold.
        """
        ring = min(_MOST_SLOTS * _EXTENT_BYTES, (room - self._tails) // _RING_PART) if self.ring else 0
        slot = min(_EXTENT_BYTES, ring // _FEWEST_SLOTS) if self.ring else _EXTENT_BYTES
        extent = max(1, slot // self.page_bytes) * self.page_bytes
        extent = max(extent, held)
        slots = max(2, min(_MOST_SLOTS, ring // whole(extent))) if self.ring else 0
        return Sizes((room - self._tails - slots * whole(extent)) // self.layers, slots, extent)

    def fixed(self, sizes: Sizes) -> int:
        """Return the bytes needed independently of the number of tokens."""
        return self._tails + sizes.slots * whole(sizes.extent)

    @property
    def _tails(self) -> int:
        return (self.layers + 1) * whole(self.tail_bytes)  # one spare, for changes of a batch size


def whole(nbytes: int) -> int:
    """Round up to the stack's page granularity."""
    return -(-nbytes // _UNIT) * _UNIT
