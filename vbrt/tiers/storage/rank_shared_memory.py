"""Host memory that ranks share: each keeps a part of every page, and all gather the whole where they compute.

Ranks that hold the same weights each keep 1/N of a page's bytes. A rank copies its part over its own link into the
page's slot, at the part's place, and the ranks gather the whole there, in place: each link carries 1/N of the bytes.
Pages are opaque, parts are ranges of bytes.

All ranks must gather the same pages in the same order. They do, because policies decide by the order of accesses alone,
budgets are agreed on, and no worker thread ever gathers. What goes wrong nevertheless is found once a pass:
`Gathering` compares a digest of the order, and the sum of all gathered words with the sum of what was written.
"""

import contextlib
import ctypes
from collections.abc import Callable, Collection
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
import xxhash

from vbrt.errors import TierError
from vbrt.host.host_memory import bytes_view
from vbrt.tiers.protocols.carrier import Source
from vbrt.tiers.protocols.tier import Holder
from vbrt.tiers.storage.device_copy import Signal, checked, copying, cuda_runtime, wait_for
from vbrt.tiers.storage.memory_tiers import Buffer, MemoryTier
from vbrt.tiers.storage.sharing_ranks import Sharers

__all__ = ["Gathering", "PartRoom", "SharedTier"]

_ALIGN = 16
_CELLS = 1 << 16  # for sums, one for each page


class PartRoom:
    """Room for this rank's part of a page.

    Attributes:
        nbytes: of the whole page; 0 until it is counted.
        room: the part, and behind it the bytes that are left when all parts are equal, which every rank keeps.
        digest: of the part, as it was written.
        total: the sum of the page's words, modulo 2^64, as a signed number.
        cell: where the sums of gathered words are.
    """

    __slots__ = ("__weakref__", "cell", "digest", "nbytes", "part_bytes", "room", "total")

    def __init__(self, part_bytes: int) -> None:
        self.nbytes, self.part_bytes = 0, part_bytes
        self.room: Buffer | None = None
        self.digest, self.total, self.cell = b"", 0, 0

    @property
    def asynchronous(self) -> bool:
        """True if copies to a GPU do not block the thread that asks for them."""
        return self.room.asynchronous

    @property
    def part(self) -> torch.Tensor:
        """This rank's part."""
        return self.room.tensor[: self.part_bytes]

    @property
    def rest(self) -> torch.Tensor:
        """What every rank keeps."""
        return self.room.tensor[self.part_bytes :]

    @property
    def fences(self) -> dict[int, torch.cuda.Event]:
        """As a `Buffer` has them."""
        return self.room.fences

    def fence(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Keep the part from being overwritten before what `stream` has been given so far is done."""
        return self.room.fence(stream)


class SharedTier:
    """A store of pages of which each rank keeps a part; budgets and bytes are those of all ranks together.

    Args:
        sharers: the ranks.
        capacity_bytes: of pages, over all ranks.
        pinned: page-lock the parts.
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
        self._cells = 0  # that are taken

    @property
    def used_bytes(self) -> int:
        """All of `held_bytes`."""
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
        holder.room = room = PartRoom(part)  # before its part is there: freeing it frees that, too
        self._parts.reserve(nbytes - part * (self.sharers.size - 1), room)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + nbytes)
        room.nbytes = nbytes  # no call in between
        self.held_bytes += nbytes
        return True

    def put(self, room: PartRoom, page: torch.Tensor, *, key: str, layout: dict | None = None) -> None:
        """Keep this rank's part of a page, and note what the whole is."""
        part, ranks = room.part_bytes, self.sharers.size
        room.part.copy_(page[self.sharers.rank * part :][:part])
        room.rest.copy_(page[ranks * part :])
        room.digest, room.total = _digest(room.room.tensor), _total(page)
        room.cell, self._cells = self._cells, (self._cells + 1) % _CELLS
        self.rooms[key] = room
        self.gathering.written(key, xxhash.xxh3_64_intdigest(bytes_view(page)))

    def get(self, room: PartRoom, out: torch.Tensor, *, key: str) -> None:
        """Gather a page in host memory, with all ranks. Raises TierError: a rank is gone, or bytes are not right."""
        self.gathering.gather(Carried(key, room, out, room.part), self.sharers.hosts)
        self.gathering.check(wrong=_total(out) != room.total)

    def read_items(self, room: PartRoom, offsets: torch.Tensor, nbytes: int, *, key: str) -> torch.Tensor:
        """Refuse: ranks read other rows, and no rank has them."""
        raise TierError(
            f"{key}: rows of a page that ranks share cannot be read by one of them; set weights.embeddings = false or "
            "tiers.cpu.shared = false"
        )

    def read_ahead(self, room: PartRoom) -> None:
        """Do nothing: parts are in memory."""

    def damaged(self) -> list[str]:
        """Return the pages of which this rank's part does not hold what was written."""
        rooms = [(key, room) for key, room in self.rooms.items() if room.nbytes]
        return [key for key, room in rooms if _digest(room.room.tensor) != room.digest]

    def free(self, room: PartRoom, *, reuse: bool) -> None:
        """Free a room."""
        if room.room is not None:
            self._parts.free(room.room, reuse=False)
            self.held_bytes -= room.nbytes  # no call in between
            room.nbytes, room.room = 0, None

    def trim(self, held_bytes: int = 0) -> None:
        """Do nothing: freed rooms are not kept."""

    def after_fork(self, rooms: Collection[PartRoom]) -> None:
        """Keep these rooms only, in a forked child."""
        self.held_bytes = sum(room.nbytes for room in rooms)
        self._parts.after_fork([room.room for room in rooms])

    def close(self) -> None:
        """Do nothing: rooms go back as they are freed."""


class Carried(NamedTuple):
    """A page on its way: its name, its room, and the slot's bytes on the computing device.

    own: this rank's part of them. start: copies it there. words, total: of the whole page, and where their sum goes.
    """

    key: str
    room: PartRoom
    target: torch.Tensor
    own: torch.Tensor
    start: Callable[[], int] | None = None
    words: torch.Tensor | None = None
    total: torch.Tensor | None = None


class Gathering:
    """Gathers pages, and finds out when ranks do not gather the same."""

    together = True

    def __init__(self, tier: SharedTier) -> None:
        self._tier, self._sharers = tier, tier.sharers
        self._keys: list[str] = []  # gathered since ranks compared last
        self._written = 0
        self._recorded: list[Carried] | None = None  # what a capture has gathered
        self._runtime: ctypes.CDLL | None = None
        self._stream = self._fetching = self._fetched = self._eager = None

    def use(self, joining: torch.cuda.Stream | None) -> None:
        """Gather on a stream, where its device computes; parts are copied there on another one. None: on the CPU.

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
        self._stream, self._fetching = joining, torch.cuda.Stream(device)
        self._fetched = Signal(self._runtime, device)
        joining.wait_stream(torch.cuda.current_stream(device))

    def written(self, key: str, digest: int) -> None:
        """Note a page that has been written; ranks compare the sum of these notes, in whichever order."""
        self._written = (self._written + digest + xxhash.xxh3_64_intdigest(key.encode())) % (1 << 64)

    # -- as lanes -----------------------------------------------------------------------------------------------------

    def take(self, source: Source) -> bool:
        """True if this brings the page of a slot."""
        return source.tier is self._tier

    def parts(self, target: torch.Tensor, source: Source) -> Carried:
        """Return what the copy of a page takes."""
        room, start = source.room, None
        at = room.part_bytes * self._sharers.rank
        own = room.part if self._stream is None else target[at : at + room.part_bytes]
        if self._stream is not None:
            start = copying(self._runtime, own, room.part, self._fetching)
        words, total = target.view(torch.int64), self._sums[room.cell]
        return Carried(source.page.key, room, target, own, start, words, total)

    def wait(self, event: torch.cuda.Event) -> None:
        """Have parts that are copied from now on wait for an event."""
        if self._fetching is not None:
            wait_for(self._runtime, event, self._fetching)

    def copy(self, carried: Carried) -> None:
        """Bring a page: this rank's part over its link, the others' from them."""
        if self._stream is None:
            self._gather(carried)
        else:
            checked(carried.start())
            self._fetched.pass_on(self._fetching, self._stream)
            with torch.cuda.stream(self._stream):
                self._gather(carried)
        if self._recorded is None:
            self._keys.append(carried.key)
        else:
            self._recorded.append(carried)

    def _gather(self, carried: Carried) -> None:
        self.gather(carried, self._sharers.group)
        torch.sum(carried.words, 0, out=carried.total)

    def gather(self, carried: Carried, group: "dist.ProcessGroup") -> None:
        """Gather a page on the current stream, from this rank's part and those of the others."""
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
        """Have what follows be recorded by a capture, until `end_capture`; it counts when it is replayed."""
        self._eager, self._fetched, self._recorded = self._fetched, Signal(self._runtime, self._stream.device), []

    def join(self) -> None:
        """Have the gathering stream wait for all parts."""
        self._stream.wait_stream(self._fetching)

    def end_capture(self) -> list[Carried]:
        """Go on as before the capture, if there is one; return what it recorded."""
        recorded, self._recorded = self._recorded or [], None
        if self._eager is not None:
            self._fetched, self._eager = self._eager, None
        return recorded

    def follow(self, event: torch.cuda.Event, recorded: list[Carried]) -> None:
        """Go on after a replay of what was recorded."""
        wait_for(self._runtime, event, self._fetching, self._stream)
        self._keys += [carried.key for carried in recorded]

    # -- what ranks compare -------------------------------------------------------------------------------------------

    def check(self, *, wrong: bool = False) -> None:
        """Compare what all ranks have gathered since the last time, if there was anything.

        Args:
            wrong: this rank knows that something is.

        Raises:
            TierError: on all ranks, with what differs: a rank is gone, a part is damaged, pages were taken in another
                order, or ranks hold other weights.
        """
        if not (self._keys or wrong):
            return
        keys, self._keys = self._keys, []
        order = xxhash.xxh3_64_intdigest("\n".join(keys).encode())
        rows = self._sharers.exchange([_signed(order), _signed(self._written)], "what was gathered")
        wrong = wrong or not self._are_right(keys)  # after the first exchange: a rank that is gone shows there
        bad = self._sharers.exchange([wrong], "what was gathered")
        if rows.count(rows[0]) < len(rows) or [1] in bad:
            self._explain(rows, keys)

    def _are_right(self, keys: list[str]) -> bool:
        """True if the pages that were gathered last hold the words that were written."""
        rooms = [room for room in map(self._tier.rooms.get, set(keys)) if room is not None and room.nbytes]
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            sums = self._of(rooms)
        return all(sums[at] == room.total for at, room in enumerate(rooms))

    def _of(self, rooms: list[PartRoom]) -> list[int]:
        cells = torch.tensor([room.cell for room in rooms], dtype=torch.int64, device=self._sums.device)
        return self._sums[cells].tolist()

    def _explain(self, rows: list[list[int]], keys: list[str]) -> None:
        """Raise what is wrong, by name; every rank says the same."""
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
