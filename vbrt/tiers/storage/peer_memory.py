"""Peer tier: pages in the memory of other GPUs of this machine, copied to the computing GPU over NVLink.

One process owns all the GPUs. Each neighbour has an equal share of the budget; a page is placed whole on the neighbour
with the most room. The tier caches no copies: pages from deeper tiers bypass it.
"""

from collections.abc import Collection, Sequence

import torch

from vbrt.errors import TierError
from vbrt.tiers.protocols.tier import Holder
from vbrt.tiers.storage.device_copy import reach
from vbrt.tiers.storage.memory_tiers import Buffer, MemoryTier

__all__ = ["PeerTier"]


class _Part(MemoryTier):
    """Memory of one neighbour."""

    def _new(self, nbytes: int) -> Buffer:
        buffer = super()._new(nbytes)
        buffer.part = self
        return buffer


class PeerTier:
    """Memory tier on other GPUs. Not thread-safe, like `MemoryTier`.

    Args:
        devices: the neighbour GPUs.
        capacity_bytes: total budget, in equal shares per neighbour.
        computing: GPU that reads the pages, for peer access; None skips the check.
    """

    name, memory, reads_ahead = "peer", True, False
    overhead_bytes = 0

    def __init__(
        self, devices: Sequence[torch.device], capacity_bytes: int, *, computing: torch.device | None = None
    ) -> None:
        self.parts = [_Part(self.name, device, 0) for device in devices]
        self.device = self.parts[0].device
        self._largest_bytes = 0  # largest page so far
        self.capacity_bytes = capacity_bytes
        self.fallbacks: list[str] = []
        for part in self.parts if computing is not None else ():
            reason = reach(computing, part.device)
            self.fallbacks += [f"tiers.peer: {reason}"] if reason else []

    @property
    def capacity_bytes(self) -> int:
        """Total budget; assignment divides it among the neighbours."""
        return self._capacity_bytes

    @capacity_bytes.setter
    def capacity_bytes(self, nbytes: int) -> None:
        self._capacity_bytes = nbytes
        for part in self.parts:
            part.capacity_bytes = nbytes // len(self.parts)

    @property
    def stuck_bytes(self) -> int:
        """Bytes lost to fragmentation: the rest of each neighbour's share that is smaller than the largest page."""
        if len(self.parts) == 1 or not self._largest_bytes:
            return 0
        return sum(_room_left(part) % self._largest_bytes for part in self.parts)

    @property
    def held_bytes(self) -> int:
        """Bytes allocated now, free lists included."""
        return sum(part.held_bytes for part in self.parts)

    @property
    def used_bytes(self) -> int:
        """Bytes of the buffers in use."""
        return sum(part.used_bytes for part in self.parts)

    @property
    def peak_bytes(self) -> int:
        """Sum of the neighbours' high-water marks; assignment resets them to the bytes held now."""
        return sum(part.peak_bytes for part in self.parts)

    @peak_bytes.setter
    def peak_bytes(self, nbytes: int) -> None:
        for part in self.parts:
            part.peak_bytes = part.held_bytes

    def reserve(self, nbytes: int, holder: Holder, *, reserved_bytes: int = 0) -> bool:
        """Reserve a buffer on the neighbour with the most room, in `holder.room`; False while none has room for it."""
        if self.used_bytes + reserved_bytes + nbytes > self.capacity_bytes:
            return False
        self._largest_bytes = max(self._largest_bytes, nbytes)
        part = max(self.parts, key=_room_left)
        if nbytes > _room_left(part):
            raise TierError(
                f"tier peer: {_room_left(part)} bytes are left of each neighbour's share, none has room for a page of "
                f"{nbytes} bytes; raise tiers.peer.budget, or lower it so that fewer pages are placed there"
            )
        return part.reserve(nbytes, holder)

    def free(self, buffer: Buffer, *, reuse: bool) -> None:
        """Free a buffer; see `MemoryTier.free`."""
        buffer.part.free(buffer, reuse=reuse)

    def caches(self, buffer: Buffer) -> bool:
        """True if a buffer is on the free list of its size."""
        return buffer.part.caches(buffer)

    def take(self, buffer: Buffer) -> None:
        """Take this buffer from its free list."""
        buffer.part.take(buffer)

    def trim(self, held_bytes: int = 0) -> None:
        """Release free-list buffers until at most `held_bytes` are held, or none is left."""
        for part in self.parts:
            part.trim(max(0, held_bytes - self.held_bytes + part.held_bytes))

    def after_fork(self, buffers: Collection[Buffer]) -> None:
        """Reset the accounting in a forked child to these buffers."""
        for part in self.parts:
            part.after_fork([buffer for buffer in buffers if buffer.part is part])

    def close(self) -> None:
        """Do nothing: `free` and `trim` release the buffers."""


def _room_left(part: MemoryTier) -> int:
    return part.capacity_bytes - part.used_bytes
