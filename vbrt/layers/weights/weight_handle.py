"""WeightHandle: where the planes of one weight are.

A handle is shared by all layers that are tied to one weight. It holds the dense parameter first, and owns pages of a
stack once `store` has run. Pages are read-only: a new weight means new pages.

Beside it: `weight_spec.py` (what the weight is), `kernel_selection.py` (which kernels compute with it),
`weight_encoding.py` (weight to planes), `tying.py` (the layers and their dense parameters), `weight_view.py` (the
temporary that `.weight` gives), `resident_planes.py` and `graph_planes.py` (planes that never move),
`linear_product.py` (the product), `weight_operators.py` (compiled graphs).
"""

import contextlib
import copy
import functools
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vbrt.config import FORMATS
from vbrt.formats.fitted_codebook import Separation
from vbrt.formats.format import WeightPlanes
from vbrt.formats.page import PageLayout, new_page, pack, unpack
from vbrt.kernels import resolves_late
from vbrt.layers.weights.graph_planes import GraphTiles, show_to_graphs
from vbrt.layers.weights.kernel_selection import Kernels, choose_kernels, coarse_kernels, refusals, vendor_refusal
from vbrt.layers.weights.linear_product import decoded_weight, precision_notes
from vbrt.layers.weights.pages_handle import PagesHandle
from vbrt.layers.weights.pickling import from_pickle, to_pickle
from vbrt.layers.weights.small_batch import ShortWay
from vbrt.layers.weights.tying import hold_dense
from vbrt.layers.weights.weight_encoding import Encoder, Planes, strides_of, uploaded
from vbrt.layers.weights.weight_spec import HandleSpec
from vbrt.layers.weights.weight_view import dense_parameter
from vbrt.residency.plan import PageSpec
from vbrt.tiers import Lease, Owner, Page, TierStack
from vbrt.tiers.stack.row_lookup import PagesAtHome

__all__ = ["WeightHandle", "find_handle", "handles_in", "register_handle"]

_handles: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()  # experts' handles too


class WeightHandle(PagesHandle):
    """Planes of one weight in a stack. Counters are integers.

    Attributes:
        dtype: what the layers compute in and show to the outside.
        trainable: whether the dense weight had requires_grad; the one that `unwrap` makes gets it back.
        layers: the live layers that share this weight.
        tied: whether there may be several.
        dense: the weight until it is encoded, as parameters on one storage, or as a temporary that was written to; ()
            after that. Layers have none among their own parameters, where an optimizer would take it.
        lent: the temporary that `.weight` has given, if one is out; writes to it change the weight.
        written: the content of a temporary that died after a write, until it is taken over.
        source: which dense parameter the pages were made of, and in which state, if of one.
        strides: of the module's weight, where it is not contiguous.
        kernels: chosen for the spec and device; None until they are needed where building them takes time.
        kernel: the name of the backend that runs.
        shows_planes: whether compiled graphs may hold planes that never move.
        ready: planes of pages that never move, used without a lease.
        short: the way of few tokens through these planes, where a kernel prepares its arguments.
        resident: the same of a dense weight, as nn.Linear keeps it; `page` is where it lies.
        graph_tiles: planes that never move as compiled graphs hold them; layers hold them too.
    """

    def __init__(self, spec: HandleSpec, stack: TierStack) -> None:
        super().__init__(stack)
        self.dtype = spec.dtype
        self.trainable = self.tied = False
        self.layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.dense: tuple[torch.Tensor, ...] = ()
        self.released: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()  # by twin
        self.lent: weakref.ref[torch.Tensor] | None = None
        self.written: torch.Tensor | None = None
        self.source: tuple[object, ...] | None = None
        self.strides: tuple[int, ...] | None = None
        self.separation = Separation(spec.levels, spec.refresh_every) if FORMATS[spec.format].fitted else None
        self.kernel, self.shows_planes = "reference", False
        self.ready: WeightPlanes | None = None
        self.resident: torch.Tensor | None = None
        self.short: ShortWay | None = None
        self.page: Page | None = None
        self.graph_tiles: GraphTiles | None = None
        self._specify(spec)
        register_handle(self)

    # -- how the weight is held ---------------------------------------------------------------------------------------

    def _specify(self, spec: HandleSpec) -> None:
        self.spec = spec
        self.encoder = Encoder(spec, self.device, self.separation, self.fallbacks)
        self.kernels: Kernels | None = None
        self._coarse_kernels: Kernels | None = None
        if not resolves_late(spec.backend, self.device):
            self.take_kernels()

    def take_kernels(self) -> Kernels:
        """Choose the kernels; warn of those that were asked for and cannot be had, once for all layers."""
        kernels = choose_kernels(self.spec, self.device)
        kernels.kernel.prepare(self.device)
        for reason in refusals(self.spec, self.device):
            if reason not in self.fallbacks:
                self.fallbacks.append(reason)
                warnings.warn(reason, stacklevel=4)  # one text for all layers: Python's filter shows it once
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
        """`fallbacks`, and what forwards have shown: a shape that the vendor refuses, no coarse plane for a draft."""
        refusal = vendor_refusal(self.spec, self.device)
        return [*self.fallbacks, *([refusal] if refusal else []), *precision_notes(self)]

    def retype(self, dtype: torch.dtype) -> None:
        """Follow a cast of the layers: the dtype to compute in and show, and, while empty, to store."""
        self.dtype = dtype
        self.forget_ready()
        if not self.keys and dtype is not self.spec.dtype:
            self._specify(self.spec.retyped(dtype))

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
                page = self.stack.add(key, layout, home, functools.partial(pack, tensors, layout), owner)
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

    def forget_ready(self) -> None:
        """Keep no views into pages: they may move."""
        self.ready = self.resident = self.short = None
        show_to_graphs(self, None)

    def lease(self, precision: str = "full") -> Lease | PagesAtHome:
        """Lease the planes of a precision, "full" or "coarse"; those of a table that is read by rows are copied
        from where they live. Raises TierError when there are none any more."""
        self.check_pages()
        keys = self.keys if precision == "full" else self.keys[:1]
        return PagesAtHome(self.stack, keys) if self.spec.by_rows else self.stack.lease(keys)

    def weight(self) -> torch.Tensor:
        """The decoded weight in the module's orientation and dtype: a temporary that shares memory with nothing."""
        return decoded_weight(self)

    # -- copies -------------------------------------------------------------------------------------------------------

    def empty_copy(self) -> "WeightHandle":
        """A handle for another weight of the same layer, in the same stack."""
        clone = WeightHandle(self.spec, self.stack)
        clone.generation, clone.trainable = self.generation, self.trainable
        clone.token = clone.token_at(self.generation)
        if self.separation is not None:  # its codebook is refreshed when the new weight asks for it
            clone.separation = clone.encoder.separation = self.separation
        return clone

    def __deepcopy__(self, memo: dict) -> "WeightHandle":
        clone = WeightHandle(self.spec, self.stack)
        clone.dtype, clone.trainable, clone.strides = self.dtype, self.trainable, self.strides
        memo[id(self)] = clone
        if self.dense:
            hold_dense(clone, *(copy.deepcopy(dense_parameter(self, twin), memo) for twin in range(len(self.dense))))
        if self.keys:
            clone.own(self.keys, self.stack.share(self.keys))
        return clone

    def __reduce__(self):
        pages, dense = [], [dense_parameter(self, twin) for twin in range(len(self.dense))]
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
) -> WeightHandle:
    """Unpickle: `stack` is one of this process, in CPU memory, shared by all handles of the pickle."""
    handle = WeightHandle(replace(spec, homes=None, backend="auto"), stack)
    handle.dtype, handle.trainable, handle.strides = dtype, trainable, strides
    hold_dense(handle, *dense)
    if pages:
        layouts = [PageLayout.from_dict(layout) for layout, _ in pages]
        made = [from_pickle(page) for _, page in pages]
        handle.store([(layout, unpack(page, layout)) for layout, page in zip(layouts, made, strict=True)])
    return handle


def _free_key(handle: WeightHandle, plane: str) -> str:
    """The plan's key, unless a copy of the layer has taken it."""
    key = handle.spec.site.page_key(plane)
    return key if key not in handle.stack.pages else f"{key}@{handle.id}.{handle.generation}"


def register_handle(handle: Any) -> None:
    """Let a handle be found by its id, in graphs, and by its stack."""
    _handles[handle.id] = handle


def find_handle(id: int) -> WeightHandle | None:
    """The live handle of an id."""
    return _handles.get(id)


def handles_in(stack: TierStack) -> list[WeightHandle]:
    """The handles of live layers whose weights are, or will be, in a stack."""
    return [handle for handle in list(_handles.values()) if handle.stack is stack and handle.layers]
