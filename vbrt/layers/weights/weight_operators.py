"""Operators of compiled, traced and exported graphs, which name a handle by its token and lease at run time.

Registered when `vbrt.layers` is imported.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from vbrt.errors import WrapError
from vbrt.kernels.frozen_product import Product, mapped, whole
from vbrt.layers.weights.linear_product import input_gradient, linear_as_cast, linear_without_grad, refuse_coarse
from vbrt.layers.weights.state import Weight, find_weight
from vbrt.libraries.torch_api import AutoDispatchBelowAutograd

__all__ = ["TAGS", "handle_of", "library", "materialized"]


def handle_of(token: torch.Tensor) -> Weight:
    """Return the live handle of a graph's token."""
    handle = find_weight(token.tolist()[0])
    if handle is None:
        raise WrapError(
            "a compiled, traced or exported graph names a VB layer that no longer exists in this process; "
            "compile or trace again (such graphs hold no weights: save a model with vb.save(), or export "
            "it after unwrap())"
        )
    return handle


def materialized(token: torch.Tensor) -> Weight:
    """Return the handle of a graph's token, encoded if it was not."""
    handle = handle_of(token)
    layer = next(iter(handle.layers), None)
    if layer is None or (handle.keys and handle.lent is None):
        return handle
    return layer.materialize_()._vb_handle  # another one, of a weight that was written to


class _Named(NamedTuple):
    """Weight of a graph, accessed through operators."""

    token: torch.Tensor
    out_features: int
    in_features: int
    cast: bool
    grad: bool

    def times(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        with _below_autograd():
            return torch.ops.vbrt.linear(x, bias, self.token, self.out_features, self.cast, self.grad)

    def back(self, dy: torch.Tensor) -> torch.Tensor:
        with _below_autograd():
            return torch.ops.vbrt.linear_backward(dy, self.token, self.in_features)

    def product(self, x: torch.Tensor, *, back: bool) -> torch.Tensor:
        if back:
            return torch.ops.vbrt.linear_backward(x, self.token, self.in_features)
        return torch.ops.vbrt.linear(x, None, self.token, self.out_features, True, True)


@contextlib.contextmanager
def _below_autograd() -> Iterator[None]:
    """For the operator itself; what torch.func's outer transforms differentiate comes after it, so grad stays on."""
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), AutoDispatchBelowAutograd():
        yield


# a lease waits and copies: a CUDA graph that recorded it would read pages that have moved on
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
library = torch.library.Library("vbrt", "FRAGMENT")
library.define(
    "linear(Tensor x, Tensor? bias, Tensor token, SymInt out_features, bool cast=False, bool grad=False) -> Tensor",
    tags=TAGS,
)
library.define("linear_backward(Tensor dy, Tensor token, SymInt in_features) -> Tensor", tags=TAGS)
# conservative, or torch.jit would run it once and keep the weight as a constant
library.define(
    "weight(Tensor token, SymInt rows, SymInt columns, ScalarType dtype, str device) -> Tensor",
    alias_analysis="CONSERVATIVE",
    tags=TAGS,
)


@torch.library.impl(library, "linear", "CompositeExplicitAutograd")
def _linear_op(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    token: torch.Tensor,
    out_features: int,
    cast: bool = False,
    grad: bool = False,
) -> torch.Tensor:
    """x [..., K] -> [..., N] with the planes of the handle that `token` names.

    cast: autocast is on, and x and bias have its dtype, whatever the weight's.
    grad: the graph computes gradients.
    """
    handle = materialized(token)
    if grad:
        refuse_coarse(handle, "a compiled graph that computes gradients")
    handle.forwards += 1
    if handle.separation is not None:
        handle.separation.tick()
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        return whole(linear_as_cast(handle, x, bias) if cast else linear_without_grad(handle, x, bias))


@torch.library.impl(library, "linear", "Autograd")
def _(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    token: torch.Tensor,
    out_features: int,
    cast: bool = False,
    grad: bool = False,
) -> torch.Tensor:
    return Product.at_this_level(x, bias, _Named(token, out_features, x.shape[-1], cast, grad), False)


@torch.library.register_fake("vbrt::linear", lib=library)
def _(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    token: torch.Tensor,
    out_features: int,
    cast: bool = False,
    grad: bool = False,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.impl(library, "linear_backward", "CompositeExplicitAutograd")
def _linear_backward_op(dy: torch.Tensor, token: torch.Tensor, in_features: int) -> torch.Tensor:
    """dX [..., K] from dY [..., N]."""
    handle = handle_of(token).still(token.tolist()[1])
    with torch.no_grad():
        return whole(input_gradient(handle, dy, handle.kernels))


@torch.library.impl(library, "linear_backward", "Autograd")
def _(dy: torch.Tensor, token: torch.Tensor, in_features: int) -> torch.Tensor:
    return Product.at_this_level(dy, None, _Named(token, dy.shape[-1], in_features, True, True), True)


@torch.library.register_fake("vbrt::linear_backward", lib=library)
def _(dy: torch.Tensor, token: torch.Tensor, in_features: int) -> torch.Tensor:
    return dy.new_empty((*dy.shape[:-1], in_features))


@torch.library.register_vmap("vbrt::linear", lib=library)
def _(info, in_dims, x, bias, *rest):
    return mapped(info, in_dims, x, bias, lambda x, bias: torch.ops.vbrt.linear(x, bias, *rest))


@torch.library.register_vmap("vbrt::linear_backward", lib=library)
def _(info, in_dims, dy, token, in_features):
    dims = (in_dims[0], None)
    return mapped(info, dims, dy, None, lambda dy, _: torch.ops.vbrt.linear_backward(dy, token, in_features))


@torch.library.impl(library, "weight", "CompositeExplicitAutograd")
def _weight_op(token: torch.Tensor, rows: int, columns: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """The decoded weight [rows, columns] in the module's orientation; the device is text, which every tracer takes."""
    handle = materialized(token)
    refuse_coarse(handle, "a graph that reads the decoded weight, as tracers and modes record it,")
    return handle.weight()


@torch.library.register_fake("vbrt::weight", lib=library)
def _(token: torch.Tensor, rows: int, columns: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.empty((rows, columns), dtype=dtype, device=device)
