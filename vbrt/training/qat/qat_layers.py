"""Layers in quantization-aware training: dense parameters, rounded in the forward.

The weight stays the optimizer's parameter. Each forward rounds it under scales kept by `TrainedSeparation`; gradients
are straight-through, as if the rounded weight were the weight. Nothing of the weight's size outlives a forward: the
backward pass rounds again, under the same scales.

Rejected: a rounded weight saved by autograd. It is two lines, but holds a second copy of every weight from forward to
backward, and saved-tensor hooks that would drop it displace those of activation checkpointing.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.fx import Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from vbrt.errors import WrapError
from vbrt.kernels.frozen_product import sum_rows, whole
from vbrt.kernels.observers import function_modes, is_recorded, is_transformed, traced_call, unwatched
from vbrt.layers.weights.weight_shards import is_sharded
from vbrt.libraries.torch_api import get_unwrapped, is_batchedtensor, is_fake, is_functorch_wrapped, is_tracing
from vbrt.training.qat.qat_weight import TrainedWeight
from vbrt.training.qat.rounded_layer import HISTORY, Rounded, RoundedLayer

__all__ = ["TrainedLayer", "TrainedLinear", "weight_gradient"]


class TrainedLayer(RoundedLayer):
    """Mixin for layers in training, in front of the swapped module's class."""

    _vb_handle: TrainedWeight
    _rounds_before_bias = False  # see `Kind.rounds_before_bias`

    @classmethod
    def adopt_(cls, module: nn.Module, handle: TrainedWeight) -> "TrainedLayer":
        """Turn `module` into a trained layer in place; its parameters stay."""
        return cls._take_(module, handle)

    def release_(self) -> nn.Module:
        """Turn the layer back into its plain class, in place; its parameters stay."""
        handle = self._vb_handle
        self._become_plain()
        if not handle.layers:
            handle.retire()
        return self

    @property
    def handle(self) -> TrainedWeight:
        """The weight's spec, counters and engine."""
        return self._vb_handle

    @property
    def trained_parameters(self) -> tuple[str, ...]:
        """Name of the parameter that forwards round."""
        return (self._vb_handle.spec.site.parameter,)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., K] -> [..., N] with the rounded weight, in autocast's dtype."""
        handle, weight = self._vb_handle, self._parameters["weight"]
        if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))
            bias = None if bias is None else bias.to(x.dtype)
            dtype = x.dtype
        else:
            dtype = weight.dtype
        if is_compiling():
            return torch.ops.vbrt.trained_linear(
                x, weight, bias, handle.token, dtype, self.training, handle.spec.transposed
            )
        if is_recorded():
            self._check_recorder()
            if is_fake(x):  # values do not matter
                return F.linear(x, weight.to(dtype).t() if handle.spec.transposed else weight.to(dtype), bias)
        if is_transformed() or function_modes():
            return F.linear(x, self._transformed(weight, dtype), bias)
        return _StraightThrough.apply(x, weight, bias, handle, dtype, self.training)

    def _check_recorder(self) -> None:
        """Raise WrapError for a tracer that would record the rounded weight as a constant."""
        if is_tracing() or get_proxy_mode() is not None:
            raise WrapError(
                f"{self._vb_handle.spec.name}: torch.jit.trace and make_fx cannot record a layer in "
                "training, whose weight is rounded again in each step; use torch.compile or torch.export, "
                "or trace the model after unwrap()"
            )

    def _transformed(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Rounded weight [N, K] for a call under torch.func transforms, forward-mode AD or a TorchFunctionMode, built
        from traceable operations. Unlike other forwards, these keep it for the backward pass.

        Raises:
            WrapError: there are per-sample weights.
        """
        values = weight
        while is_functorch_wrapped(values):
            if is_batchedtensor(values):
                raise WrapError(
                    f"{self._vb_handle.spec.name}: vmap over the weight of a layer in training would need "
                    "scales for each; map over inputs and biases, or unwrap() first"
                )
            values = get_unwrapped(values)
        handle = self._vb_handle
        with unwatched():
            w_NK = handle.rounded(values, dtype, training=self.training)
        straight = weight - weight.detach()  # zeros: a straight-through path for gradients
        return w_NK + (straight.t() if handle.spec.transposed else straight).to(dtype)

    def _trained_forward(self, x: Tensor) -> Tensor:
        """Forward of every kind: the original module's for format "dense", else a product with the rounded weight."""
        if self._vb_handle.separation is None:
            if not is_compiling():
                self._vb_handle.forwards += 1
            return super().forward(x)
        if isinstance(x, Proxy):
            return traced_call(self, x)
        bias = self._parameters["bias"]
        if not self._rounds_before_bias:
            return self._product(x, bias)
        product = self._product(x, None)
        return product if bias is None else product + bias

    # -- nn.Module's traversals ---------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_whole(name, value)
        super().__setattr__(name, value)
        if name == "weight" and "_vb_handle" in self.__dict__:  # layers tied to the old weight keep it
            self._vb_handle.layers.discard(self)
            self.__dict__["_vb_handle"] = handle = self._vb_handle.empty_copy()
            handle.layers.add(self)

    def _check_whole(self, name: str, value: Any) -> None:
        """Raise WrapError if the weight is about to be sharded over ranks."""
        if name == "weight" and is_sharded(value) and self._vb_handle.separation is not None:
            raise WrapError(
                f"{self._vb_handle.spec.name}: fully_shard (FSDP2) or a parallel plan would spread a weight that "
                "trains through 4 bits; keep such weights out of it (fully_shard: ignored_params=...), and sum their "
                "gradients over ranks"
            )

    def __delattr__(self, name: str) -> None:
        if name in ("weight", "bias") and self._vb_handle.separation is not None:
            raise self._not_to_be_replaced(name)
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As nn.Module's, except for the names under which pruning keeps the originals.

        Raises:
            WrapError: weight or bias is about to be replaced by a computed value, or the weight by a shard.
        """
        self._check_whole(name, param)
        if name in ("weight_orig", "bias_orig") and self._vb_handle.separation is not None:
            raise self._not_to_be_replaced(name.removesuffix("_orig"))
        super().register_parameter(name, param)

    def _rounded_parameters(self) -> dict[str, Rounded]:
        handle = self._vb_handle
        return {HISTORY: Rounded("weight", handle.separation, handle.spec.shape)}


class TrainedLinear(TrainedLayer, nn.Linear):
    """nn.Linear in 4-bit quantization-aware training. Made by `vbrt.wrap(model, mode="train")`, not by hand."""

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in_features] -> [..., out_features]; gradients flow to input, weight and bias.

        Raises:
            FormatError: a refit of the scales is due, and the weight holds NaN or Inf.
            WrapError: (in the backward pass) the weight was changed after the forward.
        """
        return self._trained_forward(input)

    def extra_repr(self) -> str:
        """nn.Linear's, and the format of the forward."""
        return f"{super().extra_repr()}, format={self._vb_handle.spec.label}, trains"


class _StraightThrough(Function):
    """y = x round(W)ᵀ + b, with straight-through gradients. Differentiable any number of times."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, handle: TrainedWeight, dtype: torch.dtype, training: bool
    ) -> Tensor:
        w_NK = handle.rounded(weight, dtype, training=training)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        # not a saved tensor: offloading hooks would copy the weight, and torch's version check gives no names
        ctx.weight, ctx.handle, ctx.snapshot = weight, handle, handle.snapshot(weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return whole(F.linear(x, w_NK, bias))

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        handle, weight = ctx.handle, ctx.weight
        handle.check(weight, ctx.snapshot)
        dx = dw = dbias = None
        if ctx.needs_input_grad[0]:
            dx = dy.matmul(_Rounded.apply(weight, handle, dy.dtype))
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(dy, x, transposed=handle.spec.transposed).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            dbias = sum_rows(dy).to(ctx.bias_dtype)
        return dx, dw, dbias, None, None, None


class _Rounded(Function):
    """Rounded weight [N, K] in a backward pass, with a straight-through derivative."""

    @staticmethod
    def forward(ctx, weight: Tensor, handle: TrainedWeight, dtype: torch.dtype) -> Tensor:
        ctx.transposed, ctx.dtype = handle.spec.transposed, weight.dtype
        return handle.rounded_as_before(weight, dtype)

    @staticmethod
    def backward(ctx, dw_NK: Tensor):
        return (dw_NK.t() if ctx.transposed else dw_NK).to(ctx.dtype), None, None


def weight_gradient(dy: Tensor, x: Tensor, *, transposed: bool) -> Tensor:
    """dYᵀ x [N, K], or xᵀ dY [K, N] for a weight that its module keeps transposed."""
    dy_MN, x_MK = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    return x_MK.t() @ dy_MN if transposed else dy_MN.t() @ x_MK
