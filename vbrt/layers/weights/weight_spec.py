"""Spec of one weight: site, shape, dtype, format, and home tiers of its planes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from vbrt.config import FORMATS, VBConfig
from vbrt.errors import WrapError
from vbrt.formats.error_feedback import Inputs
from vbrt.formats.fine_plane import may_code
from vbrt.residency.plan import Swap
from vbrt.residency.weight_site import WeightSite

__all__ = ["HandleSpec"]

_FINE_DTYPES = (torch.bfloat16, torch.float16)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class HandleSpec:
    """How one weight is held.

    Attributes:
        site: of the weight in the model; the first one of several tied ones.
        dtype: of the stored weight.
        fine_coding: `weights.fine_coding`, or "plain" for the planes of a save under "auto".
        by_rows: True for a lookup table whose rows are read in its home tier.
        inputs: weights of the encoding error by input channel, see `Swap.inputs`; None: uniform.
        homes: the tier of each plane.
    """

    site: WeightSite
    dtype: torch.dtype
    format: str
    fine: bool = False
    fine_coding: str = field(default="auto", compare=False)
    by_rows: bool = False
    backend: str = "auto"
    fp8: bool = False
    int8: bool = False
    homes: Mapping[str, str] | None = None
    levels: int = 8
    refresh_every: int = 100
    inputs: Inputs | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, swap: Swap, config: VBConfig) -> "HandleSpec":
        """The spec of a weight that a plan swaps."""
        asked = config.weights.fine_coding
        return cls(
            site=swap.site,
            dtype=getattr(torch, swap.dtype),
            format=swap.format,
            fine=swap.fine == "exact",
            fine_coding=swap.fine_coding or asked if asked == "auto" else asked,
            by_rows=swap.by_rows,
            backend=config.compute.backend,
            fp8=config.compute.fp8,
            int8=config.compute.int8,
            homes={page.plane: page.home for page in swap.pages},
            levels=config.separation.levels,
            refresh_every=config.separation.refresh_every,
            inputs=swap.inputs[0] if swap.inputs else None,
        )

    @property
    def name(self) -> str:
        """The site's name."""
        return self.site.name

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.site.shape

    @property
    def transposed(self) -> bool:
        """True if the module keeps its weight as [K, N]."""
        return self.site.transposed

    @property
    def lossless(self) -> bool:
        """True if the original weight comes back bit for bit."""
        return self.fine or self.dense

    def codes_fine(self, device: torch.device) -> bool:
        """True if the fine plane is coded, where that makes it smaller, for kernels of a device."""
        asked = self.fine_coding == "coded" or (self.fine_coding == "auto" and device.type != "cpu")
        return asked and self.fine and may_code(self.dtype)

    @property
    def dense(self) -> bool:
        """True if pages hold the weight's own bytes: nothing is encoded."""
        return FORMATS[self.format].lossless

    @property
    def label(self) -> str:
        """The format as statistics print it: "nvfp4", "nvfp4+exact" with a fine plane, "nvfp4, calibrated"."""
        how = ", calibrated" if self.inputs is not None and not self.dense else ""
        return f"{self.format}{'+exact' if self.fine else ''}{how}"

    @property
    def weight_shape(self) -> tuple[int, int]:
        """The weight's shape as the module keeps it: (N, K), or (K, N) for a transposed module."""
        return self.site.kept_shape

    @property
    def weight_bytes(self) -> int:
        """Bytes of the dense weight."""
        return self.site.parameters * self.dtype.itemsize

    def suits(self, other: "HandleSpec") -> bool:
        """True if both specs have the same representation, apart from the site."""
        one, two = (replace(spec.site, module="", kind="") for spec in (self, other))
        return one == two and replace(self, homes=None) == replace(other, site=self.site, homes=None)

    def home(self, plane: str, default: str) -> str:
        """Home tier of a plane; `default` if the spec names none."""
        if not self.homes:
            return default
        return self.homes.get(plane) or next(iter(self.homes.values()))

    def retyped(self, dtype: torch.dtype) -> "HandleSpec":
        """The spec for a weight cast to another dtype: as exact as before, in a dtype that the format holds."""
        if self.fine and dtype not in _FINE_DTYPES:
            return replace(self, dtype=dtype, fine=False, format="dense")  # there is no fine plane for it
        if not self.dense and dtype is torch.float64:
            return replace(self, dtype=torch.float32)
        return replace(self, dtype=dtype)

    def check(self, weight: torch.Tensor) -> None:
        """Raise WrapError for a weight whose shape or dtype does not fit this spec."""
        name = f"{self.site.module}.{self.site.parameter}"
        if tuple(weight.shape) != self.weight_shape:
            raise WrapError(f"{name}: the new weight has shape {tuple(weight.shape)}; expected {self.weight_shape}")
        if weight.dtype not in (*_DTYPES, self.dtype):
            raise WrapError(f"{name}: the new weight is {weight.dtype}; expected float32, bfloat16, float16 or float64")

    def refuse(self, what: str) -> None:
        """Raise WrapError for an operation that a weight in the tiers does not support."""
        name = f"{self.site.module}.{self.site.parameter}"
        raise WrapError(
            f"{name}: {what} is not possible while it lives in the tiers: unwrap() first; apply weight_norm, "
            "spectral_norm and parametrizations before wrapping"
        )
