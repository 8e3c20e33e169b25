"""Custom operator of routed experts in training, for compiled graphs: modules are named by their weights' token.

Registered when `vbrt.training` is imported.
"""

from typing import Any

import torch
from torch import Tensor, nn

from vbrt.errors import WrapError
from vbrt.layers.weights.weight_operators import library
from vbrt.training.qat.compiled_layers import weight_of
from vbrt.training.qat.qat_experts import TrainedExperts, compute, gradients

__all__: list[str] = []


def _layer_of(token: Tensor) -> TrainedExperts:
    """Return the live module of a compiled graph's token."""
    layer = next(iter(weight_of(token).layers), None)
    if layer is None:
        raise WrapError("a compiled graph names experts in training that are gone; compile again")
    return layer


def _held(layer: TrainedExperts, parameters: list[Tensor], cast: torch.dtype, *, training: bool | None) -> dict:
    """Return the parameters to compute with, by name; `training` None: rounded as in the last forward."""
    held = dict(zip(dict(nn.Module.named_parameters(layer)), parameters, strict=True))
    for name, stack in layer.handle.stacks.items():
        if training is None:
            held[name] = stack.stacked_as_before(held[name], cast)
        else:
            held[name] = stack.stacked(held[name], cast, training=training)
    return held


_TAGS = (torch.Tag.cudagraph_unsafe,)  # depends on counters that a CUDA graph replay would not see


@torch.library.custom_op("vbrt::trained_experts", mutates_args=(), tags=_TAGS)
def _trained_experts(
    args: list[Tensor], parameters: list[Tensor], token: Tensor, cast: torch.dtype, training: bool
) -> Tensor:
    """Output of the module that `token` names, for x, ids and routing weights, with rounded weights."""
    layer = _layer_of(token)
    layer.handle.forwards += 1
    return compute(layer, args, _held(layer, parameters, cast, training=training), cast)


@_trained_experts.register_fake
def _(args, parameters, token, cast, training):
    return torch.empty_like(args[0])


# not a custom_op, because those run without autograd
library.define(
    "trained_experts_backward(Tensor dy, Tensor[] args, Tensor[] parameters, Tensor token, ScalarType cast) "
    "-> Tensor[]",
    tags=_TAGS,
)


@torch.library.impl(library, "trained_experts_backward", "CompositeExplicitAutograd")
def _trained_experts_backward(
    dy: Tensor, args: list[Tensor], parameters: list[Tensor], token: Tensor, cast: torch.dtype
) -> list[Tensor]:
    """Gradients of the arguments and the parameters; zeros for ids."""
    layer = _layer_of(token)
    own = dict(nn.Module.named_parameters(layer))
    held = _held(layer, [p.detach() for p in parameters], cast, training=None)
    for name in held:
        held[name] = own[name] if "." in name else held[name].requires_grad_(own[name].requires_grad)
    args = [arg.detach().requires_grad_(arg.is_floating_point()) for arg in args]
    found = gradients(layer, args, held, cast, dy)
    return [
        torch.zeros_like(t) if g is None else g.to(t.dtype) for g, t in zip(found, (*args, *parameters), strict=True)
    ]


@torch.library.register_fake("vbrt::trained_experts_backward", lib=library)
def _(dy, args, parameters, token, cast):
    return [torch.empty_like(t) for t in (*args, *parameters)]


def _keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    args, parameters, token, ctx.cast, _ = inputs
    ctx.count = len(args)
    ctx.save_for_backward(token, *args, *parameters)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    token, *inputs = ctx.saved_tensors
    args, parameters = inputs[: ctx.count], inputs[ctx.count :]
    found = torch.ops.vbrt.trained_experts_backward(dy, args, parameters, token, ctx.cast)
    dargs = [grad if arg.is_floating_point() else None for grad, arg in zip(found, args, strict=False)]
    return dargs, found[ctx.count :], None, None, None


_trained_experts.register_autograd(_backward, setup_context=_keep)
