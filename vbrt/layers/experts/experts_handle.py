"""ExpertsHandle: state of a layer's routed experts, from dense parameters to pages.

It first holds the module's dense parameters, and owns one page per expert and plane after `store`. Pages are read-only.
A forward leases the pages of the experts that its tokens are routed to.

See also: `experts_coder.py` (kernels, encoding and decoding), `expert_pages_io.py` (planes into pages, pickles),
`leased_experts.py` (leased pages), `residency_owner.py` (host or device decides residency).
"""

import contextlib
import copy
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from vbrt.formats.page import PageLayout
from vbrt.host.mapped_weights import page_out
from vbrt.kernels.decoded_weight import DecodedWeight
from vbrt.kernels.experts import ExpertPages
from vbrt.layers.experts.exact_places import ExactPlaces
from vbrt.layers.experts.expert_encoding import EncodedExperts
from vbrt.layers.experts.expert_pages_io import Uneven, pickled, unpickled, write_pages
from vbrt.layers.experts.experts_coder import ExpertsCoder
from vbrt.layers.experts.experts_spec import ExpertsSpec
from vbrt.layers.experts.leased_experts import Leased
from vbrt.layers.experts.residency_owner import Deciding
from vbrt.layers.weights.dense_registry import lie_together
from vbrt.layers.weights.kernel_selection import notes
from vbrt.layers.weights.linear_product import precision_notes
from vbrt.layers.weights.pages_handle import PagesHandle
from vbrt.layers.weights.state import register_weight
from vbrt.layers.weights.weight_encoding import Planes
from vbrt.layers.weights.weight_view import Lender, dense_parameter, follow_encoding, live_temporary, plain_dense
from vbrt.libraries.torch_api import is_fake
from vbrt.residency.access_counts import RoutingCounts
from vbrt.residency.plan import PageSpec
from vbrt.tiers import LeasedTensors, Owner, Page, TierStack

__all__ = ["ExpertsHandle"]


class ExpertsHandle(PagesHandle):
    """Handle to the experts' planes of one layer in a stack. Counters are integers; keys are ordered by expert.

    Attributes:
        dtype: compute dtype of the layer, and dtype of decoded weights.
        trainable: True if the dense parameters had requires_grad.
        layers: the live layers that share these weights.
        dense: weights before encoding, by name, as parameters, or as temporaries that were written to. The module has
            no such parameters, so optimizers do not see them.
        lent: live temporaries by name of the parameter; a write to one changes the weights.
        coder: encoder, decoder and kernels.
        kernel: name of the backend in use.
        routing: counters of routed experts.
        deciding: owner of residency, host or device.
        ready: pages of all experts if they are resident; else None.
    """

    tied, separation = False, None
    _what = "its weights were"

    def __init__(self, spec: ExpertsSpec, stack: TierStack, *, trainable: bool = False) -> None:
        super().__init__(stack)
        self.dtype = spec.dtype
        self.trainable = trainable
        self.layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.dense: dict[str, torch.Tensor] = {}
        self.lent: dict[str, weakref.ref[torch.Tensor]] = {}
        self._written: dict[str, torch.Tensor] = {}  # content of temporaries that died after a write
        self._released: dict[str, torch.Tensor] = {}  # parameters, while some of the tied layers are plain again
        self.kernel = "reference"
        self.routing, self.deciding = RoutingCounts(spec.experts), Deciding()
        self.ready: ExpertPages | None = None
        self._places: tuple[tuple[Page, ...], ExactPlaces] | None = None
        self._home: tuple[int, tuple[Page, ...], LeasedTensors] | None = None
        self.spec, self.coder = spec, ExpertsCoder(spec, self.device, self.fallbacks)
        register_weight(self)

    @property
    def planes(self) -> int:
        """The number of planes of an expert."""
        return 2 if self.spec.fine else 1

    @property
    def places(self) -> ExactPlaces:
        """The places of fields in the pages of `exact` experts, found once for the pages."""
        pages, found = self.pages, self._places
        if found is None or found[0] is not pages:
            layouts = [self.layouts_of(expert) for expert in range(self.spec.experts)]
            self._places = found = pages, ExactPlaces(self.spec, layouts, self.device)
        return found[1]

    def all_fallbacks(self) -> list[str]:
        """`fallbacks`, with notes on kernels, and those found by forwards: no coarse plane for a draft."""
        return [*self.fallbacks, *notes(self.spec.first, self.device, "experts_up"), *precision_notes(self)]

    def retype(self, dtype: torch.dtype) -> None:
        """Follow a cast of the layer: the dtype to compute in and show, and, while empty, to store."""
        if dtype is self.dtype:
            return  # a graph may read the table of addresses that `ready` has
        self.dtype = dtype
        self.forget_ready()
        if not self.keys and dtype is not self.spec.dtype:
            self.spec = self.spec.retyped(dtype)
            self.coder = ExpertsCoder(self.spec, self.device, self.fallbacks)

    def cast(self, dtype: torch.dtype) -> None:
        """Cast dense weights, the same objects, and the temporaries that lie where they do; then `retype`."""
        for name, weight in self.dense.items():
            if weight.dtype != dtype:
                torch.Tensor.data.__set__(weight, torch.Tensor.detach(weight).to(dtype))
            lent = self.temporary(name)
            if lent is weight:
                lent.settle()
            elif lent is not None:
                lent.move(torch.Tensor.detach(weight))
        self.retype(dtype)

    # -- layers -------------------------------------------------------------------------------------------------------

    def tie(self, layer: nn.Module) -> None:
        """Add a layer to those of the weights."""
        self.layers.add(layer)

    def adopt(self, layer: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
        """Hold the parameters of a module that becomes a layer of these weights."""
        self.trainable = weights[self.spec.parameters[0]].requires_grad
        self.tie(layer)
        self.hold_dense(self.dense or weights)

    def pass_on(self, layers: Iterable[nn.Module], weights: Mapping[str, torch.Tensor]) -> "ExpertsHandle":
        """Give layers new weights, which are dense until they are used; those that are not given are the decoded ones.
        Return their handle."""
        for name, weight in weights.items():
            self.spec.check(name, weight)
        with self.stack.encoding:
            dense = {name: self.dense_or_decoded(name, weights.get(name)) for name in self.spec.parameters}
            heir = self.empty_copy()
            heir.forwards, heir.weight_reads, heir.routing = self.forwards, self.weight_reads, self.routing
            heir.trainable = self.trainable
            heir.retype(next(iter(dense.values())).dtype)
            heir.hold_dense(dense)
            for layer in layers:
                layer.forget_given_()
                layer.__dict__["_vb_handle"] = heir
                self.layers.discard(layer)
                heir.tie(layer)
            return heir

    def freeze(self) -> None:
        """Make `unwrap` return the weights frozen (requires_grad False)."""
        if self.trainable:
            self.trainable = False
            for weight in self.dense.values():
                weight.requires_grad_(False)

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

    def put_dense(self, name: str, weight: torch.Tensor) -> None:
        """Hold another tensor in the place of one of the dense weights."""
        self.dense[name] = weight

    def dense_parameters(self) -> tuple[torch.Tensor, ...]:
        """The dense weights that are held."""
        return tuple(self.dense.values())

    def dense_parameter(self, name: str) -> nn.Parameter:
        """A dense weight as a parameter in its memory: the one that the module had, unless it was written."""
        return dense_parameter(self.dense[name], self.trainable)

    def dense_or_decoded(self, name: str, given: torch.Tensor | None = None) -> torch.Tensor:
        """Return `given`, else the weight that is held dense, else the decoded one as a parameter."""
        if given is not None:
            return given
        held = self.dense.get(name)
        if held is not None:
            return held
        lent = self.temporary(name)
        weight = lent.become_parameter() if lent is not None else nn.Parameter(self.weight(name))
        return weight.requires_grad_(self.trainable)

    def released_parameters(self, first: nn.Parameter | None) -> dict[str, nn.Parameter]:
        """The weights as parameters of a layer that leaves the tiers, by name; the same for all that are tied.

        Args:
            first: the first parameter, where a call before was interrupted and has made it.
        """
        names, made = self.spec.parameters, None if self.dense else first
        found = self._released or {n: self.dense_or_decoded(n, made if n == names[0] else None) for n in names}
        self._released = found if len(self.layers) > 1 else {}
        return {name: self.plain_parameter(weight) for name, weight in found.items()}

    def plain_parameter(self, weight: torch.Tensor) -> nn.Parameter:
        """A weight as a parameter: a temporary that was written to becomes one."""
        if type(weight) is DecodedWeight:
            return weight.become_parameter().requires_grad_(self.trainable)
        return weight

    def encode(self) -> None:
        """Make pages of the dense weights, one expert after the other, and hold none any more.

        Call it under `stack.encoding`. Raises FormatError, TierError: the weights stay as they were.
        """
        dense = self.dense
        weights = {name: plain_dense(weight).detach() for name, weight in dense.items()}
        versions = {name: 0 if weight.is_inference() else weight._version for name, weight in weights.items()}
        self.store(self.split({self.spec.part_of(name): weight for name, weight in weights.items()}))
        self.drop_dense()
        for name, weight in dense.items():
            lent = self.temporary(name)
            if lent is not None:
                keeps = self.spec.lossless and lent.device.type == self.device.type
                follow_encoding(lent, weight, versions[name], keeps=keeps, stored=functools.partial(self.weight, name))
        for weight in weights.values():
            page_out(weight)

    # -- lent ---------------------------------------------------------------------------------------------------------

    def temporary(self, name: str) -> DecodedWeight | None:
        """Live temporary of a parameter, or None."""
        return live_temporary(self.lent.get(name))

    def lend(self, name: str) -> torch.Tensor:
        """Return the temporary of a parameter, writable and shared by all readers while it is alive. It is decoded, or
        shares the dense one's memory."""
        while True:
            lent, held = self.temporary(name), self.dense
            dense = held.get(name)
            if lent is not None:
                return lent
            if dense is not None and is_fake(dense):
                return dense
            with torch.inference_mode(False), torch.no_grad():
                made = DecodedWeight.of(Lender(self, name), self.weight(name) if dense is None else dense)
            with self.stack.encoding:
                if self.dense is held and self.temporary(name) is None:  # else another thread was here
                    self.lent[name] = weakref.ref(made)
                    return made

    def notice_writes(self) -> None:
        """Take over unreported writes to temporaries."""
        if not self.lent and not self._written:
            return
        for name, content in list(self._written.items()):
            self.take_over(name, content)
        for name in list(self.lent):
            lent = self.temporary(name)
            if lent is not None:
                lent.report_writes()
            elif self.lent[name]() is None:
                self.lent.pop(name, None)

    def take_over(self, key: str, weight: torch.Tensor) -> None:
        """Make a temporary that was written to the layers' parameter `key`, dense until the next forward.

        Raises:
            WrapError: it has another shape or dtype than the parameter.
        """
        with self.stack.encoding:
            lent = type(weight) is DecodedWeight
            if not self.layers or not (lent or weight is self._written.get(key)):
                return
            self._written.pop(key, None)
            dense = self.dense.get(key)
            if dense is not None and lie_together(dense, weight):  # it is not encoded yet
                return
            self.spec.check(key, weight)
            self.lent.pop(key, None)
            new = weight if lent else nn.Parameter(weight, requires_grad=False)
            heir = self.pass_on(list(self.layers), {key: new})
            if lent:
                heir.lent[key] = weakref.ref(weight)
                weight.lend(Lender(heir, key))

    def check_lent(self, key: str, weight: torch.Tensor) -> None:
        """Raise WrapError for a tensor that cannot take the place of a parameter."""
        self.spec.check(key, weight)

    def refuse_lent(self, key: str, what: str) -> None:
        """Raise WrapError for an operation that weights in the tiers do not support."""
        self.spec.refuse(key, what)

    def note_written(self, key: str, weight: torch.Tensor) -> None:
        """Keep the content of a temporary freed after a write, until the next forward. Takes no lock."""
        self._written[key] = weight

    def thaw(self, key: str, weight: DecodedWeight) -> None:
        """Make the temporary a parameter that trains, in a layer that leaves the tiers for it."""
        layer = next(iter(self.layers), None)
        if layer is not None:
            layer.train_({key: weight.become_parameter()})

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
        self.deciding.end_on_device()

    def keep_ready(self, pages: ExpertPages) -> None:
        """Use the resident pages of all experts without a lease from now on."""
        self.ready = pages

    def forget_ready(self) -> None:
        """Drop views into pages, because they may move."""
        self.ready = self._home = None

    def layouts_of(self, expert: int) -> list[PageLayout]:
        """The layouts of an expert's pages, as they are stored."""
        return [page.layout for page in self.pages[expert * self.planes : (expert + 1) * self.planes]]

    def count_replays(self, forwards: int) -> None:
        """Count forwards that a graph has run: scans, of which the host knows no routing."""
        super().count_replays(forwards)
        for _ in range(forwards):
            self.routing.scan_unseen()

    # -- leases -------------------------------------------------------------------------------------------------------

    def keys_of(self, experts: Sequence[int], precision: str) -> tuple[str, ...]:
        """The keys of the planes that a precision takes of some experts. Raises TierError when there are none."""
        self.check_pages()
        step, keys, taken = self.planes, self.keys, 1 if precision == "coarse" else self.planes
        return tuple(keys[e * step + plane] for e in experts for plane in range(taken))

    @contextlib.contextmanager
    def lease(self, experts: Sequence[int], precision: str = "full") -> Iterator[Leased]:
        """Lease the planes of some experts, ascending. Raises TierError when there are none any more."""
        taken, home = 1 if precision == "coarse" else self.planes, self._at_home()
        if home is not None:
            yield Leased(self, experts, self._used(experts, taken, home), taken)
            return
        with self.stack.lease(self.keys_of(experts, precision)) as tensors:
            yield Leased(self, experts, tensors, taken)

    @property
    def at_home(self) -> bool:
        """True if all pages are at home in the computing tier and none is leaving: no lease waits for any."""
        return self._at_home() is not None

    def _at_home(self) -> LeasedTensors | None:
        """The fields of all pages, where these are at home in the computing tier, and used there without a lease."""
        ledger = self.stack.ledger
        if self.streams or not self.keys or ledger.retired or ledger.lost or ledger.rewrites or ledger.guard.recorder:
            return None
        if self._home is None or self._home[0] != ledger.changes or self._home[1] is not self.pages:
            slots, changes = self.stack.levels[0].slots, ledger.changes
            self._home = changes, self.pages, LeasedTensors(slots[key].tensors for key in self.keys)
        return self._home[2]

    def _used(self, experts: Sequence[int], taken: int, home: LeasedTensors) -> Sequence[dict[str, torch.Tensor]]:
        """The fields of some experts' pages at home, counted as leases count them."""
        self.stack.capturing()
        pages, step = self.pages, self.planes
        used = (
            range(len(pages))
            if len(experts) * taken == len(pages)
            else [e * step + plane for e in experts for plane in range(taken)]
        )
        for at in used:
            pages[at].hits += 1  # no call in between: one step for threads that share an interpreter lock
        tally = pages[0].tally
        if tally is not None:
            tally.hits += len(used)
        return home if len(used) == len(pages) else [home[at] for at in used]

    def form(self, pages: list[torch.Tensor | None], addresses: torch.Tensor | None = None) -> ExpertPages:
        """Pages by expert, or their addresses, as kernels take them."""
        shapes = {part: one.shape for part, one in self.spec.parts.items()}
        spec, layout = self.spec, self.pages[0].layout
        return ExpertPages(spec.format, self.dtype, shapes, layout, pages, addresses, spec.down_format)

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

    def decoded(self, name: str) -> torch.Tensor:
        """`weight`."""
        return self.weight(name)

    def shape_of(self, name: str) -> torch.Size:
        """The shape of the module's parameter."""
        return torch.Size(self.spec.site_of(name).kept_shape)

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
        """Return an empty handle for other weights of the same layer, in the same stack."""
        clone = ExpertsHandle(self.spec, self.stack)
        clone.dtype, clone.generation, clone.trainable = self.dtype, self.generation, self.trainable
        clone.token = clone.token_at(self.generation)
        clone.deciding.like(self.deciding)
        return clone

    def __deepcopy__(self, memo: dict) -> "ExpertsHandle":
        clone = ExpertsHandle(self.spec, self.stack)
        clone.dtype, clone.trainable = self.dtype, self.trainable
        memo[id(self)] = clone
        clone.hold_dense({name: copy.deepcopy(self.dense_parameter(name), memo) for name in self.dense})
        if self.keys:
            clone.kernel = self.kernel
            clone.own_pages(self.keys, self.stack.share(self.keys))
        return clone

    def __reduce__(self):
        dense = {name: self.dense_parameter(name) for name in self.dense}
        return _restore, (self.stack, self.spec, self.dtype, self.trainable, pickled(self), dense)


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
