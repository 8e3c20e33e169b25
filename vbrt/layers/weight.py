"""What a VB layer knows of its weight: where its planes are, and how to compute with them.

A handle is shared by all layers that are tied to one weight. It begins empty, while the layers still hold the dense
parameter, and owns pages of a stack once `store` has run. Pages are read-only: a new weight means new pages.
"""

import contextlib
import functools
import secrets
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import get_spawning_popen
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad

from vbrt.errors import FormatError, TierError, WrapError
from vbrt.formats import get_format
from vbrt.formats.base import WeightPlanes
from vbrt.formats.fine import fine_layout, split_fine
from vbrt.formats.page import PageLayout, new_page, pack, unpack
from vbrt.formats.separation import Separation, identity
from vbrt.kernels import (
    EXACT,
    TILES,
    Kernel,
    fp4_refusal,
    fp8_refusal,
    kernel_refusal,
    noted_refusal,
    page_of,
    resolve,
    resolves_late,
)
from vbrt.kernels.reference import wants_grad
from vbrt.kernels.watched import dispatch_modes, is_bare, is_memory, is_tracing, is_watched, unwatched
from vbrt.layers.decoded import DecodedWeight
from vbrt.layers.product import Product, as_autocast, mapped, whole
from vbrt.tiers import Lease, Owner, Page, TierStack
from vbrt.tiers.memory import bytes_view

__all__ = ["HandleSpec", "WeightHandle", "carried", "delivered", "handle_of", "handle_with", "handles_in"]

_handles: "weakref.WeakValueDictionary[int, WeightHandle]" = weakref.WeakValueDictionary()
_shells: "weakref.WeakValueDictionary[tuple, WeightHandle]" = weakref.WeakValueDictionary()  # by where the weight lies

Planes = Sequence[tuple[PageLayout, Mapping[str, torch.Tensor]]]
"""Planes of a weight on their way into pages, or out of them."""

GraphArgs = tuple[torch.Tensor, str]
"""Tiles up to the scale behind them, as `vbrt::fp4_linear` takes them, and what they are: "format n k dtype device"."""


@dataclass(frozen=True, slots=True)
class HandleSpec:
    """How one weight is held. `shape` is (N, K); `transposed` says that the module keeps its weight as [K, N]."""

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

    @property
    def lossless(self) -> bool:
        """Whether the original weight comes back bit for bit."""
        return self.fine or self.format == "dense"

    @property
    def label(self) -> str:
        """The format for people: "nvfp4", or "nvfp4+exact" with a fine plane."""
        return f"{self.format}+exact" if self.fine else self.format

    def retyped(self, dtype: torch.dtype) -> "HandleSpec":
        """For a weight of another dtype: as exact as before, in a dtype that the format holds."""
        if self.fine and dtype not in (torch.bfloat16, torch.float16):
            return replace(self, dtype=dtype, fine=False, format="dense")  # there is no fine plane for it
        if self.format != "dense" and dtype is torch.float64:
            return replace(self, dtype=torch.float32)
        return replace(self, dtype=dtype)


class WeightHandle:
    """Planes of one weight in a stack. Counters are integers.

    Attributes:
        dtype: what the layers compute in and show to the outside.
        trainable: whether the dense weight had requires_grad; the one that `unwrap` makes gets it back.
        layers: the live layers that share this weight.
        tied: whether there may be several.
        lent: the temporary that `.weight` has given, if one is out; what is written into it is the weight.
        source: which dense parameter the pages were made of, and in which state, if of one.
        keys: pages in the stack; none before `store` and after `drop`.
        generation: counts the weights that are here no more.
        graph_args: of planes that never move, what `vbrt::fp4_linear` takes besides x and bias, or None; layers hold it
            too, see `show`.
        kernel: the implementation that runs; one that wants pages in its own order leaves others to the reference.
    """

    def __init__(self, spec: HandleSpec, stack: TierStack) -> None:
        self.stack = stack
        self.dtype = spec.dtype
        self.trainable = False
        self.layers: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.tied = False
        self.lent: weakref.ref[torch.Tensor] | None = None
        self._left: torch.Tensor | None = None  # what a temporary held as it died
        self.strides: tuple[int, ...] | None = None  # of the module's weight, where it is not contiguous
        self._made: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()  # by `parameter`
        self._own_weights: tuple[weakref.ref[torch.Tensor], ...] = ()
        self.source: tuple[object, ...] | None = None
        self.keys: tuple[str, ...] = ()
        self.forwards = self.weight_reads = self.generation = 0
        self.id = secrets.randbits(63)  # what another process has called a handle is never taken for one of this one's
        self.token = self._token(0)
        self.fallbacks: list[str] = []
        self.separation = Separation(spec.levels, spec.refresh_every) if spec.format == "quantile" else None
        self._device, self.device_name = stack.device, str(stack.device)
        self.kernel = "reference"
        self._shows_planes = False  # to compiled graphs, see `graph_planes`
        self._owner: Owner | None = None  # of the pages
        self._pages: tuple[Page, ...] = ()
        self._ready: WeightPlanes | None = None  # of pages that never move: made once, used without a lease
        self.resident: torch.Tensor | None = None  # the same, of a dense weight as nn.Linear keeps it
        self.page: Page | None = None  # that it lies in
        self.graph_args: GraphArgs | None = None
        self._specify(spec)
        _handles[self.id] = self

    def _specify(self, spec: HandleSpec) -> None:
        self.spec, self._lossless = spec, spec.lossless
        self._format = get_format(spec.format)
        self._kernel: Kernel | None = None  # of the op "linear"
        self._packing = None
        if not resolves_late(spec.backend, self._device):
            self._take_kernels()

    def _take_kernels(self) -> None:
        """A lossless weight is multiplied as torch does it; who restores it need not know its format."""
        spec = self.spec
        format = EXACT if spec.fine else spec.format
        linear = resolve("linear", spec.backend, self._device, format, rounding=self._rounding())
        decode = resolve("decode_weight", spec.backend, self._device, format)
        linear.prepare(self._device)
        packing = None if spec.lossless else linear.page_order(spec.format)
        self._announce_kernels()
        self._linear, self._decode, self._turned = linear.run, decode.run, decode.decode_turned
        self._kernel, self._packing = linear, packing  # all of them or none

    def _rounding(self) -> str | None:
        """What operands of long products may be rounded to."""
        if self.spec.lossless:
            return None
        if self.spec.fp4 and fp4_refusal(self._device) is None:
            return "fp4"
        return "fp8" if self.spec.fp8 else None

    def _announce_kernels(self) -> None:
        """What was asked for and cannot be had on this device: warned of once, and listed in `stats()`."""
        spec = self.spec
        if spec.format == "dense" or self._device.type not in ("cuda", "cpu"):
            return
        no_kernels = kernel_refusal(self._device) if spec.backend == "auto" else None
        asked = spec.backend != "reference" and not spec.lossless
        no_fp4 = fp4_refusal(self._device) if asked and spec.fp4 else None
        fp8 = asked and spec.fp8 and (no_fp4 is not None or not spec.fp4)
        no_fp8 = fp8_refusal(self._device) if fp8 else None
        if no_kernels:
            self._announce(f"kernels: {no_kernels}; 4-bit layers are decoded and multiplied in plain torch")
        if no_fp4:
            instead = "FP8" if fp8 and not no_fp8 else spec.dtype
            self._announce(f"compute.fp4: {no_fp4}; long inputs are multiplied in {instead} instead")
        elif asked and spec.fp4:
            self._announce(
                "compute.fp4 is experimental: it has never run on a GPU that multiplies FP4; compare what the model "
                "gives with compute.fp4 = false"
            )
        if no_fp8:
            self._announce(f"compute.fp8: {no_fp8}; long inputs are multiplied in {spec.dtype} instead")

    def all_fallbacks(self) -> list[str]:
        """`fallbacks`, and what the vendor's matmul of rounded weights has refused when it was called."""
        kind = self._rounding()
        refusal = noted_refusal(kind, *self.spec.shape) if kind else None
        return [*self.fallbacks, refusal] if refusal else self.fallbacks

    def _announce(self, reason: str) -> None:
        """One text for all layers, so that Python's filter shows it once."""
        if reason not in self.fallbacks:
            self.fallbacks.append(reason)
            warnings.warn(reason, stacklevel=5)

    def _token(self, generation: int) -> torch.Tensor:
        """Names handle and generation in graphs; a tensor, and not constants, so that layers share one graph."""
        return torch.tensor([self.id, generation], dtype=torch.int64, device="cpu")

    # -- life ---------------------------------------------------------------------------------------------------------

    def check(self, weight: torch.Tensor) -> None:
        """Raise WrapError for a weight of a shape or dtype that cannot take the place of this one."""
        name = f"{self.spec.name}.weight"
        if tuple(weight.shape) != self.weight_shape:
            raise WrapError(f"{name}: the new weight has shape {tuple(weight.shape)}; expected {self.weight_shape}")
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64, self.spec.dtype):
            raise WrapError(f"{name}: the new weight is {weight.dtype}; expected float32, bfloat16, float16 or float64")

    def split(self, weight: torch.Tensor) -> Planes:
        """The planes of a weight in the module's orientation; nothing is stored.

        Raises:
            FormatError: NaN, Inf, or a weight without data, with the layer's name.
        """
        spec = self.spec
        if weight.is_meta:
            raise FormatError(
                f"{spec.name}: its weight is on the meta device, without data; load it first "
                "(load_state_dict(..., assign=True))"
            )
        try:
            planes = self._split(weight.detach().to(self._device, spec.dtype))
            self.strides = None if spec.transposed else _strides(weight)
            return planes
        except FormatError as error:
            raise FormatError(f"{spec.name}: {error}; exclude the layer (weights.exclude) or repair it") from error

    def _split(self, weight: torch.Tensor) -> Planes:
        spec = self.spec
        if spec.format == "dense":
            return [(self._format.layout(tuple(weight.shape), spec.dtype), self._format.encode(weight))]
        w_NK = weight.t().contiguous() if spec.transposed else weight
        coarse = self.separation.encode(w_NK) if self.separation else self._format.encode(w_NK)
        planes = [self._coarse_page(coarse)]
        if spec.fine:
            fine = split_fine(w_NK, coarse, self._format)
            planes.append((fine_layout(fine), fine))
        return planes

    def _coarse_page(self, coarse: dict[str, torch.Tensor]) -> tuple[PageLayout, dict[str, torch.Tensor]]:
        """In the order that the kernel reads fastest, where it has one and that is exact."""
        tensors = self._packing.pack(coarse, self.spec.shape) if self._packing else None
        if tensors is None:
            if self._packing:
                self.fallbacks.append(
                    f"{self.spec.name}: its block scales lie too far apart for the kernels' order; "
                    "decoded and multiplied in plain torch"
                )
            return self._format.layout(self.spec.shape, self.spec.dtype), coarse
        return self._packing.layout(self.spec.shape), tensors

    def _is_packed(self, layout: PageLayout) -> bool:
        return self._packing is not None and layout == self._packing.layout(self.spec.shape)

    @contextlib.contextmanager
    def encoded(self) -> Iterator[Planes]:
        """The planes as the format encodes them, for machines without this one's kernels; borrowed for a `with` block.

        Raises TierError when they cannot be read.
        """
        with self.lease() as tensors:
            yield [
                (layout, self._packing.unpack(plane, self.spec.shape) if packed else plane)
                for (layout, packed), plane in zip(self._layouts(), tensors, strict=True)
            ]

    def encoded_layouts(self) -> list[PageLayout]:
        """Those of `encoded`, without borrowing anything."""
        return [layout for layout, _ in self._layouts()]

    def _layouts(self) -> list[tuple[PageLayout, bool]]:
        """The layout of each plane as the format encodes it, and whether its page is in a kernel's order instead."""
        layouts = [self.stack.pages[key].layout for key in self.keys]
        own = self._format.layout(self.spec.shape, self.spec.dtype)
        return [(own, True) if self._is_packed(layout) else (layout, False) for layout in layouts]

    def from_encoded(self, planes: Mapping[str, dict[str, torch.Tensor]]) -> Planes:
        """What `store` takes, of planes that were encoded before: name of the plane -> its tensors."""
        spec = self.spec
        if spec.format == "dense":
            return [(self._format.layout(self.weight_shape, spec.dtype), planes["dense"])]
        coarse = {name: t.to(self._device) if self._packing else t for name, t in planes["coarse"].items()}
        fine = [(fine_layout(planes["fine"]), planes["fine"])] if spec.fine else []
        return [self._coarse_page(coarse), *fine]

    def store(self, planes: Planes) -> None:
        """Write planes into pages; earlier pages are dropped first, so that a tight budget has room for the new ones.

        Raises:
            TierError: the pages do not fit or cannot be written; the handle is empty then.
        """
        self.drop()
        self.stack.collect()
        owner, keys = Owner(self.stack), []
        try:
            for layout, tensors in planes:
                key = self._free_key(layout.plane)
                self.stack.add(key, layout, self._home(layout.plane), functools.partial(_fill, tensors, layout), owner)
                keys.append(key)
            self._own(tuple(keys), owner)
        except BaseException:
            if self._owner is not owner:
                self.stack.retire(owner)
            raise

    def _free_key(self, plane: str) -> str:
        """The plan's key, unless a copy of the layer has taken it."""
        key = f"{self.spec.name}#{plane}"
        return key if key not in self.stack.pages else f"{key}@{self.id}.{self.generation}"

    def _home(self, plane: str) -> str:
        homes = self.spec.homes
        if not homes:
            return self.stack.names[0]
        return homes.get(plane) or next(iter(homes.values()))

    def _own(self, keys: tuple[str, ...], owner: Owner) -> None:
        if self._kernel is None:
            self._take_kernels()
        pages = tuple(self.stack.pages[key] for key in keys)
        has_kernel = self._has_kernel(pages)
        kernel = self._kernel.backend if has_kernel else "reference"
        shows_planes = has_kernel and self._kernel.reads_resident_planes and not self.spec.lossless
        # no call from here on: Ctrl-C finds an empty handle or a full one
        self._owner, self._pages, self.kernel, self._shows_planes = owner, pages, kernel, shows_planes
        self.keys = keys

    def _has_kernel(self, pages: Sequence[Page]) -> bool:
        spec = self.spec
        if spec.lossless:
            return spec.fine and self._kernel.merges(spec.format, spec.shape)
        return self._is_packed(pages[0].layout) or self._kernel.runs_unpacked

    def still(self, generation: int) -> "WeightHandle":
        """The handle. Raises WrapError if its weight is not that generation's any more."""
        if self.keys and self.generation != generation:
            raise WrapError(
                f"{self.spec.name}: its weight was loaded anew between forward and backward; run the forward again"
            )
        return self

    def drop(self) -> None:
        """Give the pages back; the handle is empty again."""
        owner, generation = self._owner, self.generation + (self._owner is not None)
        token = self._token(generation)
        retired, claims = self.stack.retired, () if owner is None else (owner.claim,)
        # no call from here on: Ctrl-C finds pages that are owned, or an empty handle
        retired += claims
        self.keys, self._pages, self._owner, self.generation, self.token = (), (), None, generation, token
        self.forget_ready()

    def forget_ready(self) -> None:
        """Keep no views into pages: they may move."""
        self._ready = self.resident = None
        self.show(None)

    def tie(self, layer: torch.nn.Module) -> None:
        """A layer more on this weight; its dense parameter, where it has one, is the handle's own."""
        self.layers.add(layer)
        self.tied = len(self.layers) > 1
        self.show(self.graph_args)
        weight = layer._parameters["weight"]
        if weight is not None:
            self._own_weights = (*self._own_weights, weakref.ref(weight))
            _shells[_place(weight)] = self

    def untie(self, layer: torch.nn.Module) -> None:
        """A layer less."""
        self.layers.discard(layer)
        self.tied = len(self.layers) > 1

    def adopt(self, weight: torch.Tensor) -> None:
        """Know a dense parameter of all layers for their own, of which planes may be made."""
        self._own_weights = (weakref.ref(weight),)

    def owns(self, weight: torch.Tensor) -> bool:
        """Whether a dense parameter is the layers' own, and not one that was put in its place for a while."""
        return any(own() is weight for own in self._own_weights)

    def holds_values(self, weight: torch.Tensor) -> bool:
        """Whether this is what a fitted codebook has made of the weight already: encoded again, it would change."""
        if self.separation is None or not self.keys or weight.is_meta:
            return False
        return torch.equal(self.weight(), weight.to(self._device, self.dtype))

    def own_weight(self) -> torch.Tensor | None:
        """The dense parameter of the layers, if it lives."""
        return next((own() for own in self._own_weights if own() is not None), None)

    def twin(self, weight: torch.Tensor) -> int:
        """Which of the parameters on one storage, that the layers hold, this is."""
        return next(i for i, own in enumerate(self._own_weights) if own() is weight)

    def part_from(self, weight: torch.Tensor) -> None:
        """Layers whose parameter lies elsewhere by now, because it was given other `.data`, are tied no more."""
        for layer in list(self.layers) if self.tied else ():
            other = layer._parameters["weight"]
            if other is not None and self.owns(other) and _place(other) != _place(weight):
                self.pass_on([layer], other)

    def holds(self, weight: torch.Tensor) -> bool:
        """Whether the pages are those of a dense parameter as it is now."""
        return bool(self.keys) and self.source == identity(weight)

    def suits(self, other: "WeightHandle") -> bool:
        """Whether layers of the other handle can be tied to this one's weight."""
        one, two = (replace(handle.spec, name="", homes=None) for handle in (self, other))
        return self.stack is other.stack and one == two and self.dtype is other.dtype

    def pass_on(self, layers: Sequence[torch.nn.Module], weight: nn.Parameter) -> "WeightHandle":
        """A handle for a new weight, which these layers hold dense until they are used; others that are tied keep
        this one, and so does whoever computes with it now."""
        heir = self.empty_copy()
        heir.retype(weight.dtype)
        heir.trainable = weight.requires_grad
        with self.stack.encoding:
            for layer in layers:  # the weight before the handle: a forward in another thread reads the handle first
                layer._parameters["weight"] = weight
                layer.__dict__.update(_vb_handle=heir, _vb_twin=0)
                self.untie(layer)
                heir.tie(layer)
        return heir

    # -- the temporary ------------------------------------------------------------------------------------------------

    def temporary(self) -> DecodedWeight:
        """The decoded weight, to be written to as well; one for all who ask while somebody holds it."""
        lent = self._out()
        if lent is None:
            with torch.inference_mode(False), torch.no_grad():
                decoded = DecodedWeight.of(weakref.ref(self), self.weight())
            with self.stack.encoding:
                lent = self._out()  # another thread's, meanwhile
                if lent is None:
                    lent, self.lent = decoded, weakref.ref(decoded)
                    self._ready = self.resident = None  # the ways without a lease would not see a write
        return lent

    def _out(self) -> DecodedWeight | None:
        lent = self.lent() if self.lent is not None else None
        return lent if type(lent) is DecodedWeight else None

    def is_lent(self, weight: torch.Tensor | None) -> bool:
        """Whether the dense parameter of the layers was a temporary that somebody has written to."""
        return self.lent is not None and self.lent() is weight

    def look(self) -> None:
        """Take over what was written to the temporary without a call that could be seen."""
        if self._left is not None:
            self.take_over(self._left)
        lent = self._out()
        if lent is not None:
            lent.look()
        elif self.lent is not None and self.lent() is None:
            self.lent = None

    def leave(self, weight: torch.Tensor) -> None:
        """What a temporary held as it died, to be taken over at the next look. Takes no lock: safe in a finalizer."""
        self._left = weight

    def take_over(self, weight: torch.Tensor) -> None:
        """The temporary was written to: it is the weight of all layers that are tied here, dense until they are used.

        Raises WrapError if it has another shape or dtype than a weight of these layers.
        """
        with self.stack.encoding:
            layers = list(self.layers)
            lent = type(weight) is DecodedWeight
            if not layers or not (lent or weight is self._left):  # they have another one, or it is theirs by now
                return
            self._left = None
            self.check(weight)
            weight = weight.become_parameter() if lent else nn.Parameter(weight, requires_grad=False)
            heir = self.pass_on(layers, weight)
            heir.trainable, heir.lent, self.lent = self.trainable, weakref.ref(weight), None
            heir.forwards, heir.weight_reads = self.forwards, self.weight_reads

    def refuse(self, what: str) -> None:
        """Raise WrapError for what cannot be done to a weight that lives in the tiers."""
        raise WrapError(
            f"{self.spec.name}.weight: {what} is not possible while it lives in the tiers (weight_norm, "
            "spectral_norm and parametrizations ask for it): apply them before wrapping, or unwrap() first"
        )

    def lend_again(self, version: int) -> None:
        """What was a temporary, and then the layers' dense parameter, of which this version is stored now, is a
        temporary again if somebody holds it still; it shows what is stored."""
        lent = self.lent() if self.lent is not None else None
        if lent is None or type(lent) is DecodedWeight:
            return
        lent.__class__ = DecodedWeight
        lent.lend(weakref.ref(self), version)
        self._ready = self.resident = None
        if not self.spec.lossless:
            self.renew_lent()

    def renew_lent(self) -> None:
        """Have the temporary, if one is out, show what is stored."""
        lent = self._out()
        values = None if lent is None else self.weight()  # before the look: another thread may write meanwhile
        if lent is not None and not lent.written:
            lent.show(values)

    def parameter(self, twin: int, made: nn.Parameter | None) -> nn.Parameter:
        """The weight as a parameter: the temporary, if one is out, so that whoever holds it holds the weight. One for
        each twin, on the storage of the one that was `made` for another, if there is one."""
        known = self._made.get(twin)
        if known is None:
            if self._made:
                known = nn.Parameter(next(self._made.values()).detach())
            elif made is not None:
                known = made
            else:
                lent = self._out()
                known = nn.Parameter(self.weight()) if lent is None else lent.become_parameter()
            self._made[twin] = known.requires_grad_(self.trainable)
        return known

    def thaw(self, weight: DecodedWeight) -> None:
        """Have the temporary be a parameter that trains, in layers that leave the tiers for it."""
        layer = next(iter(self.layers), None)
        if layer is not None:
            layer.train_(weight.become_parameter())

    def show(self, args: GraphArgs | None) -> None:
        """Have compiled graphs compute with planes that never move, or with a lease again (None).

        Layers hold this themselves, as a tensor and a string: of those dynamo sees in one step, without going through
        them at each call, that nothing in a module has changed; it cannot of what lies behind another object.
        """
        self.graph_args = args
        while True:  # again where another thread has shown something else meanwhile
            shown = self.graph_args
            page, form = shown or (None, None)
            for layer in list(self.layers):
                layer.__dict__.update(_vb_page=page, _vb_form=form)
            if self.graph_args is shown:
                return

    def retype(self, dtype: torch.dtype) -> None:
        """The layers were cast: what they compute in and show from now on, and, while empty, what will be stored."""
        self.dtype = dtype
        self.forget_ready()
        if not self.keys and dtype is not self.spec.dtype:
            self._specify(self.spec.retyped(dtype))

    # -- use ----------------------------------------------------------------------------------------------------------

    @property
    def weight_shape(self) -> tuple[int, int]:
        """The weight's shape as the module keeps it: (N, K), or (K, N) for a transposed module."""
        return self.spec.shape[::-1] if self.spec.transposed else self.spec.shape

    def lease(self) -> Lease:
        """Borrow the planes from the stack. Raises TierError when there are none any more."""
        if not self.keys:
            raise TierError(
                f"{self.spec.name}: its pages are gone, the model was closed; wrap it again, or call "
                "unwrap() instead of close() to keep the weights"
            )
        return self.stack.lease(self.keys)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x Wᵀ + bias for x [..., K] -> [..., N]; gradients flow to x and bias, the weight is frozen.

        As nn.Linear's, in dtype too: what autocast casts there it casts here, and dtypes that do not fit are refused
        in torch's words.
        """
        self.forwards += 1
        if self.separation is not None:
            self.separation.tick()
        if self._lossless and not torch.is_grad_enabled() and not is_watched():
            return self._run(x, bias)  # the plain layer's calls, whatever x is
        if not is_bare(x):
            return self._watched(x, bias)
        if torch._C._is_any_autocast_enabled():
            x, bias = as_autocast(x), as_autocast(bias)
        if not torch.is_grad_enabled():
            return self._run(x, bias)
        if wants_grad(x, bias):
            return Product.here(x, bias, self.now, False)
        with torch.no_grad():
            return whole(self._run(x, bias))

    def _watched(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`linear` for tracers, modes of the dispatcher and transforms of torch.func.

        Those that cannot look behind a function of autograd's get the very calls of the plain layer, on a weight that
        an operator has decoded.
        """
        if _sees_no_functions() or not (is_memory(x) or torch._C._functorch.is_functorch_wrapped_tensor(x)):
            return self.multiply(x, self._shown_weight(x.device), bias)
        return Product.apply(as_autocast(x), as_autocast(bias), self.now, False)

    @property
    def now(self) -> "_Moment":
        """The weight at this moment, for the passes that come back to it."""
        return _Moment(self, self.generation)

    def run(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`linear` without counting a forward or casting anything; to be called under no_grad."""
        return self._run(x, bias) if is_bare(x) else self.multiply(x, self._shown_weight(x.device), bias)

    def _run(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ready = self._ready  # another thread may take it away
        if ready is not None and self.stack.at_rest and x.device == self._device:
            for page in self._pages:
                page.hits += 1  # no call in between: one step for threads that share an interpreter lock
            return self._forward(x, ready, bias)
        with self.lease() as tensors:
            return self._forward(x, self._planes(tensors, x.device), bias)

    def run_cast(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`run` for graphs that have cast x and bias as autocast does."""
        if x.dtype is self.dtype or torch.float64 in (x.dtype, self.dtype):
            return self.run(x, bias)
        with self.lease() as tensors:
            return self.multiply(x, self._original(self._planes(tensors, x.device)).to(x.dtype), bias)

    def backward_input(self, dy: torch.Tensor) -> torch.Tensor:
        """dX [..., K] = dY [..., N] W, leasing the planes again instead of keeping the weight."""
        if not is_bare(dy):
            return self._back(dy, self._shown_weight(dy.device))
        with self.lease() as tensors:
            return self._back(dy, self._original(self._planes(tensors, dy.device)))

    def _back(self, dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        weight = weight.to(dy.dtype)
        return dy.matmul(weight.t() if self.spec.transposed else weight)

    def _shown_weight(self, device: torch.device) -> torch.Tensor:
        """The decoded weight as the result of an operator that asks for it each time it runs, now and in a trace."""
        # a mode of fake tensors takes those that are made under it
        token = self._token(self.generation) if dispatch_modes() else self.token
        weight = torch.ops.vbrt.weight(token, *self.weight_shape, self.dtype, self.device_name)
        return weight if device == self._device else weight.to(device)

    @property
    def graph_planes(self) -> WeightPlanes | None:
        """Planes that never move and that kernels compute with: a compiled graph may hold on to them, else None.

        Graphs that do count no forwards and no hits.
        """
        return self._ready if self._shows_planes else None

    def fused(self, x: torch.Tensor, planes: WeightPlanes, bias: torch.Tensor | None) -> torch.Tensor:
        """x Wᵀ + bias by the kernel, without a lease; for `graph_planes`."""
        return self._linear(x, planes, bias)

    def weight(self) -> torch.Tensor:
        """The decoded weight in the module's orientation and dtype: a temporary that shares memory with nothing."""
        self.weight_reads += 1
        with unwatched(), self.lease() as tensors:  # tables that formats keep are made on the way
            weight = self._original(self._planes(tensors, self._device))
            if self.strides is not None:
                return self._restrided(weight)
            stored = self.spec.format == "dense" and weight.dtype is self.spec.dtype  # a view into the page
            return weight.clone() if stored else weight

    def _restrided(self, weight: torch.Tensor) -> torch.Tensor:
        """A copy that lies in memory as the module's own weight did."""
        return torch.empty_strided(weight.shape, self.strides, dtype=weight.dtype, device=weight.device).copy_(weight)

    def _planes(self, tensors: list[dict[str, torch.Tensor]], device: torch.device) -> WeightPlanes:
        spec = self.spec
        if device != self._device:
            self._announce_foreign(device)
            tensors = [{name: t.to(device) for name, t in plane.items()} for plane in tensors]
        dtype = spec.dtype if spec.lossless else self.dtype
        shape = self.weight_shape if spec.format == "dense" else spec.shape
        planes = WeightPlanes(spec.format, shape, dtype, tensors[0], tensors[1] if spec.fine else None)
        if self.strides is not None and spec.lossless:  # a matmul of few rows sums in another order there
            weight = self._restrided(self._decode(planes).to(self.dtype))
            return WeightPlanes("dense", shape, self.dtype, {"weight": weight})
        if dtype is self.dtype:
            if device == self._device and self._is_at_home(tensors):
                self._make_ready(planes)
                if not self._is_at_home(tensors):  # another thread has stored, moved or lent the weight meanwhile
                    self.forget_ready()
            return planes
        return WeightPlanes("dense", shape, self.dtype, {"weight": self._decode(planes).to(self.dtype)})

    def _original(self, planes: WeightPlanes) -> torch.Tensor:
        """The weight as the module keeps it: [N, K], or [K, N] for a transposed module, in memory order too."""
        turned = self.spec.transposed and self.spec.format != "dense"
        return self._turned(planes) if turned else self._decode(planes)

    def _is_at_home(self, tensors: list[dict[str, torch.Tensor]]) -> bool:
        """Whether these are this weight's pages, in their home in the top tier, and nobody else may write to it."""
        if any(page.home for page in self._pages) or self._out() is not None or self._left is not None:
            return False
        slots = self.stack.levels[0].slots
        held = [slots.get(key) for key in self.keys]
        return len(held) == len(tensors) and all(
            slot is not None and slot.tensors is plane for slot, plane in zip(held, tensors, strict=True)
        )

    def _make_ready(self, planes: WeightPlanes) -> None:
        """Keep planes of pages that never move."""
        self._ready = planes
        if planes.format == "dense":
            self._ready = self._like_parameter(planes)
            self.page = self._pages[0]
            self.resident = None if self.spec.transposed else self._ready.coarse["weight"]
        if self.graph_planes is None:
            return
        for tensor in planes.coarse.values():
            _stays(tensor)
        tiles = planes.coarse.get(TILES)
        # where they are already shown a layer's dict is left as it is: dynamo would have to look at it anew
        if tiles is not None and not (self.graph_args and self.graph_args[0].data_ptr() == tiles.data_ptr()):
            (n, k), dtype = planes.shape, str(planes.dtype).removeprefix("torch.")
            page = page_of(tiles, planes.coarse["tensor_scale"])
            self.show((_stays(page), f"{planes.format} {n} {k} {dtype} {page.device}"))

    def _forward(self, x: torch.Tensor, planes: WeightPlanes, bias: torch.Tensor | None) -> torch.Tensor:
        """For a lossless weight the very call of the original module, so that results are bit-identical."""
        spec = self.spec
        if not self._lossless:
            if not _fit(x, planes.dtype, bias):
                return self.multiply(x, self._original(planes), bias)  # torch says why not
            return self._linear(x, planes, bias)
        if spec.transposed:
            return self.multiply(x, self._original(planes), bias)
        return self._linear(x, self._like_parameter(planes), bias)

    def _like_parameter(self, planes: WeightPlanes) -> WeightPlanes:
        """The planes with a weight that requires grad where the original did.

        torch.matmul looks at that, under no_grad too: it folds the leading dimensions of x for a weight that requires
        grad and may call a batched matmul, with other rounding, for one that does not.
        """
        if not self.trainable:
            return planes
        weight = self._decode(planes)
        if weight.requires_grad:
            return planes
        return WeightPlanes("dense", planes.shape, planes.dtype, {"weight": _requiring_grad(weight)})

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The very calls of nn.Linear, or of transformers' Conv1D, on a weight as the module keeps it."""
        if not self.spec.transposed:
            return F.linear(x, weight, bias)
        if bias is None:
            return x.matmul(weight)
        return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])

    def _announce_foreign(self, device: torch.device) -> None:
        reason = (
            f"{self.spec.name}: input on {device}, pages on {self._device}; the planes are copied on each call. "
            "Move the input, or enable the tier of that device"
        )
        if reason not in self.fallbacks:
            self.fallbacks.append(reason)

    # -- copies -------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict) -> "WeightHandle":
        clone = WeightHandle(self.spec, self.stack)
        clone.dtype, clone.trainable, clone.strides = self.dtype, self.trainable, self.strides
        memo[id(self)] = clone
        if self.keys:
            clone._own(self.keys, self.stack.share(self.keys))
        return clone

    def empty_copy(self) -> "WeightHandle":
        """A handle for another weight of the same layer, in the same stack."""
        clone = WeightHandle(self.spec, self.stack)
        clone.generation, clone.trainable = self.generation, self.trainable
        clone.token = clone._token(self.generation)
        if self.separation is not None:
            clone.separation = self.separation  # its codebook is refreshed when the new weight asks for it
        return clone

    def __reduce__(self):
        pages = []
        if self.keys:
            with self.encoded() as planes:  # bytes, because torch cannot unpickle 8-bit floats
                pages = [(layout.to_dict(), carried(pack(plane, layout, new_page(layout)))) for layout, plane in planes]
        return _restore, (self.stack, self.spec, self.dtype, self.trainable, pages, self.strides)


class _Moment(NamedTuple):
    """A weight as it was stored then."""

    handle: WeightHandle
    generation: int

    def times(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._same().run(x, bias)

    def back(self, dy: torch.Tensor) -> torch.Tensor:
        return self._same().backward_input(dy)

    def product(self, x: torch.Tensor, *, back: bool) -> torch.Tensor:
        apply = Product.here if is_bare(x) else Product.apply
        return apply(x, None, self, back)

    def _same(self) -> WeightHandle:
        return self.handle.still(self.generation)


def _sees_no_functions() -> bool:
    """Whether a tracer or transform is at work that takes a function of autograd's for one operation, or refuses it."""
    stack = get_interpreter_stack() or ()
    return is_tracing() or any(level.key() == TransformType.Functionalize for level in stack)


def _fit(x: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None) -> bool:
    """Whether nn.Linear would take x and bias beside a weight of `dtype`, or beside what autocast makes of it."""
    if bias is not None and bias.dtype is not x.dtype:
        return False
    if x.dtype is dtype:
        return True
    kind = x.device.type
    return dtype is not torch.float64 and torch.is_autocast_enabled(kind) and x.dtype is torch.get_autocast_dtype(kind)


def _fill(tensors: Mapping[str, torch.Tensor], layout: PageLayout, out: torch.Tensor) -> None:
    pack(tensors, layout, out)


def _stays(tensor: torch.Tensor) -> torch.Tensor:
    """Compiled graphs need not copy it, nor look where it is."""
    tensor._dynamo_static_input_type = "unguarded"  # what torch._dynamo.mark_static_address does
    return tensor


def _requiring_grad(weight: torch.Tensor) -> torch.Tensor:
    """An alias that requires grad, for use under no_grad; `weight` itself stays as it is."""
    if weight.is_inference():  # views of such a tensor forget requires_grad, and linear() takes one
        with torch.inference_mode(False):
            alias = torch.empty(0, dtype=weight.dtype, device=weight.device)
            weight = alias.set_(weight.untyped_storage(), weight.storage_offset(), weight.shape, weight.stride())
    with torch.no_grad():
        return weight.detach().requires_grad_().view_as(weight)  # a view, because autocast keeps its casts of leaves


def _strides(weight: torch.Tensor) -> tuple[int, ...] | None:
    """Those of a weight that is not contiguous, if its elements lie apart."""
    plain = weight.is_contiguous() or torch._debug_has_internal_overlap(weight) == 1
    return None if plain else weight.stride()


def _place(weight: torch.Tensor) -> tuple[object, ...]:
    """Where a dense weight lies; by itself if it has no memory."""
    if weight.is_meta or not torch._C._has_storage(weight) or not weight.numel():
        return (id(weight),)
    return (weight.device, weight.data_ptr(), *weight.shape, *weight.stride(), weight.dtype)


def handles_in(stack: TierStack) -> list[WeightHandle]:
    """The handles of live layers whose weights are, or will be, in a stack."""
    return [handle for handle in list(_handles.values()) if handle.stack is stack and handle.layers]


def handle_with(weight: torch.Tensor) -> WeightHandle | None:
    """The handle of the layers that hold this very weight, dense or as a temporary, if there are any."""
    if type(weight) is DecodedWeight:
        handle = weight.owner
        return handle if isinstance(handle, WeightHandle) and handle.is_lent(weight) and handle.layers else None
    handle = _shells.get(_place(weight)) if isinstance(weight, nn.Parameter) else None
    held = [] if handle is None else [layer._parameters["weight"] for layer in handle.layers]
    return handle if any(dense is not None and _place(dense) == _place(weight) for dense in held) else None


def carried(made: torch.Tensor) -> torch.Tensor | bytes:
    """uint8 that was made for a pickle, as it goes into it. A process that is being spawned gets tensors as files,
    which are closed with a tensor that nobody holds before it has begun: it gets bytes instead."""
    if get_spawning_popen() is None:
        return made
    page = made.cpu()  # outlives the view
    return bytes(bytes_view(page))


def delivered(made: torch.Tensor | bytes) -> torch.Tensor:
    """What `carried` was given."""
    return torch.frombuffer(bytearray(made), dtype=torch.uint8) if isinstance(made, bytes) else made


def _restore(
    stack: TierStack,
    spec: HandleSpec,
    dtype: torch.dtype,
    trainable: bool,
    pages: list,
    strides: tuple[int, ...] | None,
) -> WeightHandle:
    """Unpickle: `stack` is one of this process, in CPU memory, shared by all handles of the pickle."""
    handle = WeightHandle(replace(spec, homes=None, backend="auto"), stack)
    handle.dtype, handle.trainable, handle.strides = dtype, trainable, strides
    if pages:
        layouts = [PageLayout.from_dict(layout) for layout, _ in pages]
        made = [delivered(page) for _, page in pages]
        handle.store([(layout, unpack(page, layout)) for layout, page in zip(layouts, made, strict=True)])
    return handle


# -- in compiled graphs -----------------------------------------------------------------------------------------------


def handle_of(token: torch.Tensor) -> WeightHandle:
    """The live handle that a graph's token names."""
    handle = _handles.get(token.tolist()[0])
    if handle is None:
        raise WrapError(
            "a compiled, traced or exported graph names a VB layer that no longer exists in this process; "
            "compile or trace again (such graphs hold no weights: save a model with vb.save(), or export "
            "it after unwrap())"
        )
    return handle


def _materialized(token: torch.Tensor) -> WeightHandle:
    handle = handle_of(token)
    layer = next(iter(handle.layers), None)
    if layer is None or (handle.keys and handle.lent is None):
        return handle
    handle = getattr(layer.materialize_(), "_vb_handle", None)  # another one, of a weight that was written to
    if handle is None:
        raise WrapError("a compiled graph names a VB layer that has left the tiers to train; compile again")
    return handle


class _Named(NamedTuple):
    """A weight as the graph that names it sees it: behind operators."""

    token: torch.Tensor
    out_features: int
    in_features: int
    cast: bool

    def times(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        with _below_autograd():
            return torch.ops.vbrt.linear(x, bias, self.token, self.out_features, self.cast)

    def back(self, dy: torch.Tensor) -> torch.Tensor:
        with _below_autograd():
            return torch.ops.vbrt.linear_backward(dy, self.token, self.in_features)

    def product(self, x: torch.Tensor, *, back: bool) -> torch.Tensor:
        if back:
            return torch.ops.vbrt.linear_backward(x, self.token, self.in_features)
        return torch.ops.vbrt.linear(x, None, self.token, self.out_features, True)


@contextlib.contextmanager
def _below_autograd() -> Iterator[None]:
    """For the operator itself; what torch.func's outer transforms differentiate comes after it, so grad stays on."""
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
        yield


# a lease waits and copies: a CUDA graph that recorded it would read pages that have moved on
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
_library = torch.library.Library("vbrt", "FRAGMENT")
_library.define(
    "linear(Tensor x, Tensor? bias, Tensor token, SymInt out_features, bool cast=False) -> Tensor", tags=_TAGS
)
_library.define("linear_backward(Tensor dy, Tensor token, SymInt in_features) -> Tensor", tags=_TAGS)
# conservative, or torch.jit would run it once and keep the weight as a constant
_library.define(
    "weight(Tensor token, SymInt rows, SymInt columns, ScalarType dtype, str device) -> Tensor",
    alias_analysis="CONSERVATIVE",
    tags=_TAGS,
)


@torch.library.impl(_library, "linear", "CompositeExplicitAutograd")
def _linear_op(
    x: torch.Tensor, bias: torch.Tensor | None, token: torch.Tensor, out_features: int, cast: bool = False
) -> torch.Tensor:
    """x [..., K] -> [..., N] with the planes of the handle that `token` names.

    cast: autocast is on, and x and bias have its dtype, whatever the weight's.
    """
    handle = _materialized(token)
    handle.forwards += 1
    if handle.separation is not None:
        handle.separation.tick()
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        return whole(handle.run_cast(x, bias) if cast else handle.run(x, bias))


@torch.library.impl(_library, "linear", "Autograd")
def _(
    x: torch.Tensor, bias: torch.Tensor | None, token: torch.Tensor, out_features: int, cast: bool = False
) -> torch.Tensor:
    return Product.at_this_level(x, bias, _Named(token, out_features, x.shape[-1], cast), False)


@torch.library.register_fake("vbrt::linear", lib=_library)
def _(
    x: torch.Tensor, bias: torch.Tensor | None, token: torch.Tensor, out_features: int, cast: bool = False
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.impl(_library, "linear_backward", "CompositeExplicitAutograd")
def _linear_backward_op(dy: torch.Tensor, token: torch.Tensor, in_features: int) -> torch.Tensor:
    """dX [..., K] from dY [..., N]."""
    with torch.no_grad():
        return whole(handle_of(token).still(token.tolist()[1]).backward_input(dy))


@torch.library.impl(_library, "linear_backward", "Autograd")
def _(dy: torch.Tensor, token: torch.Tensor, in_features: int) -> torch.Tensor:
    return Product.at_this_level(dy, None, _Named(token, dy.shape[-1], in_features, True), True)


@torch.library.register_fake("vbrt::linear_backward", lib=_library)
def _(dy: torch.Tensor, token: torch.Tensor, in_features: int) -> torch.Tensor:
    return dy.new_empty((*dy.shape[:-1], in_features))


@torch.library.register_vmap("vbrt::linear", lib=_library)
def _(info, in_dims, x, bias, token, out_features, cast=False):
    return mapped(info, in_dims, x, bias, lambda x, bias: torch.ops.vbrt.linear(x, bias, token, out_features, cast))


@torch.library.register_vmap("vbrt::linear_backward", lib=_library)
def _(info, in_dims, dy, token, in_features):
    dims = (in_dims[0], None)
    return mapped(info, dims, dy, None, lambda dy, _: torch.ops.vbrt.linear_backward(dy, token, in_features))


@torch.library.impl(_library, "weight", "CompositeExplicitAutograd")
def _weight_op(token: torch.Tensor, rows: int, columns: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """The decoded weight [rows, columns] in the module's orientation; the device is text, which every tracer takes."""
    return _materialized(token).weight()


@torch.library.register_fake("vbrt::weight", lib=_library)
def _(token: torch.Tensor, rows: int, columns: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.empty((rows, columns), dtype=dtype, device=device)
