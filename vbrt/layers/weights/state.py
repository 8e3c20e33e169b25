"""State machine of one weight in the tiers: only the transitions here set its attributes.

| state | location of the values | a layer's forward |
| --- | --- | --- |
| dense | the module's parameter, held here until encoding | encodes it first |
| streamed | pages that move, or may | leases them (`products.Streamed`) |
| hosted | pages at home in host memory | the CPU computes few tokens there (`hosted_weights.Hosted`); else a lease |
| resident | pages at home in the computing tier | uses their planes without a lease (`products.Resident`) |
| by rows | a table whose rows are read where its pages live | looks rows up (`modules/embedding.py`) |
| lent | as before, with a live temporary from `.weight` | checks it for writes first |

`product` is the state's function, chosen at each transition, and None if a forward must settle the weight first: if it
is dense, lent or tied. Tied layers share one weight. Pages are read-only: new values mean new pages.
"""

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from vbrt.config import FORMATS
from vbrt.formats.fitted_codebook import Separation, identity
from vbrt.formats.format import WeightPlanes
from vbrt.formats.page import PageLayout, new_page, pack, unpack
from vbrt.host.logger import warn
from vbrt.host.mapped_weights import page_out
from vbrt.kernels import resolves_late
from vbrt.kernels.decoded_weight import DecodedWeight
from vbrt.layers.weights.dense_registry import lie_together, register_dense, weight_at
from vbrt.layers.weights.graph_planes import GraphTiles, graph_tiles
from vbrt.layers.weights.kernel_selection import Kernels, choose_kernels, coarse_kernels, notes, refusals
from vbrt.layers.weights.linear_product import decoded_weight, precision_notes
from vbrt.layers.weights.pages_handle import PagesHandle
from vbrt.layers.weights.pickling import from_pickle, to_pickle
from vbrt.layers.weights.products import STREAMED, Streamed, resident
from vbrt.layers.weights.weight_encoding import Encoder, Planes, strides_of, uploaded
from vbrt.layers.weights.weight_spec import HandleSpec
from vbrt.layers.weights.weight_view import Lender, dense_parameter, follow_encoding, live_temporary, plain_dense
from vbrt.libraries.torch_api import is_fake
from vbrt.residency.plan import PageSpec
from vbrt.tiers import Lease, Owner, TierStack
from vbrt.tiers.stack.row_lookup import PagesAtHome

__all__ = ["Weight", "find_weight", "register_weight", "weight_of", "weights_in"]

_weights: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()  # those of experts too


class TiedLayer(Protocol):
    """Protocol of a layer as its weight sees it."""

    _vb_twin: int
    __dict__: dict[str, Any]

    @property
    def dense(self) -> torch.Tensor | None:
        """The dense parameter that the layer has."""

    def forget_given_(self) -> None:
        """Take out a tensor that was put in the weight's place."""

    def train_(self, weight: nn.Parameter) -> None:
        """Leave the tiers, holding `weight`, which trains."""

    def freeze_(self) -> None:
        """Give the weight back as one that does not train."""


class Weight(PagesHandle):
    """One weight in a stack. Counters are integers.

    Attributes:
        dtype: compute dtype of the layers, and dtype of decoded weights.
        trainable: requires_grad of the dense weight, restored by `unwrap`.
        layers: the live layers that share this weight.
        tied: whether there may be several.
        dense: the weight until it is encoded, as parameters on one storage ("twins"), or as a temporary that was
            written to; () after that. Layers have none among their own parameters, where an optimizer would take it.
        lent: live temporary of `.weight`, or None; a write to it changes the weight.
        held: state of the encoded planes.
        product: (weight, x, bias) -> x Wᵀ + bias in the current state; None: settle the weight first.
        strides: of the module's weight, where it is not contiguous.
        kernels: for spec and device; None until first needed if building them takes time.
        kernel: name of the backend in use.
        shows_planes: whether compiled graphs may hold resident planes.
        graph_tiles: resident planes in the form that compiled graphs hold; also set on layers.
    """

    def __init__(self, spec: HandleSpec, stack: TierStack, *, trainable: bool = False) -> None:
        super().__init__(stack)
        self.dtype = spec.dtype
        self.trainable, self.tied = trainable, False
        self.layers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.dense: tuple[torch.Tensor, ...] = ()
        self._released: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()  # by twin
        self.lent: weakref.ref[torch.Tensor] | None = None
        self._written: torch.Tensor | None = None  # content of a temporary that died after a write
        self._source: tuple[object, ...] | None = None  # dense parameter that the pages were made of, and its state
        self.strides: tuple[int, ...] | None = None
        self.separation = Separation(spec.levels, spec.refresh_every) if FORMATS[spec.format].fitted else None
        self.kernel, self.shows_planes = "reference", False
        self.held: Streamed = STREAMED
        self.product: Callable[[Weight, torch.Tensor, torch.Tensor | None], torch.Tensor] | None = STREAMED.product
        self.graph_tiles: GraphTiles | None = None
        self._specify(spec)
        register_weight(self)

    def choose_product(self) -> None:
        """Choose the product for the state. Transitions clear it first, so that after an interruption a forward settles
        the weight."""
        waits = self.dense or self.tied or self.lent is not None
        self.product = None if waits else self.held.product

    def _hold(self, held: Streamed) -> None:
        """Change the state of the encoded planes."""
        before = self.held
        self.product, self.held = None, held
        self.choose_product()
        before.end()

    # -- spec and kernels ---------------------------------------------------------------------------------------------

    def _specify(self, spec: HandleSpec) -> None:
        self.spec = spec
        self.encoder = Encoder(spec, self.device, self.separation, self.fallbacks)
        self.kernels: Kernels | None = None
        self._coarse_kernels: Kernels | None = None
        if not resolves_late(spec.backend, self.device):
            self.take_kernels()

    def take_kernels(self) -> Kernels:
        """Choose the kernels; warn once for all layers about requested ones that are unavailable."""
        kernels = choose_kernels(self.spec, self.device)
        kernels.kernel.prepare(self.device)
        for reason in refusals(self.spec, self.device):
            if reason not in self.fallbacks:
                self.fallbacks.append(reason)
                warn(reason, stacklevel=4)  # one text for all layers: Python's filter shows it once
        self.encoder.packing = kernels.packing
        self.kernels = kernels
        return kernels

    @property
    def coarse_kernels(self) -> Kernels:
        """The kernels for the coarse plane alone of an `exact` weight."""
        kernels = self._coarse_kernels
        if kernels is None:
            kernels = self._coarse_kernels = coarse_kernels(self.spec, self.device)
            kernels.kernel.prepare(self.device)
        return kernels

    def all_fallbacks(self) -> list[str]:
        """`fallbacks`, with those found by forwards, and notes on kernels."""
        return [*self.fallbacks, *notes(self.spec, self.device), *precision_notes(self)]

    def retype(self, dtype: torch.dtype) -> None:
        """Follow a cast of the layers: the dtype to compute in and show, and, while empty, to store."""
        self.dtype = dtype
        self.forget_ready()
        if not self.keys and dtype is not self.spec.dtype:
            self._specify(self.spec.retyped(dtype))

    def cast(self, dtype: torch.dtype) -> None:
        """Cast dense parameters, the same objects, and the temporary that lies where they do; then `retype`."""
        lent = self.temporary
        for weight in self.dense:
            if weight.dtype != dtype:
                torch.Tensor.data.__set__(weight, torch.Tensor.detach(weight).to(dtype))
        self.hold_dense(*self.dense)
        if lent is not None and self.dense and lent is not self.dense[0]:
            lent.move(torch.Tensor.detach(self.dense[0]))
        elif lent is not None:
            lent.settle()
        self.retype(dtype)

    # -- planes -------------------------------------------------------------------------------------------------------

    def split(self, weight: torch.Tensor) -> Planes:
        """The planes of a weight in the module's orientation; nothing is stored. Raises FormatError."""
        planes = self.encoder.split(uploaded(weight, self.stack.levels[0]))
        self.strides = None if self.spec.transposed else strides_of(weight)
        return planes

    @contextlib.contextmanager
    def encoded(self) -> Iterator[Planes]:
        """Lease the planes as the format encodes them, for machines without this one's kernels. Raises TierError."""
        layouts = [page.layout for page in self.pages]
        with self.lease() as tensors:
            yield [
                (self.encoder.encoded_layout(layout), self.encoder.unpacked(layout, plane))
                for layout, plane in zip(layouts, tensors, strict=True)
            ]

    def encoded_layouts(self) -> list[PageLayout]:
        """The layouts of `encoded`, without a lease."""
        return [self.encoder.encoded_layout(page.layout) for page in self.pages]

    # -- layers -------------------------------------------------------------------------------------------------------

    def tie(self, layer: TiedLayer) -> None:
        """Add a layer to this weight."""
        self.product = None
        self.layers.add(layer)
        self.tied = len(self.layers) > 1
        self.choose_product()
        self.show_to_graphs(self.graph_tiles)

    def untie(self, layer: TiedLayer) -> None:
        """Remove a layer."""
        self.product = None
        self.layers.discard(layer)
        self.tied = len(self.layers) > 1
        self.choose_product()

    def can_tie(self, other: "Weight") -> bool:
        """True if layers of another weight can be tied to this one."""
        return self.stack is other.stack and self.spec.suits(other.spec) and self.dtype is other.dtype

    def pass_on(self, layers: Sequence[TiedLayer], weight: torch.Tensor) -> "Weight":
        """Give layers a new weight, which is dense until they are used; return it.

        Other tied layers keep this one, as do computations in flight.
        """
        heir = self.empty_copy()
        heir.retype(weight.dtype)
        heir.trainable = weight.requires_grad
        with self.stack.encoding:
            heir.hold_dense(weight)
            for layer in layers:
                layer.forget_given_()
                layer.__dict__.update(_vb_handle=heir, _vb_twin=0)
                self.untie(layer)
                heir.tie(layer)
        return heir

    def freeze(self) -> None:
        """Make `unwrap` return the weight frozen (requires_grad False)."""
        if self.trainable:
            self.trainable = False
            for weight in self.dense:
                weight.requires_grad_(False)
            if self.spec.lossless:  # whose planes require grad where the weight does
                self.forget_ready()

    # -- dense --------------------------------------------------------------------------------------------------------

    def hold_dense(self, *weights: torch.Tensor) -> None:
        """Hold dense parameters, all on one storage, of which planes are made later; one for each twin."""
        self.product = None
        for weight in weights:
            register_dense(weight, self)
        self.dense = weights
        if weights:
            self.stack.shells.add(self)
        self.choose_product()

    def drop_dense(self) -> None:
        """Hold no dense parameters: the pages have their values."""
        self.dense = ()
        self.stack.shells.discard(self)
        self.choose_product()

    def adopt(self, weight: nn.Parameter) -> int:
        """Hold the parameter of a module that becomes a layer of this weight; return its twin."""
        self.trainable = weight.requires_grad
        known = next((twin for twin, own in enumerate(self.dense) if own is weight), None)
        if known is not None:
            return known
        self.hold_dense(*self.dense, weight)
        return len(self.dense) - 1

    def put_dense(self, twin: int, weight: torch.Tensor) -> None:
        """Hold another tensor in the place of one of the dense parameters."""
        self.hold_dense(*self.dense[:twin], weight, *self.dense[twin + 1 :])

    def dense_parameters(self) -> tuple[torch.Tensor, ...]:
        """The dense parameters that are held."""
        return self.dense

    def dense_parameter(self, twin: int) -> nn.Parameter:
        """The dense weight as a parameter in its memory: the one that the module had, unless it was written."""
        return dense_parameter(self.dense[twin], self.trainable)

    def lies_with(self, weight: torch.Tensor) -> bool:
        """True if a tensor lies where a dense parameter does: a write to one is a write to the other."""
        return any(lie_together(own, weight) for own in self.dense)

    def empty_parameter(self) -> nn.Parameter:
        """A dense parameter to draw new values into."""
        return nn.Parameter(torch.empty(self.spec.weight_shape, dtype=self.dtype, device=self.stack.device))

    def released_parameter(self, twin: int, made: nn.Parameter | None) -> nn.Parameter:
        """The weight as a parameter of layers that leave the tiers; one for each twin, all on one storage.

        It is the dense parameter if there is one, else a live temporary, so that its holders hold the weight.

        Args:
            made: the parameter that another layer on the same storage has been given, if one has.
        """
        if self.dense:
            weight = self.dense[twin]
            if type(weight) is not DecodedWeight:
                return weight
            return weight.become_parameter().requires_grad_(self.trainable)
        known = self._released.get(twin)
        if known is None:
            if self._released:
                known = nn.Parameter(next(self._released.values()).detach())
            elif made is not None:
                known = made
            else:
                lent = self.temporary
                known = nn.Parameter(self.weight()) if lent is None else lent.become_parameter()
            self._released[twin] = known.requires_grad_(self.trainable)
        return known

    # -- dense to pages -----------------------------------------------------------------------------------------------

    def encode(self, dense: torch.Tensor) -> None:
        """Make pages of a dense parameter that is held, unless they are its pages already, and hold none any more.

        Call it under `stack.encoding`. Raises FormatError, TierError: the weight stays as it was.
        """
        self._detach_moved(dense)
        weight = plain_dense(dense)
        version = 0 if weight.is_inference() else weight._version
        if not (self.keys and self._source == identity(weight)):
            self.store(self.split(weight))
            self._source = identity(weight)
        self.drop_dense()
        page_out(weight)
        lent = self.temporary
        if lent is not None:
            self._hold(STREAMED)
            keeps = self.spec.lossless and lent.device.type == self.device.type
            follow_encoding(lent, dense, version, keeps=keeps, stored=self.weight)

    def _detach_moved(self, weight: torch.Tensor) -> None:
        """Untie layers whose parameter lies elsewhere than `weight` by now, because it was given other `.data`."""
        for layer in list(self.layers) if len(self.dense) > 1 else ():
            other = layer.dense
            if not lie_together(other, weight):
                self.pass_on([layer], other)

    def load(self, weight: torch.Tensor) -> None:
        """Store new values for all tied layers; the planes before them are retired first, to make room.

        Raises:
            FormatError: the weight cannot be encoded; the old one is still in place.
            TierError: the pages cannot be stored; the weight is dense, with the new values.
        """
        with torch.no_grad(), self.stack.encoding:
            if self._has_values(weight):
                return
            dense = nn.Parameter(weight.detach().to(self.dtype), requires_grad=self.trainable)
            strides = self.strides
            planes = self.split(dense)
            self.strides = strides  # those of the weight whose place it takes
            self.hold_dense(*[dense] * (1 + max(layer._vb_twin for layer in self.layers)))
            self.store(planes)
            self.drop_dense()
        lent = self.temporary
        values = None if lent is None else self.weight()  # before the test: another thread may write meanwhile
        if lent is not None and not lent.written:
            lent.hold(values)

    def _has_values(self, weight: torch.Tensor) -> bool:
        """True if these values were decoded from a fitted codebook: encoding them again would change them."""
        if self.separation is None or not self.keys or weight.is_meta:
            return False
        return torch.equal(self.weight(), weight.to(self.device, self.dtype))

    # -- lent ---------------------------------------------------------------------------------------------------------

    @property
    def temporary(self) -> DecodedWeight | None:
        """The live temporary, or None."""
        return live_temporary(self.lent) if self.lent is not None else None

    def lend(self, twin: int) -> torch.Tensor:
        """Return the temporary of the weight, writable and shared by all readers while it is alive.

        Args:
            twin: which of the parameters on one storage the layer has that it is read of.
        """
        while True:
            lent, dense = self.temporary, self.dense
            if lent is not None:
                return lent
            if dense and is_fake(dense[twin]):
                return dense[twin]
            with torch.inference_mode(False), torch.no_grad():
                made = DecodedWeight.of(Lender(self, twin), dense[twin] if dense else self.weight())
            with self.stack.encoding:
                if self.dense is dense and self.temporary is None:  # else another thread has encoded or lent it
                    self.product, self.lent = None, weakref.ref(made)
                    self._hold(STREAMED)  # a use without a lease would not see a write
                    return made

    def notice_writes(self) -> None:
        """Take over unreported writes to the temporary."""
        if self._written is not None:
            self.take_over(0, self._written)
        lent = self.temporary
        if lent is not None:
            lent.report_writes()
        elif self.lent is not None and self.lent() is None:
            self.lent = None
            self.choose_product()

    def take_over(self, key: object, weight: torch.Tensor) -> None:
        """Make a temporary that was written to the weight of all tied layers, dense until they are used; where it is
        one of a dense weight and was given other `.data`, of those that have the twin `key`, as in torch.

        Raises:
            WrapError: it has another shape or dtype than a weight of these layers.
        """
        with self.stack.encoding:
            layers = list(self.layers)
            lent = type(weight) is DecodedWeight
            if not layers or not (lent or weight is self._written):  # they have another one, or it is theirs by now
                return
            self._written = None
            if self.lies_with(weight):  # it is not encoded yet
                return
            self.spec.check(weight)
            if len(self.dense) > 1:
                layers = [layer for layer in layers if layer._vb_twin == key]
            heir = self.pass_on(layers, weight if lent else nn.Parameter(weight, requires_grad=False))
            heir.trainable, self.lent = self.trainable, None
            heir.forwards, heir.weight_reads, heir.computed = self.forwards, self.weight_reads, self.computed
            self.choose_product()
            if lent:
                heir.lent = weakref.ref(weight)
                weight.lend(Lender(heir, 0))

    def check_lent(self, key: object, weight: torch.Tensor) -> None:
        """Raise WrapError for a tensor that cannot take the weight's place."""
        self.spec.check(weight)

    def refuse_lent(self, key: object, what: str) -> None:
        """Raise WrapError for an operation that a weight in the tiers does not support."""
        self.spec.refuse(what)

    def note_written(self, key: object, weight: torch.Tensor) -> None:
        """Keep the content of a temporary freed after a write, until the next forward. Takes no lock."""
        self._written = weight

    def thaw(self, key: object, weight: DecodedWeight) -> None:
        """Make the temporary a parameter that trains, in layers that leave the tiers for it."""
        layer = next(iter(self.layers), None)
        if layer is not None:
            layer.train_(weight.become_parameter())

    # -- resident -----------------------------------------------------------------------------------------------------

    def keep_resident(self, planes: WeightPlanes, tensors: list[dict[str, torch.Tensor]]) -> None:
        """Use leased planes without a lease from now on, if their pages are at home in the computing tier and there is
        no live temporary."""
        if not self._is_at_home(tensors):
            return
        self.hold_resident(planes)
        if not self._is_at_home(tensors):  # another thread has stored, moved or lent the weight meanwhile
            self.forget_ready()

    def host(self, hosted: Streamed) -> None:
        """Have the CPU compute products of few tokens where the page lies, until it moves; see `Host.take`."""
        self._hold(hosted)

    def hold_resident(self, planes: WeightPlanes) -> None:
        """Use resident planes without a lease, and expose them to compiled graphs if kernels support that."""
        self._hold(resident(self, planes))
        if self.graph_planes is not None:
            tiles = graph_tiles(planes, self.graph_tiles)
            if tiles is not self.graph_tiles:
                self.show_to_graphs(tiles)

    def _is_at_home(self, tensors: list[dict[str, torch.Tensor]]) -> bool:
        """True if these are the weight's pages, at home in the computing tier, without a live temporary that may be
        written."""
        if any(page.home for page in self.pages) or self.temporary is not None or self._written is not None:
            return False
        slots = self.stack.levels[0].slots
        held = [slots.get(key) for key in self.keys]
        return len(held) == len(tensors) and all(
            slot is not None and slot.tensors is plane for slot, plane in zip(held, tensors, strict=True)
        )

    def forget_ready(self) -> None:
        """Drop views into pages, because they may move."""
        self._hold(STREAMED)
        self.show_to_graphs(None)

    @property
    def graph_planes(self) -> WeightPlanes | None:
        """The planes that a compiled graph may hold: they never move, and kernels compute with them. Else None.

        Graphs that hold them count no forwards and no hits.
        """
        return self.held.planes if self.shows_planes else None

    def show_to_graphs(self, tiles: GraphTiles | None) -> None:
        """Expose resident planes to compiled graphs, or let these lease again (None).

        Layers hold this themselves, as a tensor and a string: dynamo checks in one step that these have not changed in
        a module's dict; behind another object it would go through them one by one at each call.
        """
        self.graph_tiles = tiles
        while True:  # again where another thread has shown something else meanwhile
            shown = self.graph_tiles
            page, form = shown or (None, None)
            for layer in list(self.layers):
                layer.__dict__.update(_vb_page=page, _vb_form=form)
            if self.graph_tiles is shown:
                return

    # -- pages --------------------------------------------------------------------------------------------------------

    def store(self, planes: Planes) -> None:
        """Write planes into pages; earlier pages are retired first, so that a tight budget has room for the new ones.

        Raises:
            TierError: the pages do not fit or cannot be written; the handle is empty then.
        """
        self.retire()
        self.stack.retire_unowned()
        owner, keys = Owner(self.stack), []
        try:
            for layout, tensors in planes:
                key, home = _free_key(self, layout.plane), self.spec.home(layout.plane, self.stack.names[0])
                page = self.stack.add(key, layout, home, functools.partial(pack, tensors, layout), owner, frozen=True)
                page.passes = not self.spec.by_rows
                keys.append(key)
            self.own(tuple(keys), owner)
        except BaseException:
            if self.owner is not owner:
                self.stack.retire(owner)
            raise

    def own(self, keys: tuple[str, ...], owner: Owner) -> None:
        """Hold pages that `owner` owns."""
        kernels = self.kernels or self.take_kernels()
        pages = tuple(self.stack.pages[key] for key in keys)
        served = kernels.computes(pages[0].layout)
        kernel = kernels.kernel.backend if served else "reference"
        shows_planes = served and kernels.kernel.reads_resident_planes and not kernels.lossless
        if self.spec.inputs is not None:
            self.spec.inputs.moments = None  # they are large, and have done their work
        # no call from here on: Ctrl-C finds an empty handle or a full one
        self.owner, self.pages, self.kernel, self.shows_planes = owner, pages, kernel, shows_planes
        self.keys = keys

    def assign_homes(self, homes: Mapping[PageSpec, str]) -> None:
        """Have planes that are stored from now on live in these tiers."""
        self.spec = replace(self.spec, homes={page.plane: home for page, home in homes.items()})

    def lease(self, precision: str = "full") -> Lease | PagesAtHome:
        """Lease the planes of a precision, "full" or "coarse"; those of a table that is read by rows are copied
        from where they live. Raises TierError when there are none any more."""
        self.check_pages()
        keys = self.keys if precision == "full" else self.keys[:1]
        return PagesAtHome(self.stack, keys) if self.spec.by_rows else self.stack.lease(keys)

    def shape_of(self, twin: int) -> torch.Size:
        """The shape of the module's parameter."""
        return torch.Size(self.spec.weight_shape)

    def decoded(self, twin: int) -> torch.Tensor:
        """`weight`, of which every parameter on one storage has the values."""
        return self.weight()

    def weight(self) -> torch.Tensor:
        """The decoded weight in the module's orientation and dtype: a temporary that shares memory with nothing."""
        return decoded_weight(self)

    # -- copies -------------------------------------------------------------------------------------------------------

    def empty_copy(self) -> "Weight":
        """Return an empty handle for another weight of the same layer, in the same stack."""
        clone = Weight(self.spec, self.stack)
        clone.generation, clone.trainable = self.generation, self.trainable
        clone.token = clone.token_at(self.generation)
        if self.separation is not None:  # its codebook is refreshed when the new weight asks for it
            clone.separation = clone.encoder.separation = self.separation
        return clone

    def __deepcopy__(self, memo: dict) -> "Weight":
        clone = Weight(self.spec, self.stack)
        clone.dtype, clone.trainable, clone.strides = self.dtype, self.trainable, self.strides
        memo[id(self)] = clone
        if self.dense:
            clone.hold_dense(*(copy.deepcopy(self.dense_parameter(twin), memo) for twin in range(len(self.dense))))
        if self.keys:
            clone.own(self.keys, self.stack.share(self.keys))
        return clone

    def __reduce__(self):
        pages, dense = [], [self.dense_parameter(twin) for twin in range(len(self.dense))]
        if self.keys:
            with self.encoded() as planes:  # bytes, because torch cannot unpickle 8-bit floats
                made = [(layout, pack(plane, layout, new_page(layout))) for layout, plane in planes]
                pages = [(layout.to_dict(), to_pickle(page)) for layout, page in made]
        return _restore, (self.stack, self.spec, self.dtype, self.trainable, pages, self.strides, dense)


def _restore(
    stack: TierStack,
    spec: HandleSpec,
    dtype: torch.dtype,
    trainable: bool,
    pages: list,
    strides: tuple[int, ...] | None,
    dense: Sequence[nn.Parameter],
) -> Weight:
    """Unpickle: `stack` is one of this process, in CPU memory, shared by all handles of the pickle."""
    handle = Weight(replace(spec, homes=None, backend="auto"), stack)
    handle.dtype, handle.trainable, handle.strides = dtype, trainable, strides
    handle.hold_dense(*dense)
    if pages:
        layouts = [PageLayout.from_dict(layout) for layout, _ in pages]
        made = [from_pickle(page) for _, page in pages]
        handle.store([(layout, unpack(page, layout)) for layout, page in zip(layouts, made, strict=True)])
    return handle


def _free_key(handle: Weight, plane: str) -> str:
    """The plan's key, unless a copy of the layer has taken it."""
    key = handle.spec.site.page_key(plane)
    return key if key not in handle.stack.pages else f"{key}@{handle.id}.{handle.generation}"


def register_weight(weight: Any) -> None:
    """Register a weight by its id, for graphs, and by its stack."""
    _weights[weight.id] = weight


def find_weight(id: int) -> Any:
    """Return the live weight of an id, or that of a layer's experts; None if there is none."""
    return _weights.get(id)


def weights_in(stack: TierStack) -> list[Any]:
    """Return the weights of live layers that are, or will be, in a stack."""
    return [weight for weight in list(_weights.values()) if weight.stack is stack and weight.layers]


def weight_of(value: torch.Tensor) -> Weight | None:
    """Return the weight of a dense parameter or temporary, if its layers are alive."""
    if type(value) is not DecodedWeight:
        found = weight_at(value) if isinstance(value, nn.Parameter) else None
        return found if found is not None and found.layers and found.lies_with(value) else None
    owner = value.owner
    found = owner.lends if isinstance(owner, Lender) else None
    return found if isinstance(found, Weight) and found.temporary is value and found.layers else None
