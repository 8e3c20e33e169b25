"""Tier protocol: allocation of pages within a budget, and access to their bytes.

There are two kinds. A *memory* holds a page as a tensor that kernels and copies use in place. A *store* keeps it in
another form (a file, compressed, in a neighbour's memory): it writes a page from host memory and reads it back.

The stack is a list of tiers. The first must be a memory; any class with this protocol may stand below it. A tier with
a policy also caches copies of pages from deeper tiers; a tier without one holds only the pages whose home it is, and
pages from deeper tiers bypass it.

A config can name a tier once `vbrt.config.tier_records` has a record of it.
"""

from collections.abc import Collection
from typing import Any, Protocol

import torch

__all__ = ["Holder", "Reservation", "Room", "Store", "Tier"]


class Room(Protocol):
    """Allocation for one page: reserved before its bytes arrive, held until it is freed."""

    @property
    def nbytes(self) -> int:
        """Bytes charged to the budget: the reserved size, or less once a store knows the size that it needs."""


class Holder(Protocol):
    """Owner of a room, such as a page's slot. `reserve` stores the room in it before it returns."""

    room: Any


class Reservation:
    """Holder of a room that belongs to no slot yet."""

    __slots__ = ("room",)

    def __init__(self) -> None:
        self.room: Any = None


class Tier(Protocol):
    """Storage tier. `reserve`, `free` and `trim` run under the stack's lock and must be fast; `put` and `get` run
    outside it: several threads may `get` concurrently while one thread puts.

    Attributes:
        name: as in the config and in links such as "ssd>cpu".
        device: of a memory's tensors; the CPU for a store.
        memory: True for a memory, whose rooms are `Buffer`s.
        overhead_bytes: overhead per page, added to its own bytes.
        capacity_bytes: the budget; the stack changes it.
        held_bytes, peak_bytes: bytes allocated now, free lists included, and their high-water mark.
        used_bytes: bytes of `held_bytes` that are in rooms.
        stuck_bytes: bytes that can no longer be freed (a file that cannot be removed).
        reads_ahead: True if `read_ahead` prefetches a page without using this process's cores.
        fallbacks: messages for users: where the tier falls back to another way than the config asks for.
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
        """Reserve room for a page of `nbytes`, overhead included, in `holder.room`; False while the budget has too
        little besides `reserved_bytes`.

        Interrupt safety: the last two statements store the room and count it, with no call in between, so that
        Ctrl-C finds both done or neither.
        """

    def free(self, room: Any, *, reuse: bool) -> None:
        """Free a room; with `reuse` its memory may go to a free list for the next room of its size. An
        interrupted call may be repeated."""

    def trim(self, held_bytes: int = 0) -> None:
        """Return cached memory to the system until at most `held_bytes` are held."""

    def after_fork(self, rooms: Collection[Any]) -> None:
        """Reset the accounting in a forked child to these rooms."""

    def close(self) -> None:
        """Close the tier; all rooms that are not in use have been freed before. Idempotent."""


class Store(Tier, Protocol):
    """Tier that writes and reads pages instead of holding them as tensors."""

    def put(self, room: Any, page: torch.Tensor, *, key: str, layout: dict | None = None) -> None:
        """Write a page (uint8, CPU, contiguous) into its room. Raises TierError."""

    def get(self, room: Any, out: torch.Tensor, *, key: str) -> None:
        """Read a page into `out` (uint8, CPU, aligned to 4096 bytes) and verify it.

        Raises TierError."""

    def read_items(self, room: Any, offsets: torch.Tensor, nbytes: int, *, key: str) -> torch.Tensor:
        """Return items of a page, verified: uint8 [n, nbytes] from byte offsets int64 [n]."""

    def is_cached(self, room: Any) -> bool:
        """True if a page is where `read_ahead` would bring it, such as the page cache; never blocks, never raises."""

    def read_ahead(self, room: Any) -> None:
        """Start to prefetch a page, such as into the page cache; never raises."""
