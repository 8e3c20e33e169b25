"""Extent store: pages of a KV cache in the tiers of a runtime, under the same budgets as the weights.

The home of an extent (`extent.py`) is the computing tier while the layer's share lasts, else the first lower tier with
room. All layers have equal shares, so that the link stays busy throughout a pass.

Extents are *put* (pinned to their home): policies ignore them, and rehoming does not move them. Their order of use is
known (layer by layer, oldest tokens first), so they are prefetched through their own ring (`fetch_ring.py`). A budget
change releases them for its duration; the stack then moves them like any page.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator

from torch import Tensor

from vbrt.errors import TierError
from vbrt.generation.kv.device_shares import Needs, Sizes, whole
from vbrt.generation.kv.extent import Alive, Extent, Memory
from vbrt.generation.kv.fetch_ring import Ring
from vbrt.generation.kv.quantized import PageCode
from vbrt.host import accelerator
from vbrt.tiers import Level, Tally, TierStack

__all__ = ["KVStore"]

_PASSING_PAGES = 4  # streaming slots of weights: two leased, two prefetched
_names = itertools.count(1)


class KVStore:
    """Pages of one cache.

    Args:
        stack: of the model's runtime.
        layers: number of paged layers.
        room: bytes of the computing tier for the cache; None: what weights leave.
        others: returns the stores of all caches on the runtime, including this one's.
        give_way: evicts weights to free that many bytes for a cache with an explicit room.

    Attributes:
        name: in keys, stats and timelines.
        tally: counts extents read in place (hits) and through the ring (misses), and bytes moved; links such as
            "gpu>cpu" count writes.
        extents: live extents, by layer.
    """

    def __init__(
        self,
        stack: TierStack,
        layers: int,
        *,
        room: int | None = None,
        others: Callable[[], "list[KVStore]"],
        give_way: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self.stack, self.layers, self.room, self._others = stack, max(1, layers), room, others
        self._give_way = give_way
        self.name = f"kv{next(_names)}"
        self.tally = Tally()
        self.extents = {layer: Alive[Extent]() for layer in range(self.layers)}
        self.tails = Alive[Memory]()
        self.order: Callable = lambda place: None  # next extent to prefetch after a place; set by the cache
        self._sizes: Sizes | None = None  # None: recompute after a budget change
        self._ring: Ring | None = None
        self._peers = 0  # caches that the room was shared with
        self._serial, self._passing_bytes, self._tail_bytes, self._page_bytes = itertools.count(), 0, 0, 0
        self._out = accelerator.Stream(stack.device) if accelerator.has_streams(stack.device) else None

    # -- room ---------------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of all pages in all tiers, ring included."""
        extents = sum(extent.nbytes for layer in self.extents.values() for extent in layer)
        ring = self._ring.nbytes if self._ring else 0
        return extents + ring + sum(tail.page.nbytes for tail in self.tails)

    def bytes_by_tier(self) -> dict[str, int]:
        """Return the bytes of all pages per tier."""
        found = dict.fromkeys(self.stack.names, 0)
        memories = [*itertools.chain(*self.extents.values()), *self.tails, *([self._ring.memory] if self._ring else [])]
        for memory in memories:
            found[self.stack.names[memory.page.home]] += memory.page.nbytes
        return found

    def tail(self, nbytes: int, page_bytes: int) -> Memory:
        """Allocate a layer's tail on the computing device. Raises TierError: the budget has no room for it."""
        if nbytes > self._tail_bytes or page_bytes > self._page_bytes:
            self._tail_bytes, self._page_bytes = max(self._tail_bytes, nbytes), max(self._page_bytes, page_bytes)
            self._sizes = None
        if self._sizes is None:
            self._share()
        tail = Memory(self.stack, self._key("tail"), self.stack.names[0], nbytes)
        self.tails.add(tail)
        return tail

    def _key(self, what: str) -> str:
        return f"{self.name}/{what}#{next(self._serial)}"

    @property
    def sizes(self) -> Sizes:
        """Current split of the room. Raises TierError: the room is too small."""
        if self._sizes is None:
            self._share()
        return self._sizes

    def _share(self) -> None:
        """Split what weights leave on the computing device equally among active caches without an explicit room; a
        cache that holds more demotes extents."""
        stores = self._sharing()
        sharing = [] if self.room is not None else [self, *stores]
        passing, free = self._left(sharing or [self])
        if self.room is not None and self.room > free:
            self._give_way(self.room - free)
            passing, free = self._left([self])
        changed = []
        for store in sharing or [self]:
            store._passing_bytes, store._peers = passing, len(stores)
            sizes = store._divided(free // len(sharing) if sharing else self.room, free)
            if store._sizes != sizes:
                store._shrink(sizes)
                changed.append(store)
        for store in changed:
            store._grow()

    def _left(self, stores: "list[KVStore]") -> tuple[int, int]:
        """Return the bytes of streaming slots, and the bytes left for these caches after streaming slots, resident
        pages and other caches' room."""
        top, pages = self.stack.levels[0], self.stack.pages.values()
        passing = _PASSING_PAGES * max((p.nbytes for p in pages if p.passes and p.home and p.put is None), default=0)
        free = top.free_bytes - passing + sum(store.bytes_by_tier()[top.tier.name] for store in stores)
        return passing, free - sum(_unused(store) for store in self._others() if store.tails and store is not self)

    def _sharing(self) -> "list[KVStore]":
        """Return the other active caches without an explicit room."""
        return [store for store in self._others() if store.room is None and store.tails and store is not self]

    def _divided(self, room: int, free: int) -> Sizes:
        """Split room on the computing device, of which `free` bytes are available, into tails, ring and shares."""
        needs = Needs(self.layers, self._tail_bytes, self._page_bytes, ring=len(self.stack.levels) > 1)
        held = max((extent.nbytes for extent in itertools.chain(*self.extents.values())), default=0)
        sizes = needs.divide(room, held)
        if room > free or sizes.share < 0:
            top = self.stack.levels[0].tier
            raise TierError(
                f"{self.name}: the KV cache needs {max(needs.fixed(sizes), self.room or 0)} bytes of tiers.{top.name} "
                f"(the last tokens of {self.layers} layers, slots that pages pass through, and its room); of the "
                f"budget of {top.capacity_bytes} bytes {max(min(room, free), 0)} are left for it: raise the budget "
                "with vb.set_budget(), pass room= (it evicts weights), or take smaller pages or a smaller batch"
            )
        return sizes

    def _shrink(self, sizes: Sizes) -> None:
        """Apply a new split, part one: drop the ring, and demote each layer's newest extents beyond its share."""
        self.forget_ring()
        self._sizes = sizes
        for layer, extents in self.extents.items():
            left = sizes.share
            for extent in sorted(extents, key=lambda extent: extent.serial):
                left -= extent.nbytes
                if left < 0 and extent.page.home == 0:
                    self._move(extent, self._home(layer, extent.nbytes, below=True), layer)

    def _grow(self) -> None:
        """Apply a new split, part two: allocate the ring, and promote the oldest extents that fit."""
        sizes, top = self._sizes, self.stack.names[0]
        if sizes.slots:
            slot = whole(sizes.extent)
            memory = Memory(self.stack, self._key("ring"), top, sizes.slots * slot)
            self._ring = Ring(memory, slot, self.tally, self.order)
        for layer, extents in self.extents.items():
            for extent in sorted(extents, key=lambda extent: extent.serial):
                if extent.page.home and self._home(layer, extent.nbytes) == top:
                    self._move(extent, top, layer)

    def _move(self, extent: Extent, home: str | None, layer: int) -> None:
        if home is None:
            raise _full(self, layer, extent.nbytes)
        extent.release()
        try:
            self.stack.rehome({extent.key: home})
        finally:
            extent.put()

    # -- extents ------------------------------------------------------------------------------------------------------

    def extend(self, layer: int, code: PageCode, pages: Tensor, held: int) -> Extent:
        """Create an extent and write the first of these pages, uint8 [n, page_bytes], at least one.

        Args:
            held: pages that the layer already has: capacity grows to as many, so sizes double.

        Raises:
            TierError: no tier has room, or a file cannot be written.
        """
        if self._peers != len(self._sharing()):  # another cache came or went
            self._sizes = None
        size = code.page_bytes
        most = max(1, self.sizes.extent // size)
        count = min(len(pages), most)
        wanted = min(most, max(count, held))
        for capacity in dict.fromkeys((wanted, count)):
            home = self._home(layer, whole(capacity * size))
            if home is not None:
                break
        else:
            raise _full(self, layer, whole(count * size))
        level = self.stack.levels[self.stack.names.index(home)]
        key = self._key(f"{layer}")
        if level.tier.memory:
            extent = Extent(self.stack, key, home, code, capacity)
            self.extents[layer].add(extent)
            self.write(extent, pages[:count])
        else:
            extent = Extent(self.stack, key, home, code, count, pages[:count])
            self.extents[layer].add(extent)
            _count_written(self, level, extent.nbytes)
        return extent

    def write(self, extent: Extent, pages: Tensor) -> None:
        """Append pages to an extent with room in a memory tier; D2H copies are asynchronous on pinned memory."""
        size, count = extent.code.page_bytes, len(pages)
        level, slot = extent.level, extent.level.slots[extent.key]
        out = slot.view[extent.filled * size : (extent.filled + count) * size].view(count, size)
        if level.index and self._out is not None and slot.room.pinned:
            recorder = self.stack.guard.recorder
            self._out.wait_stream(accelerator.current_stream(self.stack.device))
            began = None if recorder is None else recorder.mark_on(self._out)
            with accelerator.stream(self._out):
                out.copy_(pages, non_blocking=True)
            pages.record_stream(self._out)
            extent.written = slot.room.fence(self._out)
            if recorder is not None:
                link = f"{self.stack.names[0]}>{level.tier.name}"
                recorder.note(link, extent.key, began, recorder.mark_on(self._out), pages.numel())
        else:
            out.copy_(pages)
        if level.index:
            _count_written(self, level, pages.numel())
        extent.filled += count

    def _home(self, layer: int, nbytes: int, *, below: bool = False) -> str | None:
        """Return the first tier with room for an extent of a layer; `below`: skip the computing tier."""
        top, *lower = self.stack.levels
        on_top = sum(extent.nbytes for extent in self.extents[layer] if extent.page.home == 0)
        if not below and on_top + nbytes <= self.sizes.share and nbytes <= top.free_bytes - self._passing_bytes:
            return top.tier.name
        for level in lower:
            passing = self._passing_bytes if level.keeps_copies and level is not lower[-1] else 0
            if nbytes + level.overhead_bytes <= level.free_bytes - passing:
                return level.tier.name
        return None

    @property
    def ring(self) -> Ring:
        """The prefetch ring. Raises TierError: no room for it."""
        if self._ring is None or self._sizes is None:
            self._sizes = None  # force a new split, which allocates the ring
            self._share()
        return self._ring

    def forget_ring(self) -> None:
        """Drop the ring; it is allocated again on demand. Idempotent."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()

    # -- budget changes -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def movable(self) -> Iterator[None]:
        """Unpin extents in a `with` block, for a budget change; then the room is split anew."""
        with self.stack.encoding:
            extents = [extent for layer in self.extents.values() for extent in layer]
            self.forget_ring()
            try:
                for extent in extents:
                    extent.release()
                    extent.written = None  # release has synchronized
                yield
            finally:
                for extent in extents:
                    extent.put()
                self._sizes = None

    def close(self) -> None:
        """Free all pages now. Idempotent."""
        self.forget_ring()
        for memory in [*itertools.chain(*self.extents.values()), *self.tails]:
            self.stack.retire(memory.owner)
        if not self.stack.closed:
            self.stack.retire_unowned()


def _unused(store: KVStore) -> int:
    """Bytes of an explicit room that are not allocated yet."""
    return 0 if store.room is None else max(0, store.room - store.bytes_by_tier()[store.stack.names[0]])


def _full(store: KVStore, layer: int, nbytes: int) -> TierError:
    """Build the error for an extent that fits into no tier."""
    rooms = (
        f"tiers.{level.tier.name}.budget = {level.tier.capacity_bytes} has {max(level.free_bytes, 0)} free"
        for level in store.stack.levels
    )
    lower = "" if any(not level.tier.memory for level in store.stack.levels) else ", enable tiers.ssd"
    return TierError(
        f"{store.name}: {nbytes} more bytes of keys and values of layer {layer} fit into no tier "
        f"({', '.join(rooms)}); raise a budget with vb.set_budget(){lower}, use KVCache(bits=8) or 4, or a "
        "shorter context"
    )


def _count_written(store: KVStore, level: Level, nbytes: int) -> None:
    link, moved = f"{store.stack.names[0]}>{level.tier.name}", store.tally.bytes_moved
    moved[link] = moved.get(link, 0) + nbytes
