"""ExpertsHandle: where the planes of a layer's routed experts are.

It holds the module's dense parameters first, and owns one page for each expert and plane once `store` has run. Pages
are read-only. A forward leases the pages of the experts that its tokens are sent to.

Beside it: `experts_coder.py` (kernels, encoding and decoding), `expert_pages_io.py` (planes into pages, pickles),
`leased_experts.py` (pages while they are leased), `residency_owner.py` (who decides what is resident).
"""

import contextlib
import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from vbrt.formats.page import PageLayout
from vbrt.kernels.experts import ExpertPages
from vbrt.layers.experts.expert_encoding import EncodedExperts
from vbrt.layers.experts.expert_pages_io import Uneven, pickled, unpickled, write_pages
from vbrt.layers.experts.expert_views import dense_parameters
from vbrt.layers.experts.experts_coder import ExpertsCoder
from vbrt.layers.experts.experts_spec import ExpertsSpec
from vbrt.layers.experts.leased_experts import Leased
from vbrt.layers.experts.residency_owner import Deciding
from vbrt.layers.weights.linear_product import precision_notes
from vbrt.layers.weights.pages_handle import PagesHandle
from vbrt.layers.weights.weight_encoding import Planes
from vbrt.layers.weights.weight_handle import register_handle
from vbrt.residency.access_counts import RoutingCounts
from vbrt.residency.plan import PageSpec
from vbrt.tiers import Owner, TierStack

__all__ = ["ExpertsHandle"]


class ExpertsHandle(PagesHandle):
    """Planes of the experts of one layer in a stack. Counters are integers; keys go expert by expert.

    Attributes:
        dtype: what the layer computes in and shows to the outside.
        trainable: True if the dense parameters had requires_grad.
        layers: the live layers that share these weights.
        dense: the weights until they are encoded, by name, as parameters, or as temporaries that were written to. The
            module has none of them among its parameters, where an optimizer would take them.
        lent: the temporaries that reading a parameter has given, by name; writes to them change the weights.
        written: the content of temporaries that died after a write, by name, until it is taken over.
        released: the dense parameters, by name, while some of the layers that are tied are plain again.
        coder: encodes and decodes, and has the kernels.
        kernel: the name of the backend that runs.
        routing: counts of what forwards have asked for.
        deciding: who decides which pages move.
        ready: the pages of all experts, where they never move.
    """

    tied, separation = False, None
    _what = "its weights were"

    def __init__(self, spec: ExpertsSpec, stack: TierStack) -> None:
        super().__init__(stack)
        self.dtype = spec.dtype
        self.trainable = False
        self.layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.dense: dict[str, torch.Tensor] = {}
        self.lent: dict[str, weakref.ref[torch.Tensor]] = {}
        self.written: dict[str, torch.Tensor] = {}
        self.released: dict[str, nn.Parameter] = {}
        self.kernel = "reference"
        self.routing, self.deciding = RoutingCounts(spec.experts), Deciding()
        self.ready: ExpertPages | None = None
        self.spec, self.coder = spec, ExpertsCoder(spec, self.device, self.fallbacks)
        register_handle(self)

    @property
    def planes(self) -> int:
        """The number of planes of an expert."""
        return 2 if self.spec.fine else 1

    def all_fallbacks(self) -> list[str]:
        """`fallbacks`, and what forwards have shown: no coarse plane for a draft."""
        return [*self.fallbacks, *precision_notes(self)]

    def retype(self, dtype: torch.dtype) -> None:
        """Follow a cast of the layer: the dtype to compute in and show, and, while empty, to store."""
        if dtype is self.dtype:
            return  # a graph may read the table of addresses that `ready` has
        self.dtype = dtype
        self.forget_ready()
        if not self.keys and dtype is not self.spec.dtype:
            self.spec = self.spec.retyped(dtype)
            self.coder = ExpertsCoder(self.spec, self.device, self.fallbacks)

    # -- dense weights ------------------------------------------------------------------------------------------------

    def hold_dense(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Hold dense weights, by name, of which planes are made later."""
        self.dense = dict(weights)
        if self.dense:
            self.stack.shells.add(self)

    def drop_dense(self) -> None:
        """Hold none: the pages have their values."""
        self.dense = {}
        self.stack.shells.discard(self)

    # -- pages --------------------------------------------------------------------------------------------------------

    def split(self, weights: Mapping[str, torch.Tensor]) -> Iterable[Planes]:
        """The planes of each expert, encoded as they are asked for; `weights`: [E, ...] by part, as the module keeps
        them. Iterating raises FormatError."""
        shapes = {part: one.site.matrix_shape for part, one in self.spec.parts.items()}
        return EncodedExperts(self, {part: w.reshape(-1, *shapes[part]) for part, w in weights.items()})

    def store(self, planes: Iterable[Planes]) -> None:
        """Write the planes of each expert into pages; earlier pages are retired first.

        Raises:
            FormatError: a matrix cannot be encoded; the handle is empty then.
            TierError: the pages do not fit or cannot be written; likewise.
        """
        if self.coder.kernels is None:
            self.coder.take_kernels()
        self.retire()
        self.stack.retire_unowned()
        try:
            write_pages(self, planes)
        except Uneven:
            self.coder.refuse_order()
            write_pages(self, planes)
        self.kernel = self.coder.backend

    def own_pages(self, keys: tuple[str, ...], owner: Owner) -> None:
        """Hold pages that `owner` owns."""
        pages = tuple(self.stack.pages[key] for key in keys)
        # no call from here on: Ctrl-C finds an empty handle or a full one
        self.owner, self.pages, self.keys = owner, pages, keys

    def assign_homes(self, homes: Mapping[PageSpec, str]) -> None:
        """Have pages that are stored from now on live in these tiers."""
        self.spec = replace(self.spec, homes={page.key: home for page, home in homes.items()})

    def retire(self) -> None:
        """Retire the pages; the handle is empty again."""
        super().retire()
        self.deciding.cache = None

    def forget_ready(self) -> None:
        """Keep no views into pages: they may move."""
        self.ready = None

    def layouts_of(self, expert: int) -> list[PageLayout]:
        """The layouts of an expert's pages, as they are stored."""
        return [page.layout for page in self.pages[expert * self.planes : (expert + 1) * self.planes]]

    # -- leases -------------------------------------------------------------------------------------------------------

    def keys_of(self, experts: Sequence[int], precision: str) -> tuple[str, ...]:
        """The keys of the planes that a precision takes of some experts. Raises TierError when there are none."""
        self.check_pages()
        step, keys, taken = self.planes, self.keys, 1 if precision == "coarse" else self.planes
        return tuple(keys[e * step + plane] for e in experts for plane in range(taken))

    @contextlib.contextmanager
    def lease(self, experts: Sequence[int], precision: str = "full") -> Iterator[Leased]:
        """Lease the planes of some experts, ascending. Raises TierError when there are none any more."""
        lease = self.stack.lease(self.keys_of(experts, precision))
        with lease:
            yield Leased(self, experts, lease, 1 if precision == "coarse" else self.planes)

    def form(self, pages: list[torch.Tensor | None], addresses: torch.Tensor | None = None) -> ExpertPages:
        """Pages by expert, or their addresses, as kernels take them."""
        shapes = {part: one.shape for part, one in self.spec.parts.items()}
        return ExpertPages(self.spec.format, self.dtype, shapes, self.pages[0].layout, pages, addresses)

    def weight(self, parameter: str) -> torch.Tensor:
        """A parameter, decoded, as the module keeps it: a temporary that shares memory with nothing."""
        self.weight_reads += 1
        part, spec = self.spec.part_of(parameter), self.spec
        site = spec.site_of(parameter)
        out = torch.empty((site.matrices, *site.matrix_shape), dtype=self.dtype, device=self.device)
        for expert in range(site.matrices):  # one at a time: the budget may have room for no more
            with self.lease([expert]) as leased:
                out[expert].copy_(leased.matrix(part, 0))
        return out.view(site.kept_shape)

    # -- for saves ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def encoded_matrix(self, part: str, expert: int) -> Iterator[Planes]:
        """The planes of one matrix as the format encodes them, leased."""
        with self.lease([expert]) as leased:
            yield [
                (self.coder.encoded_layout(part, layout), self.coder.encoded_part(part, layout, fields))
                for layout, fields in zip(self.layouts_of(expert), leased.fields(0), strict=True)
            ]

    def encoded_layouts(self, part: str, expert: int) -> list[PageLayout]:
        """The layouts of `encoded_matrix`, without a lease."""
        return [self.coder.encoded_layout(part, layout) for layout in self.layouts_of(expert)]

    # -- copies -------------------------------------------------------------------------------------------------------

    def empty_copy(self) -> "ExpertsHandle":
        """A handle for other weights of the same layer, in the same stack."""
        clone = ExpertsHandle(self.spec, self.stack)
        clone.dtype, clone.generation, clone.trainable = self.dtype, self.generation, self.trainable
        clone.token = clone.token_at(self.generation)
        clone.deciding.follow, clone.deciding.missed = self.deciding.follow, self.deciding.missed
        return clone

    def __deepcopy__(self, memo: dict) -> "ExpertsHandle":
        clone = ExpertsHandle(self.spec, self.stack)
        clone.dtype, clone.trainable = self.dtype, self.trainable
        memo[id(self)] = clone
        clone.hold_dense({name: copy.deepcopy(weight, memo) for name, weight in dense_parameters(self).items()})
        if self.keys:
            clone.kernel = self.kernel
            clone.own_pages(self.keys, self.stack.share(self.keys))
        return clone

    def __reduce__(self):
        return _restore, (self.stack, self.spec, self.dtype, self.trainable, pickled(self), dense_parameters(self))


def _restore(
    stack: TierStack,
    spec: ExpertsSpec,
    dtype: torch.dtype,
    trainable: bool,
    pages: list,
    dense: Mapping[str, nn.Parameter],
) -> ExpertsHandle:
    """Unpickle: `stack` is one of this process, in CPU memory, shared by all handles of the pickle."""
    handle = ExpertsHandle(spec.portable(), stack)
    handle.dtype, handle.trainable = dtype, trainable
    handle.hold_dense(dense)
    if pages:
        handle.store(unpickled(pages))
    return handle
