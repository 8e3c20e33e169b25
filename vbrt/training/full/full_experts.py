"""Modules of routed experts that train from the tiers: each stacked parameter is one weight.

A parameter's matrices, of all experts, are one page of high halves, one page of state and one gradient: a step's tokens
go to nearly all experts of a layer. Forward and backward lease the pages of all parameters of a module together, and
compute by the experts implementation that the model's config names, so the bits are those of the resident module. The
backward pass computes the layer once more, and keeps nothing of the weights' size. Experts without tokens have a
gradient of zeros, as autograd gives it to a stacked parameter: weight decay and moments go on for them.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from vbrt.kernels.frozen_product import as_autocast
from vbrt.layers.experts.expert_gradients import autocast_of
from vbrt.layers.rebind_forward import rebind_
from vbrt.tiers import Lease
from vbrt.tiers.stack.pass_counts import in_backward
from vbrt.training.full.full_layers import FullLayer, check_held, check_version, wanted
from vbrt.training.full.full_weight import FullWeight, graphs_end_here
from vbrt.training.qat.qat_experts import class_of_experts, compute, gradients

__all__ = ["ExpertsPart", "FullExperts"]


class FullExperts(FullLayer):
    """Common part of modules of routed experts that train from the tiers; a mixin in front of the module's own class.

    What the model's registry has are the module's parts, one for each stacked parameter.
    """

    _vb_parts: "dict[str, ExpertsPart]"

    @classmethod
    def adopt_(cls, module: nn.Module, handle: FullWeight) -> "ExpertsPart":
        """Have a module's parameter train from the tiers; the first one turns the module into a layer in place."""
        if not isinstance(module, FullExperts):
            module.__class__ = _experts_class(type(module))
            rebind_(module, type(module))
            module.__dict__.update(_vb_handle=handle, _vb_parts={})
        part = module._vb_parts[handle.spec.site.parameter] = ExpertsPart.of(module, handle)
        return part

    @property
    def materialized(self) -> bool:
        """True once all weights are in the tiers."""
        return all(part.materialized for part in self._vb_parts.values())

    @property
    def trained_parameters(self) -> tuple[str, ...]:
        """The names of the parameters that train."""
        return tuple(self._vb_parts)

    def materialize_(self) -> None:
        """Take the weights into the tiers, those that are not there."""
        for part in self._vb_parts.values():
            part.materialize_()

    def _held(self) -> dict[str, FullWeight]:
        return {name: part.handle for name, part in self._vb_parts.items()}

    @graphs_end_here
    def _experts_forward(self, *args: Any) -> Tensor:
        """The module's own forward, with the high halves."""
        if not self.materialized:
            self.materialize_()
        weights = self._held()
        others = {name: p for name, p in nn.Module.named_parameters(self) if name not in weights}
        for weight in weights.values():
            weight.forwards += 1
            weight.check_dtype(as_autocast(args[0][:0]))
            check_held(self, weight)
        if not torch.is_grad_enabled():
            with _leased(weights) as held:
                return compute(self, args, _read(others) | held, None)
        for weight in weights.values():
            weight.gradient.expected += weight.trainable and not in_backward()  # computed again there
        stacked = [weight.parameter for weight in weights.values()]
        return _Routed.apply(self, tuple(others), *stacked, *args, *others.values())


class ExpertsPart(FullLayer):
    """One stacked parameter of a module of routed experts, as the model's registry has it. It is no module of the
    model, and goes with the one that it is a part of."""

    @classmethod
    def of(cls, module: FullExperts, handle: FullWeight) -> "ExpertsPart":
        """Return the part of a module that a weight is."""
        part = cls.__new__(cls)
        part.__dict__.update(_vb_handle=handle, _vb_module=weakref.ref(module), _modules={}, _buffers={})
        handle.layers.add(part)
        return part

    @property
    def _parameters(self) -> dict[str, nn.Parameter | None]:
        return self.__dict__["_vb_module"]()._parameters

    def release_(self, dense: nn.Parameter | None = None) -> nn.Module:
        """Give the module its parameter back, in fp32; with the last one it is what it was. Returns the module."""
        module, handle = self.__dict__["_vb_module"](), self._vb_handle
        handle.give_back()
        handle.layers.discard(self)
        module._vb_parts.pop(handle.spec.site.parameter)
        if not module._vb_parts:
            module._become_plain()
        return module


@functools.cache
def _experts_class(plain: type[nn.Module]) -> type[FullExperts]:
    """Return the class that takes the place of `plain`."""
    return class_of_experts(FullExperts, plain, f"Full{plain.__name__}", "trains from the tiers")


@contextlib.contextmanager
def _leased(weights: Mapping[str, FullWeight]) -> Iterator[dict[str, Tensor]]:
    """Lease the high halves of all weights of a module, by parameter, once they are up to date."""
    for weight in weights.values():
        weight.check_pages()
        weight.settle()
    first = next(iter(weights.values()))
    with Lease(first.stack, [key for weight in weights.values() for key in weight.keys]) as tensors:
        yield {name: fields["weight"] for name, fields in zip(weights, tensors, strict=True)}


def _read(others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters that the module reads itself; those of modules within it these read."""
    return {name: parameter for name, parameter in others.items() if "." not in name}


class _Routed(Function):
    """A module's output, whose gradients of stacked parameters go to the weights' handles. `inputs`: these parameters,
    which is where they are in autograd's graph, the module's arguments, and the other parameters, named."""

    @staticmethod
    def forward(ctx: Any, layer: FullExperts, names: tuple[str, ...], *inputs: Any) -> Tensor:
        ctx.layer, ctx.weights = layer, layer._held()
        begin, end = len(ctx.weights), len(inputs) - len(names)
        args, ctx.others = inputs[begin:end], dict(zip(names, inputs[end:], strict=True))
        ctx.versions = [weight.state.version for weight in ctx.weights.values()]
        ctx.autocast = autocast_of(args[0].device.type)
        ctx.constants = tuple(None if isinstance(arg, Tensor) else arg for arg in args)
        ctx.save_for_backward(*(arg if isinstance(arg, Tensor) else None for arg in args))
        with _leased(ctx.weights) as held:
            return compute(layer, args, _read(ctx.others) | held, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved, first = zip(ctx.saved_tensors, ctx.constants, strict=True), 2 + len(ctx.weights)
        wants = {name: wanted(ctx, weight, at) for at, (name, weight) in enumerate(ctx.weights.items())}
        args = [
            constant if t is None else t.detach().requires_grad_(ctx.needs_input_grad[first + i])
            for i, (t, constant) in enumerate(saved)
        ]
        with _leased(ctx.weights) as held:
            for weight, version in zip(ctx.weights.values(), ctx.versions, strict=True):
                check_version(weight, version)
            for name, high in held.items():
                held[name] = high.detach().requires_grad_(wants[name])
            with ctx.autocast:
                found = gradients(ctx.layer, args, {**ctx.others, **held}, None, dy)
        found, of_weights = found[: -len(held)], found[-len(held) :]
        for weight, dw in zip(ctx.weights.values(), of_weights, strict=True):
            if dw is not None:
                weight.outlet.send(weight.gradient, weight.spec.weight_shape, functools.partial(_put, dw))
        return None, None, *(None for _ in ctx.weights), *found


def _put(dw: Tensor, out: Tensor) -> None:
    out.copy_(dw)
