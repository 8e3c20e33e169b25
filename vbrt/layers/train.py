"""Layers whose weight trains while the forward sees it as 4 bits hold it.

The weight stays the parameter that it was: the optimizer owns it, nothing moves it. Each forward rounds it under scales
that `TrainedSeparation` keeps; the gradient goes straight through, as if the rounded weight were the weight. Nothing of
the weight's size outlives a forward: the backward pass rounds again, under the same scales.

The road not taken: a rounded weight that autograd keeps. It is two lines, holds a second copy of every weight from
forward to backward, and saved-tensor hooks that would drop it take the place of those of activation checkpointing.
"""

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.fx import Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.optim.optimizer import register_optimizer_step_post_hook

from vbrt.errors import FormatError, WrapError
from vbrt.formats import TrainedSeparation, get_format
from vbrt.formats.page import PageLayout
from vbrt.formats.separation import identity
from vbrt.kernels.watched import is_recorded, is_transformed, unwatched
from vbrt.layers.encoding import Planes
from vbrt.layers.linear import SwappedLayer, leaf
from vbrt.layers.pickling import from_pickle, to_pickle
from vbrt.layers.product import sum_rows, whole
from vbrt.layers.spec import HandleSpec

__all__ = ["TrainedLayer", "TrainedLinear", "TrainedWeight"]

_STATE = "separation"  # what the engine's history is called in state dicts, beside "weight"

_ids = itertools.count()
_weights: "weakref.WeakValueDictionary[int, TrainedWeight]" = weakref.WeakValueDictionary()


class TrainedWeight:
    """What layers in training know of their weight; shared by all that are tied to it.

    Attributes:
        separation: the engine; None for format "dense".
        layers: the live layers that hold the weight.
        forwards: of all of them, recomputed ones included.
    """

    def __init__(self, spec: HandleSpec) -> None:
        self.spec, self.dtype = spec, spec.dtype
        self.layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.forwards = 0
        self.separation: TrainedSeparation | None = None
        if spec.format != "dense":
            self.separation = TrainedSeparation(get_format(spec.format), spec.levels, spec.refresh_every)
        self._name()

    def _name(self) -> None:
        """A name for compiled graphs; a tensor, and not a constant, so that layers share one graph."""
        _see_optimizer_steps()
        self.id = next(_ids)
        self.token = torch.tensor(self.id, dtype=torch.int64, device="cpu")
        _weights[self.id] = self

    @property
    def weight(self) -> nn.Parameter:
        """The parameter, in the module's orientation."""
        return next(iter(self.layers))._parameters["weight"]

    @property
    def trainable(self) -> bool:
        """Whether the parameter requires grad."""
        return self.weight.requires_grad

    def retype(self, dtype: torch.dtype) -> None:
        """The layers were cast."""
        self.dtype, self.spec = dtype, self.spec.retyped(dtype)

    def empty_copy(self) -> "TrainedWeight":
        """One for another weight of the same layer, without a history."""
        return TrainedWeight(self.spec)

    # -- rounding -----------------------------------------------------------------------------------------------------

    def rounded(self, weight: Tensor, dtype: torch.dtype, *, training: bool) -> Tensor:
        """The weight [N, K] in `dtype` as the forward sees it. Raises FormatError with the layer's name."""
        self.forwards += 1
        if weight.is_meta:
            raise FormatError(f"{self.spec.name}: its weight is on the meta device, without data; load it first")
        try:
            return self.separation.forward(weight, self._as_NK(weight), dtype, training=training)
        except FormatError as error:
            raise FormatError(
                f"{self.spec.name}: {error}; exclude the layer (weights.exclude), or go back to a state "
                "dict from before and a lower learning rate"
            ) from error

    def again(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """What the forward has seen."""
        return self.separation.again(self._as_NK(weight), dtype)

    def _as_NK(self, weight: Tensor) -> Tensor:
        weight = weight.detach()
        return weight.t() if self.spec.transposed else weight

    def moment(self, weight: Tensor) -> tuple[Any, ...]:
        """Changes with the weight and with its scales."""
        return (*identity(weight), self.separation.generation)

    def check(self, weight: Tensor, moment: tuple[Any, ...]) -> None:
        """Raise WrapError if weight or scales are not those of that moment any more."""
        if self.moment(weight) != moment:
            raise WrapError(
                f"{self.spec.name}: its weight was changed or loaded anew between forward and backward (an "
                "optimizer step, load_state_dict, .to()); run the forward again"
            )

    # -- for saves ----------------------------------------------------------------------------------------------------

    def encoded_layouts(self) -> list[PageLayout]:
        """Those of `encoded`."""
        dense = self.spec.format == "dense"
        shape = tuple(self.weight.shape) if dense else self.spec.shape
        return [get_format(self.spec.format).layout(shape, self.weight.dtype)]

    @contextmanager
    def encoded(self) -> Iterator[Planes]:
        """The planes that an inference model holds: what the forward computes with now. Nothing is refreshed."""
        weight = self.weight.detach()
        if self.separation is None:
            yield [(self.encoded_layouts()[0], get_format("dense").encode(weight))]
        else:
            yield [(self.encoded_layouts()[0], self.separation.encode(self._as_NK(weight).contiguous()))]

    # -- copies -------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict) -> "TrainedWeight":
        clone = memo[id(self)] = TrainedWeight(self.spec)
        clone.dtype, clone.forwards = self.dtype, self.forwards
        if self.separation is not None:
            clone.separation = self.separation.copied(self.weight)
        return clone

    def __reduce__(self):
        state = None if self.separation is None else self.separation.state(self.weight)
        return _restore, (self.spec, self.dtype, self.forwards, None if state is None else to_pickle(state))


@cache
def _see_optimizer_steps() -> None:
    """Fused optimizers, and those that write through `.data`, do not count their writes in the parameter's version, so
    every step of an optimizer in this process is noted at the parameters of layers in training that it holds."""
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    trained = {id(layer._parameters["weight"]) for handle in list(_weights.values()) for layer in list(handle.layers)}
    for group in optimizer.param_groups if trained else ():
        for parameter in group["params"]:
            if id(parameter) in trained:
                torch.autograd.graph.increment_version(parameter)


def _restore(spec: HandleSpec, dtype: torch.dtype, forwards: int, state: Tensor | bytes | None) -> TrainedWeight:
    handle = TrainedWeight(spec)
    handle.dtype, handle.forwards = dtype, forwards
    if state is not None:
        handle.separation.load(from_pickle(state), spec.shape)
    return handle


class TrainedLayer(SwappedLayer):
    """What layers in training share; a mixin in front of the class of the module that was swapped."""

    _vb_handle: TrainedWeight

    @classmethod
    def adopt_(cls, module: nn.Module, handle: TrainedWeight) -> "TrainedLayer":
        """Turn `module` into a trained layer in place; its parameters stay."""
        module.__class__ = cls
        module.__dict__["_vb_handle"] = handle
        handle.layers.add(module)
        return module

    def release_(self) -> nn.Module:
        """Turn the layer back, in place, into the module it was; its parameters stay."""
        self._become_plain()
        return self

    @property
    def handle(self) -> TrainedWeight:
        """What is known of the weight, and its engine."""
        return self._vb_handle

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., K] -> [..., N] with the rounded weight, in the dtype that autocast asks for."""
        handle, weight = self._vb_handle, self._parameters["weight"]
        if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))
            bias = None if bias is None else bias.to(x.dtype)
            dtype = x.dtype
        else:
            dtype = weight.dtype
        if is_compiling():
            return torch.ops.vbrt.trained_linear(
                x, weight, bias, handle.token, handle.spec.shape[0], dtype, self.training, handle.spec.transposed
            )
        if is_recorded():
            self._check_recorder()
            if is_fake(x):  # values do not count
                return F.linear(x, weight.to(dtype).t() if handle.spec.transposed else weight.to(dtype), bias)
        if is_transformed():
            return F.linear(x, self._transformed(weight, dtype), bias)
        return _StraightThrough.apply(x, weight, bias, handle, dtype, self.training)

    def _check_recorder(self) -> None:
        """Raise WrapError for a tracer that would keep the weight as it is rounded now, as a constant."""
        if torch._C._is_tracing() or get_proxy_mode() is not None:
            raise WrapError(
                f"{self._vb_handle.spec.name}: torch.jit.trace and make_fx cannot record a layer in "
                "training, whose weight is rounded anew in each step; use torch.compile or torch.export, "
                "or trace the model after unwrap()"
            )

    def _transformed(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The rounded weight [N, K] of a call under a transform of torch.func or with forward-mode derivatives, made of
        what those see through. Unlike other forwards, theirs keeps it for the backward pass.

        Raises:
            WrapError: there is a weight for each sample.
        """
        values = weight
        while is_functorch_wrapped_tensor(values):
            if is_batchedtensor(values):
                raise WrapError(
                    f"{self._vb_handle.spec.name}: vmap over the weight of a layer in training would need "
                    "scales for each; map over inputs and biases, or unwrap() first"
                )
            values = get_unwrapped(values)
        handle = self._vb_handle
        with unwatched():
            w_NK = handle.rounded(values, dtype, training=self.training)
        straight = weight - weight.detach()  # zeros, through which gradients go
        return w_NK + (straight.t() if handle.spec.transposed else straight).to(dtype)

    def _plain_forward(self, x: Tensor) -> Tensor:
        """The very call of the original module."""
        if not is_compiling():
            self._vb_handle.forwards += 1
        return super().forward(x)

    # -- nn.Module's walks --------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight" and "_vb_handle" in self.__dict__:  # another weight: layers tied to the old one keep theirs
            self._vb_handle.layers.discard(self)
            self.__dict__["_vb_handle"] = handle = self._vb_handle.empty_copy()
            handle.layers.add(self)

    def __delattr__(self, name: str) -> None:
        if name in ("weight", "bias") and self._vb_handle.separation is not None:
            raise self._not_to_be_replaced(name)
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in nn.Module, but for the names under which pruning keeps what it replaces.

        Raises:
            WrapError: weight or bias is about to be replaced by something that is computed.
        """
        if name in ("weight_orig", "bias_orig") and self._vb_handle.separation is not None:
            raise self._not_to_be_replaced(name.removesuffix("_orig"))
        super().register_parameter(name, param)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._vb_handle.layers.add(self)

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        weight = self._parameters.get("weight")
        if weight is not None:  # else pruning, a norm or a parametrization computes it
            self._vb_handle.retype(weight.dtype)
        return self

    def _save_to_state_dict(self, destination, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        engine = self._vb_handle.separation
        state = engine.state(self._parameters["weight"]) if engine else None
        if state is not None:
            destination[f"{prefix}{_STATE}"] = state

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        """A state dict without a history, of a dense model for one, starts a new one and is not incomplete."""
        key = f"{prefix}{_STATE}"
        rest = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        engine = self._vb_handle.separation
        if engine is None:  # trains dense: scales of another format are of no use
            return
        if key not in state_dict:
            if f"{prefix}weight" in state_dict:
                engine.forget()
            return
        try:
            engine.load(state_dict[key], self._vb_handle.spec.shape)
        except FormatError as error:
            error_msgs.append(f"{key}: {error}")


class TrainedLinear(TrainedLayer, nn.Linear):
    """nn.Linear that trains through 4 bits. Made by `vbrt.wrap(model, mode="train")`, not by hand."""

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in_features] -> [..., out_features]; gradients flow to input, weight and bias.

        Raises:
            FormatError: the scales are to be refreshed, and the weight holds NaN or Inf.
            WrapError: (in the backward pass) the weight was changed after the forward.
        """
        if self._vb_handle.separation is None:
            return self._plain_forward(input)
        if isinstance(input, Proxy):
            return leaf(self, input)
        return self._product(input, self._parameters["bias"])

    def extra_repr(self) -> str:
        """nn.Linear's, and what the forward sees."""
        return f"{super().extra_repr()}, format={self._vb_handle.spec.label}, trains"


class _StraightThrough(Function):
    """y = x round(W)ᵀ + b, with the gradients of y = x Wᵀ + b at W = round(W). Differentiable any number of times."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, handle: TrainedWeight, dtype: torch.dtype, training: bool
    ) -> Tensor:
        w_NK = handle.rounded(weight, dtype, training=training)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        # not a saved tensor: hooks that offload those would copy the weight, and torch's own check knows no names
        ctx.weight, ctx.handle, ctx.moment = weight, handle, handle.moment(weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return whole(F.linear(x, w_NK, bias))

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        handle, weight = ctx.handle, ctx.weight
        handle.check(weight, ctx.moment)
        dx = dw = dbias = None
        if ctx.needs_input_grad[0]:
            dx = dy.matmul(_Rounded.apply(weight, handle, dy.dtype))
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(dy, x, transposed=handle.spec.transposed).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            dbias = sum_rows(dy).to(ctx.bias_dtype)
        return dx, dw, dbias, None, None, None


class _Rounded(Function):
    """The rounded weight [N, K] of a backward pass, through which further derivatives go straight."""

    @staticmethod
    def forward(ctx, weight: Tensor, handle: TrainedWeight, dtype: torch.dtype) -> Tensor:
        ctx.transposed, ctx.dtype = handle.spec.transposed, weight.dtype
        return handle.again(weight, dtype)

    @staticmethod
    def backward(ctx, dw_NK: Tensor):
        return (dw_NK.t() if ctx.transposed else dw_NK).to(ctx.dtype), None, None


def weight_gradient(dy: Tensor, x: Tensor, *, transposed: bool) -> Tensor:
    """dYᵀ x [N, K], or xᵀ dY [K, N] for a weight that its module keeps transposed."""
    dy_MN, x_MK = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    return x_MK.t() @ dy_MN if transposed else dy_MN.t() @ x_MK


# -- in compiled graphs -----------------------------------------------------------------------------------------------


def _weight_of(token: Tensor) -> TrainedWeight:
    """The live one that a compiled graph's token names."""
    handle = _weights.get(token.item())
    if handle is None:
        raise WrapError(
            f"a compiled graph names a layer in training (id {token.item()}) that no longer exists; compile again"
        )
    return handle


# what it computes depends on counters that a CUDA graph would not see
_TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("vbrt::trained_linear", mutates_args=(), tags=_TAGS)
def _trained_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token: Tensor,
    out_features: int,
    dtype: torch.dtype,
    training: bool,
    transposed: bool,
) -> Tensor:
    """x [..., K] -> [..., N] with the rounded weight."""
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x, _weight_of(token).rounded(weight, dtype, training=training), bias)


@_trained_op.register_fake
def _(x, weight, bias, token, out_features, dtype, training, transposed):
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.custom_op("vbrt::trained_weight", mutates_args=(), tags=_TAGS)
def _trained_weight_op(weight: Tensor, token: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    """The rounded weight [N, K] of a backward pass."""
    return _weight_of(token).again(weight, dtype)


@_trained_weight_op.register_fake
def _(weight, token, dtype, transposed):
    return weight.new_empty(weight.shape[::-1] if transposed else weight.shape, dtype=dtype)


def _keep_inputs(ctx, inputs, output) -> None:
    x, weight, bias, token, *_, ctx.transposed = inputs
    ctx.save_for_backward(x, weight, token)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _compiled_backward(ctx, dy: Tensor):
    x, weight, token = ctx.saved_tensors
    dx = dw = dbias = None
    if ctx.needs_input_grad[0]:
        dx = dy.matmul(torch.ops.vbrt.trained_weight(weight, token, dy.dtype, ctx.transposed))
    if ctx.needs_input_grad[1]:
        dw = weight_gradient(dy, x, transposed=ctx.transposed).to(weight.dtype)
    if ctx.needs_input_grad[2]:
        dbias = sum_rows(dy).to(ctx.bias_dtype)
    return dx, dw, dbias, *[None] * 5


_trained_op.register_autograd(_compiled_backward, setup_context=_keep_inputs)
