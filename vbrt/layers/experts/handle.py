"""ExpertsHandle: where the planes of a layer's routed experts are.

It begins empty, while the module still holds its dense parameters, and owns one page for each expert and plane once
`store` has run. Pages are read-only. A forward leases the pages of the experts that its tokens are sent to.
"""

import contextlib
import functools
import secrets
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from vbrt.config import FORMATS
from vbrt.errors import TierError, WrapError
from vbrt.formats.base import WeightPlanes
from vbrt.formats.experts import join_fields, join_layouts, part_fields, part_layout
from vbrt.formats.page import PageLayout, new_page, pack, unpack
from vbrt.formats.separation import Separation
from vbrt.kernels import resolve, resolves_late
from vbrt.kernels.experts import ExpertPages
from vbrt.layers.compute import pass_precision, precision_notes
from vbrt.layers.encoding import Encoder, Planes
from vbrt.layers.experts.deciding import CachedLayer
from vbrt.layers.experts.encoding import EncodedExperts, join_planes
from vbrt.layers.experts.leased import Leased
from vbrt.layers.experts.spec import ExpertsSpec
from vbrt.layers.pickling import from_pickle, to_pickle
from vbrt.layers.selection import Kernels, choose_kernels, coarse_kernels, refusals
from vbrt.layers.weight import register_handle
from vbrt.residency.counts import RoutingCounts
from vbrt.residency.plan import PageSpec
from vbrt.tiers import Owner, Page, Tally, TierStack

__all__ = ["ExpertsHandle"]


class ExpertOps(NamedTuple):
    """The functions of the ops on pages."""

    up: Callable[..., torch.Tensor]
    down: Callable[..., torch.Tensor]
    sum: Callable[..., torch.Tensor]


class ExpertsHandle:
    """Planes of the experts of one layer in a stack. Counters are integers.

    Attributes:
        dtype: what the layer computes in and shows to the outside.
        trainable: True if the dense parameters had requires_grad.
        layers: the live layers that share these weights.
        own: the dense parameters of the layer, by name, while they count.
        lent: the temporaries that reading a parameter has given, by name; writes to them change the weights.
        written: the content of temporaries that died after a write, by name, until it is taken over.
        released: the dense parameters, by name, while some of the layers that are tied are plain again.
        keys: pages in the stack, expert by expert; none before `store` and after `retire`.
        generation: counts the weights that this handle has held before.
        token: names handle and generation in graphs.
        kernels: by part, chosen for spec and device; None until they are needed where building them takes time.
        routing: counts of what forwards have asked for.
        decides: who decides which pages move, "host" or "gpu".
        follow: a method that may give the layer a cache, see `ask_for_cache_with`.
        cache: the layer's part of the model's device cache, where the GPU decides; None where the host does.
        resident: how many experts were in that cache when it was last asked.
    """

    tied, separation, decides = False, None, "host"

    def __init__(self, spec: ExpertsSpec, stack: TierStack) -> None:
        self.spec, self.stack = spec, stack
        self.dtype = spec.dtype
        self.device, self.device_name = stack.device, str(stack.device)
        self.trainable = False
        self.layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.own: dict[str, weakref.ref[torch.Tensor]] = {}
        self.lent: dict[str, weakref.ref[torch.Tensor]] = {}
        self.written: dict[str, torch.Tensor] = {}
        self.released: dict[str, nn.Parameter] = {}
        self.keys: tuple[str, ...] = ()
        self.pages: tuple[Page, ...] = ()
        self.owner: Owner | None = None
        self.forwards = self.weight_reads = self.generation = 0
        self.id = secrets.randbits(63)
        self.token = self.token_at(0)
        self.fallbacks: list[str] = []
        self.kernel = "reference"
        self.routing = RoutingCounts(spec.experts)
        self.ready: ExpertPages | None = None
        self.cache: CachedLayer | None = None
        self.follow: weakref.WeakMethod | None = None
        self.resident = 0
        self._specify(spec)
        register_handle(self)

    def token_at(self, generation: int) -> torch.Tensor:
        """A tensor, and not constants, so that layers share one compiled graph."""
        return torch.tensor([self.id, generation], dtype=torch.int64, device="cpu")

    # -- how the weights are held -------------------------------------------------------------------------------------

    def _specify(self, spec: ExpertsSpec) -> None:
        self.spec, fitted = spec, FORMATS[spec.format].fitted
        self.encoders = {
            part: Encoder(one, self.device, Separation(one.levels, one.refresh_every) if fitted else None, [])
            for part, one in spec.parts.items()
        }
        self.kernels: dict[str, Kernels] | None = None
        self._coarse_kernels: dict[str, Kernels] | None = None
        self._ops: ExpertOps | None = None
        if not resolves_late(spec.first.backend, self.device):
            self.take_kernels()

    def take_kernels(self) -> dict[str, Kernels]:
        """Choose the kernels; warn of those that were asked for and cannot be had, once for all layers."""
        kernels = {part: choose_kernels(one, self.device) for part, one in self.spec.parts.items()}
        for part, chosen in kernels.items():
            chosen.kernel.prepare(self.device)
            self.encoders[part].packing = chosen.packing
        for reason in refusals(self.spec.first, self.device):
            if reason not in self.fallbacks:
                self.fallbacks.append(reason)
                warnings.warn(reason, stacklevel=4)
        self.kernels = kernels
        return kernels

    def kernels_of_pass(self) -> dict[str, Kernels]:
        """The kernels for the planes that this pass takes."""
        kernels = self.kernels or self.take_kernels()
        if not (self.spec.fine and pass_precision() == "coarse"):
            return kernels
        if self._coarse_kernels is None:
            self._coarse_kernels = {part: coarse_kernels(one, self.device) for part, one in self.spec.parts.items()}
        return self._coarse_kernels

    def ops_of_pass(self) -> "ExpertOps":
        """The ops on the planes that this pass takes; only for those that lose bits."""
        if self._ops is None:
            spec = self.spec.first
            ops = ("experts_up", "experts_down", "experts_sum")
            functions = (resolve(op, spec.backend, self.device, spec.format).run for op in ops)
            self._ops = ExpertOps(*functions)
        return self._ops

    def all_fallbacks(self) -> list[str]:
        """`fallbacks`, and what forwards have shown: no coarse plane for a draft."""
        return [*self.fallbacks, *precision_notes(self)]

    def retype(self, dtype: torch.dtype) -> None:
        """Follow a cast of the layer: the dtype to compute in and show, and, while empty, to store."""
        self.dtype = dtype
        self.forget_ready()
        if not self.keys and dtype is not self.spec.dtype:
            self._specify(self.spec.retyped(dtype))

    # -- planes -------------------------------------------------------------------------------------------------------

    def split(self, weights: Mapping[str, torch.Tensor]) -> "Iterable[Planes]":
        """The planes of each expert, encoded as they are asked for; `weights`: [E, ...] by part, as the module keeps
        them. Iterating raises FormatError."""
        shapes = {part: one.site.matrix_shape for part, one in self.spec.parts.items()}
        return EncodedExperts(self, {part: w.reshape(-1, *shapes[part]) for part, w in weights.items()})

    def from_encoded(self, planes: Mapping[str, Mapping[str, dict[str, torch.Tensor]]]) -> Planes:
        """The joint planes of one expert, from encoded tensors by part and name of the plane; zeros where it has none
        of a part."""
        return join_planes(
            {
                part: self.encoders[part].from_encoded(planes[part]) if part in planes else self._zeros(part)
                for part in self.spec.parts
            }
        )

    def _zeros(self, part: str) -> Planes:
        one = self.spec.parts[part]
        return self.encoders[part].split(torch.zeros(one.site.matrix_shape, dtype=one.dtype, device=self.device))

    def encoded_part(
        self, part: str, layout: PageLayout, fields: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The fields of one part of a stored plane as the format encodes them."""
        encoder, own = self.encoders[part], part_fields(fields, part)
        return encoder.unpacked_fields(own) if layout.plane == "coarse" else own

    def matrix(self, part: str, planes: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
        """One matrix of one expert as the module keeps it, in the handle's dtype, decoded; perhaps a view of a page."""
        one = self.spec.parts[part]
        kernels = (self.kernels_of_pass() if len(planes) == 1 else self.kernels or self.take_kernels())[part]
        fields = [part_fields(plane, part) for plane in planes]
        if one.dense:
            return fields[0]["weight"].to(self.dtype)
        held = WeightPlanes(
            one.format,
            one.shape,
            one.dtype if kernels.lossless else self.dtype,
            fields[0],
            fields[1] if len(fields) > 1 else None,
        )
        return (kernels.decode_turned(held) if one.transposed else kernels.decode(held)).to(self.dtype)

    # -- pages --------------------------------------------------------------------------------------------------------

    def store(self, planes: Iterable[Planes]) -> None:
        """Write the planes of each expert into pages; earlier pages are retired first.

        Raises:
            FormatError: a matrix cannot be encoded; the handle is empty then.
            TierError: the pages do not fit or cannot be written; likewise.
        """
        kernels = self.kernels or self.take_kernels()
        self.retire()
        self.stack.retire_unowned()
        try:
            self._store(planes)
        except _Uneven:
            for encoder in self.encoders.values():
                encoder.packing = None
            self.fallbacks.append(
                f"{self.spec.name}: the block scales of some experts lie too far apart for the kernels' order; all are "
                "decoded and multiplied in plain torch"
            )
            self._store(planes)
        self.kernel = self._backend(next(iter(kernels.values())))

    def _backend(self, kernels: Kernels) -> str:
        """The name of the backend that runs."""
        spec = self.spec.first
        if spec.lossless:
            return kernels.kernel.backend
        return resolve("experts_up", spec.backend, self.device, spec.format).backend

    def _store(self, planes: Iterable[Planes]) -> None:
        owner, keys, first = Owner(self.stack, Tally()), [], None
        try:
            for expert, planes_of_expert in enumerate(planes):
                first = first or planes_of_expert[0][0]
                if planes_of_expert[0][0] != first:
                    raise _Uneven
                for layout, tensors in planes_of_expert:
                    keys.append(self._add(layout, tensors, expert, owner))
            self.own_pages(tuple(keys), owner)
        except BaseException:
            if self.owner is not owner:
                self.stack.retire(owner)
                self.stack.retire_unowned()
            raise

    def _add(self, layout: PageLayout, tensors: Mapping[str, torch.Tensor], expert: int, owner: Owner) -> str:
        planned = self.spec.site.expert_key(layout.plane, expert)
        key = planned if planned not in self.stack.pages else f"{planned}@{self.id}.{self.generation}"
        home = self.spec.homes.get(planned, self.stack.names[0])
        self.stack.add(key, layout, home, functools.partial(_fill, tensors, layout), owner)
        return key

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
        owner, generation = self.owner, self.generation + (self.owner is not None)
        token = self.token_at(generation)
        retired, claims = self.stack.retired, () if owner is None else (owner.claim,)
        # no call from here on: Ctrl-C finds pages that are owned, or an empty handle
        retired += claims
        self.keys, self.pages, self.owner, self.generation, self.token = (), (), None, generation, token
        self.cache = None
        self.forget_ready()

    def forget_ready(self) -> None:
        """Keep no views into pages: they may move."""
        self.ready = None

    def ask_for_cache_with(self, follow: Callable[[], None]) -> None:
        """Have forwards without a cache call a method that may give the layer one; kept weakly."""
        self.follow = weakref.WeakMethod(follow)

    def cached(self) -> CachedLayer | None:
        """The layer's part of a device cache, asked for if there is none."""
        if self.cache is None and self.follow is not None and self.device.type == "cuda":
            follow = self.follow()
            if follow is not None:
                follow()
        return self.cache

    def decide_by(self, cache: CachedLayer | None) -> None:
        """Have the device decide which experts are resident, by its cache; None: the host decides again."""
        self.cache, self.decides = cache, "host" if cache is None else "gpu"

    def form(self) -> ExpertPages:
        """The layer's pages as kernels take them where only the device knows which are where."""
        shapes = {part: one.shape for part, one in self.spec.parts.items()}
        return ExpertPages(self.spec.format, self.dtype, shapes, self.pages[0].layout, [None] * self.spec.experts)

    def why_host(self) -> str:
        """Return why the device cannot decide which experts are resident; "" if it can."""
        spec = self.spec.first
        if self.planes > 1 or spec.lossless:
            return f"{self.spec.name}: held as {self.spec.label}; the GPU fetches experts of one 4-bit plane by itself"
        kernel = resolve("experts_up", spec.backend, self.device, spec.format)
        if not kernel.by_address(self.pages[0].layout, self.device):
            return (
                f"{self.spec.name}: the {kernel.backend} kernels of {self.spec.label} do not take pages by address here"
            )
        return ""

    def still(self, generation: int) -> "ExpertsHandle":
        """The handle. Raises WrapError if its weights are not that generation's any more."""
        if self.keys and self.generation != generation:
            raise WrapError(
                f"{self.spec.name}: its weights were loaded anew between forward and backward; run the forward again"
            )
        return self

    # -- leases -------------------------------------------------------------------------------------------------------

    @property
    def planes(self) -> int:
        """The number of planes of an expert."""
        return 2 if self.spec.fine else 1

    def keys_of(self, experts: Sequence[int], planes: int) -> tuple[str, ...]:
        """The keys of the first planes of some experts."""
        self._check_pages()
        step, keys = self.planes, self.keys
        return tuple(keys[e * step + plane] for e in experts for plane in range(planes))

    @contextlib.contextmanager
    def lease(self, experts: Sequence[int], precision: str = "full") -> Iterator[Leased]:
        """Lease the planes of some experts, ascending. Raises TierError when there are none any more."""
        planes = 1 if precision == "coarse" else self.planes
        lease = self.stack.lease(self.keys_of(experts, planes))
        with lease:
            yield Leased(self, experts, lease, planes)

    def announce(self, experts: Sequence[int], precision: str) -> None:
        """Tell the policies that the next leases go through these experts in order; their pages are staged ahead."""
        if not self.stack.at_rest:
            self.stack.announce(self.keys_of(experts, 1 if precision == "coarse" else self.planes))

    def _check_pages(self) -> None:
        if not self.keys:
            raise TierError(
                f"{self.spec.name}: its pages are gone, the model was closed; wrap it again, or call "
                "unwrap() instead of close() to keep the weights"
            )

    def pages_of(self, pages: list[torch.Tensor | None]) -> ExpertPages:
        """Pages by expert, as kernels take them."""
        spec, addresses = self.spec, None
        if self.device.type == "cuda":
            table = torch.tensor([0 if p is None else p.data_ptr() for p in pages], dtype=torch.int64, device="cpu")
            addresses = table.pin_memory().to(self.device, non_blocking=True)
        shapes = {part: one.shape for part, one in spec.parts.items()}
        return ExpertPages(spec.format, self.dtype, shapes, self.pages[0].layout, pages, addresses)

    def resident_pages(self, device: torch.device) -> ExpertPages | None:
        """The pages of all experts, where all live on the GPU that computes and none is moving, for use without a lease
        and without knowing which are touched. Else None."""
        if device.type != "cuda" or self.spec.lossless or not self.stack.at_rest or device != self.device:
            return None
        self.stack.capturing()
        ready = self.ready
        if ready is None:
            self._check_pages()
            slots = self.stack.levels[0].slots
            pages = [slots[key].view for key in self.keys if key in slots]
            if len(pages) < len(self.keys) or any(page.home for page in self.pages):
                return None
            ready = self.pages_of(pages)
            if self.stack.at_rest:
                self.ready = ready
        return ready

    def weight(self, parameter: str) -> torch.Tensor:
        """A parameter, decoded, as the module keeps it: a temporary that shares memory with nothing."""
        self.weight_reads += 1
        part, spec = self.spec.part_of(parameter), self.spec
        site = spec.sites[spec.parameters.index(parameter)]
        out = torch.empty((site.matrices, *site.matrix_shape), dtype=self.dtype, device=self.device)
        for expert in range(site.matrices):  # one at a time: the budget may have room for no more
            with self.lease([expert]) as leased:
                out[expert].copy_(self.matrix(part, leased.fields(0)))
        return out.view(site.kept_shape)

    # -- copies -------------------------------------------------------------------------------------------------------

    def empty_copy(self) -> "ExpertsHandle":
        """A handle for other weights of the same layer, in the same stack."""
        clone = ExpertsHandle(self.spec, self.stack)
        clone.dtype, clone.generation, clone.trainable = self.dtype, self.generation, self.trainable
        clone.token = clone.token_at(self.generation)
        clone.follow = self.follow
        return clone

    def __deepcopy__(self, memo: dict) -> "ExpertsHandle":
        clone = ExpertsHandle(self.spec, self.stack)
        clone.dtype, clone.trainable = self.dtype, self.trainable
        memo[id(self)] = clone
        if self.keys:
            clone.kernel = self.kernel
            clone.own_pages(self.keys, self.stack.share(self.keys))
        return clone

    def __reduce__(self):
        pages = []
        for expert in range(self.spec.experts if self.keys else 0):
            with self.lease([expert]) as leased:
                pages.append([_to_pickle(layout, fields) for layout, fields in self.encoded(expert, leased)])
        return _restore, (self.stack, self.spec, self.dtype, self.trainable, pages)

    def encoded(self, expert: int, leased: Leased) -> Planes:
        """The joint planes of a leased expert as the format encodes them, for machines without this one's kernels."""
        stored = [page.layout for page in self.pages[expert * self.planes : (expert + 1) * self.planes]]
        joined = []
        for layout, fields in zip(stored, leased.fields(leased.experts.index(expert)), strict=True):
            parts = {part: self.encoded_part(part, layout, fields) for part in self.spec.parts}
            joined.append((self.encoded_layout(layout), join_fields(parts)))
        return joined

    @contextlib.contextmanager
    def encoded_matrix(self, part: str, expert: int) -> Iterator[Planes]:
        """The planes of one matrix as the format encodes them, leased."""
        stored = [page.layout for page in self.pages[expert * self.planes : (expert + 1) * self.planes]]
        with self.lease([expert]) as leased:
            yield [
                (layout, self.encoded_part(part, layout, fields))
                for layout, fields in zip(stored, leased.fields(0), strict=True)
            ]

    def encoded_layouts(self, part: str, expert: int) -> list[PageLayout]:
        """The layouts of `encoded_matrix`, without a lease."""
        encoder, layouts = self.encoders[part], []
        for page in self.pages[expert * self.planes : (expert + 1) * self.planes]:
            if page.layout.plane == "fine":
                layouts.append(part_layout(page.layout, part))
            else:
                shape = encoder.spec.site.matrix_shape if encoder.spec.dense else encoder.spec.shape
                layouts.append(encoder.format.layout(shape, encoder.spec.dtype))
        return layouts

    def encoded_layout(self, layout: PageLayout) -> PageLayout:
        """The layout of a stored joint plane as the format encodes it."""
        if layout.plane != "coarse":
            return layout  # nothing packs these
        return join_layouts({part: e.format.layout(e.spec.shape, e.spec.dtype) for part, e in self.encoders.items()})


class _Uneven(Exception):
    """The matrices of an expert are in another order than those before."""


def _fill(tensors: Mapping[str, torch.Tensor], layout: PageLayout, out: torch.Tensor) -> None:
    pack(tensors, layout, out)


def _to_pickle(layout: PageLayout, fields: Mapping[str, torch.Tensor]) -> tuple[dict, torch.Tensor | bytes]:
    return layout.to_dict(), to_pickle(pack(fields, layout, new_page(layout)))


def _restore(stack: TierStack, spec: ExpertsSpec, dtype: torch.dtype, trainable: bool, pages: list) -> ExpertsHandle:
    """Unpickle: `stack` is one of this process, in CPU memory, shared by all handles of the pickle."""
    handle = ExpertsHandle(spec.portable(), stack)
    handle.dtype, handle.trainable = dtype, trainable
    if pages:
        handle.store([_from_pickle(handle, planes) for planes in pages])
    return handle


def _from_pickle(handle: ExpertsHandle, planes: list) -> Planes:
    found = []
    for layout, page in planes:
        layout = PageLayout.from_dict(layout)
        found.append((layout, unpack(from_pickle(page), layout)))
    return found
