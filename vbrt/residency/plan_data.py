"""Records of a plan: pages, swaps, skips, and totals over them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vbrt.config.format_records import FORMATS
from vbrt.residency.weight_site import WeightSite

__all__ = ["Beside", "PageSpec", "PlanData", "Skip", "Swap", "lease_bytes", "leased_pages"]


@dataclass(frozen=True, slots=True)
class PageSpec:
    """One plane of one weight.

    Attributes:
        nbytes: an upper estimate where the data decides.
        home: the tier that it lives in.
        by_rows: True if only rows of it are read, where it lives: it passes through no tier.
        top_k: of a page of a routed expert, the experts that a token goes to: a lease takes at least as many pages of
            the plane, not all. 0: every lease of the layer takes the page.
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
        site: where the weight is in the model; its first site, where several are tied.
        tied: the other sites of the same weight; of routed experts, those of the first parameter of other modules that
            hold all the same parameters.
        parts: the other parameters of a module of routed experts, whose matrices are in the same pages.
        dtype: of the weight, by torch's name.
        experts, top_k: of routed experts, how many the layer has and how many a token goes to; else 0. Such a swap has
            a page for each plane of each expert.
        inputs: what errors are weighed by as the weight is encoded, for the site and each of the parts: an `Inputs` of
            `vbrt.formats.error_feedback`. Empty: not weighed. A plan does not look at them.
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
    experts: int = 0
    top_k: int = 0
    inputs: tuple[Any, ...] = field(default=(), compare=False, repr=False)

    @property
    def sites(self) -> tuple[WeightSite, ...]:
        """All sites of the weight."""
        return (self.site, *self.parts, *self.tied)

    @property
    def name(self) -> str:
        """The name of the first site; of the module, where its experts are routed."""
        return self.site.module if self.experts else self.site.name

    @property
    def modules(self) -> dict[str, str]:
        """The names of the VB layers that it makes, and the modules that become them."""
        held_by = (self.site, *self.tied) if self.experts else self.sites
        return {site.module if self.experts else site.name: site.module for site in held_by}

    @property
    def lease(self) -> str:
        """Names what takes its pages in one lease: the module, of which stacked parameters are leased together."""
        return self.site.module if self.site.stacked else self.name

    @property
    def aliases(self) -> tuple[str, ...]:
        """The names of the other sites."""
        return tuple(site.module if self.experts else site.name for site in self.tied)

    @property
    def kind(self) -> str:
        """The kind of the first site's module."""
        return self.site.kind

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of each matrix."""
        return self.site.shape

    @property
    def lossless(self) -> bool:
        """True if the weight is held bit for bit."""
        return FORMATS[self.format].lossless or self.fine == "exact"

    @property
    def page_bytes(self) -> int:
        """Bytes of all planes of the layer."""
        return sum(page.nbytes for page in self.pages)

    @property
    def by_rows(self) -> bool:
        """True if only rows of the weight are read, where its pages live."""
        return bool(self.pages) and all(page.by_rows for page in self.pages)

    @property
    def leased(self) -> tuple[PageSpec, ...]:
        """The pages that a lease of the weight takes for one token: none of a table that is read by rows, and of
        routed experts as many as the token goes to, the largest."""
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
            "fine": self.fine,
            "pages": [asdict(page) for page in self.pages],
            "aliases": list(self.aliases),
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Skip:
    """Parameters that stay dense: their bytes and the reason. A refusal is data."""

    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Beside:
    """The state of a runtime that a further model shares: resolved budgets, and the pages of each layer of its models,
    under keys that no page of the further model has."""

    budgets: Mapping[str, int]
    layers: tuple[tuple[PageSpec, ...], ...]


@dataclass(frozen=True, slots=True)
class PlanData:
    """The fields of a `Plan`, and its totals."""

    swaps: tuple[Swap, ...]
    skipped: Mapping[str, Skip]
    budgets: Mapping[str, int]
    notes: tuple[str, ...] = field(default=())
    mode: str = "infer"
    warnings: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()

    @property
    def compute_tier(self) -> str:
        """The tier whose memory kernels read: "gpu", or "cpu" on a machine without one."""
        return next(iter(self.budgets))

    @property
    def dense_bytes(self) -> int:
        """Bytes of the model as it came: swapped weights and everything that stays."""
        return sum(swap.dense_bytes for swap in self.swaps) + self.kept_bytes

    @property
    def swapped_bytes(self) -> int:
        """Dense bytes of the weights that are swapped."""
        return sum(swap.dense_bytes for swap in self.swaps)

    @property
    def kept_bytes(self) -> int:
        """Bytes of parameters that stay as they are, in the computing device's memory, outside the budgets."""
        return sum(skip.nbytes for skip in self.skipped.values())

    @property
    def unbudgeted_bytes(self) -> int:
        """Bytes of all parameters that are in the computing device's memory outside the budgets."""
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
        """Pages that one lease takes together for one token, at most."""
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
        """Bytes of the largest page that a lease takes."""
        return max((page.nbytes for swap in self.swaps for page in swap.leased), default=0)

    def home_bytes(self, tier: str) -> int:
        """Bytes of the pages whose home is `tier`."""
        return sum(page.nbytes for swap in self.swaps for page in swap.pages if page.home == tier)


def leased_pages(pages: Sequence[PageSpec]) -> tuple[PageSpec, ...]:
    """Return those of a layer's pages that a lease takes for one token: of routed experts the `top_k` largest of each
    plane."""
    every = [page for page in pages if not (page.by_rows or page.top_k)]
    routed: dict[str, list[PageSpec]] = {}
    for page in pages:
        if page.top_k:
            routed.setdefault(page.plane, []).append(page)
    for plane in routed.values():
        every += sorted(plane, key=lambda page: -page.nbytes)[: plane[0].top_k]
    return tuple(every)


def lease_bytes(pages: Sequence[PageSpec]) -> int:
    """Return the bytes of the pages that a lease takes for one token."""
    return sum(page.nbytes for page in leased_pages(pages))
