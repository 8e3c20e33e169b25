"""Routed experts that train from the tiers: one weight per stacked parameter.

The matrices of all experts in a parameter form one page of high halves, one state page and one gradient, since a step's
tokens reach nearly all experts of a layer. Forward and backward lease all pages of a module together and compute with
the experts implementation of the model's config, so results are bitwise those of the resident module. The backward pass
recomputes the layer and keeps nothing of the weights' size. Experts without tokens get zero gradients, as autograd
gives a stacked parameter: weight decay and moments go on for them.
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
    """Mixin for modules of routed experts that train from the tiers, in front of the module's own class.

    The model's registry holds the module's parts, one per stacked parameter.
    """

    _vb_parts: "dict[str, ExpertsPart]"

    @classmethod
    def adopt_(cls, module: nn.Module, handle: FullWeight) -> "ExpertsPart":
        """Make one parameter train from the tiers; the first call swaps the module's class in place."""
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
        """Names of the trained parameters."""
        return tuple(self._vb_parts)

    def materialize_(self) -> None:
        """Move the remaining weights into the tiers."""
        for part in self._vb_parts.values():
            part.materialize_()

    def _held(self) -> dict[str, FullWeight]:
        return {name: part.handle for name, part in self._vb_parts.items()}

    @graphs_end_here
    def _experts_forward(self, *args: Any) -> Tensor:
        """Run the module's own forward on the high halves."""
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
            weight.gradient.expected += weight.trainable and not in_backward()  # recomputed there
        stacked = [weight.parameter for weight in weights.values()]
        return _Routed.apply(self, tuple(others), *stacked, *args, *others.values())


class ExpertsPart(FullLayer):
    """One stacked parameter of a module of routed experts, as the model's registry has it. It is not a submodule of the
    model, and lives as long as its module."""

    @classmethod
    def of(cls, module: FullExperts, handle: FullWeight) -> "ExpertsPart":
        """Return the part for a weight of a module."""
        part = cls.__new__(cls)
        part.__dict__.update(_vb_handle=handle, _vb_module=weakref.ref(module), _modules={}, _buffers={})
        handle.layers.add(part)
        return part

    @property
    def _parameters(self) -> dict[str, nn.Parameter | None]:
        return self.__dict__["_vb_module"]()._parameters

    def release_(self, dense: nn.Parameter | None = None) -> nn.Module:
        """Restore the parameter in fp32; the last part also restores the module's class. Returns the module."""
        module, handle = self.__dict__["_vb_module"](), self._vb_handle
        handle.give_back()
        handle.layers.discard(self)
        module._vb_parts.pop(handle.spec.site.parameter)
        if not module._vb_parts:
            module._become_plain()
        return module


@functools.cache
def _experts_class(plain: type[nn.Module]) -> type[FullExperts]:
    """Return the subclass that replaces `plain`."""
    return class_of_experts(FullExperts, plain, f"Full{plain.__name__}", "trains from the tiers")


@contextlib.contextmanager
def _leased(weights: Mapping[str, FullWeight]) -> Iterator[dict[str, Tensor]]:
    """Lease the high halves of all weights of a module, by parameter, after their pending updates."""
    for weight in weights.values():
        weight.check_pages()
        weight.settle()
    first = next(iter(weights.values()))
    with Lease(first.stack, [key for weight in weights.values() for key in weight.keys]) as tensors:
        yield {name: fields["weight"] for name, fields in zip(weights, tensors, strict=True)}


def _read(others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's direct parameters; nested modules read their own."""
    return {name: parameter for name, parameter in others.items() if "." not in name}


class _Routed(Function):
    """Output of a module of routed experts whose stacked gradients go to the weights' handles. `inputs`: the stacked
    parameters (their anchors in autograd's graph), the module's arguments, and the other parameters, named."""

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
