"""What a VB layer knows of its weight: where its planes are, and how to compute with them.

A handle is shared by all layers that are tied to one weight. It begins empty, while the layers still hold the dense
parameter, and owns pages of a stack once `encode` has run. Pages are read-only: a new weight means new pages.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from vbrt.errors import FormatError, WrapError
from vbrt.formats import get_format
from vbrt.formats.base import WeightPlanes
from vbrt.formats.fine import fine_layout, split_fine
from vbrt.formats.page import PageLayout, pack
from vbrt.formats.separation import Separation
from vbrt.kernels import kernel_name, resolve
from vbrt.tiers import TierStack, detached_stack

__all__ = ["HandleSpec", "WeightHandle", "handle_of"]

_ids = itertools.count()
_handles: "weakref.WeakValueDictionary[int, WeightHandle]" = weakref.WeakValueDictionary()


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
    homes: Mapping[str, str] | None = None
    levels: int = 8
    refresh_every: int = 100

    @property
    def lossless(self) -> bool:
        """Whether the original weight comes back bit for bit."""
        return self.fine or self.format == "dense"


class WeightHandle:
    """Planes of one weight in a stack. Counters are integers; `dtype` is what the layer shows to the outside."""

    def __init__(self, spec: HandleSpec, stack: TierStack) -> None:
        self.spec, self.stack = spec, stack
        self.dtype = spec.dtype
        self.keys: tuple[str, ...] = ()
        self.id = next(_ids)
        self.forwards = self.weight_reads = self.generation = 0
        self.fallbacks: list[str] = []
        self.separation = Separation(spec.levels, spec.refresh_every) if spec.format == "quantile" else None
        self._format = get_format(spec.format)
        self._linear = resolve("linear", spec.backend, stack.device)
        self._decode = resolve("decode_weight", spec.backend, stack.device)
        self._retire: weakref.finalize | None = None
        self.layer: Callable[[], torch.nn.Module | None] = lambda: None  # a shell that can materialize this handle
        _handles[self.id] = self

    # -- life ---------------------------------------------------------------------------------------------------------

    def encode(self, weight: torch.Tensor) -> None:
        """Split the weight, in the module's orientation, into planes and store them; earlier pages are dropped.

        Raises:
            FormatError: NaN, Inf or a dtype that the format cannot hold, with the layer's name.
            TierError: the pages do not fit; the earlier ones, if any, are still in place.
        """
        spec, weight = self.spec, weight.detach().to(self.stack.device)
        if tuple(weight.shape) != self.weight_shape:
            raise FormatError(f"{spec.name}: the new weight has shape {tuple(weight.shape)}; expected {self.weight_shape}")
        try:
            planes = self._split(weight.to(spec.dtype))
        except FormatError as error:
            raise FormatError(f"{spec.name}: {error}; exclude the layer (weights.exclude) or repair it") from error
        keys: list[str] = []
        suffix = f"@{self.generation}" if self.generation else ""
        try:
            for plane, (layout, tensors) in planes.items():
                key = f"{spec.name}#{plane}{suffix}"
                self.stack.add(key, layout, self._home(plane), functools.partial(_fill, tensors, layout))
                keys.append(key)
        except BaseException:
            self.stack.retire(keys)
            raise
        self.drop()
        self._own(tuple(keys))

    def _own(self, keys: tuple[str, ...]) -> None:
        self.keys, self.generation = keys, self.generation + 1
        self._retire = weakref.finalize(self, self.stack.retire, keys)
        self._retire.atexit = False

    def drop(self) -> None:
        """Give the pages back; the handle is empty again."""
        if self._retire is not None:
            self._retire()
            self._retire = None
        self.keys = ()

    def retype(self, dtype: torch.dtype) -> None:
        """The layer was cast: what it computes in and shows from now on, and, while empty, what it will encode."""
        self.dtype = dtype
        if self.keys or dtype is self.spec.dtype:
            return
        self.spec = replace(self.spec, dtype=dtype)
        if self.spec.fine and dtype not in (torch.bfloat16, torch.float16):
            self.spec = replace(self.spec, fine=False, format="dense")  # still exact: there is no fp32 fine plane
            self._format = get_format("dense")

    def _home(self, plane: str) -> str:
        homes = self.spec.homes
        if not homes:
            return self.stack.names[0]
        return homes.get(plane) or next(iter(homes.values()))

    def _split(self, weight: torch.Tensor) -> dict[str, tuple[PageLayout, dict[str, torch.Tensor]]]:
        spec = self.spec
        if spec.format == "dense":
            return {"dense": (self._format.layout(tuple(weight.shape), spec.dtype), self._format.encode(weight))}
        w_NK = weight.t().contiguous() if spec.transposed else weight
        coarse = self.separation.encode(w_NK) if self.separation else self._format.encode(w_NK)
        planes = {"coarse": (self._format.layout(spec.shape, spec.dtype), coarse)}
        if spec.fine:
            fine = split_fine(w_NK, coarse, self._format)
            planes["fine"] = (fine_layout(fine), fine)
        return planes

    def materialize(self) -> None:
        """Encode the weight of the shell that this handle belongs to.

        Raises:
            WrapError: there is no such shell: the layer is a copy that has not run yet.
        """
        layer = self.layer()
        if layer is None:
            raise WrapError(f"{self.spec.name}: not materialized yet; run it once, or call materialize(), before compiling")
        layer.materialize_()

    # -- use ----------------------------------------------------------------------------------------------------------

    @property
    def weight_shape(self) -> tuple[int, int]:
        """The weight's shape as the module keeps it: (N, K), or (K, N) for a transposed module."""
        return self.spec.shape[::-1] if self.spec.transposed else self.spec.shape

    @property
    def kernel(self) -> str:
        """Name of the implementation that runs."""
        return kernel_name(self._linear)

    def lease(self):
        """Borrow the planes from the stack."""
        return self.stack.lease(self.keys)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, activation: str = "none") -> torch.Tensor:
        """activation(x Wᵀ + bias) for x [..., K] -> [..., N]; gradients flow to x and bias, the weight is frozen."""
        self.forwards += 1
        if self.separation is not None:
            self.separation.tick()
        if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
            return _FrozenLinear.apply(x, bias, self)
        return self.run(x, bias, activation)

    def run(self, x: torch.Tensor, bias: torch.Tensor | None, activation: str = "none") -> torch.Tensor:
        """`linear` without gradients and without counting a forward."""
        spec = self.spec
        with self.lease() as tensors:
            if spec.transposed and spec.lossless:
                return self._conv1d(x, bias, self._original(tensors, x))
            return self._linear(x, self._planes(tensors, x), bias, activation)

    def backward_input(self, dy: torch.Tensor) -> torch.Tensor:
        """dX [..., K] = dY [..., N] W, leasing the planes again instead of keeping the weight."""
        with self.lease() as tensors:
            weight = self._original(tensors, dy).to(dy.dtype)
            return dy.matmul(weight.t() if self.spec.transposed else weight)

    def weight(self) -> torch.Tensor:
        """The decoded weight in the module's orientation and dtype: a temporary, never a part of the model.

        The one exception: a dense page that lives in the computing tier for good is returned as a view.
        """
        self.weight_reads += 1
        with self.lease() as tensors:
            weight = self._original(tensors, None)
            moves = self.stack.pages[self.keys[0]].home != 0
            return weight.clone() if self.spec.format == "dense" and moves and weight.dtype == self.spec.dtype else weight

    def _planes(self, tensors: list[dict[str, torch.Tensor]], x: torch.Tensor | None) -> WeightPlanes:
        spec = self.spec
        if x is not None and x.device != self.stack.device:
            self._announce_foreign(x.device)
            tensors = [{name: t.to(x.device) for name, t in plane.items()} for plane in tensors]
        dtype = spec.dtype if spec.lossless else self.dtype
        shape = self.weight_shape if spec.format == "dense" else spec.shape
        planes = WeightPlanes(spec.format, shape, dtype, tensors[0], tensors[1] if spec.fine else None)
        if dtype is self.dtype:
            return planes
        return WeightPlanes("dense", shape, self.dtype, {"weight": self._decode(planes).to(self.dtype)})

    def _original(self, tensors: list[dict[str, torch.Tensor]], x: torch.Tensor | None) -> torch.Tensor:
        """The weight as the module keeps it: [N, K], or [K, N] for a transposed module, in memory order too."""
        weight = self._decode(self._planes(tensors, x))
        return weight.t().contiguous() if self.spec.transposed and self.spec.format != "dense" else weight

    def _conv1d(self, x: torch.Tensor, bias: torch.Tensor | None, w_KN: torch.Tensor) -> torch.Tensor:
        """The very calls of Conv1D, so that results are bit-identical."""
        if bias is None:
            return x.matmul(w_KN)
        return torch.addmm(bias, x.reshape(-1, x.shape[-1]), w_KN).view(*x.shape[:-1], w_KN.shape[1])

    def _announce_foreign(self, device: torch.device) -> None:
        if not self.fallbacks:
            self.fallbacks.append(f"{self.spec.name}: input on {device}, pages on {self.stack.device}; the planes are "
                                  "copied on each call. Move the input, or enable the tier of that device")

    # -- copies -------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict) -> "WeightHandle":
        clone = WeightHandle(self.spec, self.stack)
        clone.dtype = self.dtype
        memo[id(self)] = clone
        if self.keys:
            self.stack.share(self.keys)
            clone._own(self.keys)
        return clone

    def empty_copy(self) -> "WeightHandle":
        """A handle for another weight of the same layer, in the same stack."""
        clone = WeightHandle(self.spec, self.stack)
        clone.generation = self.generation
        if self.separation is not None:
            clone.separation = self.separation  # its codebook is refreshed when the new weight asks for it
        return clone

    def __reduce__(self):
        pages = []
        if self.keys:
            with self.lease() as tensors:
                for key, plane in zip(self.keys, tensors, strict=True):
                    pages.append((self.stack.pages[key].layout.to_dict(), {k: t.cpu().clone() for k, t in plane.items()}))
        return _restore, (self.spec, self.dtype, pages)


class _FrozenLinear(torch.autograd.Function):
    """y = x Wᵀ + b with a frozen weight that is not kept for the backward pass."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, bias: torch.Tensor | None, handle: WeightHandle) -> torch.Tensor:
        ctx.handle, ctx.x_dtype, ctx.bias_dtype = handle, x.dtype, None if bias is None else bias.dtype
        return handle.run(x, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: torch.Tensor):
        dx = ctx.handle.backward_input(dy).to(ctx.x_dtype) if ctx.needs_input_grad[0] else None
        dbias = dy.flatten(0, -2).sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[1] else None
        return dx, dbias, None


def _fill(tensors: Mapping[str, torch.Tensor], layout: PageLayout, out: torch.Tensor) -> None:
    pack(tensors, layout, out)


def handle_of(id: int) -> WeightHandle:
    """The live handle with this id: how a compiled graph names a layer's weight."""
    handle = _handles.get(id)
    if handle is None:
        raise WrapError(f"a compiled graph refers to a VB layer (id {id}) that no longer exists; compile again")
    return handle


def _restore(spec: HandleSpec, dtype: torch.dtype, pages: list) -> WeightHandle:
    stack = detached_stack()
    handle = WeightHandle(replace(spec, homes=None), stack)
    handle.dtype = dtype
    keys = []
    for layout_dict, tensors in pages:
        layout = PageLayout.from_dict(layout_dict)
        key = f"{spec.name}#{layout.plane}~{handle.id}"
        stack.add(key, layout, stack.names[0], functools.partial(_fill, tensors, layout))
        keys.append(key)
    if keys:
        handle._own(tuple(keys))
    return handle


@torch.library.custom_op("vbrt::linear", mutates_args=())
def _linear_op(x: torch.Tensor, bias: torch.Tensor | None, handle: int) -> torch.Tensor:
    """x [..., K] -> [..., N] with the planes of handle `handle`, computed in x's dtype."""
    owner = handle_of(handle)
    owner.forwards += 1
    if not owner.keys:
        owner.materialize()
    with torch.autocast(x.device.type, enabled=False):
        if x.dtype == owner.dtype:
            return owner.run(x, bias)
        weight = owner.weight().to(x.dtype)
        return F.linear(x, weight.t() if owner.spec.transposed else weight, None if bias is None else bias.to(x.dtype))


@_linear_op.register_fake
def _(x: torch.Tensor, bias: torch.Tensor | None, handle: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], handle_of(handle).spec.shape[0]))


@torch.library.custom_op("vbrt::linear_backward", mutates_args=())
def _linear_backward_op(dy: torch.Tensor, handle: int) -> torch.Tensor:
    """dX [..., K] from dY [..., N]."""
    return handle_of(handle).backward_input(dy)


@_linear_backward_op.register_fake
def _(dy: torch.Tensor, handle: int) -> torch.Tensor:
    return dy.new_empty((*dy.shape[:-1], handle_of(handle).spec.shape[1]))


def _save_handle(ctx, inputs, output) -> None:
    x, bias, ctx.handle = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype


def _compiled_backward(ctx, dy: torch.Tensor):
    dbias = dy.flatten(0, -2).sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[1] else None
    return torch.ops.vbrt.linear_backward(dy, ctx.handle), dbias, None


_linear_op.register_autograd(_compiled_backward, setup_context=_save_handle)
