"""Routed experts in quantization-aware training: dense parameters, rounded in the forward.

As in `TrainedLayer`, weights stay parameters, gradients are straight-through, and nothing of the weights' size outlives
a forward: the backward pass rounds again under the same scales, and recomputes the layer with the experts
implementation of the model's config. The recomputation is the price of supporting every experts class, with its own
gates, biases and norms, without a copy of the weights.

Legend: T tokens, k experts a token, H hidden.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from vbrt.errors import WrapError
from vbrt.kernels.observers import is_recorded, is_transformed, unwatched
from vbrt.kernels.uncompiled import uncompiled
from vbrt.layers.experts.expert_gradients import autocast_of
from vbrt.layers.experts.library_experts import ExpertsView, implementation_of
from vbrt.layers.swapped_layer import SwappedLayer
from vbrt.libraries.torch_api import get_unwrapped, is_batchedtensor, is_functorch_wrapped, is_tracing
from vbrt.training.qat.qat_expert_weight import TrainedExpertsWeight, TrainedStack
from vbrt.training.qat.rounded_layer import HISTORY, Rounded, RoundedLayer

__all__ = ["TrainedExperts", "class_of_experts", "compute", "gradients", "trained_experts_class"]


class TrainedExperts(RoundedLayer):
    """Mixin for modules of routed experts in training, in front of the module's own class."""

    _vb_handle: TrainedExpertsWeight

    @classmethod
    def adopt_(cls, module: nn.Module, handle: TrainedExpertsWeight) -> "TrainedExperts":
        """Turn `module` into one in training, in place; its parameters stay."""
        return trained_experts_class(type(module))._take_(module, handle)

    def release_(self) -> nn.Module:
        """Turn the module back into its plain class, in place; its parameters stay."""
        handle = self._vb_handle
        self._become_plain()
        if not handle.layers:
            handle.retire()
        return self

    @property
    def handle(self) -> TrainedExpertsWeight:
        """The weights' spec, counters and engines."""
        return self._vb_handle

    @property
    def trained_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that forwards round."""
        return self._vb_handle.spec.parameters

    def _experts_forward(self, *args: Any) -> Tensor:
        """Run the module's own forward for format "dense", else the same on rounded weights."""
        handle, plain = self._vb_handle, type(self).plain_class()
        if handle.spec.dense:
            handle.forwards += not is_compiling()
            return plain.forward(self, *args)
        if is_compiling() and not hasattr(plain.forward, "__wrapped__"):  # args not for the operator
            return _uncompiled(self, *args)
        handle.forwards += not is_compiling()
        named = dict(nn.Module.named_parameters(self))
        cast = _cast_of(args[0], self._parameters[handle.spec.parameters[0]].dtype)
        if is_compiling():
            return torch.ops.vbrt.trained_experts(list(args), list(named.values()), handle.token, cast, self.training)
        if is_recorded():
            self._check_recorder()
            return plain.forward(self, *args)  # fake tensors: values do not matter
        if is_transformed():
            return compute(self, args, self._transformed(cast), cast)
        return _StraightThrough.apply(self, tuple(named), cast, len(args), *args, *named.values())

    def _check_recorder(self) -> None:
        """Raise WrapError for a tracer that would record the rounded weights as constants."""
        if is_tracing() or get_proxy_mode() is not None:
            raise WrapError(
                f"{self._vb_handle.spec.name}: torch.jit.trace and make_fx cannot record experts in training, whose "
                "weights are rounded again in each step; use torch.compile, or trace the model after unwrap()"
            )

    def _transformed(self, cast: torch.dtype) -> dict[str, Tensor]:
        """Rounded weights for a call under torch.func transforms or forward-mode AD, built from traceable operations.
        Unlike other forwards, these keep the rounded weights for the backward pass.

        Raises:
            WrapError: there are per-sample weights.
        """
        found = {}
        for name, stack in self._vb_handle.stacks.items():
            weight = values = self._parameters[name]
            while is_functorch_wrapped(values):
                if is_batchedtensor(values):
                    raise WrapError(
                        f"{stack.spec.name}: vmap over the weights of experts in training would need scales for each; "
                        "map over inputs, or unwrap() first"
                    )
                values = get_unwrapped(values)
            with unwatched():
                rounded = stack.stacked(values, cast, training=self.training)
            found[name] = rounded + (weight - weight.detach()).to(cast)  # zeros: straight-through path
        return found

    # -- nn.Module's traversals ---------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        stack = self._vb_handle.stacks.get(name) if "_vb_handle" in self.__dict__ else None
        if stack is not None and stack.separation is not None:  # the weight was replaced
            stack.separation.reset()

    def __delattr__(self, name: str) -> None:
        if name in self._parameters and not self._vb_handle.spec.dense:
            raise self._not_to_be_replaced_here(name)
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As nn.Module's, except for the names under which pruning keeps the originals.

        Raises:
            WrapError: a weight is about to be replaced by a computed value.
        """
        handle = self.__dict__.get("_vb_handle")
        replaced = name.removesuffix("_orig")
        if handle is not None and not handle.spec.dense and replaced != name and replaced in self._parameters:
            raise self._not_to_be_replaced_here(replaced)
        super().register_parameter(name, param)

    def _not_to_be_replaced_here(self, name: str) -> WrapError:
        return WrapError(
            f"{self._vb_handle.spec.name}.{name} cannot be removed or computed from something else (as by prune, "
            "parametrizations and PEFT's target_parameters): apply them before wrapping, or unwrap() first"
        )

    def __reduce_ex__(self, protocol: int):
        return _new_layer, (type(self).plain_class(),), self.__getstate__()

    def _rounded_parameters(self) -> dict[str, Rounded]:
        stacks = self._vb_handle.stacks
        return {f"{n}.{HISTORY}": Rounded(n, stack.separation, stack.spec.shape) for n, stack in stacks.items()}


@functools.cache
def trained_experts_class(plain: type[nn.Module]) -> type[TrainedExperts]:
    """Return the class that replaces `plain` in training."""
    return class_of_experts(TrainedExperts, plain, f"Trained{plain.__name__}", "trains through 4 bits")


def class_of_experts(base: type[SwappedLayer], plain: type[nn.Module], name: str, does: str) -> type[Any]:
    """Return a class of a mixin and an experts module, with that module's forward signature.

    Args:
        base: has `_experts_forward`, which gets all arguments by position.
        does: phrase for the docstring.
    """

    @functools.wraps(plain.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs:
            args = inspect.signature(plain.forward).bind(self, *args, **kwargs).args[1:]
        return self._experts_forward(*args)

    doc = f"{plain.__name__} that {does}. Made by `vbrt.wrap`, not by hand."
    return type(name, (base, plain), {"__module__": plain.__module__, "__doc__": doc, "forward": forward})


@uncompiled(reason="experts are called with what no operator takes")
def _uncompiled(layer: TrainedExperts, *args: Any) -> Tensor:
    return layer._experts_forward(*args)


def _new_layer(plain: type[nn.Module]) -> TrainedExperts:
    return trained_experts_class(plain).__new__(trained_experts_class(plain))


# -- compute and gradients --------------------------------------------------------------------------------------------


def _cast_of(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return autocast's dtype, or that of the weights."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return dtype


def compute(layer: SwappedLayer, args: Sequence[Any], held: Mapping[str, Tensor], cast: torch.dtype | None) -> Tensor:
    """Return the module's output with `held` in place of its parameters.

    Args:
        cast: compute dtype, if it differs from that of the first argument, the hidden states; None: as the
            implementation chooses.
    """
    x, *rest = args
    _, forward = implementation_of(layer)
    return forward(ExpertsView(layer, held, None), x if cast is None else x.to(cast), *rest).to(x.dtype)


def gradients(
    layer: SwappedLayer, args: Sequence[Any], held: Mapping[str, Tensor], cast: torch.dtype | None, dy: Tensor
) -> list[Tensor | None]:
    """Return the gradients of the arguments and of the substituted parameters; None where none is needed."""
    again, inputs = torch.is_grad_enabled(), (*args, *held.values())
    wanted = [value for value in inputs if _has_gradient(value)]
    with torch.enable_grad():
        y = compute(layer, args, held, cast)
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=again, allow_unused=True))
    grads = ((next(found) if _has_gradient(value) else None, value) for value in inputs)
    return [torch.zeros_like(value) if grad is None and _has_gradient(value) else grad for grad, value in grads]


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


@dataclass(frozen=True, slots=True)
class _Seen:
    """Parameters that a forward saw."""

    layer: TrainedExperts
    module: str
    stacks: dict[str, TrainedStack]
    names: tuple[str, ...]
    parameters: tuple[Tensor, ...]
    snapshots: dict[str, tuple]

    def check(self) -> None:
        """Raise WrapError if a weight, its scales, or a nested module's parameter has changed since."""
        parameters, own = dict(zip(self.names, self.parameters, strict=True)), dict(self.layer.named_parameters())
        for name, stack in self.stacks.items():
            stack.check(parameters[name], self.snapshots[name])
        for name, parameter in parameters.items():
            if "." in name and own[name] is not parameter:
                raise WrapError(
                    f"{self.module}: its {name} was replaced between forward and backward (as functional_call does); "
                    "run the backward pass where the forward ran"
                )


class _StraightThrough(Function):
    """Output with rounded weights, and straight-through gradients. Differentiable any number of times."""

    @staticmethod
    def forward(
        ctx: Any, layer: TrainedExperts, names: tuple[str, ...], cast: torch.dtype, count: int, *inputs: Any
    ) -> Tensor:
        args, parameters = inputs[:count], inputs[count:]
        stacks, held = layer.handle.stacks, dict(zip(names, parameters, strict=True))
        rounded = {name: s.stacked(held[name], cast, training=layer.training) for name, s in stacks.items()}
        snapshots = {name: stack.snapshot(held[name]) for name, stack in stacks.items()}
        # not saved tensors: offloading hooks would copy the weights
        ctx.seen = _Seen(layer, layer.handle.spec.name, stacks, names, parameters, snapshots)
        ctx.cast, ctx.autocast = cast, autocast_of(args[0].device.type)
        ctx.others = tuple(None if isinstance(arg, Tensor) else arg for arg in args)
        ctx.save_for_backward(*(arg if isinstance(arg, Tensor) else None for arg in args))
        return compute(layer, args, _by_name(held) | rounded, cast)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        seen, again, needed = ctx.seen, torch.is_grad_enabled(), ctx.needs_input_grad[4 + len(ctx.others) :]
        seen.check()
        args = [other if t is None else t for t, other in zip(ctx.saved_tensors, ctx.others, strict=True)]
        if not again:
            args = [t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in args]
        with ctx.autocast:
            held = _held_again(seen, ctx.cast, needed, again=again)
            grads = gradients(seen.layer, args, held, ctx.cast, dy)
        found = zip(grads[len(args) :], seen.parameters, needed, strict=True)
        kept = (grad.to(parameter.dtype) if need else None for grad, parameter, need in found)
        return None, None, None, None, *grads[: len(args)], *kept


def _by_name(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's direct parameters; nested modules read their own."""
    return {name: parameter for name, parameter in parameters.items() if "." not in name}


def _held_again(seen: _Seen, cast: torch.dtype, needed: Sequence[bool], *, again: bool) -> dict[str, Tensor]:
    """Return the parameters for the backward pass's recomputation, by name, in order."""
    stacks, held = seen.stacks, {}
    for name, parameter, need in zip(seen.names, seen.parameters, needed, strict=True):
        if name not in stacks:
            held[name] = parameter
        elif again:
            held[name] = _Rounded.apply(parameter, stacks[name], cast)
        else:
            with torch.no_grad():
                rounded = stacks[name].stacked_as_before(parameter, cast)
            held[name] = rounded.requires_grad_(need)
    return held


class _Rounded(Function):
    """Rounded parameter in a backward pass, with a straight-through derivative."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, stack: TrainedStack, dtype: torch.dtype) -> Tensor:
        ctx.dtype = weight.dtype
        return stack.stacked_as_before(weight, dtype)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, ...]:
        return dw.to(ctx.dtype), None, None
