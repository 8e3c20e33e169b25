"""Expert residency on the device: tables of resident pages; a lease is two launches without synchronization.

    addresses = tables.decide(layer, ids)
    tables.fetch(layer)                             # now kernels may read the pages

A *pool* is an array of slots shared by one or several layers. `ResidentTables.decide` takes routed ids, evicts by the
rule of `vbrt.residency.expert_pool` and fetches missing pages, except those whose experts the host computes
(`Shares`); the returned addresses locate each leased expert. All
leases and all kernels that read slots are in one stream, so a slot is overwritten only after its readers. Both launches
can be captured in a CUDA graph: the tables are static, and have the slots' addresses and their number, so that slots
may come and go (`place`, `resize`) without another capture.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vbrt.formats.page import PAGE_ALIGN
from vbrt.host import accelerator
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.experts.drive_mail import DriveMail
from vbrt.kernels.cuda.launcher import Launcher
from vbrt.libraries import triton_api

__all__ = ["NEEDS", "Experts", "Heard", "PoolRoom", "ResidentTables", "Shares", "Source", "gather_pages"]

NEEDS = devices.TRITON
_PAGE_ROWS, _HITS = 7, 4  # see resolve_triton
_CLOCKS, _USED, _LIMIT, _WINDOW = (0, 0, 0, -1, 1, 0, 0, 0), 2, 5, 6  # whole rows of 64 bytes
_WHERE = 2  # row of the slots' addresses
_ROUTED = 8
_IDS = 1024  # routed ids processed together
_LANES = 256  # table entries per warp of the deciding program
_BLOCK, _PROGRAMS, _WARPS = 1024, 264, 4  # int64 per copy of a program; two programs per multiprocessor


@dataclass(frozen=True, slots=True)
class PoolRoom:
    """Slots of a pool.

    Attributes:
        slots: their number, at most.
        page_bytes: per slot, a multiple of 4096; for all pages of an expert.
        epoch: leases after which scores are halved.
    """

    slots: int
    page_bytes: int
    epoch: int


class Experts(NamedTuple):
    """Number of a layer's experts, and index of its pool."""

    count: int
    pool: int


class Source(NamedTuple):
    """Address of a page in device-accessible memory, and its size, a multiple of 4096 bytes. Below 0: -1 - number of a
    page on a drive (`drive_mail.py`)."""

    address: int
    nbytes: int


class Shares(NamedTuple):
    """Misses of one lease that the host computes.

    Attributes:
        counts: int64 [E + 1] on the device, how many, by the number of misses.
        kept: like the ids, on the device: gets them with -1 for experts that the host computes.
    """

    counts: Tensor
    kept: Tensor


class Heard(NamedTuple):
    """What the host hears of a layer's pass.

    Attributes:
        ids: int64 [P], the expert of each pair; E for one of none.
        pairs: of each expert.
        resident: address of each resident expert's page.
        free: slots without a page that the pool may use.
        next_missing: experts of the next layer that are not resident, ascending; empty after the last layer.
    """

    ids: Tensor
    pairs: Sequence[int]
    resident: Mapping[int, int]
    free: int
    next_missing: Sequence[int]


class ResidentTables:
    """Residency tables of some layers. They begin without slots: `place` some, and `resize`.

    Args:
        layers, pools: pages are numbered by layer and expert, slots by pool.
        device: the computing one.
        sources: of each number the expert's pages, which share a slot: one, or two, of which the first ones are of one
            size in a layer.
        one: score increment of a lease.
        mail: makes the mailbox by which pages on a drive are fetched, for so many pages that a lease may be missing;
            None if no page is on one.

    Attributes:
        slots: that each pool has now: the first ones.
    """

    def __init__(
        self,
        layers: Sequence[Experts],
        pools: Sequence[PoolRoom],
        device: torch.device,
        sources: Sequence[Sequence[Source]],
        *,
        one: int,
        mail: Callable[[int], DriveMail] | None = None,
    ) -> None:
        self.layers, self.pools, self.one = tuple(layers), tuple(pools), one
        self._first_page = _starts([layer.count for layer in layers])
        self._first_slot = _starts([pool.slots for pool in pools])
        table = functools.partial(torch.zeros, dtype=torch.int64, device=device)
        of_layers = [sources[at : at + layer.count] for at, layer in zip(self._first_page, layers, strict=False)]
        self._planes = [len(pages[0]) for pages in of_layers]
        self._second_at = [pages[0][0].nbytes for pages in of_layers]
        self._largest = [max(page.nbytes for expert in pages for page in expert) for pages in of_layers]
        rows = [[0] * len(sources) for _ in range(2 * max(self._planes))]
        self._far: dict[int, int] = {}  # place in _sources, by number of a page on the drive
        for number, pages in enumerate(sources):
            for plane, page in enumerate(pages):
                rows[2 * plane][number], rows[2 * plane + 1][number] = page.address, page.nbytes // PAGE_ALIGN
                if page.address < 0:
                    self._far[-1 - page.address] = 2 * plane * len(sources) + number
        self._asks = [any(page.address < 0 for expert in pages for page in expert) for pages in of_layers]
        self._sources = torch.tensor(rows, dtype=torch.int64, device=device)
        self._pages, self._slots = table(_PAGE_ROWS, len(sources)), table(_WHERE + 1, self._first_slot[-1])
        self._all_clocks = table(len(pools), len(_CLOCKS))
        self._clocks = list(self._all_clocks)
        self._all_routed = table(len(layers), _ROUTED)
        self._routed = list(self._all_routed)
        self._where = [[0] * pool.slots for pool in pools]
        self._addresses = [table(layer.count) for layer in layers]
        most = max(_power_of_two(layer.count) for layer in layers)
        self._fetch, self._marks = table(1 + 3 * max(self._planes) * most), table(most)
        self._mail = None if mail is None else mail(max(self._planes) * most)
        numbers = functools.partial(torch.tensor, dtype=torch.int64, device=device)
        self._pools_of_pages = numbers([layer.pool for layer in self.layers for _ in range(layer.count)])
        self._pools_of_slots = numbers([number for number, pool in enumerate(self.pools) for _ in range(pool.slots)])
        self._places = numbers([slot for pool in self.pools for slot in range(pool.slots)])
        self.slots, self._limits, self._windows = ([0] * len(pools) for _ in range(3))
        self.forget()

    def forget(self) -> None:
        """Mark all pages as not resident; scores, times and counters are kept."""
        self._pages[0].fill_(-1)
        self._slots[0].fill_(-1)
        self._slots[1].zero_()
        for column, start in enumerate(_CLOCKS[_USED:], _USED):
            self._all_clocks[:, column] = start
        self._note_limits()

    def _note_limits(self) -> None:
        told = torch.tensor([self._limits, self._windows], dtype=torch.int64, device="cpu")
        self._all_clocks[:, _LIMIT : _WINDOW + 1] = accelerator.sent(told, self._pages.device).t()

    def place(self, number: int, first: int, addresses: Sequence[int]) -> None:
        """Say where slots of a pool lie, from one on, in memory of the computing device."""
        self._where[number][first : first + len(addresses)] = addresses
        told = torch.tensor(addresses, dtype=torch.int64, device="cpu")
        start = self._first_slot[number] + first
        self._slots[_WHERE, start : start + len(addresses)] = accelerator.sent(told, self._pages.device)

    def resize(self, slots: Sequence[int], windows: Sequence[int]) -> None:
        """Give each pool so many slots, its first ones, whose places it knows; pages in others are not resident any
        more. Leases of captured graphs follow. No lease may be under way.

        Args:
            windows: maximum newcomers among the resident pages, by pool.
        """
        self.slots, self._windows = list(slots), list(windows)
        self.limit(slots)
        self._note_limits()
        for layer, addresses in zip(self.layers, self._addresses, strict=True):  # of experts that no lease names
            addresses.fill_(self._where[layer.pool][0])

    def limit(self, slots: Sequence[int]) -> None:
        """Let each pool use its first slots only; pages in others are not resident any more. Leases of captured graphs
        follow."""
        before, self._limits = self._limits, list(slots)
        if before == self._limits:
            return
        self._note_limits()
        limits = self._all_clocks[:, _LIMIT]
        if all(now >= then for now, then in zip(self._limits, before, strict=True)):
            return
        used = self._all_clocks[:, _USED]
        used.copy_(torch.minimum(used, limits))
        self._pages[0].masked_fill_(self._pages[0] >= limits[self._pools_of_pages], -1)
        beyond = self._places >= limits[self._pools_of_slots]
        self._slots[0].masked_fill_(beyond, -1)
        self._slots[1].masked_fill_(beyond, 0)

    def fits(self, layer: int, ids: Tensor) -> bool:
        """True if the pool has a slot for each expert that this many ids may name."""
        experts = self.layers[layer]
        return min(ids.numel(), experts.count) <= self.slots[experts.pool]

    def decide(self, layer: int, ids: Tensor, *, scan: bool = False, shares: Shares | None = None) -> Tensor:
        """Lease the experts in `ids`; return the addresses of the layer's experts, int64 [E], for after `fetch`.

        Addresses of other experts are arbitrary slots. The tensor is static; its contents are valid until the next
        lease of the layer's pool. Call `fits` first: the device does not detect a lack of slots.

        Args:
            ids: int32 or int64 on the device; values outside 0 .. E - 1 are sentinels.
            scan: True if the lease is part of a scan.
            shares: the host computes some misses: they are not leased. None: it computes none.
        """
        experts = self.layers[layer]
        pool, ids = self.pools[experts.pool], ids.contiguous()
        lanes, slots = _power_of_two(experts.count), _power_of_two(pool.slots)
        first, addresses = self._first_page[layer], self._addresses[layer]
        tables = (
            ids,
            self._pages,
            self._slots,
            self._clocks[experts.pool],
            self._sources,
            addresses,
            self._fetch,
            self._routed[layer],
            *((ids, self._marks, ids) if shares is None else (shares.counts, self._marks, shares.kept)),
        )
        _launch("resolve")(
            1,
            tables,
            (
                ids.numel(),
                experts.count,
                first,
                self._pages.shape[1],
                self._first_slot[experts.pool],
                pool.slots,
                self._slots.shape[1],
                pool.epoch,
                self._second_at[layer],
            ),
            warps=max(1, min(8, max(lanes, slots) // _LANES)),
            EXPERTS=lanes,
            SLOTS=slots,
            IDS=min(_IDS, _power_of_two(ids.numel())),
            ONE=self.one,
            SCAN=scan,
            HOSTS=shares is not None,
            PLANES=self._planes[layer],
        )
        return addresses

    def hear(self, layer: int, ids: Tensor) -> Heard:
        """Tell the host a pass's routing, and what is resident; synchronizes."""
        count, number = self.layers[layer]
        first, after = self._first_page[layer], min(layer + 2, len(self.layers))
        ids_P = ids.reshape(-1).long()
        ids_P = ids_P.masked_fill((ids_P < 0) | (ids_P >= count), count)
        pairs = ids_P.new_zeros(count + 1).scatter_add_(0, ids_P, torch.ones_like(ids_P))
        slots = self._pages[0, first : self._first_page[after]]
        used, *heard = torch.cat((self._clocks[number][_USED : _USED + 1], pairs[:count], slots)).tolist()
        pairs, slots, following = heard[:count], heard[count : 2 * count], heard[2 * count :]
        places = {e: self._where[number][slot] for e, slot in enumerate(slots) if slot >= 0}
        return Heard(
            ids_P, pairs, places, self._limits[number] - used, [e for e, slot in enumerate(following) if slot < 0]
        )

    def note_passing(self, layer: int, seen: Tensor) -> None:
        """Count the experts of a pass that changes no residency: a scan.

        Args:
            seen: int64 [2, E] on the device, 1 for hits and for misses.
        """
        count, first = self.layers[layer].count, self._first_page[layer]
        self._pages[_HITS : _HITS + 2, first : first + count] += seen
        self._routed[layer][:1].zero_()  # see resolve_triton

    def fetch(self, layer: int, named: int) -> None:
        """Fetch the missing pages of the lease just decided, of so many experts at most."""
        experts = self.layers[layer]
        pages, units = self._planes[layer] * _power_of_two(experts.count), self._largest[layer] // PAGE_ALIGN
        if self._asks[layer]:
            missing = self._planes[layer] * min(named, experts.count)
            self._mail.fetch(self._fetch, self._slots, units, pages=pages, missing=missing)
            return
        constants = {"PAGES": pages, "BLOCK": _BLOCK, "PROGRAMS": _PROGRAMS}
        _launch("fetch")(_PROGRAMS, (self._fetch, self._slots), (units,), warps=_WARPS, **constants)

    def publish(self, places: Mapping[int, int | None]) -> None:
        """Tell the device where pages on a drive, by number, lie in host memory; None: nowhere. No lease may be under
        way that reads where one was."""
        if not places:
            return
        told = [[self._far[number] for number in places], [-1 - n if at is None else at for n, at in places.items()]]
        where, addresses = accelerator.sent(torch.tensor(told, dtype=torch.int64, device="cpu"), self._pages.device)
        self._sources.view(-1)[where] = addresses

    def mend(self) -> None:
        """Ask for pages on a drive again after some did not come; what has slots may lack their bytes and is gone."""
        self.forget()
        self._mail.mend()

    def counts(self) -> Tensor:
        """Return hits, misses and misses that the host computed of each page, int64 [3, pages] on the CPU;
        synchronizes."""
        return self._pages[_HITS : _HITS + 3].cpu()

    def misses(self) -> Tensor:
        """Return the misses of each page, int64 [pages] on the CPU; synchronizes."""
        return self._pages[_HITS + 1].cpu()

    def routed(self) -> Tensor:
        """Return each layer's counters over leases except scans, int64 [layers, 5] on the CPU: leases, ids that named
        experts, experts touched, and of those the ones touched right after another lease, and by that one, too;
        synchronizes."""
        return self._all_routed[:, 1:6].cpu()

    def resident(self) -> Tensor:
        """Return each page's slot within its pool, int64 [pages] on the CPU, or -1; synchronizes."""
        return self._pages[0].cpu()


def gather_pages(addresses: Tensor, experts: Tensor, page_bytes: int) -> Tensor:
    """Gather pages in one launch without synchronization: uint8 [P, page_bytes] on the device.

    Args:
        addresses: of each expert's page, int64 [E], in device-accessible memory.
        experts: int64 [P], within 0 .. E - 1; -1: any page.
        page_bytes: per page, a multiple of 4096.
    """
    count = len(experts)
    out = torch.empty((count, page_bytes), dtype=torch.uint8, device=experts.device)
    places = torch.arange(count, dtype=torch.int64, device=experts.device)
    targets = places * page_bytes + out.data_ptr()
    units = page_bytes // PAGE_ALIGN
    table = torch.cat(
        (torch.full_like(targets[:1], count), addresses[experts], targets, torch.full_like(targets, units))
    )
    constants = {"PAGES": count, "BLOCK": _BLOCK, "PROGRAMS": _PROGRAMS}
    words = out.view(-1).view(torch.int64)
    _launch("fetch")(_PROGRAMS, (table, words), (units,), warps=_WARPS, **constants)
    return out


class _Launch:
    """A kernel: through a `Launcher` on a GPU, through Triton's interpreter elsewhere."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self._launcher = kernel, Launcher(kernel)

    def __call__(
        self, programs: int, tensors: tuple[Tensor, ...], numbers: tuple[int, ...], *, warps: int, **constants: Any
    ) -> None:
        device = tensors[0].device
        if device.type == "cuda":
            dtype = (tensors[0].dtype,)
            self._launcher(device.index, (programs, 1), tensors, numbers, warps=warps, specialized=dtype, **constants)
        else:
            self._kernel[(programs,)](*tensors, *numbers, **constants, **triton_api.fp_fusion(True))


@functools.cache
def _launch(name: str) -> _Launch:
    from vbrt.kernels.cuda.experts import fetch_triton, resolve_triton

    return _Launch({"resolve": resolve_triton.resolve_kernel, "fetch": fetch_triton.fetch_kernel}[name])


def _starts(counts: Sequence[int]) -> list[int]:
    """Return the exclusive prefix sums, and the total."""
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
