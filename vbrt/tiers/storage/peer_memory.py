"""The neighbours' memory: pages on other GPUs of this machine, which come to the computing one over NVLink.

One process has all the GPUs. Every neighbour has an equal share of the budget, and a page lies whole on one of them, on
that with the most room left. The tier keeps no copies: pages from further down pass by it.
"""

from collections.abc import Collection, Sequence

import torch

from vbrt.errors import TierError
from vbrt.tiers.protocols.tier import Holder
from vbrt.tiers.storage.device_copy import reach
from vbrt.tiers.storage.memory_tiers import Buffer, MemoryTier

__all__ = ["PeerTier"]


class _Part(MemoryTier):
    """One neighbour's memory."""

    def _new(self, nbytes: int) -> Buffer:
        buffer = super()._new(nbytes)
        buffer.part = self
        return buffer


class PeerTier:
    """Pages in the memory of other GPUs. Not thread-safe by itself, as `MemoryTier`.

    Args:
        devices: the neighbours.
        capacity_bytes: the budget of all of them together, in equal shares.
        computing: the GPU that the pages are for; None: nothing is asked of it.
    """

    name, memory, reads_ahead = "peer", True, False
    overhead_bytes = 0

    def __init__(
        self, devices: Sequence[torch.device], capacity_bytes: int, *, computing: torch.device | None = None
    ) -> None:
        self.parts = [_Part(self.name, device, 0) for device in devices]
        self.device = self.parts[0].device
        self._largest_bytes = 0  # of a page so far
        self.capacity_bytes = capacity_bytes
        self.fallbacks: list[str] = []
        for part in self.parts if computing is not None else ():
            reason = reach(computing, part.device)
            self.fallbacks += [f"tiers.peer: {reason}"] if reason else []

    @property
    def capacity_bytes(self) -> int:
        """The budget; assigning divides it."""
        return self._capacity_bytes

    @capacity_bytes.setter
    def capacity_bytes(self, nbytes: int) -> None:
        self._capacity_bytes = nbytes
        for part in self.parts:
            part.capacity_bytes = nbytes // len(self.parts)

    @property
    def stuck_bytes(self) -> int:
        """Bytes that may be left of each neighbour's share when none has room for a page any more."""
        if len(self.parts) == 1 or not self._largest_bytes:
            return 0
        return sum(_room_left(part) % self._largest_bytes for part in self.parts)

    @property
    def held_bytes(self) -> int:
        """Bytes that are held now."""
        return sum(part.held_bytes for part in self.parts)

    @property
    def used_bytes(self) -> int:
        """Bytes of the buffers that are in use."""
        return sum(part.used_bytes for part in self.parts)

    @property
    def peak_bytes(self) -> int:
        """The most that each neighbour has held, added up; assigning begins again from what is held."""
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
        """True if a freed buffer waits for the next page of its size."""
        return buffer.part.caches(buffer)

    def take(self, buffer: Buffer) -> None:
        """Take this buffer, which is cached."""
        buffer.part.take(buffer)

    def trim(self, held_bytes: int = 0) -> None:
        """Give cached buffers back until at most `held_bytes` are held, as far as there are any."""
        for part in self.parts:
            part.trim(max(0, held_bytes - self.held_bytes + part.held_bytes))

    def after_fork(self, buffers: Collection[Buffer]) -> None:
        """Keep these buffers only, in a forked child."""
        for part in self.parts:
            part.after_fork([buffer for buffer in buffers if buffer.part is part])

    def close(self) -> None:
        """Do nothing: buffers go back as they are freed and trimmed."""


def _room_left(part: MemoryTier) -> int:
    return part.capacity_bytes - part.used_bytes
