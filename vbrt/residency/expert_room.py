"""Division of the experts' room among pools, with borrowing.

Scope "layer": every layer and plane is a pool, all with the same number of slots; the first ones get one of the
remainder each. Scope "model": all pages are one pool with all the room.

A pool at its share evicts its own pages. Only a lease wider than the share borrows: free room first, then slots of the
pools furthest above their share. A borrowed slot is returned when the pool loads its next page.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from vbrt.residency.expert_pool import ExpertPage, Pool

__all__ = ["ExpertRoom", "largest_pages", "split_key"]


def split_key(key: str) -> tuple[str, int] | None:
    """Split the key of an expert's page into (layer and plane, expert); None for other pages."""
    layer, _, expert = key.rpartition(".")
    return (layer, int(expert)) if expert.isdecimal() and "#" in layer else None


def largest_pages(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of the largest expert page by layer and plane, from the sizes of pages by key."""
    largest: dict[str, int] = {}
    for key, size in sizes.items():
        parts = split_key(key)
        if parts is not None:
            largest[parts[0]] = max(size, largest.get(parts[0], 0))
    return largest


@dataclass(slots=True)
class _Layer:
    """One plane of a layer: its number in the model, bytes of its largest page, its known pages, its pool."""

    number: int
    page_bytes: int
    pool: Pool
    known: int = 0


class ExpertRoom:
    """Pages of routed experts within `capacity_bytes`.

    Args:
        by_layer: True for one pool per layer and plane, False for a single pool.
        layers: bytes of the largest page by layer and plane, in model order.

    Attributes:
        pages: by key, all pages leased or announced so far, less removed ones.
        resident_bytes: bytes of resident pages.
        largest_bytes: bytes of the largest page.
    """

    def __init__(self, *, by_layer: bool, layers: Mapping[str, int]) -> None:
        self._by_layer, self._common = by_layer, Pool()
        self._layers: dict[str, _Layer] = {}
        self.pages: dict[str, ExpertPage] = {}
        self.capacity_bytes = self.resident_bytes = self.largest_bytes = 0
        for layer, nbytes in layers.items():
            self._add_layer(layer, nbytes)
        self.resize(0)

    def page(self, key: str, size: int) -> ExpertPage | None:
        """Return the state of an expert's page, created at first use; None for other pages."""
        page = self.pages.get(key)
        if page is not None:
            return page
        parts = split_key(key)
        if parts is None:
            return None
        layer = self._layers.get(parts[0]) or self._add_layer(parts[0], size)
        layer.known += 1
        if size > layer.page_bytes or layer.known == 1:
            layer.page_bytes = max(size, layer.page_bytes)
            self.resize(self.capacity_bytes)
        page = self.pages[key] = ExpertPage(key, layer.pool, (layer.number, parts[1]), size)
        return page

    def _add_layer(self, name: str, page_bytes: int) -> _Layer:
        number = max((layer.number for layer in self._layers.values()), default=-1) + 1
        layer = self._layers[name] = _Layer(number, page_bytes, Pool() if self._by_layer else self._common)
        return layer

    def remove(self, key: str) -> None:
        """Remove a page; the last page of a layer removes the layer."""
        page = self.pages.pop(key)
        if page.place:
            self.evict(page)
        name = split_key(key)[0]
        layer = self._layers[name]
        layer.known -= 1
        if not layer.known:
            del self._layers[name]
            self.resize(self.capacity_bytes)

    # -- shares -------------------------------------------------------------------------------------------------------

    def resize(self, capacity_bytes: int) -> None:
        """Set the room and divide it. Pages stay resident until `shrink`, or until their pools need the slots."""
        self.capacity_bytes = capacity_bytes
        layers = self._layers
        self.largest_bytes = max((layer.page_bytes for layer in layers.values()), default=0)
        if not self._by_layer:
            self._common.share = capacity_bytes
            self._common.layers = len({name.rpartition("#")[0] for name in layers}) or 1
            return
        slot_of_each = sum(layer.page_bytes for layer in layers.values())
        slots = max(0, capacity_bytes) // slot_of_each if slot_of_each else 0
        rest = max(0, capacity_bytes) - slots * slot_of_each
        for layer in layers.values():
            more = layer.page_bytes <= rest
            rest -= more * layer.page_bytes
            layer.pool.share = (slots + more) * layer.page_bytes

    def shares(self) -> dict[str, int]:
        """Return the share of each pool in bytes, by layer and plane."""
        return {name: layer.pool.share for name, layer in self._layers.items()}

    def shrink(self, nbytes: int, busy: Collection[str] = ()) -> tuple[str, ...]:
        """Evict pages until the resident ones fit into `nbytes`, or only busy ones are left."""
        victims = []
        while self.resident_bytes > nbytes:
            page = self._victim_of_all(busy)
            if page is None:
                break
            self.evict(page)
            victims.append(page.key)
        return tuple(victims)

    # -- pages --------------------------------------------------------------------------------------------------------

    def busy_bytes(self, busy: Collection[str]) -> int:
        """Return the bytes of resident pages that are busy."""
        found = (self.pages.get(key) for key in busy)
        return sum(page.size for page in found if page is not None and page.place)

    def lacks(self, size: int, busy: Collection[str]) -> int:
        """Return the shortage of bytes for one more page besides the busy ones; 0 if it fits."""
        if (len(busy) + 1) * max(size, self.largest_bytes) <= self.capacity_bytes:
            return 0  # the common case
        return max(0, self.busy_bytes(busy) + size - self.capacity_bytes)

    def load(self, page: ExpertPage, busy: Collection[str], *, scanned: bool) -> tuple[str, ...]:
        """Load a page that fits besides the busy ones; return the pages evicted for it."""
        pool, victims = page.pool, []
        while pool.resident_bytes + page.size > pool.share:
            victim = pool.victim(busy)
            if victim is None:
                break
            self.evict(victim)
            victims.append(victim.key)
        victims += self.shrink(self.capacity_bytes - page.size, busy)
        pool.insert(page, scanned=scanned)
        self.resident_bytes += page.size
        return tuple(victims)

    def evict(self, page: ExpertPage) -> None:
        """Remove a page from the resident ones."""
        page.pool.evict(page)
        self.resident_bytes -= page.size

    def _victim_of_all(self, busy: Collection[str]) -> ExpertPage | None:
        """Return a victim from the pool furthest above its share that has an evictable page."""
        pools = dict.fromkeys(layer.pool for layer in self._layers.values())
        for pool in sorted(pools, key=lambda pool: pool.share - pool.resident_bytes):
            page = pool.victim(busy)
            if page is not None:
                return page
        return None
