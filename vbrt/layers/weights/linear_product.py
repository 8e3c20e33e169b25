"""Dispatch of x Wᵀ + bias by caller, precision and state of the weight.

| caller | function | how it differs |
| --- | --- | --- |
| eager calls without a fast path in `products.py` | `linear` | counts, casts as autocast does, tells autograd |
| `Product` and compiled graphs, after that | `linear_without_grad`, `linear_as_cast` | neither counts nor casts |
| all of them | `leased_linear` | leases planes, or takes those that never move |
| backward passes | `input_gradient`, `leased_gradient` | dY W, likewise |
| rows of a captured step | `linear_of_rows` | one lease for several x |
| | `linear_on_planes` | the kernel of `kernel_selection.py` on planes |
| lossless transposed weights, watched calls | `linear_on_weight` | the plain layer's own call on a decoded weight |
| compiled graphs, planes that never move | `vbrt::fp4_linear` or the kernel itself: `compiled_forward.py` | no lease |

A pass may ask for less precision:

    with precision("coarse"):      # a draft: `exact` weights are leased without their fine plane
        y = model(x)
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch.compiler import is_compiling

from vbrt.errors import ArgumentError, WrapError
from vbrt.formats.format import WeightPlanes
from vbrt.kernels.frozen_product import Product, as_autocast, whole
from vbrt.kernels.observers import (
    dispatch_modes,
    function_modes,
    is_bare,
    is_known_memory,
    is_memory,
    is_tracing,
    is_watched,
    unwatched,
)
from vbrt.kernels.operator_trace import recorder
from vbrt.kernels.reference import wants_grad
from vbrt.layers.weights.encoded_weight import EncodedWeight
from vbrt.layers.weights.kernel_selection import Kernels
from vbrt.layers.weights.weight_spec import HandleSpec
from vbrt.libraries.torch_api import TransformType, interpreter_stack, is_any_autocast_enabled, is_functorch_wrapped
from vbrt.tiers import LeasedTensors

__all__ = [
    "PRECISIONS",
    "Products",
    "SharedProduct",
    "decoded_weight",
    "input_gradient",
    "kernels_of_pass",
    "linear",
    "linear_as_cast",
    "linear_of_rows",
    "linear_on_planes",
    "linear_on_weight",
    "linear_without_grad",
    "linears_without_grad",
    "pass_precision",
    "precision",
    "precision_notes",
    "products_are_taken",
    "products_by",
    "refuse_coarse",
    "requiring_grad",
    "resting_product",
    "shared_product",
]

# -- precision --------------------------------------------------------------------------------------------------------

PRECISIONS = ("full", "coarse")


class Products(Protocol):
    """Computes the products of a thread's passes in the place of `leased_linear`, as row-wise verification does."""

    def product(
        self, handle: EncodedWeight, kernels: Kernels, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x Wᵀ + bias."""


class _Pass(threading.local):
    precision = "full"
    products: Products | None = None


_pass = _Pass()
_drafted = False  # whether a coarse pass has begun in this process


class precision:  # a context manager, used like a function
    """Set the precision of this thread's forwards within a `with` block.

    "coarse" is for drafts: an `exact` layer computes with its coarse plane alone and gives, bit for bit, what a 4-bit
    layer of that plane gives; half of the bytes move. Layers without a fine plane have one precision: 4-bit layers
    compute as ever, and so do those that `exact` holds dense, such as float32 ones. Graphs that torch.compile made
    follow the precision of each call; a CUDA graph replays the one that it was captured with. The backward pass takes
    the precision of its forward.

    Raises:
        ArgumentError: another name than "coarse" or "full".
        WrapError: (in the block) a compiled graph that computes gradients, or one that reads a decoded weight, as
            torch.jit.trace and make_fx record it; entered in code that torch.compile traces.
    """

    def __init__(self, name: str) -> None:
        if name not in PRECISIONS:
            raise ArgumentError(f"precision {name!r}; expected one of {', '.join(PRECISIONS)}")
        self.name, self._before = name, []

    def __enter__(self) -> "precision":
        if is_compiling():
            raise WrapError(
                f'precision("{self.name}") within a function that torch.compile traces: graphs follow the precision '
                "of the call, enter the block outside of the function"
            )
        global _drafted
        _drafted = _drafted or self.name == "coarse"
        self._before.append(_pass.precision)
        _pass.precision = self.name
        return self

    def __exit__(self, *_: object) -> None:
        _pass.precision = self._before.pop()


def pass_precision() -> str:
    """The precision of this thread's pass."""
    return _pass.precision


def kernels_of_pass(handle: EncodedWeight) -> Kernels:
    """The kernels for the planes that this pass takes of a weight."""
    kernels = handle.kernels or handle.take_kernels()
    return handle.coarse_kernels if kernels.spec.fine and _pass.precision == "coarse" else kernels


def precision_notes(handle: EncodedWeight) -> list[str]:
    """Fallbacks for statistics: layers that coarse passes, once there was one, compute in full."""
    if not _drafted or not handle.spec.dense:
        return []
    return ['precision("coarse"): layers that are held dense have no coarse plane and compute in full']


def refuse_coarse(handle: EncodedWeight, what: str) -> None:
    """Raise WrapError in a coarse pass, for a computation that always takes all planes of an `exact` weight."""
    if handle.spec.fine and _pass.precision == "coarse":
        raise WrapError(f'{handle.spec.name}: {what} cannot compute with precision("coarse")')


# -- eager calls ------------------------------------------------------------------------------------------------------


def linear(handle: EncodedWeight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x Wᵀ + bias for x [..., K] -> [..., N]; gradients flow to x and bias, the weight is frozen.

    Dtypes follow nn.Linear: autocast casts the same operands, and mismatches raise torch's own errors.
    """
    handle.forwards += 1
    if handle.separation is not None:
        handle.separation.tick()
    kernels = handle.kernels
    if kernels is None or kernels.spec.fine:
        kernels = kernels_of_pass(handle)
    if kernels.lossless and not torch.is_grad_enabled() and not is_watched():
        return leased_linear(handle, kernels, x, bias)  # the plain layer's calls, whatever x is
    if not is_bare(x) or not _is_plain(bias):
        return _watched_linear(handle, kernels, x, bias)
    if is_any_autocast_enabled():
        x, bias = as_autocast(x), as_autocast(bias)
    if not torch.is_grad_enabled():
        return leased_linear(handle, kernels, x, bias)
    if wants_grad(x, bias):
        return Product.here(x, bias, _BareSnapshot(handle, handle.generation, kernels), False)
    with torch.no_grad():
        return whole(leased_linear(handle, kernels, x, bias))


def _watched_linear(
    handle: EncodedWeight, kernels: Kernels, x: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`linear` for tracers, modes of the dispatcher and transforms of torch.func.

    Those that cannot see into an autograd.Function get the plain layer's calls, on a weight decoded by an operator.
    In a step that is being captured the call is one opaque operator.
    """
    step = recorder()
    if step is not None:
        return step.leaf(linear_without_grad, handle, x, bias)
    if _sees_no_functions() or not (_is_for_functions(x) and (bias is None or _is_for_functions(bias))):
        return linear_on_weight(handle.spec, x, _weight_by_operator(handle, x.device), bias)
    snapshot = _Snapshot(handle, handle.generation, kernels)
    return Product.apply(as_autocast(x), as_autocast(bias), snapshot, False)


def _is_plain(bias: torch.Tensor | None) -> bool:
    return bias is None or is_known_memory(bias)


def _is_for_functions(tensor: torch.Tensor) -> bool:
    """True if a function of autograd's takes a tensor as it is."""
    return is_memory(tensor) or is_functorch_wrapped(tensor)


def _sees_no_functions() -> bool:
    """True if a tracer, mode or transform is at work that takes a function of autograd's for one operation, looks past
    it, or refuses it."""
    stack = interpreter_stack() or ()
    return is_tracing() or function_modes() or any(level.key() == TransformType.Functionalize for level in stack)


class _Snapshot(NamedTuple):
    """Snapshot of a weight at a forward: its generation, and the kernels of the leased planes."""

    handle: EncodedWeight
    generation: int
    kernels: Kernels

    def times(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear_without_grad(self.handle.still(self.generation), x, bias, self.kernels)

    def back(self, dy: torch.Tensor) -> torch.Tensor:
        return input_gradient(self.handle.still(self.generation), dy, self.kernels)

    def product(self, x: torch.Tensor, *, back: bool) -> torch.Tensor:
        if not is_bare(x):
            return Product.apply(x, None, _Snapshot(*self), back)
        bare = _BareSnapshot(*self)
        if torch.is_grad_enabled():
            return Product.here(x, None, bare, back)
        return whole(bare.back(x) if back else bare.times(x, None))  # without a second graph: nothing to record


class _BareSnapshot(_Snapshot):
    """Snapshot whose operands are known to be bare (`observers.is_bare`)."""

    __slots__ = ()

    def times(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return leased_linear(self.handle.still(self.generation), self.kernels, x, bias)

    def back(self, dy: torch.Tensor) -> torch.Tensor:
        return leased_gradient(self.handle.still(self.generation), self.kernels, dy)


# -- without autograd -------------------------------------------------------------------------------------------------


def linear_without_grad(
    handle: EncodedWeight, x: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels | None = None
) -> torch.Tensor:
    """`linear` without counters and casts; call it under no_grad."""
    if is_bare(x):
        return leased_linear(handle, kernels or kernels_of_pass(handle), x, bias)
    return linear_on_weight(handle.spec, x, _weight_by_operator(handle, x.device), bias)


def linears_without_grad(
    handles: Sequence[EncodedWeight], x: torch.Tensor, biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """`linear_without_grad` with each weight; for weights that the CPU computes, in one call of it."""
    bare = is_bare(x) and not products_are_taken()
    ys = handles[0].held.compute_siblings(handles, x) if bare else None
    if ys is None:
        return [linear_without_grad(handle, x, bias) for handle, bias in zip(handles, biases, strict=True)]
    return [y if bias is None else y + bias for y, bias in zip(ys, biases, strict=True)]


def linear_of_rows(
    handle: EncodedWeight, rows: Sequence[torch.Tensor], bias: torch.Tensor | None
) -> list[torch.Tensor]:
    """`linear_without_grad` of each x in `rows`, under one lease."""
    ys = handle.held.compute_rows(handle, rows, bias)
    if ys is not None:
        return ys
    with shared_product(handle, kernels_of_pass(handle), rows[0].device) as product:
        return [product(x, bias) for x in rows]


def linear_as_cast(handle: EncodedWeight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear_without_grad` for graphs that already applied autocast to x and bias."""
    if x.dtype is handle.dtype or torch.float64 in (x.dtype, handle.dtype):
        return linear_without_grad(handle, x, bias)
    kernels = kernels_of_pass(handle)
    with handle.lease(kernels.precision) as tensors:
        weight = _weight_of(kernels, _planes(handle, kernels, tensors, x.device))
        return linear_on_weight(handle.spec, x, weight.to(x.dtype), bias)


def leased_linear(handle: EncodedWeight, kernels: Kernels, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x Wᵀ + bias on resident planes, or on leased ones."""
    products = _pass.products
    if products is not None:
        return products.product(handle, kernels, x, bias)
    ready = _resting_planes(handle, kernels) if x.device == handle.device else None
    if ready is not None:
        _count_hits(handle, kernels)
        return linear_on_planes(handle, kernels, x, ready, bias)
    y = handle.held.compute(handle, x, bias)
    if y is not None:
        return y
    handle.tokens = x.numel() // handle.spec.shape[1]
    if not kernels.lossless:  # then x is memory
        handle.input_at = x.data_ptr()
    with handle.lease(kernels.precision) as tensors:
        return linear_on_planes(handle, kernels, x, _planes(handle, kernels, tensors, x.device), bias)


def resting_product(handle: EncodedWeight) -> tuple[Kernels, WeightPlanes] | None:
    """Kernels and planes of this pass for a resident weight, for `linear_on_planes`; callers count. None: the pass
    leases."""
    kernels = kernels_of_pass(handle)
    ready = None if products_are_taken() else _resting_planes(handle, kernels)
    return None if ready is None else (kernels, ready)


def _resting_planes(handle: EncodedWeight, kernels: Kernels) -> WeightPlanes | None:
    """Planes of a resident weight; callers count. None: the pass leases."""
    ready = handle.held.planes  # another thread may take them away
    if ready is None or not handle.stack.at_rest:
        return None
    if kernels.precision == "coarse":
        return WeightPlanes(ready.format, ready.shape, ready.dtype, ready.coarse)
    return ready


def _count_hits(handle: EncodedWeight, kernels: Kernels) -> None:
    """Count a use of planes without a lease."""
    for page in handle.pages if kernels.precision == "full" else handle.pages[:1]:
        page.hits += 1  # no call in between: one step for threads that share an interpreter lock


@contextlib.contextmanager
def products_by(products: Products | None) -> Iterator[None]:
    """Have this thread's products computed by `products` within a `with` block (None: as ever)."""
    before = _pass.products
    _pass.products = products
    try:
        yield
    finally:
        _pass.products = before


def products_are_taken() -> bool:
    """True if this thread's products are computed by another than the layers' kernels."""
    return _pass.products is not None


class SharedProduct(NamedTuple):
    """A weight that is leased for several products; (x, bias) -> what `leased_linear` gives, bit for bit.

    Attributes:
        weight: as the module keeps it; None where kernels multiply with planes.
    """

    of: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    weight: torch.Tensor | None

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x Wᵀ + bias."""
        return self.of(x, bias)


@contextlib.contextmanager
def shared_product(handle: EncodedWeight, kernels: Kernels, device: torch.device) -> Iterator[SharedProduct]:
    """Lease a weight once for several products; a lossless weight is restored once."""
    with handle.lease(kernels.precision) as tensors:
        planes = _planes(handle, kernels, tensors, device)
        if not kernels.lossless:
            yield SharedProduct(lambda x, bias: linear_on_planes(handle, kernels, x, planes, bias), None)
            return
        weight = _weight_of(kernels, planes)
        if handle.trainable and not kernels.spec.transposed:
            weight = requiring_grad(weight)
        yield SharedProduct(lambda x, bias: linear_on_weight(kernels.spec, x, weight, bias), weight)


def linear_on_planes(
    handle: EncodedWeight, kernels: Kernels, x: torch.Tensor, planes: WeightPlanes, bias: torch.Tensor | None
) -> torch.Tensor:
    """x Wᵀ + bias by the kernel; for a lossless weight the very call of the original module, bit for bit."""
    if not kernels.lossless:
        if not _fits(x, planes, bias):
            return linear_on_weight(kernels.spec, x, _weight_of(kernels, planes), bias)  # torch says why not
        return kernels.linear(x, planes, bias)
    if kernels.spec.transposed:
        return linear_on_weight(kernels.spec, x, _weight_of(kernels, planes), bias)
    if handle.trainable:
        weight = kernels.decode(planes)
        if not weight.requires_grad:
            planes = WeightPlanes("dense", planes.shape, planes.dtype, {"weight": requiring_grad(weight)})
    return kernels.linear(x, planes, bias)


def requiring_grad(weight: torch.Tensor) -> torch.Tensor:
    """An alias that requires grad, for use under no_grad; `weight` itself stays as it is.

    torch.matmul looks at that, under no_grad too: it folds the leading dimensions of x for a weight that requires
    grad and may call a batched matmul, with other rounding, for one that does not.
    """
    if weight.requires_grad:
        return weight
    if weight.is_inference():  # views of such a tensor forget requires_grad, and linear() takes one
        with torch.inference_mode(False):
            alias = torch.empty(0, dtype=weight.dtype, device=weight.device)
            weight = alias.set_(weight.untyped_storage(), weight.storage_offset(), weight.shape, weight.stride())
    with torch.no_grad():
        return weight.detach().requires_grad_().view_as(weight)  # a view, because autocast keeps its casts of leaves


def linear_on_weight(
    spec: HandleSpec, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Call nn.Linear's functions, or those that transformers' Conv1D uses, on a weight in the module's orientation."""
    if not spec.transposed:
        return F.linear(x, weight, bias)
    if bias is None:
        return x.matmul(weight)
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])


def _fits(x: torch.Tensor, planes: WeightPlanes, bias: torch.Tensor | None) -> bool:
    """True if nn.Linear would take x, and a bias of one value for each output, beside such a weight, or beside what
    autocast makes of it."""
    if bias is not None and not (bias.dtype is x.dtype and bias.device == x.device and bias.shape == planes.shape[:1]):
        return False
    dtype = planes.dtype
    if x.dtype is dtype:
        return True
    kind = x.device.type
    return dtype is not torch.float64 and torch.is_autocast_enabled(kind) and x.dtype is torch.get_autocast_dtype(kind)


def input_gradient(handle: EncodedWeight, dy: torch.Tensor, kernels: Kernels | None = None) -> torch.Tensor:
    """dX [..., K] = dY [..., N] W; leases the planes again instead of saving the decoded weight."""
    if not is_bare(dy):
        return _matmul(handle, dy, _weight_by_operator(handle, dy.device))
    return leased_gradient(handle, kernels or kernels_of_pass(handle), dy)


def leased_gradient(handle: EncodedWeight, kernels: Kernels, dy: torch.Tensor) -> torch.Tensor:
    """dX = dY W on resident planes, or on leased ones."""
    ready, stack = _resting_planes(handle, kernels) if dy.device == handle.device else None, handle.stack
    # the first lease of a backward begins its phase, and those of a CUDA graph pin what they lease
    if ready is not None and not (stack.passes.backward or stack.capturing()):
        _count_hits(handle, kernels)
        return _gradient_on_planes(handle, kernels, dy, ready)
    with handle.lease(kernels.precision) as tensors:
        return _gradient_on_planes(handle, kernels, dy, _planes(handle, kernels, tensors, dy.device))


def _gradient_on_planes(
    handle: EncodedWeight, kernels: Kernels, dy: torch.Tensor, planes: WeightPlanes
) -> torch.Tensor:
    if kernels.gradient is not None:
        return kernels.gradient(dy, planes)
    weight = _weight_of(kernels, planes)
    return _matmul(handle, dy, weight.detach() if weight.requires_grad else weight)  # see `requiring_grad`


def _matmul(handle: EncodedWeight, dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    weight = weight.to(dy.dtype)
    return dy.matmul(weight.t() if handle.spec.transposed else weight)


# -- planes and weights -----------------------------------------------------------------------------------------------


def _planes(
    handle: EncodedWeight, kernels: Kernels, tensors: list[dict[str, torch.Tensor]], device: torch.device
) -> WeightPlanes:
    """Leased tensors as kernels take them, on the device of x."""
    again = type(tensors) is LeasedTensors and device == handle.device
    if again and tensors.planes is not None and tensors.planes[:2] == (handle.id, handle.dtype):
        return tensors.planes[2]
    spec = kernels.spec
    if device != handle.device:
        _note_foreign(handle, device)
        tensors = [{name: t.to(device) for name, t in plane.items()} for plane in tensors]
    dtype = spec.dtype if kernels.lossless else handle.dtype
    shape = spec.weight_shape if spec.dense else spec.shape
    planes = WeightPlanes(spec.format, shape, dtype, tensors[0], tensors[1] if spec.fine else None)
    if handle.strides is not None and kernels.lossless:  # a matmul of few rows sums in another order there
        weight = _restrided(handle, kernels.decode(planes).to(handle.dtype))
        return WeightPlanes("dense", shape, handle.dtype, {"weight": weight})
    if dtype is handle.dtype:
        held = handle.held.planes
        if held is not None and held.coarse is planes.coarse and held.fine is planes.fine:
            return held  # with what kernels have prepared of them
        if device == handle.device and kernels.precision == "full":
            handle.keep_resident(planes, tensors)
        if again:
            tensors.planes = handle.id, dtype, planes
        return planes
    return WeightPlanes("dense", shape, handle.dtype, {"weight": kernels.decode(planes).to(handle.dtype)})


def _note_foreign(handle: EncodedWeight, device: torch.device) -> None:
    reason = (
        f"{handle.spec.name}: input on {device}, pages on {handle.device}; the planes are copied on each call. "
        "Move the input, or enable the tier of that device"
    )
    if reason not in handle.fallbacks:
        handle.fallbacks.append(reason)


def _weight_of(kernels: Kernels, planes: WeightPlanes) -> torch.Tensor:
    """The weight as the module keeps it: [N, K], or [K, N] for a transposed module, in memory order too."""
    turned = kernels.spec.transposed and not kernels.spec.dense
    return kernels.decode_turned(planes) if turned else kernels.decode(planes)


def decoded_weight(handle: EncodedWeight) -> torch.Tensor:
    """The decoded weight in the module's orientation and dtype: a temporary that shares memory with nothing."""
    handle.weight_reads += 1
    with unwatched(), handle.lease() as tensors:  # tables that formats keep are made on the way
        kernels = handle.kernels
        weight = _weight_of(kernels, _planes(handle, kernels, tensors, handle.device))
        if handle.strides is not None:
            return _restrided(handle, weight)
        stored = handle.spec.dense and weight.dtype is handle.spec.dtype  # a view into the page
        return weight.clone() if stored else weight


def _restrided(handle: EncodedWeight, weight: torch.Tensor) -> torch.Tensor:
    """Copy with the strides of the module's own weight."""
    return torch.empty_strided(weight.shape, handle.strides, dtype=weight.dtype, device=weight.device).copy_(weight)


def _weight_by_operator(handle: EncodedWeight, device: torch.device) -> torch.Tensor:
    """Decoded weight from an operator that decodes at each run, eagerly and in traces."""
    # a mode of fake tensors takes those that are made under it
    token = handle.token_at(handle.generation) if dispatch_modes() else handle.token
    weight = torch.ops.vbrt.weight(token, *handle.spec.weight_shape, handle.dtype, handle.device_name)
    return weight if device == handle.device else weight.to(device)
