"""Codebook cache: fitted levels of a frozen weight, reused until they are stale.

A format whose record says `fitted` (`quantile`) fits eight magnitudes to each weight, reading all of it. `Separation`
reuses them for every encode until they are stale: the weight has changed and `refresh_every` forwards have passed since
the fit, or the share of clipped weights has grown. For weights that an optimizer moves, see
`vbrt.training.qat.incremental_encoding`.

The cache is detached and of constant size.
"""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from vbrt.config.format_records import FORMATS
from vbrt.errors import FormatError
from vbrt.formats.quantile import MAGNITUDES, Quantile

__all__ = ["Separation", "SeparationCounters", "check_separation", "clipping_bound", "identity"]


@dataclass(frozen=True, slots=True)
class SeparationCounters:
    """hits: encodes (in training: optimizer steps) with the cached codebook; refreshes: fits, the first included;
    clipped_share: share of the last encode's weights beyond the cell of their block's largest level, 0..1."""

    hits: int = 0
    refreshes: int = 0
    clipped_share: float = 0.0


class Separation:
    """One layer's codebook cache; `levels` magnitudes (2..8), refreshed after `refresh_every` forwards if needed.

    Attributes:
        format: fits and encodes; may be replaced by an equivalent with other kernels.

    Raises FormatError for values out of range.
    """

    def __init__(self, levels: int = MAGNITUDES, refresh_every: int = 100) -> None:
        check_separation(levels, refresh_every)
        self._count, self._refresh_every = levels, refresh_every
        self.format = Quantile(FORMATS["quantile"])
        self._codebook: Tensor | None = None
        self._fitted_on: tuple[object, ...] = ()
        self._forwards = 0
        self._accepted_share = inf
        self._counters = SeparationCounters()

    @property
    def counters(self) -> SeparationCounters:
        """Snapshot of the counters."""
        return self._counters

    def tick(self) -> None:
        """Count a forward of the layer."""
        self._forwards += 1

    @torch.no_grad()
    def encode(self, w_NK: Tensor, squares: Tensor | None = None) -> dict[str, Tensor]:
        """Encode a weight with the cached codebook, refreshed first if it is stale; `squares` as in `Format.encode`.

        Raises FormatError like `Quantile.encode`; the cached codebook is then unchanged.
        """
        if self._codebook is not None and not self._due(w_NK):
            tensors = self.format.encode(w_NK, squares, self._codebook.to(w_NK.device))
            share = self.format.clipped_share(w_NK, tensors)
            if share <= clipping_bound(self._accepted_share):
                c = self._counters
                self._counters = SeparationCounters(c.hits + 1, c.refreshes, share)
                return tensors
        return self._refresh(w_NK, squares)

    @torch.no_grad()
    def encode_part(self, part: Tensor, w_NK: Tensor, amax: float) -> dict[str, Tensor]:
        """Encode a part of a weight with a codebook fitted to the whole weight, each time anew: every process with a
        part finds the same one. `amax`: largest magnitude of the whole weight.

        Raises FormatError like `Quantile.encode`.
        """
        codebook = self.format.fit(w_NK, self._count)
        tensors = self.format.encode(part, levels=codebook, amax=amax)
        self._counters = SeparationCounters(
            self._counters.hits, self._counters.refreshes + 1, self.format.clipped_share(part, tensors)
        )
        return tensors

    def _due(self, w_NK: Tensor) -> bool:
        return self._forwards >= self._refresh_every and identity(w_NK) != self._fitted_on

    def _refresh(self, w_NK: Tensor, squares: Tensor | None) -> dict[str, Tensor]:
        codebook = self.format.fit(w_NK, self._count)
        tensors = self.format.encode(w_NK, squares, codebook)
        share = self.format.clipped_share(w_NK, tensors)
        self._codebook, self._fitted_on, self._forwards = codebook, identity(w_NK), 0
        self._accepted_share = share
        self._counters = SeparationCounters(self._counters.hits, self._counters.refreshes + 1, share)
        return tensors


def check_separation(levels: int, refresh_every: int) -> None:
    """Raise FormatError for values out of range."""
    if not 2 <= levels <= MAGNITUDES:
        raise FormatError(f"separation: levels = {levels}; expected 2 to {MAGNITUDES} (a 4-bit code has a sign)")
    if refresh_every < 1:
        raise FormatError(f"separation: refresh_every = {refresh_every}; expected at least 1")


def clipping_bound(accepted_share: float) -> float:
    """Return the share of clipped weights that triggers a refit: 1.5 times the share after the last fit, plus 0.001,
    since small layers clip a few weights by chance."""
    return 1.5 * accepted_share + 1e-3


def identity(w_NK: Tensor) -> tuple[object, ...]:
    """Return a key that changes when the weight is replaced or written to, without a reference to it. Inference tensors
    have no version counter."""
    version = 0 if w_NK.is_inference() else w_NK._version
    return w_NK.data_ptr(), version, w_NK.shape, w_NK.dtype, w_NK.device
