"""Describes one weight: its shape, its format, where its planes live, and what the module may ask of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from vbrt.config import VBConfig
from vbrt.errors import WrapError
from vbrt.residency.plan import Swap

__all__ = ["HandleSpec"]

_FINE_DTYPES = (torch.bfloat16, torch.float16)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class HandleSpec:
    """How one weight is held. `shape` is (N, K); `transposed`: the module keeps its weight as [K, N]."""

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype
    format: str
    fine: bool = False
    transposed: bool = False
    backend: str = "auto"
    fp8: bool = False
    fp4: bool = False
    homes: Mapping[str, str] | None = None
    levels: int = 8
    refresh_every: int = 100

    @classmethod
    def of(cls, swap: Swap, config: VBConfig) -> "HandleSpec":
        """The spec of a weight that a plan swaps."""
        return cls(
            name=swap.name,
            shape=swap.shape,
            dtype=getattr(torch, swap.dtype),
            format=swap.format,
            fine=swap.fine == "exact",
            transposed=swap.site.transposed,
            backend=config.compute.backend,
            fp8=config.compute.fp8,
            fp4=config.compute.fp4,
            homes={page.plane: page.home for page in swap.pages},
            levels=config.separation.levels,
            refresh_every=config.separation.refresh_every,
        )

    @property
    def lossless(self) -> bool:
        """True if the original weight comes back bit for bit."""
        return self.fine or self.format == "dense"

    @property
    def label(self) -> str:
        """The format as statistics print it: "nvfp4", or "nvfp4+exact" with a fine plane."""
        return f"{self.format}+exact" if self.fine else self.format

    @property
    def weight_shape(self) -> tuple[int, int]:
        """The weight's shape as the module keeps it: (N, K), or (K, N) for a transposed module."""
        return self.shape[::-1] if self.transposed else self.shape

    def home(self, plane: str, default: str) -> str:
        """The tier where a plane lives; `default` where the spec names none."""
        if not self.homes:
            return default
        return self.homes.get(plane) or next(iter(self.homes.values()))

    def retyped(self, dtype: torch.dtype) -> "HandleSpec":
        """The spec for a weight cast to another dtype: as exact as before, in a dtype that the format holds."""
        if self.fine and dtype not in _FINE_DTYPES:
            return replace(self, dtype=dtype, fine=False, format="dense")  # there is no fine plane for it
        if self.format != "dense" and dtype is torch.float64:
            return replace(self, dtype=torch.float32)
        return replace(self, dtype=dtype)

    def check(self, weight: torch.Tensor) -> None:
        """Raise WrapError for a weight whose shape or dtype does not fit this spec."""
        name = f"{self.name}.weight"
        if tuple(weight.shape) != self.weight_shape:
            raise WrapError(f"{name}: the new weight has shape {tuple(weight.shape)}; expected {self.weight_shape}")
        if weight.dtype not in (*_DTYPES, self.dtype):
            raise WrapError(f"{name}: the new weight is {weight.dtype}; expected float32, bfloat16, float16 or float64")

    def refuse(self, what: str) -> None:
        """Raise WrapError for an operation that a weight in the tiers does not support."""
        raise WrapError(
            f"{self.name}.weight: {what} is not possible while it lives in the tiers (weight_norm, "
            "spectral_norm and parametrizations ask for it): apply them before wrapping, or unwrap() first"
        )
