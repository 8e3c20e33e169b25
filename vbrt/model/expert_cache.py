"""Device-side cache of routed experts: the GPU decides which experts are resident, where possible.

Once all experts are encoded, those with pages in pinned host memory, or on a drive below it, share one device cache,
which takes the rest of the GPU's budget, and of the host memory's where there is a drive. It follows a lower budget of
the GPU, and one up to that which it was made for, and captured steps go on (`give_way`, `take_room`). Another one, or
new weights, end it; the next forward of a layer creates another. So does any budget for `dense` experts, whose products
may take all slots as one tensor. Fallback: the host decides, and `stats().fallbacks` has the reason.
The host also decides where the CPU computes missed experts: see `layers/experts/missed_experts.py`.
"""

import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from vbrt.errors import KernelError, TierError
from vbrt.host import accelerator
from vbrt.layers import KINDS
from vbrt.layers.experts import ExpertsHandle
from vbrt.layers.experts.device_cache import DeviceCache, DeviceCounts, DeviceTotals
from vbrt.layers.experts.hosted_experts import HostedLayer, HostedMisses
from vbrt.layers.experts.missed_experts import MissedExperts
from vbrt.layers.experts.residency_owner import CachedLayer
from vbrt.layers.experts.residency_reasons import why_host
from vbrt.tiers import Page, TierStack
from vbrt.tiers.stack.page_counters import Tally

if TYPE_CHECKING:
    from vbrt.layers import SwappedLayer

__all__ = ["ExpertCache", "give_way"]

_POLICY = "experts"  # the only policy that the device implements
_PASSING = 4  # room for streamed pages of other layers, in leases of two of their largest pages


class ExpertCache:
    """Owner of a model's device cache of experts; there may be none.

    Args:
        wait_s: the device waits so long for pages from a drive.

    Attributes:
        missed: CPU compute of missed experts where the host decides; None: they are fetched.
        hosted: the same where the device decides.
        fallbacks: why the host decides; empty where that is intended, or where the device decides.
    """

    def __init__(
        self,
        stack: TierStack,
        layers: Callable[[], Iterable["SwappedLayer"]],
        missed: MissedExperts | None = None,
        hosted: HostedMisses | None = None,
        wait_s: float = 10.0,
    ) -> None:
        self._wait_s = wait_s
        self._stack, self._layers, self.missed, self.hosted = stack, layers, missed, hosted
        self._cache: DeviceCache | None = None
        self._handles: dict[str, ExpertsHandle] = {}  # by name, in the cache's layer order
        self._lock = threading.Lock()  # guards _told and _told_pages
        self._told: dict[str, DeviceTotals] = {}  # device totals already added to layers' tallies
        self._told_pages: dict[str, DeviceCounts] = {}  # device counts already added to pages
        self._tried: object = None
        self.fallbacks: list[str] = []

    def follow(self) -> None:
        """Create or recreate the cache, at most one attempt per state of the stack's pages.

        Layers without a cache call it at each forward.
        """
        stack = self._stack
        if stack.ledger.changes == self._tried or stack.levels[0].policy.kind != _POLICY:
            return
        if accelerator.is_current_stream_capturing() or (self._cache is not None and self._cache.recorded):
            return
        with stack.encoding:
            handles = [layer.handle for layer in self._layers() if isinstance(layer.handle, ExpertsHandle)]
            handles = [h for h in handles if not KINDS[h.spec.site.kind].every]  # without routing there is no choice
            if stack.ledger.changes != self._tried and all(handle.keys for handle in handles):
                self.close()
                self._make(handles)
                self._tried = stack.ledger.changes

    def _make(self, handles: list[ExpertsHandle]) -> None:
        moving = [handle for handle in handles if any(page.home for page in handle.pages)]
        refusals = {handle: why_host(handle) for handle in moving}
        served = {handle.spec.name: handle for handle, why in refusals.items() if not why}
        refused = [why for handle, why in refusals.items() if why and not self._kept_on_host(handle)]
        self.fallbacks = [f"the host decides which experts are resident: {why}" for why in refused[:1]]
        if not served:
            return
        try:
            capacity = self._room(served)
            why = "they are all fetched" if self.hosted is None else self.hosted.refusal(served.values())
            if self.missed is not None and why and not self.missed.left_to_device(served.values(), capacity, why):
                return
            keys = {name: handle.keys[:: handle.planes] for name, handle in served.items()}
            fine = {name: handle.keys[1::2] for name, handle in served.items() if handle.spec.fine}
            scope = self._stack.levels[0].policy.scope
            spare = self._spare(served, 1)
            resizes = not any(handle.spec.dense for handle in served.values())
            how = {"spare_bytes": spare, "wait_s": self._wait_s, "resizes": resizes}
            self._cache = DeviceCache(self._stack, keys, capacity, scope=scope, fine=fine, **how)
        except TierError as error:
            self.fallbacks = [f"the host decides which experts are resident: {error}"]
            return
        self._handles = served
        self._told, self._told_pages = self._cache.totals(), self._cache.counts()
        hosted = {} if why else self._hosted_layers(served)
        if why and self._cache.drive is not None and self.computes_misses:
            self.missed.announce(f"the GPU decides, which waits for no routing, and then {why}")
        for number, (name, handle) in enumerate(served.items()):
            form = handle.form([None] * handle.spec.experts)
            exact = handle.places if handle.spec.fine else None
            handle.deciding.begin_on_device(CachedLayer(self._cache, number, form, hosted.get(name), exact))

    def _hosted_layers(self, served: dict[str, ExpertsHandle]) -> Mapping[str, HostedLayer]:
        try:
            return self.hosted.take(served)
        except KernelError as error:
            self.missed.announce(str(error))
            return {}

    def _kept_on_host(self, handle: ExpertsHandle) -> bool:
        return self.missed is not None and self.missed.keeps_on_host(handle)

    def _room(self, served: dict[str, ExpertsHandle]) -> int:
        """Return the bytes of the GPU's budget that no other page needs."""
        return self._stack.levels[0].free_bytes - self._spare(served, 0)

    def _spare(self, served: dict[str, ExpertsHandle], index: int) -> int:
        """Return the bytes of a level's budget that pages from below need to pass through, or to be leased."""
        stack, own = self._stack, {key for handle in served.values() for key in handle.keys}
        below = ((key, page) for key, page in stack.pages.items() if page.home > index and page.passes)
        others = [page.nbytes for key, page in below if key not in own]
        token = max(
            sum(page.nbytes for page in handle.pages[: handle.spec.top_k * handle.planes]) for handle in served.values()
        )
        passing = min(sum(others), _PASSING * 2 * max(others, default=0))
        return passing + token

    # -- another budget -----------------------------------------------------------------------------------------------

    @property
    def lives(self) -> bool:
        """True if the device decides."""
        return self._cache is not None

    @property
    def gives_bytes(self) -> int:
        """Bytes that the cache can give way by while it lives."""
        return self._cache.capacity_bytes - self._cache.least_bytes

    def lacks(self, budget_bytes: int) -> int:
        """Return by how many bytes the GPU's pages and what passes exceed a budget; below 0: so many are left."""
        return -self._left(budget_bytes)

    def outgrown(self, budget_bytes: int) -> bool:
        """True if a budget has room for more slots than the cache can have."""
        return self._cache.outgrown(self._cache.capacity_bytes + self._left(budget_bytes))

    def give_way(self, nbytes: int) -> None:
        """Use so many bytes less; captured steps go on."""
        if nbytes > 0:
            self._cache.resize(self._cache.capacity_bytes - nbytes)

    def take_room(self) -> None:
        """Use what the budget has left, up to what the cache was made with. Raises TierError: there is no memory."""
        left = self._left(self._stack.levels[0].tier.capacity_bytes)
        if left > 0:
            self._cache.resize(self._cache.capacity_bytes + left)

    def _left(self, budget_bytes: int) -> int:
        """Bytes of a budget that neither pages at home on the GPU, the cache included, nor passing ones need."""
        level = self._stack.levels[0]
        return budget_bytes - level.tier.capacity_bytes + self._room(self._handles)

    def told(self) -> str:
        """Return how missed experts are computed while the device decides, for statistics; "" if they are fetched."""
        layers = [h for h in self._handles.values() if h.deciding.cache is not None and h.deciding.cache.hosted]
        return self.hosted.told(len(layers)) if layers else ""

    @property
    def computes_misses(self) -> bool:
        """True if the CPU may compute missed experts: which they are, and so how a pass rounds, depends on the passes
        before."""
        experts = [layer for layer in self._layers() if isinstance(layer.handle, ExpertsHandle)]
        return self.missed is not None and any(
            self.missed.serves(layer) if (cache := layer.handle.deciding.cache) is None else cache.hosted is not None
            for layer in experts
        )

    def settle(self, *, each: bool = False) -> None:
        """Add the device's counters to the tallies of layers, and with `each` to their pages; synchronizes."""
        with self._lock:
            if self._cache is not None:
                self._settle(self._cache, each=each)

    def _settle(self, cache: DeviceCache, *, each: bool) -> None:
        link, before, self._told = f"{self._stack.names[1]}>{self._stack.names[0]}", self._told, cache.totals()
        for name, of in self._told.items():
            handle = self._handles[name]
            handle.deciding.note_resident(of.resident)
            more, pages = DeviceTotals(*map(operator.sub, of, before[name])), handle.planes
            _count(handle.pages[0].tally, pages * more.hits, pages * more.misses, more.bytes_in, link)
            handle.routing.computed += more.computed
            tokens = more.named // handle.spec.top_k
            handle.routing.add(more.leases, tokens, more.touched, compared=more.compared, reused=more.reused)
        if cache.drive is not None:
            owners = {key: handle for handle in self._handles.values() for key in handle.keys}
            for key, times in cache.drive.drained().items():
                page = self._stack.pages[key]
                for counted in (page, owners[key].pages[0].tally):
                    _count(counted, 0, 0, times * page.nbytes, cache.drive.link)
        if each:
            told, self._told_pages = self._told_pages, cache.counts()
            for name, counts in self._told_pages.items():
                _count_each(self._handles[name].pages, counts, told[name], link)

    def begin_replay(self) -> None:
        """See `DeviceCache.begin_replay`. Raises TierError."""
        if self._cache is not None:
            self._cache.begin_replay()

    def check(self) -> None:
        """See `DeviceCache.check`. Raises TierError."""
        if self._cache is not None:
            self._cache.check()

    def forget_recording(self) -> None:
        """Allow the cache to end although a graph has captured it: the graph's owner checks pages before replays."""
        if self._cache is not None:
            self._cache.recorded = False

    def close(self) -> None:
        """End the cache; the host decides again. Idempotent.

        Raises:
            TierError: a CUDA graph has captured it.
        """
        cache = self._cache
        if cache is None:
            return
        if not self._stack.closed:
            cache.check_not_recorded()
            self.settle(each=True)
        for handle in self._handles.values():
            _end_hosting(handle)
            handle.deciding.end_on_device()
        self._cache, self._handles = None, {}
        cache.close()

    def end(self) -> None:
        """End the cache with the model, captured or not: its graphs are invalid, as for all pages."""
        cache, self._cache = self._cache, None
        for handle in self._handles.values():
            _end_hosting(handle)
        if cache is not None:
            cache.close()

    def reset(self) -> None:
        """End the cache; the next forward creates another. Raises TierError: a CUDA graph has captured it."""
        self.close()
        self._tried = None


def give_way(caches: Sequence[ExpertCache], budget_bytes: int, page_bytes: int) -> bool:
    """Have device caches give way to another budget of the GPU, that of most slots first; False, with nothing changed,
    if they must end for it: it has room for all pages at home, for more slots than they can have, or for too few.

    Args:
        caches: that live.
        page_bytes: of all pages.
    """
    if not caches or page_bytes <= budget_bytes or any(cache.outgrown(budget_bytes) for cache in caches):
        return False
    lacks = max(cache.lacks(budget_bytes) for cache in caches)
    if lacks > sum(cache.gives_bytes for cache in caches):
        return False
    for cache in sorted(caches, key=lambda cache: cache.gives_bytes, reverse=True):
        gives = min(lacks, cache.gives_bytes)
        cache.give_way(gives)
        lacks -= gives
    return True


def _end_hosting(handle: ExpertsHandle) -> None:
    """Have the CPU compute no experts of a layer anymore: pages are about to move."""
    cached = handle.deciding.cache
    if cached is not None and cached.hosted is not None:
        cached.hosted.end()


def _count_each(pages: Sequence[Page], now: DeviceCounts, before: DeviceCounts, link: str) -> None:
    columns = [(after - early).tolist() for after, early in zip(now[:3], before[:3], strict=True)]
    planes = len(pages) // len(columns[0])
    for number, page in enumerate(pages):
        hits, misses, computed = (column[number // planes] for column in columns)
        if hits or misses:
            _count(page, hits, misses, (misses - computed) * page.nbytes, link)


def _count(counted: Page | Tally, hits: int, misses: int, nbytes: int, link: str) -> None:
    """Add the device's hits, misses, and bytes copied in to a counter."""
    counted.hits += hits
    counted.misses += misses
    if nbytes:
        counted.bytes_moved[link] = counted.bytes_moved.get(link, 0) + nbytes
