"""Layers that train from the tiers: forward and backward lease the weight's high half; gradients go to the host at
once.

The computing tier holds the pages that the policy keeps, and one gradient. The backward pass leases the page again, so
it refuses a weight updated after the forward.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from vbrt.errors import WrapError
from vbrt.kernels.frozen_product import as_autocast, sum_rows, whole
from vbrt.layers.swapped_layer import SwappedLayer
from vbrt.libraries.torch_api import will_execute
from vbrt.tiers.stack.pass_counts import in_backward
from vbrt.training.full.full_weight import FullWeight, graphs_end_here

__all__ = [
    "FullLayer",
    "FullLinear",
    "check_assigns",
    "check_held",
    "check_same",
    "check_version",
    "collecting",
    "wanted",
]


class _Here(threading.local):
    place: Callable[[FullWeight], Tensor] | None = None


_here = _Here()


@contextlib.contextmanager
def collecting(place: Callable[[FullWeight], Tensor]) -> Iterator[None]:
    """Context in which backward passes of this thread compute gradients of weights into memory of the caller's, and
    send none to the host. `place`: returns a weight's memory, bf16 in its shape on the computing device."""
    before, _here.place = _here.place, place
    try:
        yield
    finally:
        _here.place = before


class FullLayer(SwappedLayer):
    """Mixin for layers that train from the tiers, in front of the swapped module's class."""

    _vb_handle: FullWeight
    _rounds_before_bias = False  # see `Kind.rounds_before_bias`

    @classmethod
    def adopt_(cls, module: nn.Module, handle: FullWeight) -> "FullLayer":
        """Turn `module` into a layer in place; its parameter keeps its values until `materialize_`."""
        return cls._take_(module, handle)

    @property
    def handle(self) -> FullWeight:
        """The weight in the tiers."""
        return self._vb_handle

    @property
    def materialized(self) -> bool:
        """True once the weight is in the tiers."""
        return bool(self._vb_handle.keys)

    @property
    def trained_parameters(self) -> tuple[str, ...]:
        """Name of the trained parameter."""
        return (self._vb_handle.spec.site.parameter,)

    def materialize_(self) -> None:
        """Move the weight into the tiers, if it is not there."""
        handle = self._vb_handle
        with handle.stack.encoding:
            if not handle.keys:
                handle.store(self.dense)

    def keep_given_(self) -> None:
        """Do nothing: there is no separately given weight."""

    def notice_writes(self) -> None:
        """Do nothing: the weight cannot be written in place."""

    def weight_now(self) -> Tensor:
        """Return a copy of the current fp32 weight, in the module's orientation."""
        return self._vb_handle.master()

    def release_(self, dense: nn.Parameter | None = None) -> nn.Module:
        """Turn the layer back, in place, into its plain module, with its own parameter object, in fp32."""
        self._vb_handle.give_back()
        self._become_plain()
        return self

    @graphs_end_here
    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., K] -> [..., N] with the high half."""
        handle = self._vb_handle
        if not handle.keys:
            self.materialize_()
        x, bias = as_autocast(x), as_autocast(bias)
        handle.forwards += 1
        handle.gradient.expected += not in_backward()  # the recomputation runs in the backward pass
        handle.check_dtype(x)
        check_held(self, handle)
        if not torch.is_grad_enabled():
            return _multiply(handle, x, bias)
        return _Streamed.apply(handle.parameter, x, bias, handle)

    def _full_forward(self, x: Tensor) -> Tensor:
        """Forward of every kind. It reads nothing of the weight, so that all layers share one compiled graph."""
        bias = self._parameters["bias"]
        if not self._rounds_before_bias:
            return self._product(x, bias)
        product = self._product(x, None)
        return product if bias is None else product + bias

    # -- nn.Module's traversals ---------------------------------------------------------------------------------------

    def _held(self) -> dict[str, FullWeight]:
        """Return the weights in the tiers, by parameter name."""
        return {self._vb_handle.spec.site.parameter: self._vb_handle}

    @contextlib.contextmanager
    def _without_weights(self) -> Iterator[None]:
        """Context in which the module lacks the parameters that live in the tiers."""
        lacking = {name: self._parameters.pop(name) for name in self._held() if name in self._parameters}
        try:
            yield
        finally:
            self._parameters = {**lacking, **self._parameters}

    def _apply(self, fn, recurse: bool = True):
        """nn.Module's `_apply` for everything except weights in the tiers."""
        if not self.materialized:
            return super()._apply(fn, recurse)
        for handle in self._held().values():
            handle.check_cast(fn(torch.zeros((), dtype=handle.dtype, device="cpu")).dtype)
        with self._without_weights():
            super()._apply(fn, recurse)
        return self

    def _save_to_state_dict(self, destination, prefix: str, keep_vars: bool) -> None:
        if not self.materialized:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        for name, handle in self._held().items():
            destination[f"{prefix}{name}"] = handle.master()
        with self._without_weights():
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        if not self.materialized:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
            return
        check_assigns(self._vb_handle, local_metadata)
        own = {f"{prefix}{name}": handle for name, handle in self._held().items()}
        for key, handle in own.items():
            if key in state_dict:
                try:
                    handle.load(state_dict[key])
                except WrapError as error:
                    error_msgs.append(str(error))
            elif strict:
                missing_keys.append(key)
        rest = {key: value for key, value in state_dict.items() if key not in own}
        with self._without_weights():
            super()._load_from_state_dict(
                rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )


class FullLinear(FullLayer, nn.Linear):
    """nn.Linear that trains from the tiers. Made by `vbrt.wrap(model, "full", optimizer=...)`, not by hand."""

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in_features] -> [..., out_features]; gradients flow to input, weight and bias.

        Raises:
            TierError: a page cannot be read, or the weight's last update failed.
            WrapError: the input is not bf16 (after autocast); (in the backward pass) the weight was updated after the
                forward.
        """
        return self._full_forward(input)

    def extra_repr(self) -> str:
        """nn.Linear's, and where it trains."""
        return f"{super().extra_repr()}, trains from the tiers"


def _multiply(handle: FullWeight, x: Tensor, bias: Tensor | None) -> Tensor:
    """The plain layer's own matmul call, on the high half."""
    with handle.lease() as weight:
        if not handle.spec.transposed:
            weight = weight.detach().requires_grad_(handle.trainable)  # decides how torch folds dims
            return F.linear(x, weight, bias)
        if bias is None:
            return x.matmul(weight)
        return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])


class _Streamed(Function):
    """y = x Wᵀ + b, whose gradient of W goes to the weight's handle. `parameter` anchors W in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, x: Tensor, bias: Tensor | None, handle: FullWeight) -> Tensor:
        ctx.save_for_backward(x if parameter.requires_grad else None)
        ctx.handle, ctx.version = handle, handle.state.version
        ctx.bias_dtype = None if bias is None else bias.dtype
        return whole(_multiply(handle, x, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        handle = ctx.handle
        dx = dbias = None
        if ctx.needs_input_grad[1]:
            with handle.lease() as weight:
                check_same(ctx)
                dx = dy.matmul(weight.t() if handle.spec.transposed else weight)
        if ctx.needs_input_grad[0] and (_here.place or wanted(ctx, handle)):
            dy_MN, x_MK = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
            one, two = (x_MK, dy_MN) if handle.spec.transposed else (dy_MN, x_MK)
            if _here.place:
                torch.mm(one.t(), two, out=_here.place(handle))
            else:
                shape = handle.spec.weight_shape
                handle.outlet.send(handle.gradient, shape, lambda out: torch.mm(one.t(), two, out=out))
        if ctx.needs_input_grad[2]:
            dbias = sum_rows(dy).to(ctx.bias_dtype)
        return None, dx, dbias, None


def check_held(layer: nn.Module, handle: FullWeight) -> None:
    """Raise WrapError if a module holds another tensor in place of its weight's parameter."""
    name = handle.spec.site.parameter
    if layer._parameters.get(name) is not handle.parameter:
        raise WrapError(
            f"{handle.name}: another tensor was put in the place of its {name} (an assignment, or functional_call), "
            "and its forward computes with the weight in the tiers; vb.load_state_dict() gives it other values, and "
            "unwrap() plain parameters"
        )


def check_assigns(handle: FullWeight, metadata: Mapping[str, Any]) -> None:
    """Raise WrapError for `load_state_dict(assign=True)`, detected by torch's metadata."""
    if metadata.get("assign_to_params_buffers"):
        raise WrapError(
            f"{handle.name}: load_state_dict(assign=True) puts other parameters in the place of those that the "
            "optimizer updates; without assign it fills these, or load before vbrt.wrap()"
        )


def wanted(ctx: Any, handle: FullWeight, at: int = 0) -> bool:
    """True if the running backward pass accumulates into the weight's gradient: the weight trains, and the pass is not
    limited to other tensors (torch.autograd.grad, backward(inputs=...)).

    Args:
        at: index of the weight's parameter among the inputs of the function of `ctx`.
    """
    return handle.trainable and will_execute(ctx.next_functions[at][0])


def check_same(ctx: Any) -> None:
    """Raise WrapError if the weight was updated between forward and backward."""
    check_version(ctx.handle, ctx.version)


def check_version(handle: FullWeight, version: tuple[int, int]) -> None:
    """Raise WrapError if a weight was updated or loaded since `version`."""
    if handle.state.version != version:
        raise WrapError(f"{handle.name}: its weight was updated between forward and backward; run the forward again")
