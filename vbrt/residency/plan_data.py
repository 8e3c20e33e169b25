"""Records of a plan: pages, swaps, skips, and totals over them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from vbrt.config.format_records import FORMATS
from vbrt.residency.weight_site import WeightSite

__all__ = ["Beside", "GpuRoom", "PageSpec", "PlanData", "Skip", "Swap", "lease_bytes", "leased_pages"]


@dataclass(frozen=True, slots=True)
class PageSpec:
    """Page of a plan: one plane of one weight, or of one routed expert.

    Attributes:
        nbytes: an upper bound if the size depends on the data.
        home: name of its home tier.
        by_rows: True if only rows of it are read, in its home: it is never copied to a tier above.
        top_k: for a page of a routed expert, the experts per token: a lease takes at least as many pages of the plane.
            0: every lease of the layer takes the page.
    """

    key: str
    plane: str
    nbytes: int
    home: str = ""
    by_rows: bool = False
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class Swap:
    """Swap: a weight that goes into the tiers; the modules of its sites become VB layers.

    Attributes:
        site: site of the weight; of tied weights the first one.
        tied: the other sites of a tied weight; for routed experts, the first parameter's sites in the other modules
            that hold the same parameters.
        parts: for routed experts, sites of the module's other parameters, whose matrices are in the same pages.
        dtype: torch's name of the weight's dtype.
        fine_coding: "plain": so are the fine planes of a save, and stay so unless the config says otherwise; "": as the
            config has it.
        published: True if its planes are a checkpoint's own, unchanged.
        down_format: format of the last part's matrices, if other than `format`: a Q4_K_M file's are in Q4_K and Q6_K.
        experts, top_k: experts of the layer, and per token; 0 for other weights. Routed experts have one page per plane
            and expert.
        inputs: calibration `Inputs` (`vbrt.formats.error_feedback`) for the site and each part, which weight encoding
            errors; empty: unweighted. Unused by the plan itself.
    """

    site: WeightSite
    dtype: str
    dense_bytes: int
    format: str
    fine: str
    pages: tuple[PageSpec, ...] = ()
    tied: tuple[WeightSite, ...] = ()
    parts: tuple[WeightSite, ...] = ()
    note: str = ""
    fine_coding: str = field(default="", compare=False)
    published: bool = False
    down_format: str = ""
    experts: int = 0
    top_k: int = 0
    inputs: tuple[Any, ...] = field(default=(), compare=False, repr=False)

    @property
    def sites(self) -> tuple[WeightSite, ...]:
        """All sites of the weight."""
        return (self.site, *self.parts, *self.tied)

    @property
    def part_formats(self) -> tuple[str, ...]:
        """Format of the first site's matrices and of each part's."""
        return (*(self.format for _ in self.parts), self.down_format or self.format)

    def in_formats(self, formats: Sequence[str]) -> "Swap":
        """Return the swap with these formats of its parts: see `part_formats`."""
        first, last = formats[0], formats[-1]
        return replace(self, format=first, down_format="" if last == first else last)

    @property
    def label(self) -> str:
        """Format as people read it."""
        held = f"{self.format}+exact" if self.fine == "exact" else self.format
        return f"{held} and {self.down_format}" if self.down_format else held

    @property
    def name(self) -> str:
        """Name of the first site; for routed experts, of their module."""
        return self.site.module if self.experts else self.site.name

    @property
    def modules(self) -> dict[str, str]:
        """Modules that become VB layers, by the layers' names."""
        held_by = (self.site, *self.tied) if self.experts else self.sites
        return {site.module if self.experts else site.name: site.module for site in held_by}

    @property
    def lease(self) -> str:
        """Name of the lease that takes its pages: stacked parameters of a module share one."""
        return self.site.module if self.site.stacked else self.name

    @property
    def aliases(self) -> tuple[str, ...]:
        """Names of the tied sites."""
        return tuple(site.module if self.experts else site.name for site in self.tied)

    @property
    def kind(self) -> str:
        """Kind of the first site's module."""
        return self.site.kind

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of each matrix."""
        return self.site.shape

    @property
    def lossless(self) -> bool:
        """True if the weight is stored losslessly."""
        return FORMATS[self.format].lossless or self.fine == "exact"

    @property
    def original(self) -> bool:
        """True if the weight has all bits that it came with, be they those of a quantized checkpoint."""
        return self.lossless or self.published or FORMATS[self.format].published

    @property
    def page_bytes(self) -> int:
        """Bytes of all planes of the layer."""
        return sum(page.nbytes for page in self.pages)

    @property
    def by_rows(self) -> bool:
        """True if only rows of the weight are read, in its home."""
        return bool(self.pages) and all(page.by_rows for page in self.pages)

    @property
    def leased(self) -> tuple[PageSpec, ...]:
        """Pages leased for one token; see `leased_pages`."""
        return leased_pages(self.pages)

    def to_dict(self) -> dict:
        """Plain data for JSON."""
        return {
            "name": self.name,
            "kind": self.kind,
            "shape": list(self.shape),
            "matrices": self.site.matrices,
            "experts": self.experts,
            "top_k": self.top_k,
            "dtype": self.dtype,
            "dense_bytes": self.dense_bytes,
            "format": self.format,
            "down_format": self.down_format,
            "fine": self.fine,
            "pages": [asdict(page) for page in self.pages],
            "aliases": list(self.aliases),
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Skip:
    """Parameters that stay dense: their bytes, and the reason."""

    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Beside:
    """State of a runtime that another model joins: resolved budgets, and the pages of its models by layer, with keys
    distinct from the new model's."""

    budgets: Mapping[str, int]
    layers: tuple[tuple[PageSpec, ...], ...]


class GpuRoom(NamedTuple):
    """Share of a GPU that a process has asked for: all its bytes there, and those of them that a pass over so many
    tokens takes for a while."""

    limit_bytes: int
    passing_bytes: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PlanData:
    """Fields of a `Plan`, and totals over them."""

    swaps: tuple[Swap, ...]
    skipped: Mapping[str, Skip]
    budgets: Mapping[str, int]
    notes: tuple[str, ...] = field(default=())
    mode: str = "infer"
    warnings: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    gpu_room: GpuRoom | None = None

    @property
    def compute_tier(self) -> str:
        """The tier whose memory kernels read: "gpu", or "cpu" on a machine without one."""
        return next(iter(self.budgets))

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense model: swapped weights and skipped parameters."""
        return sum(swap.dense_bytes for swap in self.swaps) + self.kept_bytes

    @property
    def swapped_bytes(self) -> int:
        """Dense bytes of swapped weights."""
        return sum(swap.dense_bytes for swap in self.swaps)

    @property
    def kept_bytes(self) -> int:
        """Bytes of skipped parameters: in the computing device's memory, outside the budgets."""
        return sum(skip.nbytes for skip in self.skipped.values())

    @property
    def unbudgeted_bytes(self) -> int:
        """Bytes of all parameters in the computing device's memory and outside the budgets."""
        return self.dense_bytes if self.mode == "train" else self.kept_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(swap.page_bytes for swap in self.swaps)

    @property
    def routed(self) -> tuple[Swap, ...]:
        """The swaps of routed experts."""
        return tuple(swap for swap in self.swaps if swap.experts)

    @property
    def group(self) -> int:
        """Most pages per lease, for one token."""
        return max((len(swap.leased) for swap in self.swaps), default=0) or 1

    @property
    def largest_layer_bytes(self) -> int:
        """Bytes of the largest lease for one token."""
        leases = Counter[str]()
        for swap in self.swaps:
            leases[swap.lease] += lease_bytes(swap.pages)
        return max(leases.values(), default=0)

    @property
    def largest_page_bytes(self) -> int:
        """Bytes of the largest leased page."""
        return max((page.nbytes for swap in self.swaps for page in swap.leased), default=0)

    def home_bytes(self, tier: str) -> int:
        """Bytes of the pages whose home is `tier`."""
        return sum(page.nbytes for swap in self.swaps for page in swap.pages if page.home == tier)


def leased_pages(pages: Sequence[PageSpec]) -> tuple[PageSpec, ...]:
    """Return the pages of a layer leased for one token: of routed experts the `top_k` largest of each plane, of tables
    read by rows none."""
    every = [page for page in pages if not (page.by_rows or page.top_k)]
    routed: dict[str, list[PageSpec]] = {}
    for page in pages:
        if page.top_k:
            routed.setdefault(page.plane, []).append(page)
    for plane in routed.values():
        every += sorted(plane, key=lambda page: -page.nbytes)[: plane[0].top_k]
    return tuple(every)


def lease_bytes(pages: Sequence[PageSpec]) -> int:
    """Return the bytes of the pages leased for one token."""
    return sum(page.nbytes for page in leased_pages(pages))
