"""Owner of expert residency: the host by leases, or the device by a layer's part of a `DeviceCache`."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from vbrt.host import accelerator
from vbrt.kernels.cuda.experts.residency import Shares
from vbrt.kernels.experts import ExpertPages
from vbrt.layers.experts.device_cache import DeviceCache, Part, Passing
from vbrt.layers.experts.exact_places import ExactPlaces

__all__ = ["CachedLayer", "Deciding", "HostOperands", "HostRows", "HostedExperts", "Misses"]


class HostOperands(Protocol):
    """The arguments of a layer's forward in host memory."""

    def pairs(self, experts: int) -> Mapping[int, int]:
        """Return how many pairs go to each expert that has any, ascending."""

    def sent(self, experts: Sequence[int], ids_Tk: Tensor) -> Tensor:
        """Return the ids on the computing device, with those of other experts masked."""


class HostRows(Protocol):
    """Rows of missed experts that the CPU computes.

    Attributes:
        experts: which those are.
    """

    experts: Sequence[int]

    def rows(self) -> Tensor:
        """Return the rows of all pairs on the computing device, zeros but for these experts'; waits for them."""

    def ids(self) -> Tensor:
        """Return the ids [T, k], those of other experts masked."""


class Misses(Protocol):
    """CPU compute of missed experts, on their host pages."""

    def operands(self, layer: Any, x: Tensor, ids: Tensor) -> HostOperands | None:
        """Return the arguments of a pass in host memory; None where its misses are fetched."""

    def begin(self, layer: Any, operands: HostOperands) -> HostRows | None:
        """Start computing missed experts; None if the CPU has none to compute."""

    def keeps_on_host(self, handle: Any) -> bool:
        """True if the host decides for a layer because all its misses are computed."""


class HostedExperts(Protocol):
    """CPU compute of a share of a cached layer's missed experts."""

    def shares(self, routed: Any) -> Shares | None:
        """Return the division of a pass's misses; None if all are fetched."""

    def post(self, routed: Any, kept_Tk: Tensor) -> None:
        """Launch the post of the experts that are not kept."""

    def add(self, y_TN: Tensor) -> None:
        """Launch the wait for the last post, and the sum."""

    def end(self) -> None:
        """Let the pages go."""


class CachedLayer(NamedTuple):
    """One layer of a device cache.

    Attributes:
        cache: of the model's layers.
        number: of this one among them.
        form: the layer's pages, whose slots only the device knows.
        hosted: CPU compute of missed experts; None if all are fetched.
        exact: places of fields in slots; None if an expert has one plane.
    """

    cache: DeviceCache
    number: int
    form: ExpertPages
    hosted: HostedExperts | None = None
    exact: ExactPlaces | None = None

    def whole(self, ids_Tk: Tensor) -> bool:
        """True if one lease takes all experts that so many ids may name."""
        return self.cache.fits(self.number, ids_Tk)

    def lease(self, ids_Tk: Tensor) -> AbstractContextManager[Tensor]:
        """See `DeviceCache.lease`."""
        return self.cache.lease(self.number, ids_Tk)

    def lease_beside(self, ids_Tk: Tensor, shares: Shares, post: Callable[[], None]) -> AbstractContextManager[Tensor]:
        """See `DeviceCache.lease_beside`."""
        return self.cache.lease_beside(self.number, ids_Tk, shares, post)

    def passes(self, ids_Tk: Tensor) -> bool:
        """True if a prompt passes by the cache: one lease does not take it, there is a ring, and nothing captures."""
        return self.cache.has_ring and not (self.whole(ids_Tk) or accelerator.is_current_stream_capturing())

    def pass_through(self, ids_Tk: Tensor, compute: Callable[[Passing, ExpertPages], None], most: int) -> None:
        """Call `compute` with each part of a prompt and its pages; see `DeviceCache.pass_through`."""
        whole = len(ids_Tk), ids_Tk.numel()

        def on_pages(part: Passing) -> None:
            compute(part, replace(self.at(part.addresses), whole=whole))

        self.cache.pass_through(self.number, ids_Tk, on_pages, most)

    def each_part(self, ids_Tk: Tensor, compute: Callable[[Tensor, ExpertPages], None]) -> None:
        """Call `compute` with the ids of each part of a scan, others masked, and the pages of its experts."""
        for part in self.cache.scan(self.number, ids_Tk):
            with self.lease_part(part) as addresses:
                compute(part.ids, self.at(addresses))

    def parts(self, ids_Tk: Tensor, touched: Sequence[int], most: int) -> list[tuple[Sequence[int], Part]]:
        """See `DeviceCache.scan_touched`."""
        return self.cache.scan_touched(self.number, ids_Tk, touched, most)

    def lease_part(self, part: Part) -> AbstractContextManager[Tensor]:
        """See `DeviceCache.lease_part`."""
        return self.cache.lease_part(self.number, part)

    def slots(self, addresses: Tensor, ids_Tk: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots that a lease has given ids, int64 [T, k], their number for an id of no expert; and the
        memory of all, uint8 [slots, bytes of a page]."""
        memory, ids_Tk = self.cache.memory(self.number), ids_Tk.long()
        outside = (ids_Tk < 0) | (ids_Tk >= len(addresses))
        slots_Tk = (addresses[ids_Tk.masked_fill(outside, 0)] - memory.data_ptr()) // memory.shape[1]
        return slots_Tk.masked_fill(outside, len(memory)), memory

    def at(self, addresses: Tensor) -> ExpertPages:
        """Return the pages at the addresses that a lease gives."""
        places = None if self.exact is None else self.exact.in_slots(addresses)
        return replace(self.form, addresses=addresses, places=places)


class Deciding:
    """Residency owner of one layer.

    Attributes:
        cache: the layer's part of the model's device cache if the GPU decides; None if the host does.
        resident: number of experts in that cache at the last query.
        follow: method that may assign a cache to the layer; a weak reference.
        missed: CPU compute of missed experts; None if they are fetched.
    """

    def __init__(self) -> None:
        self.missed: Misses | None = None
        self.cache: CachedLayer | None = None
        self.resident = 0
        self.follow: weakref.WeakMethod | None = None

    @property
    def by(self) -> str:
        """ "host" or "gpu"."""
        return "host" if self.cache is None else "gpu"

    def begin_on_device(self, cache: CachedLayer) -> None:
        """Have the device decide, by the layer's part of a cache."""
        self.cache = cache

    def end_on_device(self) -> None:
        """Have the host decide again."""
        self.cache = None

    def note_resident(self, experts: int) -> None:
        """Keep how many experts the cache holds."""
        self.resident = experts

    def compute_misses_by(self, missed: Misses | None) -> None:
        """Have missed experts computed where they lie; None: fetched."""
        self.missed = missed

    def like(self, other: "Deciding") -> None:
        """Ask for a cache, and treat misses, as another layer of the same model does."""
        self.follow, self.missed = other.follow, other.missed

    def ask_with(self, follow: Callable[[], None]) -> None:
        """Have forwards without a cache call a method that may give the layer one."""
        self.follow = weakref.WeakMethod(follow)

    def asked(self) -> CachedLayer | None:
        """Return the layer's part of a cache; ask for one if there is none."""
        if self.cache is None and self.follow is not None:
            follow = self.follow()
            if follow is not None:
                follow()
        return self.cache
