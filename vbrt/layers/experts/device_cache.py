"""Device-managed cache of routed experts: passes never wait for the host, so a whole pass can be one CUDA graph.

    cache = DeviceCache(handle.stack, {name: handle.keys, ...}, capacity_bytes)
    with cache.lease(layer, ids_Tk) as addresses:      # int64 [E]: where the kernels find each routed expert
        y = op(x, ids_Tk, ..., addresses)

The pages live in pinned host memory, or some of them on a drive (`drive_pages.py`). The cache's share of the computing
tier's budget is cut into equal slots; tables on the device map pages to slots (`vbrt.kernels.cuda.experts.residency`).
Eviction follows the policy `experts`: counts equal those of `vbrt.simulate` for the same routing, and pages of the
slots' sizes.

**Segments.** Slots lie in a few `Arena`s (`residency/slot_segments.py`). Kernels read from tables where each slot lies
and how many there are, so that `resize` frees the last segments, whose pages are not resident any more, or allocates
them again, and captured graphs go on.

**Order.** Slots are overwritten in stream order, so leases are serialized: a second thread waits until the first one
has left its `with`, and a lease on another stream waits, on the device, for the stream of the previous lease. Captured
graphs are replayed without this class: replay them on the stream of the other leases, or order the streams.

**Prompts** that one lease does not take pass by the cache (`pass_through`): pools lend their last slots to a ring
(`prompt_ring.py`) until the last layer. The device reads how many slots a pool may use, so captured graphs follow; none
lends what they may need.

**Pages on a drive** are read when the device asks for them. Between passes, when it is quiet, those that it missed
most often get fixed places in host memory, which it reads by address like the others: at the first layer of a prompt,
and every `_CHOOSE_EVERY` passes, which wait for the device then.

**Ctrl-C.** A lease that was interrupted between its two launches may leave pages in the tables whose bytes were not
copied: the next lease empties the cache first.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.errors import TierError
from vbrt.host import accelerator
from vbrt.kernels.cuda.experts.residency import Experts, Heard, PoolRoom, ResidentTables, Shares, Source
from vbrt.layers.experts.drive_pages import DrivePages
from vbrt.layers.experts.prompt_ring import PromptRing, chunks, ring_room
from vbrt.residency.expert_pool import HALF, ONE, WINDOW_PART
from vbrt.residency.expert_room import ExpertRoom
from vbrt.residency.host_slots import slots_wanted
from vbrt.residency.slot_segments import SEGMENTS, SlotSegments
from vbrt.tiers import Page, TierStack
from vbrt.tiers.stack.device_arena import Arena
from vbrt.tiers.stack.staged_pages import StagedPages, on_drive

__all__ = ["DeviceCache", "DeviceCounts", "DeviceTotals", "Part", "Passing"]

_CHOOSE_EVERY = 32  # passes
_HALVES = 2  # misses counted so far are divided by this at each choice
_NEARLY_ALL = 4  # pairs per expert from which nearly all are touched, so that pages of the next layer are copied ahead


class DeviceCounts(NamedTuple):
    """Counters of a layer: hits, misses and misses that the host computed by expert, int64 [E] on the CPU, and bytes
    copied in."""

    hits: Tensor
    misses: Tensor
    computed: Tensor
    bytes_in: int


class DeviceTotals(NamedTuple):
    """Counters of a layer summed over its experts, with the number of resident pages.

    Attributes:
        bytes_in: copied in.
        leases, named, touched, compared, reused: without scans: leases, ids of experts, touched experts, touched
            experts of leases that directly follow another one, and of these, experts touched by that one, too.
    """

    hits: int = 0
    misses: int = 0
    computed: int = 0
    bytes_in: int = 0
    resident: int = 0
    leases: int = 0
    named: int = 0
    touched: int = 0
    compared: int = 0
    reused: int = 0


class Part(NamedTuple):
    """Part of a scan: routed ids [T, k], with sentinels for experts of other parts."""

    ids: Tensor


class Passing(NamedTuple):
    """Part of a pass that passes by the cache.

    Attributes:
        experts: ascending.
        pairs: of T k, int64, expert by expert.
        tokens: of the pairs.
        ids: of the pairs' experts, int64 [pairs, 1].
        addresses: int64 [E], where the experts' pages lie; of other experts any.
    """

    experts: Sequence[int]
    pairs: Tensor
    tokens: Tensor
    ids: Tensor
    addresses: Tensor


class DeviceCache:
    """Cache of the experts of some layers, with residency decided by the device.

    Args:
        stack: that has the pages.
        layers: the keys of each layer's pages, expert by expert, in the order of the model.
        capacity_bytes: of the computing tier's budget.
        scope: "layer" or "model"; see `vbrt.residency.expert_pages`.
        fine: the keys of the fine pages of layers whose experts have two planes: a slot has both, one behind the other.
        spare_bytes: of host memory, left for pages from a drive that other layers' passes need.
        wait_s: the device waits so long for pages from a drive.
        resizes: False where kernels take all slots of a layer as one tensor: they lie in one segment then.

    Attributes:
        layers: their names; `lease` takes the number of one.
        keys, fine, scope: as given.
        recorded: True once a CUDA graph has captured leases; cleared when all such graphs are dropped.
        capacity_bytes: of all slots now.
        made_for_bytes: room that the cache was made for, with all slots that it may have.
        slot_bytes: of a slot that takes any expert of a layer, by layer; slots that layers share take the largest.
        drive: pages on a drive; None if all are in host memory.

    Raises:
        TierError: pages are neither in pinned host memory nor on a drive below it; coarse pages of a layer have several
            sizes; a budget has no room, or `capacity_bytes` none for a slot of each layer. Nothing has changed then:
            leases of the stack work, with the host deciding.
    """

    def __init__(
        self,
        stack: TierStack,
        layers: Mapping[str, Sequence[str]],
        capacity_bytes: int,
        *,
        scope: str = "layer",
        fine: Mapping[str, Sequence[str]] | None = None,
        spare_bytes: int = 0,
        wait_s: float = 10.0,
        resizes: bool = True,
    ) -> None:
        self._stack, self.keys, self.scope = stack, {name: tuple(keys) for name, keys in layers.items()}, scope
        self.fine = {name: tuple(keys) for name, keys in (fine or {}).items()}
        self.layers = tuple(layers)
        self._lock = threading.RLock()
        self._stream: torch.Stream | None = None
        self.recorded = self._deciding = self._leased = self._lending = False
        self.slot_bytes = {name: self._bytes_of_slot(name) for name in self.keys}
        self._segments: list[_Segment] = []  # none once it is closed
        self.drive: DrivePages | None = None
        self._passes, self._demand = 0, _Demand()
        self._reserve(capacity_bytes, spare_bytes, wait_s, SEGMENTS if resizes else 1)

    def __deepcopy__(self, memo: dict) -> "DeviceCache":
        return self  # copies of a model share the pages

    def __reduce__(self):
        raise TierError("a device cache cannot be pickled; make another one for the layers that were unpickled")

    @torch.inference_mode(False)  # tables of a pass in inference mode are written by passes outside of it
    def _reserve(self, capacity_bytes: int, spare_bytes: int, wait_s: float, segments: int) -> None:
        """Allocate the slots, and make the tables and what reads pages on a drive."""
        stack, experts = self._stack, self._experts()
        layers, pools = self._rooms(capacity_bytes)
        self._name, self._pools = f"{experts[0][0]}#cache", pools
        self._division = SlotSegments(*zip(*((pool.slots, pool.page_bytes) for pool in pools), strict=True), segments)
        self.made_for_bytes = capacity_bytes
        keys = [key for keys in experts for key in keys]
        far = [key for key in keys if on_drive(stack, key)]
        near = keys if not far else [key for key in keys if not on_drive(stack, key)]
        try:
            self._segments += [self._segment(0, near)]
            while len(self._segments) < len(self._division.ends):
                self._segments += [self._segment(len(self._segments))]
            if far:
                planes = max(map(len, experts))
                least, most = slots_wanted(len(far), planes)
                staged = StagedPages(stack, far, f"{self._name}-host", spare_bytes=spare_bytes, least=least, most=most)
                self.drive = DrivePages(staged, planes, wait_s, stack.device)
            addresses = self._segments[0].arena.addresses
            places = dict(zip(near, addresses, strict=True)) | {key: -1 - n for n, key in enumerate(far)}
            sizes = stack.pages
            sources = [[Source(places[key], sizes[key].nbytes) for key in keys] for keys in experts]
            mail = None if self.drive is None else self.drive.mail
            self._tables = ResidentTables(layers, pools, stack.device, sources, one=ONE, mail=mail)
            for number in range(len(self._segments)):
                self._place(number)
            self._use_segments()
        except BaseException:
            self._end()
            raise
        if accelerator.has_streams(stack.device):
            self._stream = accelerator.current_stream(stack.device)
        self._far = {key: number for number, key in enumerate(far)}
        self._far_experts = [e for e, keys in enumerate(experts) for key in keys if key in self._far]
        self._needed = [1] * len(pools)
        self._forget_ring()

    # -- segments -----------------------------------------------------------------------------------------------------

    def _segment(self, number: int, sources: Sequence[str] = ()) -> "_Segment":
        """Allocate a segment; the first one, which has the sources, stays while the cache lives. Raises TierError."""
        division = self._division
        name = self._name if not number else f"{self._name}-{number}"
        arena = Arena(self._stack, name, sources, division.own_bytes(number), movable=number > 0)
        counts = [end - begin for begin, end in zip(division.begin(number), division.ends[number], strict=True)]
        parts = arena.memory.split([n * pool.page_bytes for n, pool in zip(counts, self._pools, strict=True)])
        shapes = [(n, pool.page_bytes) for n, pool in zip(counts, self._pools, strict=True)]
        return _Segment(arena, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)])

    def _place(self, number: int) -> None:
        """Tell the device where the slots of a segment lie."""
        for pool, slots in enumerate(self._segments[number].slots):
            start, nbytes = slots.data_ptr(), self._pools[pool].page_bytes
            addresses = [start + slot * nbytes for slot in range(len(slots))]
            self._tables.place(pool, self._division.begin(number)[pool], addresses)

    def _use_segments(self, count: int | None = None) -> None:
        """Have the device use the slots of the first segments, of all by default."""
        slots = self._division.ends[(count or len(self._segments)) - 1]
        self._tables.resize(slots, [max(1, n // WINDOW_PART) for n in slots])
        self.capacity_bytes = self._division.nbytes[(count or len(self._segments)) - 1]

    @property
    def least_bytes(self) -> int:
        """Bytes of the fewest segments that captured graphs may need."""
        return self._division.nbytes[self._division.least(self._needed) - 1]

    def outgrown(self, room_bytes: int) -> bool:
        """True if a room has place for more slots than the cache may have, and not all experts have one."""
        smallest = min(pool.page_bytes for pool in self._pools)
        return not self.all_have_slots and room_bytes >= self.made_for_bytes + smallest

    @property
    def all_have_slots(self) -> bool:
        """True if the cache may have a slot for every expert."""
        return sum(pool.slots for pool in self._pools) == sum(map(len, self.keys.values()))

    @torch.inference_mode(False)  # as in `_reserve`
    def resize(self, room_bytes: int) -> None:
        """Use the segments that fit into a room, `least_bytes` at least; captured graphs follow.

        Memory is given back after the kernels that read it: this waits for the device then. Pages in it are not
        resident any more.

        Raises:
            TierError: the budget has no room for a segment; those before it are in use.
        """
        with self._lock:
            self._check_open(0)
            division = self._division
            count = max(division.within(room_bytes), division.least(self._needed))
            if count == len(self._segments) and self._tables.slots == list(division.ends[count - 1]):
                return
            capturing = self._stream is not None and accelerator.is_current_stream_capturing()
            if self._leased or capturing:
                raise TierError(
                    f"{self.layers[0]}: a lease of its cache is under way, or a capture; resize it after that"
                )
            if self._stream is not None:
                self._follow_stream(self._stack.device)
            self._settle(lend=False)
            self._forget_ring()
            if count < len(self._segments):
                self._use_segments(count)
                self._wait()  # replays that are launched from here on use the other segments only
                while len(self._segments) > count:
                    self._segments.pop().arena.close()
                return
            try:
                while len(self._segments) < count:
                    self._segments += [self._segment(len(self._segments))]
                    self._place(len(self._segments) - 1)
            finally:
                self._use_segments()

    def _planes(self, name: str, expert: int) -> tuple[str, ...]:
        """Return the keys of an expert's pages."""
        fine = self.fine.get(name)
        return (self.keys[name][expert], *(() if fine is None else (fine[expert],)))

    def _experts(self) -> list[tuple[str, ...]]:
        """Return the keys of all experts' pages, by expert, layer by layer."""
        return [self._planes(name, expert) for name, keys in self.keys.items() for expert in range(len(keys))]

    def _bytes_of_slot(self, name: str) -> int:
        """Return the bytes of a slot that takes any expert of a layer. Raises TierError if coarse pages differ."""
        pages, fine = self._stack.pages, self.fine.get(name, ())
        return _page_bytes(self._stack, name, self.keys[name]) + max(
            (pages[key].nbytes for key in fine if key in pages), default=0
        )

    def _source(self, layer: int, expert: int) -> list[Tensor | int]:
        """Return an expert's pages in host memory, which do not move while the cache lives; numbers of those on the
        drive."""
        keys = self._planes(self.layers[layer], expert)
        return [self._far[key] if key in self._far else self._view(self._stack.pages[key]) for key in keys]

    def _view(self, page: Page) -> Tensor:
        return self._stack.levels[page.home].slots[page.key].view

    def _rooms(self, capacity_bytes: int) -> tuple[list[Experts], list[PoolRoom]]:
        by_layer, largest = self.scope == "layer", max(self.slot_bytes.values())
        room = ExpertRoom(by_layer=by_layer, layers=self.slot_bytes)
        room.resize(capacity_bytes)
        shares = room.shares() if by_layer else {self.layers[0]: capacity_bytes}
        experts = {name: len(keys) for name, keys in self.keys.items()}
        most = experts if by_layer else {self.layers[0]: sum(experts.values())}
        layers = len(self.keys) if not by_layer else 1
        sizes = self.slot_bytes if by_layer else {self.layers[0]: largest}
        pools = [_pool(name, share, sizes[name], most[name], layers) for name, share in shares.items()]
        return [Experts(count, i if by_layer else 0) for i, count in enumerate(experts.values())], pools

    # -- slots that pools lend to prompts -----------------------------------------------------------------------------

    def _forget_ring(self) -> None:
        """Forget which slots pools lend: graphs that were recorded since may need some of them."""
        self._ring: PromptRing | None = None
        self._lends: list[int] | None = None

    def _lent(self) -> list[int]:
        """Return how many slots each pool lends to a prompt's ring, none that a recorded graph may need."""
        if self._lends is None:
            tables, largest = self._tables, max(self.slot_bytes.values())
            slots_of, sharing = tables.slots, Counter(layer.pool for layer in tables.layers)
            whole = (pool.page_bytes == largest for pool in tables.pools)  # they take any page
            own = [slots * takes for slots, takes in zip(slots_of, whole, strict=True)]
            missing = max(layer.count - slots_of[layer.pool] // sharing[layer.pool] for layer in tables.layers)
            segments, pages = ring_room(max(0, missing), largest, sum(own) * largest)
            self._lends, left = [], segments * pages
            for number, slots in enumerate(own):
                part = -(-left * slots // max(1, sum(own[number:])))
                self._lends.append(max(0, min(part, slots // 2, slots - self._needed[number])))
                left -= self._lends[-1]
            self._ring_segments = min(segments, sum(self._lends))
        return self._lends

    def _settle(self, *, lend: bool) -> None:
        """Lend slots, whose pages are gone then, or take them back after the copies to them. After an interrupt the
        cache is empty."""
        if not self._deciding and lend == self._lending:
            return
        tables = self._tables
        lent = self._lent() if lend else [0] * len(tables.pools)
        if self._deciding:
            tables.forget()
        self._deciding = True
        if self._lending and not lend:
            self._ring.stop()
        tables.limit([slots - part for slots, part in zip(tables.slots, lent, strict=True)])
        self._lending, self._deciding = lend, False
        if lend and self._ring is None:
            slots = [slot for n, part in enumerate(lent) for slot in self._last_slots(n, part)]
            segments = chunks(slots, len(slots) // self._ring_segments)[: self._ring_segments]
            self._ring = PromptRing(segments, self._source, self.drive)

    # -- leases -------------------------------------------------------------------------------------------------------

    def slots(self, layer: int) -> int:
        """Return how many slots the layer's pool has now."""
        return self._tables.slots[self._tables.layers[layer].pool]

    def memory(self, layer: int) -> Tensor:
        """Return the slots of the layer's pool, to which leases map experts, as one tensor, uint8 [slots, bytes of a
        page]; of a cache that does not resize."""
        (segment,) = self._segments
        return segment.slots[self._tables.layers[layer].pool]

    def _last_slots(self, pool: int, count: int) -> list[Tensor]:
        slots = [slot for segment in self._segments for slot in segment.slots[pool]]
        return slots[len(slots) - count :]

    def fits(self, layer: int, ids_Tk: Tensor) -> bool:
        """True if one lease serves any ids of this count; otherwise `scan` them."""
        return self._tables.fits(layer, ids_Tk)

    @contextlib.contextmanager
    def lease(self, layer: int, ids_Tk: Tensor) -> Iterator[Tensor]:
        """Lease the routed experts of a layer: yield the addresses of the layer's pages, int64 [E].

        They are valid for kernels launched on this stream within the `with`. Addresses of experts without tokens are
        undefined.

        Args:
            layer: its number.
            ids_Tk: int32 or int64, on the device; values outside 0 .. E - 1 are sentinels.

        Raises:
            TierError: there may be more experts than slots, or the stack or the cache was closed.
        """
        if not self.fits(layer, ids_Tk):
            raise TierError(
                f"{self.layers[layer]}: {ids_Tk.numel()} routed ids may name more experts than the "
                f"{self.slots(layer)} slots of its cache; scan them, or raise the cache's bytes"
            )
        with self._entered(layer):
            yield self._lease(layer, ids_Tk, scan=False)

    @contextlib.contextmanager
    def lease_beside(self, layer: int, ids_Tk: Tensor, shares: Shares, post: Callable[[], None]) -> Iterator[Tensor]:
        """`lease` without the misses that the host computes.

        Args:
            post: launched before pages are fetched, once `shares.kept` names the experts that are leased.
        """
        with self._entered(layer):
            yield self._lease(layer, ids_Tk, scan=False, shares=shares, post=post)

    @contextlib.contextmanager
    def lease_part(self, layer: int, part: Part) -> Iterator[Tensor]:
        """`lease` a part of a scan; eviction scores are unchanged."""
        with self._entered(layer):
            yield self._lease(layer, part.ids, scan=True)

    @property
    def has_ring(self) -> bool:
        """True if prompts may pass through slots that are lent to them: `pass_through`."""
        return sum(self._lent()) > 1  # a segment takes one at least

    def pass_through(self, layer: int, ids_Tk: Tensor, compute: Callable[[Passing], None], most: int) -> None:
        """Call `compute` with each part of a layer: experts that are resident, those with the most pairs if slots are
        free, and the others through the ring: slots that are lent to the prompt until its last layer, and are empty
        then. What other slots have stays. The host hears the counts of pairs: this waits for the device, while the
        first pages are copied.

        Args:
            most: experts in a part, at most.

        Raises:
            TierError: the cache has no ring, the stack or the cache was closed.
        """
        if not self.has_ring:
            raise TierError(f"{self.layers[layer]}: its cache has no room for a ring; scan the ids")
        with self._entered(layer):
            self._check_open(layer)
            if accelerator.is_device(ids_Tk):
                self._follow_stream(ids_Tk.device)
            self._check_drive()
            self._settle(lend=True)
            heard = self._tables.hear(layer, ids_Tk)
            if layer == 0 and self.drive is not None:  # the device has just answered
                self._choose()
            touched = [expert for expert, pairs in enumerate(heard.pairs) if pairs]
            resident = [expert for expert in touched if expert in heard.resident]
            missing = [expert for expert in touched if expert not in heard.resident]
            stay = sorted(sorted(missing, key=heard.pairs.__getitem__, reverse=True)[: heard.free])
            passing = [expert for expert in missing if expert not in set(stay)]
            following = heard.next_missing if ids_Tk.numel() >= _NEARLY_ALL * len(heard.pairs) else ()
            passage = self._ring.schedule(layer, passing, following, most)
            residents, stays = chunks(resident, most), chunks(stay, most)
            places, noted = heard.resident | passage.places, (resident, passing)
            first, last = passage.parts[: passage.ahead], passage.parts[passage.ahead :]
            order = _Order([*first, *residents, *stays, *last], heard, ids_Tk.shape[1], places, noted)
            self._tables.note_passing(layer, order.noted)
            for number, part in enumerate(first):  # which leaves segments to the last ones
                with passage.read(number):
                    compute(order.part(part))
            for part in residents:
                compute(order.part(part))
            for part in stays:
                passing = order.part(part)
                alone_P = torch.full_like(heard.ids, -1).index_copy_(0, passing.pairs, passing.ids.squeeze(1))
                compute(passing._replace(addresses=self._fetch(layer, alone_P, len(part), scan=True)))
            for number, part in enumerate(last, len(first)):
                with passage.read(number):
                    compute(order.part(part))
            if layer == len(self.layers) - 1:
                self._settle(lend=False)

    def scan(self, layer: int, ids_Tk: Tensor) -> list[Part]:
        """Split a pass that uses more experts than there are slots into parts, by expert, without a device sync.

        Each pair (token, expert) is in one part: `lease_part` it, and add the rows of its pairs. A part takes at most
        half of the slots: pages in the others, which decoding needs most, are not evicted.
        """
        count, step = self._tables.layers[layer].count, self._scanned(layer)
        most = min(ids_Tk.numel(), count)
        if step >= most:
            return [Part(ids_Tk)]
        if most == count:
            return [_between(ids_Tk, first, first + step) for first in range(0, count, step)]
        ranks_Tk = _ranks(ids_Tk, count)
        parts = (_between(ranks_Tk, first, first + step).ids >= 0 for first in range(0, most, step))
        return [Part(ids_Tk.where(chosen, -1)) for chosen in parts]

    def scan_touched(
        self, layer: int, ids_Tk: Tensor, touched: Sequence[int], most: int
    ) -> list[tuple[Sequence[int], Part]]:
        """`scan` with touched experts known to the host: return each part with its experts, at least one part.

        Args:
            touched: experts that ids name, ascending.
            most: experts in a part, at most.
        """
        step = min(most, self._scanned(layer))
        parts = chunks(touched, step)
        if len(parts) <= 1:
            return [(touched, Part(ids_Tk))]
        return [(part, _between(ids_Tk, part[0], part[-1] + 1)) for part in parts]

    def _scanned(self, layer: int) -> int:
        """Maximum number of experts in a part of a scan."""
        count, slots = self._tables.layers[layer].count, self.slots(layer)
        return count if count <= slots else max(1, slots // 2)

    @contextlib.contextmanager
    def _entered(self, layer: int) -> Iterator[None]:
        """Serialize leases: the previous one's kernels are launched by then."""
        with self._lock:
            if self._leased:
                raise TierError(f"{self.layers[layer]}: this thread has a lease of its cache already; leave that first")
            self._leased = True
            try:
                yield
            finally:
                self._leased = False

    def _lease(
        self, layer: int, ids_Tk: Tensor, *, scan: bool, shares: Shares | None = None, post: Callable[[], None] = int
    ) -> Tensor:
        self._check_open(layer)
        if accelerator.is_device(ids_Tk):
            self._follow_stream(ids_Tk.device)
        if accelerator.is_device(ids_Tk) and accelerator.is_current_stream_capturing():
            self._note_needed(layer, ids_Tk, scan=scan)
        else:
            if layer == 0 and not scan:
                self._begin_pass()
            self._check_drive()
            self._settle(lend=False)
        return self._fetch(layer, ids_Tk, ids_Tk.numel(), scan=scan, shares=shares, post=post)

    def _fetch(
        self,
        layer: int,
        ids_Tk: Tensor,
        experts: int,
        *,
        scan: bool,
        shares: Shares | None = None,
        post: Callable[[], None] = int,
    ) -> Tensor:
        """experts: that ids name, at most."""
        self._deciding = True
        addresses = self._tables.decide(layer, ids_Tk, scan=scan, shares=shares)
        post()
        self._tables.fetch(layer, experts)
        self._deciding = False
        return addresses

    def _note_needed(self, layer: int, ids_Tk: Tensor, *, scan: bool) -> None:
        """Lend no slots, from the next prompt on, that a graph which captures this lease may need."""
        experts = self._tables.layers[layer]
        needed = self._scanned(layer) if scan else min(ids_Tk.numel(), experts.count)
        if self._lending:
            raise TierError(
                f"{self.layers[layer]}: a prompt did not reach the last layer, and has slots of its cache; run a pass "
                "before recording a CUDA graph"
            )
        if needed > self._needed[experts.pool]:
            self._needed[experts.pool] = needed
            self._forget_ring()

    def _follow_stream(self, device: torch.device) -> None:
        """Make this stream wait for that of the previous lease; not in captures: graphs run later, elsewhere."""
        if accelerator.is_current_stream_capturing():
            if self._deciding:
                raise TierError(
                    f"{self.layers[0]}: its cache was interrupted; run a pass before recording a CUDA graph"
                )
            self.recorded = self._stack.ledger.captured = True
            return
        stream = accelerator.current_stream(device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _check_open(self, layer: int) -> None:
        if not self._segments:
            raise TierError(f"{self.layers[layer]}: its device cache was closed")
        self._segments[0].arena.check_open()

    # -- pages on a drive ---------------------------------------------------------------------------------------------

    def begin_replay(self) -> None:
        """Prepare for the launch of a graph that has captured leases: pages on a drive may be asked for.

        Raises TierError: pages did not come in an earlier pass. The next one asks again.
        """
        if self.drive is not None:
            with self._lock:
                self._begin_pass()
                self._check_drive()

    def check(self) -> None:
        """Raise TierError if pages did not come from the drive in a pass so far; waits for the device if there are
        any."""
        if self.drive is not None:
            with self._lock:
                self._wait()
                self._check_drive()

    def _wait(self) -> None:
        """Wait until the device has run what was launched, replays on other streams included."""
        if accelerator.has_streams(self._stack.device):
            accelerator.synchronize(self._stack.device)

    def _check_drive(self) -> None:
        if self.drive is None:
            return
        self.drive.awake()
        if self.drive.recovers():
            self._tables.publish(dict.fromkeys(range(len(self._far))))
        error = self.drive.failure()
        if error is not None:
            self._wait()
            self.drive.mend()
            self._tables.mend()
            raise error

    def _begin_pass(self) -> None:
        """Count a pass; every so many, fix places of pages in host memory, with the device quiet."""
        self._passes += 1
        if self.drive is not None and self._passes % _CHOOSE_EVERY == 0:
            self._wait()
            self._choose()

    def _choose(self) -> None:
        """Fix the places of the pages on the drive that the device missed most; it must be quiet."""
        with self.drive.changing():
            if self._demand.follows(self._tables.misses(), sum(self.drive.counts)):
                demand = self._demand.of(self._far_experts)
                self._tables.publish(self.drive.choose(demand))

    # -- counts, room -------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, DeviceCounts]:
        """Return the counters by layer; waits for the device."""
        sizes, counts = [len(keys) for keys in self.keys.values()], self._counts()
        rows = zip(self.keys, *(of_all.split(sizes) for of_all in counts), strict=True)
        return {name: DeviceCounts(*of, int(fetched.sum())) for name, *of, fetched in rows}

    def _counts(self) -> Tensor:
        """Return hits, misses, misses that the host computed, and bytes copied in, int64 [4, pages] on the CPU."""
        counts, pages = self._tables.counts(), self._stack.pages
        nbytes = [sum(pages[key].nbytes for key in keys) for keys in self._experts()]
        fetched = (counts[1] - counts[2]) * torch.tensor(nbytes, dtype=torch.int64, device="cpu")
        return torch.cat((counts, fetched.unsqueeze(0)))

    def resident(self) -> frozenset[str]:
        """Return the keys of resident pages; waits for the device."""
        rows = zip(self._experts(), self._tables.resident().tolist(), strict=True)
        return frozenset(key for keys, slot in rows if slot >= 0 for key in keys)

    def totals(self) -> dict[str, DeviceTotals]:
        """Return the sums of each layer, in a few steps for all of them; waits for the device."""
        rows = torch.cat((self._counts(), (self._tables.resident() >= 0).long().unsqueeze(0)))
        ends = torch.tensor([0, *accumulate(map(len, self.keys.values()))], dtype=torch.int64, device="cpu")
        sums = torch.nn.functional.pad(rows.cumsum(1), (1, 0))[:, ends].diff(dim=1)
        of_layers = torch.cat((sums.t(), self._tables.routed()), dim=1).tolist()
        return {name: DeviceTotals(*of) for name, of in zip(self.keys, of_layers, strict=True)}

    def check_not_recorded(self) -> None:
        """Raise TierError if a CUDA graph has captured slot addresses."""
        if self.recorded:
            raise TierError(
                f"{self.layers[0]}: a CUDA graph has recorded where the slots of its cache lie; choose the budget "
                "of the GPU before the capture"
            )

    def close(self) -> None:
        """Free the slots, and let the pages move again. Idempotent."""
        with self._lock:
            if self._segments:
                if self._ring is not None:
                    self._ring.stop()
                    self._ring = None  # it refers to this cache: the slots' memory would wait for the collector
                self._end()

    def _end(self) -> None:
        """End what reads pages, once the device asks for none, and free the slots."""
        if self.drive is not None:
            self._wait()
            self.drive.close()
        while self._segments:
            self._segments.pop().arena.close()


class _Segment(NamedTuple):
    """Slots that are allocated together.

    Attributes:
        arena: their memory.
        slots: of each pool, uint8 [slots, bytes of a page].
    """

    arena: Arena
    slots: Sequence[Tensor]


class _Demand:
    """Counts of misses by expert, of which later ones weigh more."""

    def __init__(self) -> None:
        self._misses: Tensor | None = None
        self._worth: Tensor | None = None
        self._read = 0

    def follows(self, misses: Tensor, read: int) -> bool:
        """Take new counts; False if the drive was asked for nothing since the last ones: all that is missed is fixed.

        Args:
            misses: so far, by expert.
            read: grows with what the drive is asked for.
        """
        if read == self._read:
            return False
        worth = misses.double() if self._misses is None else self._worth / _HALVES + (misses - self._misses)
        self._misses, self._worth, self._read = misses, worth, read
        return True

    def of(self, experts: Sequence[int]) -> list[float]:
        """Return the worth of pages, by their experts."""
        return self._worth[experts].tolist()


class _Order:
    """Pairs of a pass, part by part.

    Args:
        parts: the experts of each part.
        k: experts of a token.
        places: address of each expert's page, but of those that are leased.
        noted: hits and misses, by expert.

    Attributes:
        noted: int64 [2, E] on the device, 1 for each of them.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[int]],
        heard: Heard,
        k: int,
        places: Mapping[int, int],
        noted: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        count, device = len(heard.pairs), heard.ids.device
        rows = [
            [count] * (count + 1),
            [next(iter(places.values()), 0)] * (count + 1),
            *([0] * (count + 1) for _ in noted),
        ]
        for turn, expert in enumerate(expert for part in parts for expert in part):
            rows[0][expert] = turn
        for expert, place in places.items():
            rows[1][expert] = place
        for row, experts in zip(rows[2:], noted, strict=True):
            for expert in experts:
                row[expert] = 1
        told = accelerator.sent(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)
        self._addresses, self.noted = told[1, :count], told[2:, :count]
        sizes = [sum(heard.pairs[expert] for expert in part) for part in parts]
        pairs_P = told[0].to(torch.int32)[heard.ids].argsort(stable=True)[: sum(sizes)]
        ids_P1 = heard.ids[pairs_P].unsqueeze(1)
        self._parts = zip(pairs_P.split(sizes), (pairs_P // k).split(sizes), ids_P1.split(sizes), strict=True)

    def part(self, experts: Sequence[int]) -> Passing:
        """Return the next part; experts that are leased get other addresses."""
        return Passing(experts, *next(self._parts), self._addresses)


def _ranks(ids_Tk: Tensor, count: int) -> Tensor:
    """Return the place of each id among the touched experts, -1 for sentinels, without a sync."""
    outside = (ids_Tk < 0) | (ids_Tk >= count)
    ids = ids_Tk.long().masked_fill(outside, count)
    touched = torch.zeros(count + 1, dtype=torch.int64, device=ids.device).scatter_(0, ids.view(-1), 1)
    return (touched.cumsum(0) - 1)[ids].masked_fill(outside, -1)


def _between(ids_Tk: Tensor, first: int, end: int) -> Part:
    return Part(ids_Tk.where((ids_Tk >= first) & (ids_Tk < end), -1))


def _page_bytes(stack: TierStack, name: str, keys: Sequence[str]) -> int:
    """Return the bytes of a layer's pages. Raises TierError if they differ."""
    sizes = {stack.pages[key].nbytes for key in keys if key in stack.pages}
    if len(sizes) != 1:
        raise TierError(f"{name}: pages of {len(sizes)} sizes; a device cache takes equal ones")
    return sizes.pop()


def _pool(name: str, share: int, page_bytes: int, pages: int, layers: int) -> PoolRoom:
    slots = min(share // page_bytes, pages)
    if slots < 1:
        raise TierError(f"{name}: {share} bytes of a device cache have no room for a page of {page_bytes} bytes")
    return PoolRoom(slots, page_bytes, HALF * layers)
