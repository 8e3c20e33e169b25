"""How a plan holds weights, as far as memory sees it: changes of a copy of a model that is traced.

The copy has fewer blocks than the plan knows, so that weights are found by their class and shape, not by name.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vbrt.estimation.memory.expert_workspace import HeldExperts, pairs_among
from vbrt.estimation.memory.task import Task
from vbrt.kernels.frozen_product import as_autocast
from vbrt.residency.activation_plan import KEEP
from vbrt.residency.plan import Plan

__all__ = ["Held", "held_alike", "held_by"]

_BUFFERS = 2  # of gradients on their way from the device, see vbrt.training.full.host_gradients


@dataclass(frozen=True, slots=True)
class Held:
    """What is different from the plain model.

    Attributes:
        rounded: returns the weights of a copy that train in 4 bits.
        prepare: changes a copy before it runs.
        full: weights train from the tiers: parameters that stay have fp32 masters.
        activations: what blocks keep for the backward pass, see `vbrt.residency.activation_plan`.
    """

    rounded: Callable[[nn.Module], Iterable[Tensor]] = lambda model: ()
    prepare: Callable[[nn.Module], None] = lambda model: None
    full: bool = False
    activations: str = KEEP


def held_by(model: nn.Module, plan: Plan | None, task: Task) -> Held:
    """Return how a plan holds the weights of a model; None: as they are."""
    if plan is None:
        return Held()
    if plan.mode == "full":
        return Held(prepare=_streamed(model, plan), full=True)
    return Held(_rounded(plan), _fused_experts(model, plan, task))


def held_alike(model: nn.Module, plan: Plan | None, task: Task) -> Hashable:
    """Return what is equal for plans of one model under which a task allocates the same."""
    if plan is None or (task.trains and plan.mode == "infer" and not plan.routed):
        return ""  # what is frozen trains nothing, wrapped or not: PEFT freezes all that is swapped, and more
    return plan.mode, frozenset(_held_experts(model, plan, task).items())


def _rounded(plan: Plan) -> Callable[[nn.Module], list[Tensor]]:
    """Return which weights of a copy train in 4 bits: those of the shapes that are swapped."""
    shapes = {swap.shape for swap in plan.swaps} if plan.mode == "train" else set()

    def rounded(model: nn.Module) -> list[Tensor]:
        linear = (module for module in model.modules() if isinstance(module, nn.Linear))
        return [module.weight for module in linear if tuple(module.weight.shape) in shapes]

    return rounded


def _fused_experts(model: nn.Module, plan: Plan, task: Task) -> Callable[[nn.Module], None]:
    """Return what gives swapped experts of a copy the sizes of vbrt's kernels, see `expert_workspace.py`."""
    held = _held_experts(model, plan, task)

    def prepare(model: nn.Module) -> None:
        for module in model.modules():
            if type(module) in held:
                module.forward = partial(held[type(module)].forward, module, module.forward)

    return prepare


def _held_experts(model: nn.Module, plan: Plan, task: Task) -> dict[type[nn.Module], HeldExperts]:
    swaps = {type(model.get_submodule(swap.site.module)): swap for swap in plan.routed}
    return {kind: HeldExperts.of(swap, plan, task) for kind, swap in swaps.items()}


# -- weights that train from the tiers --------------------------------------------------------------------------------


def _streamed(model: nn.Module, plan: Plan) -> Callable[[nn.Module], None]:
    """Return what makes swapped layers of a copy compute with a bf16 half that nobody counts: the plan does."""
    kinds: dict[tuple[type, tuple[int, ...]], tuple[tuple[str, ...], bool]] = {}
    for site, shape in ((site, swap.shape) for swap in plan.swaps for site in swap.sites):
        module = model.get_submodule(site.module)
        found = tuple(getattr(module, site.parameter).shape)
        names, _ = kinds.get((type(module), found), ((), False))
        kinds[type(module), found] = (*names, site.parameter), found != shape
    largest = max((swap.site.parameters for swap in plan.swaps), default=0)

    def prepare(model: nn.Module) -> None:
        leaving = _Leaving(largest)
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                found = kinds.get((type(module), tuple(parameter.shape)))
                if found is None or name not in found[0]:
                    continue
                high = torch.empty(parameter.shape, dtype=torch.bfloat16, device=parameter.device)
                setattr(module, name, nn.Parameter(high, requires_grad=False))
                if high.dim() > 2:
                    module.forward = partial(_routed, module, leaving)
                    continue
                forward = _looked_up if isinstance(module, nn.Embedding) else _multiplied
                module.forward = partial(forward, module, name, found[1], leaving)

    return prepare


def _looked_up(module: nn.Module, name: str, transposed: bool, leaving: "_Leaving", ids: Tensor) -> Tensor:
    return _Lookup.apply(ids, getattr(module, name), leaving.anchor, leaving)


def _multiplied(module: nn.Module, name: str, transposed: bool, leaving: "_Leaving", x: Tensor) -> Tensor:
    bias = as_autocast(module.bias) if module.bias is not None else None
    return _Streamed.apply(as_autocast(x), getattr(module, name), bias, leaving.anchor, (transposed, leaving))


def _routed(module: nn.Module, leaving: "_Leaving", x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The output of routed experts: what their products take and give is counted, nothing is computed."""
    pairs = pairs_among((*args, *kwargs.values())) or x.numel() // x.shape[-1]
    stacked = [p for p in module.parameters(recurse=False) if p.dim() > 2 and not p.requires_grad]
    return _Routed.apply(x, leaving.anchor, stacked, pairs, leaving)


class _Leaving:
    """The buffers through which gradients leave the device; there from the first of them on."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._buffers: list[Tensor] = []
        self.anchor = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)

    def of(self, weight: Tensor) -> Tensor:
        """Return room for the gradient of a weight."""
        while len(self._buffers) < _BUFFERS:
            self._buffers.append(weight.new_empty(self._largest))
        return self._buffers[0][: weight.numel()].view(weight.shape)


class _Streamed(torch.autograd.Function):
    """x [..., K] times a weight in the tiers, [N, K], or [K, N] if transposed: the gradient goes into a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor, how: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.has_bias, (ctx.transposed, ctx.leaving) = weight, bias is not None, how
        return F.linear(x, weight.t() if ctx.transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dx = dy.matmul(ctx.weight.t() if ctx.transposed else ctx.weight)
        pair = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        one, two = reversed(pair) if ctx.transposed else pair
        torch.mm(one.t(), two, out=ctx.leaving.of(ctx.weight))
        return dx, None, dy.flatten(0, -2).sum(0) if ctx.has_bias else None, None, None


class _Lookup(torch.autograd.Function):
    """Rows [..., K] of a table [N, K] in the tiers: the gradient is dense, and copied into a buffer."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, anchor: Tensor, leaving: _Leaving) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table, ctx.leaving = table, leaving
        return table.new_empty((*ids.shape, table.shape[1]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        made = torch.ops.aten.embedding_dense_backward(dy, ids, ctx.table.shape[0], -1, False)
        ctx.leaving.of(ctx.table).copy_(made)
        return None, None, None, None


class _Routed(torch.autograd.Function):
    """Rows [..., K] through routed experts in the tiers: inputs and outputs of the products of all pairs, once in the
    forward; with gradients of them, and of all stacked weights, in the backward pass, which computes them again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, stacked: list[Tensor], pairs: int, leaving: _Leaving) -> Tensor:
        ctx.save_for_backward(x)
        ctx.how = stacked, pairs, leaving
        _products(x, stacked, pairs)
        return x.new_empty(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        stacked, pairs, leaving = ctx.how
        held = [_products(dy, stacked, pairs) for _ in range(2)]
        gradients = [weight.new_empty(weight.shape) for weight in stacked]
        del held
        for weight, gradient in zip(stacked, gradients, strict=True):
            leaving.of(weight).copy_(gradient)
        return dy.new_empty(dy.shape), None, None, None, None


def _products(x: Tensor, stacked: list[Tensor], pairs: int) -> list[Tensor]:
    """Return room for the inputs and outputs of the products of all pairs."""
    return [x.new_empty((pairs, size), dtype=torch.bfloat16) for weight in stacked for size in weight.shape[1:]]
