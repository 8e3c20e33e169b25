"""Sharded host memory: each rank keeps 1/N of every page, and an all-gather assembles pages on the GPUs.

Ranks that hold the same weights each keep 1/N of a page's bytes. A rank copies its shard over its own link to the
shard's offset in the page's slot, and the ranks all-gather the whole in place: each link carries 1/N of the bytes.
Pages are opaque; shards are byte ranges.

All ranks must gather the same pages in the same order. They do: policies depend on the access order alone, budgets are
agreed on, and no worker thread ever gathers. Divergence and damage are detected once per pass: `Gathering` compares a
digest of the order across ranks, and the sum of all gathered words with the sum of the words written.
"""

import contextlib
import ctypes
from collections.abc import Callable, Collection, Hashable
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
import xxhash

from vbrt.errors import TierError
from vbrt.host import accelerator
from vbrt.host.host_memory import bytes_view
from vbrt.tiers.protocols.carrier import Source
from vbrt.tiers.protocols.tier import Holder
from vbrt.tiers.storage.device_copy import Signal, checked, copying, cuda_runtime, wait_for
from vbrt.tiers.storage.memory_tiers import Buffer, MemoryTier
from vbrt.tiers.storage.sharing_ranks import Sharers

__all__ = ["Gathering", "PartRoom", "SharedTier"]

_ALIGN = 16
_CELLS = 1 << 16  # for sums, one per page


class PartRoom:
    """Room for this rank's part of a page.

    Attributes:
        nbytes: of the whole page; 0 until it is counted.
        room: the part, followed by the remainder of the division into equal parts, which every rank keeps.
        digest: of the part, as written.
        total: sum of the page's int64 words, modulo 2^64, as a signed number.
        cell: index of the page's sum of gathered words.
    """

    __slots__ = ("__weakref__", "cell", "digest", "nbytes", "part_bytes", "room", "total")

    def __init__(self, part_bytes: int) -> None:
        self.nbytes, self.part_bytes = 0, part_bytes
        self.room: Buffer | None = None
        self.digest, self.total, self.cell = b"", 0, 0

    @property
    def asynchronous(self) -> bool:
        """True if copies to a GPU are asynchronous."""
        return self.room.asynchronous

    @property
    def part(self) -> torch.Tensor:
        """This rank's part."""
        return self.room.tensor[: self.part_bytes]

    @property
    def rest(self) -> torch.Tensor:
        """Remainder that every rank keeps."""
        return self.room.tensor[self.part_bytes :]

    @property
    def fences(self) -> dict[Hashable, torch.Event]:
        """Fences, see `Buffer`."""
        return self.room.fences

    def fence(self, stream: torch.Stream) -> torch.Event:
        """Fence the part: no reuse before the work queued so far on `stream` has ended."""
        return self.room.fence(stream)


class SharedTier:
    """Store of pages sharded over ranks; budget and byte counters are totals over all ranks.

    Args:
        sharers: the ranks.
        capacity_bytes: of pages, over all ranks.
        pinned: pin the parts.
    """

    name, memory, reads_ahead = "cpu", False, False
    overhead_bytes = stuck_bytes = 0
    device = torch.device("cpu")

    def __init__(self, sharers: Sharers, capacity_bytes: int, *, pinned: bool = False) -> None:
        self.sharers, self.capacity_bytes = sharers, capacity_bytes
        self.held_bytes = self.peak_bytes = 0
        self._parts = MemoryTier(self.name, self.device, 1 << 62, pinned=pinned)
        self.fallbacks = self._parts.fallbacks
        self.gathering = Gathering(self)
        self.rooms: dict[str, PartRoom] = {}
        self._cells = 0  # next free one

    @property
    def used_bytes(self) -> int:
        """Equal to `held_bytes`: there is no free list."""
        return self.held_bytes

    @property
    def own_bytes(self) -> int:
        """Bytes of host memory that this rank holds."""
        return self._parts.held_bytes

    def reserve(self, nbytes: int, holder: Holder, *, reserved_bytes: int = 0) -> bool:
        """Reserve room for a page; see `Tier.reserve`."""
        if self.held_bytes + reserved_bytes + nbytes > self.capacity_bytes:
            return False
        part = nbytes // (self.sharers.size * _ALIGN) * _ALIGN
        holder.room = room = PartRoom(part)  # before its part is allocated, so that freeing the room frees that, too
        self._parts.reserve(nbytes - part * (self.sharers.size - 1), room)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + nbytes)
        room.nbytes = nbytes  # no call in between
        self.held_bytes += nbytes
        return True

    def put(self, room: PartRoom, page: torch.Tensor, *, key: str, layout: dict | None = None) -> None:
        """Keep this rank's part of a page, and the checksums of the whole."""
        part, ranks = room.part_bytes, self.sharers.size
        room.part.copy_(page[self.sharers.rank * part :][:part])
        room.rest.copy_(page[ranks * part :])
        room.digest, room.total = _digest(room.room.tensor), _total(page)
        room.cell, self._cells = self._cells, (self._cells + 1) % _CELLS
        self.rooms[key] = room
        self.gathering.written(key, xxhash.xxh3_64_intdigest(bytes_view(page)))

    def get(self, room: PartRoom, out: torch.Tensor, *, key: str) -> None:
        """All-gather a page in host memory. Raises TierError: a rank is gone, or the bytes are wrong."""
        self.gathering.gather(Carried(key, room, out, room.part), self.sharers.hosts)
        self.gathering.check(wrong=_total(out) != room.total)

    def read_items(self, room: PartRoom, offsets: torch.Tensor, nbytes: int, *, key: str) -> torch.Tensor:
        """Raise TierError: ranks need different rows, and no rank has the whole page."""
        raise TierError(
            f"{key}: rows of a page that ranks share cannot be read by one of them; set weights.embeddings = false or "
            "tiers.cpu.shared = false"
        )

    def read_ahead(self, room: PartRoom) -> None:
        """Do nothing: parts are in memory already."""

    def damaged(self) -> list[str]:
        """Return the keys of pages whose part on this rank fails its digest."""
        rooms = [(key, room) for key, room in self.rooms.items() if room.nbytes]
        return [key for key, room in rooms if _digest(room.room.tensor) != room.digest]

    def free(self, room: PartRoom, *, reuse: bool) -> None:
        """Free a room."""
        if room.room is not None:
            self._parts.free(room.room, reuse=False)
            self.held_bytes -= room.nbytes  # no call in between
            room.nbytes, room.room = 0, None

    def trim(self, held_bytes: int = 0) -> None:
        """Do nothing: there is no free list."""

    def after_fork(self, rooms: Collection[PartRoom]) -> None:
        """Reset the accounting in a forked child to these rooms."""
        self.held_bytes = sum(room.nbytes for room in rooms)
        self._parts.after_fork([room.room for room in rooms])

    def close(self) -> None:
        """Do nothing: `free` releases the rooms."""


class Carried(NamedTuple):
    """Prepared gather of a page: its key, its room, and the target slot on the computing device.

    own: this rank's part of the target. start: its H2D copy. words: the page as int64; total: output of their sum.
    """

    key: str
    room: PartRoom
    target: torch.Tensor
    own: torch.Tensor
    start: Callable[[], int] | None = None
    words: torch.Tensor | None = None
    total: torch.Tensor | None = None


class Gathering:
    """Carrier that all-gathers pages, and detects ranks that diverge."""

    together = True

    def __init__(self, tier: SharedTier) -> None:
        self._tier, self._sharers = tier, tier.sharers
        self._keys: list[str] = []  # gathered since the last check
        self._written = 0
        self._recorded: list[Carried] | None = None  # gathers of the open capture
        self._runtime: ctypes.CDLL | None = None
        self._stream = self._fetching = self._fetched = self._eager = None

    def use(self, joining: torch.Stream | None) -> None:
        """Set the stream that gathers, on its device; H2D copies of parts get a second stream. None: on the CPU.

        Raises TierError: the CUDA runtime cannot be called.
        """
        device = torch.device("cpu") if joining is None else joining.device
        with torch.inference_mode(False):
            self._sums = torch.zeros(_CELLS, dtype=torch.int64, device=device)
        if joining is None:
            return
        self._runtime = cuda_runtime()
        if self._runtime is None:
            raise TierError("tiers.cpu.shared: the CUDA runtime that torch uses cannot be called; set shared = false")
        self._stream, self._fetching = joining, accelerator.Stream(device)
        self._fetched = Signal(self._runtime, device)
        joining.wait_stream(accelerator.current_stream(device))

    def written(self, key: str, digest: int) -> None:
        """Add a written page to the checksum that ranks compare; independent of order."""
        self._written = (self._written + digest + xxhash.xxh3_64_intdigest(key.encode())) % (1 << 64)

    # -- Carrier ------------------------------------------------------------------------------------------------------

    def take(self, source: Source) -> bool:
        """True if the page of a slot is in this tier."""
        return source.tier is self._tier

    def parts(self, target: torch.Tensor, source: Source) -> Carried:
        """Return the prepared gather of a page."""
        room, start = source.room, None
        at = room.part_bytes * self._sharers.rank
        own = room.part if self._stream is None else target[at : at + room.part_bytes]
        if self._stream is not None:
            start = copying(self._runtime, own, room.part, self._fetching)
        words, total = target.view(torch.int64), self._sums[room.cell]
        return Carried(source.page.key, room, target, own, start, words, total)

    def wait(self, event: torch.Event) -> None:
        """Make later H2D copies of parts wait for an event."""
        if self._fetching is not None:
            wait_for(self._runtime, event, self._fetching)

    def copy(self, carried: Carried) -> None:
        """Copy this rank's part over its link, and gather the others'."""
        if self._stream is None:
            self._gather(carried)
        else:
            checked(carried.start())
            self._fetched.pass_on(self._fetching, self._stream)
            with accelerator.stream(self._stream):
                self._gather(carried)
        if self._recorded is None:
            self._keys.append(carried.key)
        else:
            self._recorded.append(carried)

    def _gather(self, carried: Carried) -> None:
        self.gather(carried, self._sharers.group)
        torch.sum(carried.words, 0, out=carried.total)

    def gather(self, carried: Carried, group: "dist.ProcessGroup") -> None:
        """All-gather a page on the current stream, from the parts of all ranks."""
        target, room = carried.target, carried.room
        equal = room.part_bytes * self._sharers.size
        try:
            if equal:
                dist.all_gather_into_tensor(target[:equal], carried.own, group=group)
        except RuntimeError as error:
            raise self._sharers.lost(carried.key, error) from error
        if equal < len(target):
            target[equal:].copy_(room.rest, non_blocking=True)

    # -- CUDA graphs --------------------------------------------------------------------------------------------------

    def begin_capture(self) -> None:
        """Record the gathers that follow into the CUDA graph under capture, until `end_capture`; replays count them."""
        self._eager, self._fetched, self._recorded = self._fetched, Signal(self._runtime, self._stream.device), []

    def join(self) -> None:
        """Make the gathering stream wait for all H2D copies."""
        self._stream.wait_stream(self._fetching)

    def end_capture(self) -> list[Carried]:
        """Return to eager gathers, if a capture is open; return its gathers."""
        recorded, self._recorded = self._recorded or [], None
        if self._eager is not None:
            self._fetched, self._eager = self._eager, None
        return recorded

    def follow(self, event: torch.Event, recorded: list[Carried]) -> None:
        """Order later copies after a replay, and count its gathers."""
        wait_for(self._runtime, event, self._fetching, self._stream)
        self._keys += [carried.key for carried in recorded]

    # -- checks across ranks ------------------------------------------------------------------------------------------

    def check(self, *, wrong: bool = False) -> None:
        """Compare the gathers of all ranks since the last check, if there were any.

        Args:
            wrong: True if this rank has found wrong bytes already.

        Raises:
            TierError: on all ranks, with the difference: a rank is gone, a part is damaged, the order of pages differs,
                or the weights differ.
        """
        if not (self._keys or wrong):
            return
        keys, self._keys = self._keys, []
        order = xxhash.xxh3_64_intdigest("\n".join(keys).encode())
        rows = self._sharers.exchange([_signed(order), _signed(self._written)], "what was gathered")
        wrong = wrong or not self._are_right(keys)  # after the first exchange, which detects a lost rank
        bad = self._sharers.exchange([wrong], "what was gathered")
        if rows.count(rows[0]) < len(rows) or [1] in bad:
            self._explain(rows, keys)

    def _are_right(self, keys: list[str]) -> bool:
        """True if the checksums of the last gathers equal those of the pages as written."""
        rooms = [room for room in map(self._tier.rooms.get, set(keys)) if room is not None and room.nbytes]
        with contextlib.nullcontext() if self._stream is None else accelerator.stream(self._stream):
            sums = self._of(rooms)
        return all(sums[at] == room.total for at, room in enumerate(rooms))

    def _of(self, rooms: list[PartRoom]) -> list[int]:
        cells = torch.tensor([room.cell for room in rooms], dtype=torch.int64, device=self._sums.device)
        return self._sums[cells].tolist()

    def _explain(self, rows: list[list[int]], keys: list[str]) -> None:
        """Raise TierError with the cause by name; the same on every rank."""
        told = self._sharers.tell((keys, self._tier.damaged()), "what went wrong")
        for rank, (_, damaged) in enumerate(told):
            if damaged:
                raise TierError(
                    f"{damaged[0]}: the part of rank {rank} does not hold the bytes that were written; its memory is "
                    "damaged, start the ranks again"
                )
        first = told[0][0]
        for rank, (taken, _) in enumerate(told):
            if rows[rank][1] != rows[0][1]:
                raise TierError(
                    f"tiers.cpu.shared: ranks 0 and {rank} hold other weights; give all ranks one model and one config"
                )
            if taken != first:
                here, there = next((a, b) for a, b in zip_longest(first, taken, fillvalue="nothing") if a != b)
                raise TierError(
                    f"{here}: rank 0 took it where rank {rank} took {there}; ranks that share pages must run the same "
                    "layers in the same order"
                )
        raise TierError("tiers.cpu.shared: what was gathered is not what was written; start the ranks again")


def _digest(part: torch.Tensor) -> bytes:
    return xxhash.xxh3_64_digest(bytes_view(part))


def _total(page: torch.Tensor) -> int:
    return int(page.view(torch.int64).sum())


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
