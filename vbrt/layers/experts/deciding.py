"""Where the device decides which experts are resident: a layer's forward on its part of a `DeviceCache`."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from torch import Tensor

from vbrt.kernels.experts import ExpertPages
from vbrt.layers.experts.device_cache import DeviceCache

__all__ = ["CachedLayer"]


class CachedLayer(NamedTuple):
    """One layer of a device cache.

    Attributes:
        cache: of the model's layers.
        number: of this one among them.
        form: the layer's pages, of which only the device knows which are where.
    """

    cache: DeviceCache
    number: int
    form: ExpertPages

    def whole(self, ids_Tk: Tensor) -> bool:
        """True if one lease takes all experts that so many ids may name."""
        return self.cache.fits(self.number, ids_Tk)

    def lease(self, ids_Tk: Tensor) -> AbstractContextManager[Tensor]:
        """See `DeviceCache.lease`."""
        return self.cache.lease(self.number, ids_Tk)

    def each_part(self, ids_Tk: Tensor, compute: Callable[[Tensor, ExpertPages], None]) -> None:
        """Call `compute` with the ids of each part of a scan, others masked, and the pages of its experts."""
        for part in self.cache.scan(self.number, ids_Tk):
            with self.cache.lease_part(self.number, part) as addresses:
                compute(part.ids, self.at(addresses))

    def at(self, addresses: Tensor) -> ExpertPages:
        """Return the pages at the addresses that a lease gives."""
        form = self.form
        return ExpertPages(form.format, form.dtype, form.shapes, form.layout, form.pages, addresses)
