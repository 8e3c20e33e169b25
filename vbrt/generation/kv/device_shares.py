"""How a KV cache divides its room on the computing device: open pages, the ring's slots, and the layers' shares."""

from dataclasses import dataclass

__all__ = ["Needs", "Sizes", "whole"]

_EXTENT_BYTES = 16 << 20  # a link's full speed needs copies of this size
_FEWEST_SLOTS, _MOST_SLOTS = 8, 32
_RING_PART = 8  # of the room, at most: where a third of all pages has its home there, two layers' others
_UNIT = 4096


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that each layer may have in extents, how many slots the ring has, and the bytes of the largest extent."""

    share: int
    slots: int
    extent: int


@dataclass(frozen=True, slots=True)
class Needs:
    """What a cache needs: a tail for each of its layers, pages of this size, and a ring where tiers lie below."""

    layers: int
    tail_bytes: int
    page_bytes: int
    ring: bool

    def divide(self, room: int, held: int = 0) -> Sizes:
        """Divide the room. The share is negative where there is too little.

        Args:
            held: bytes of the largest extent that is there already: a slot holds it.
        """
        ring = min(_MOST_SLOTS * _EXTENT_BYTES, (room - self._tails) // _RING_PART) if self.ring else 0
        slot = min(_EXTENT_BYTES, ring // _FEWEST_SLOTS) if self.ring else _EXTENT_BYTES
        extent = max(1, slot // self.page_bytes) * self.page_bytes
        extent = max(extent, held)
        slots = max(2, min(_MOST_SLOTS, ring // whole(extent))) if self.ring else 0
        return Sizes((room - self._tails - slots * whole(extent)) // self.layers, slots, extent)

    def fixed(self, sizes: Sizes) -> int:
        """Return the bytes that are needed whatever the tokens."""
        return self._tails + sizes.slots * whole(sizes.extent)

    @property
    def _tails(self) -> int:
        return (self.layers + 1) * whole(self.tail_bytes)  # while a batch changes a layer has two


def whole(nbytes: int) -> int:
    """Return the bytes of a stack's page that holds so many."""
    return -(-nbytes // _UNIT) * _UNIT
