"""Spec of a layer's routed experts: a weight spec per part, and shared properties."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from vbrt.config import VBConfig
from vbrt.errors import WrapError
from vbrt.layers.modules.layer_kinds import KINDS
from vbrt.layers.weights.weight_spec import HandleSpec
from vbrt.residency.plan import Swap
from vbrt.residency.weight_site import WeightSite

__all__ = ["ExpertsSpec"]


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """How the experts of one module are held.

    Attributes:
        sites: of the parameters that stack the experts' matrices, in the order of `parts`.
        parts: by part, the spec of one matrix of it.
        top_k: experts per token.
        homes: the tier of each page, by key.
    """

    sites: tuple[WeightSite, ...]
    parts: Mapping[str, HandleSpec]
    top_k: int
    homes: Mapping[str, str]

    @classmethod
    def of(cls, swap: Swap, config: VBConfig, prefix: str = "") -> "ExpertsSpec":
        """The spec of experts that a plan swaps; `prefix`: of the model, see `Terms`."""
        sites = tuple(replace(site, module=prefix + site.module) for site in (swap.site, *swap.parts))
        one = HandleSpec.of(replace(swap, pages=()), config)
        parts = {
            part: replace(one, site=replace(site, matrices=1, stacked=False), inputs=inputs, format=format)
            for part, site, inputs, format in zip(
                KINDS[swap.kind].parts, sites, swap.inputs or (None,) * len(sites), swap.part_formats, strict=True
            )
        }
        return cls(sites, parts, swap.top_k, {prefix + page.key: page.home for page in swap.pages})

    @property
    def site(self) -> WeightSite:
        """The site of the first parameter."""
        return self.sites[0]

    @property
    def first(self) -> HandleSpec:
        """The spec of the first part; dtype and backend are those of all, the format is that of all but the last."""
        return next(iter(self.parts.values()))

    @property
    def name(self) -> str:
        """The module's name."""
        return self.site.module

    @property
    def experts(self) -> int:
        """E."""
        return max(site.matrices for site in self.sites)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return tuple(site.parameter for site in self.sites)

    @property
    def columns(self) -> int:
        """The number of outputs of an expert."""
        return self.sites[-1].shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored weights."""
        return self.first.dtype

    @property
    def format(self) -> str:
        """Of the coarse plane, or "dense"; of all parts but, perhaps, the last."""
        return self.first.format

    @property
    def down_format(self) -> str:
        """Of the last part; "": the others'."""
        last = self.parts[next(reversed(self.parts))].format
        return "" if last == self.format else last

    @property
    def fine(self) -> bool:
        """True if there is a fine plane."""
        return self.first.fine

    @property
    def dense(self) -> bool:
        """True if pages hold the weights' own bytes."""
        return self.first.dense

    @property
    def lossless(self) -> bool:
        """True if the original weights come back bit for bit."""
        return self.first.lossless

    @property
    def label(self) -> str:
        """The format as statistics print it."""
        return f"{self.first.label} and {self.down_format}" if self.down_format else self.first.label

    @property
    def weight_bytes(self) -> int:
        """Bytes of the dense weights of all experts."""
        return sum(site.parameters for site in self.sites) * self.dtype.itemsize

    def site_of(self, parameter: str) -> WeightSite:
        """Return the site of a parameter."""
        return self.sites[self.parameters.index(parameter)]

    def part_of(self, parameter: str) -> str:
        """Return the part that a parameter stacks."""
        return tuple(self.parts)[self.parameters.index(parameter)]

    def retyped(self, dtype: torch.dtype) -> "ExpertsSpec":
        """The spec for weights cast to another dtype: see `HandleSpec.retyped`."""
        return replace(self, parts={part: spec.retyped(dtype) for part, spec in self.parts.items()})

    def portable(self) -> "ExpertsSpec":
        """The spec for another machine: its tiers and kernels."""
        return replace(self, homes={}, parts={part: replace(one, backend="auto") for part, one in self.parts.items()})

    def check(self, parameter: str, weight: torch.Tensor) -> None:
        """Raise WrapError for a tensor that cannot take the place of a parameter."""
        site = self.site_of(parameter)
        if tuple(weight.shape) != site.kept_shape:
            raise WrapError(
                f"{self.name}.{parameter}: the new weight has shape {tuple(weight.shape)}; expected {site.kept_shape}"
            )
        one = self.parts[self.part_of(parameter)]
        one.check(weight.detach().reshape(-1, *site.matrix_shape)[0])

    def refuse(self, parameter: str, what: str) -> None:
        """Raise WrapError for an operation that weights in the tiers do not support."""
        self.parts[self.part_of(parameter)].refuse(what)
