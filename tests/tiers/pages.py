"""Pages on an ssd tier that tests call by name, without a stack."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vbrt.tiers.protocols.tier import Reservation, Tier
from vbrt.tiers.storage.memory_tiers import MemoryTier
from vbrt.tiers.storage.ssd_tier import PageFile, SsdTier

PAGE = 4096
CHUNK = 2 << 20  # what is read and hashed at a time


def reserved(tier: Tier, nbytes: int, **options: int) -> Any:
    """Reserve room; None if there is none."""
    holder = Reservation()
    assert tier.reserve(nbytes, holder, **options) == (holder.room is not None)
    return holder.room


class NamedSsd(SsdTier):
    """Keeps its rooms by name."""

    def __init__(self, root: Path, capacity_bytes: int = 1 << 30, **options) -> None:
        super().__init__(root, capacity_bytes, **options)
        self.rooms: dict[str, PageFile] = {}

    def write(self, key: str, page: torch.Tensor, layout: dict | None = None) -> None:
        """Reserve and put, as a stack does; the room is freed if that fails."""
        room = reserved(self, page.numel() + self.overhead_bytes)
        try:
            self.put(room, page, key=key, layout=layout)
        except BaseException:
            self.free(room)
            raise
        self.rooms[key] = room

    def drop(self, key: str) -> None:
        """Free the room of a page."""
        self.free(self.rooms[key])


def page(nbytes: int = 3 * PAGE, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def buffer(nbytes: int) -> torch.Tensor:
    """Aligned memory, as the stack has it."""
    return reserved(MemoryTier("cpu", torch.device("cpu"), 1 << 40), nbytes).tensor


def read(tier: NamedSsd, key: str, nbytes: int = 3 * PAGE) -> torch.Tensor:
    out = buffer(nbytes)
    tier.get(tier.rooms[key], out, key=key)
    return out


def file_of(tier: NamedSsd, key: str) -> Path:
    return tier.rooms[key].path


def forked(work: Callable[[], object]) -> int:
    """Fork a child that calls `work` and ends, with 0 if that raised nothing; return its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - printed, and the exit status says so
            traceback.print_exc()
        finally:
            os._exit(1)
    return child
