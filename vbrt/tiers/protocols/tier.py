"""The protocol of tiers: room for pages within a budget, and their bytes.

There are two sorts. A *memory* holds a page as a tensor that kernels and copies use in place. A *store* keeps it in
some other form (a file, compressed, at a neighbour's) and is asked to write it from host memory and to read it back.
The stack is a list of tiers, each of them a file of its own: whatever keeps this protocol may stand anywhere below the
first, which must be a memory. Any tier may have a policy and keep copies of pages from further down; without one it
keeps the pages that live there only, and pages from below pass by it.

`vbrt.config.tier_records` says what else a tier needs before a config can name it.
"""

from collections.abc import Collection
from typing import Any, Protocol

import torch

__all__ = ["Holder", "Reservation", "Room", "Store", "Tier"]


class Room(Protocol):
    """Room for one page, from before its bytes come until it is freed."""

    @property
    def nbytes(self) -> int:
        """Bytes of the budget that it takes: what was reserved, or less once a store knows better."""


class Holder(Protocol):
    """Owner of a room, such as a page's slot: a reservation is written into it before the call returns."""

    room: Any


class Reservation:
    """Holder of a room that has no slot yet."""

    __slots__ = ("room",)

    def __init__(self) -> None:
        self.room: Any = None


class Tier(Protocol):
    """A place for pages. `reserve`, `free` and `trim` are called under the stack's lock, and are quick; `put` and `get`
    are not, and several threads may get at a time while one puts.

    Attributes:
        name: as in the config and in links such as "ssd>cpu".
        device: of a memory's tensors; the CPU for a store.
        memory: True for a memory, whose rooms are `Buffer`s.
        overhead_bytes: what a page costs beside its own bytes.
        capacity_bytes: the budget; the stack changes it.
        held_bytes, peak_bytes: bytes that are held now, caches included, and at most so far.
        used_bytes: of those, the bytes of rooms.
        stuck_bytes: held bytes that cannot be freed any more (a file that cannot be removed).
        reads_ahead: True if `read_ahead` brings a page nearer without work for this process's cores.
        fallbacks: sentences for users: what the tier does in another way than it was asked to.
    """

    name: str
    device: torch.device
    memory: bool
    overhead_bytes: int
    capacity_bytes: int
    held_bytes: int
    peak_bytes: int
    stuck_bytes: int
    fallbacks: list[str]

    @property
    def used_bytes(self) -> int: ...

    @property
    def reads_ahead(self) -> bool: ...

    def reserve(self, nbytes: int, holder: Holder, *, reserved_bytes: int = 0) -> bool:
        """Reserve room for a page whose bytes and overhead are `nbytes`, in `holder.room`; False while the budget has
        none beside `reserved_bytes`.

        Storing the room and counting it are the last two things that it does, with no call in between: Ctrl-C finds it
        counted and held, or neither.
        """

    def free(self, room: Any, *, reuse: bool) -> None:
        """Free a room; with `reuse` its memory may be cached for the next one of its size. A call that was
        interrupted may be repeated."""

    def trim(self, held_bytes: int = 0) -> None:
        """Give cached memory back to the system until at most `held_bytes` are held."""

    def after_fork(self, rooms: Collection[Any]) -> None:
        """Go on in a forked child, where only these rooms are left."""

    def close(self) -> None:
        """End the tier, whose rooms have all been freed but for those that are still in use. Idempotent."""


class Store(Tier, Protocol):
    """A tier that writes and reads pages instead of holding them as tensors."""

    def put(self, room: Any, page: torch.Tensor, *, key: str, layout: dict | None = None) -> None:
        """Write a page (uint8, CPU, contiguous) into its room. Raises TierError."""

    def get(self, room: Any, out: torch.Tensor, *, key: str) -> None:
        """Read a page into `out` (uint8, CPU, aligned to 4096 bytes) and verify it.

        Raises TierError."""

    def read_items(self, room: Any, offsets: torch.Tensor, nbytes: int, *, key: str) -> torch.Tensor:
        """Return parts of a page, verified: uint8 [n, nbytes] at the offsets int64 [n]."""

    def is_cached(self, room: Any) -> bool:
        """Return whether a page is as near as `read_ahead` brings it; never waits, never fails."""

    def read_ahead(self, room: Any) -> None:
        """Begin to bring a page nearer; never fails."""
