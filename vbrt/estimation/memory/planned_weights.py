"""A plan's effect on memory: changes to the traced copy of a model.

The copy has fewer blocks than the plan, so weights are matched by class and shape, not by name.
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
from vbrt.libraries.transformers_loss import replace_losses
from vbrt.residency.activation_plan import KEEP
from vbrt.residency.plan import Plan
from vbrt.training.token_loss import TokenLoss

__all__ = ["Held", "held_alike", "held_by"]

_BUFFERS = 2  # double buffer for gradients, D2H, see vbrt.training.full.host_gradients


@dataclass(frozen=True, slots=True)
class Held:
    """Differences from the plain model.

    Attributes:
        rounded: returns a copy's weights that train in 4 bits.
        prepare: changes a copy before it runs.
        full: weights train from the tiers, and unswapped parameters have fp32 masters.
        activations: mode of blocks' activations, see `vbrt.residency.activation_plan`.
        recorded: blocks that compute again are CUDA graphs, see `vbrt.model.recorded_blocks`.
    """

    rounded: Callable[[nn.Module], Iterable[Tensor]] = lambda model: ()
    prepare: Callable[[nn.Module], None] = lambda model: None
    full: bool = False
    activations: str = KEEP
    recorded: bool = False


def held_by(model: nn.Module, plan: Plan | None, task: Task) -> Held:
    """Return a plan's effect on a model's weights; plan None: unwrapped."""
    if plan is None:
        return Held()
    prepared = _streamed(model, plan) if plan.mode == "full" else _fused_experts(model, plan, task)

    def prepare(model: nn.Module) -> None:
        prepared(model)
        replace_losses(model, TokenLoss)

    if plan.mode == "full":
        return Held(prepare=prepare, full=True, recorded=plan.compute_tier == "gpu")
    return Held(_rounded(plan), prepare)


def held_alike(model: nn.Module, plan: Plan | None, task: Task) -> Hashable:
    """Return a key that is equal for plans under which a task allocates the same."""
    if plan is None:
        return ""
    return plan.mode, frozenset(_held_experts(model, plan, task).items())


def _rounded(plan: Plan) -> Callable[[nn.Module], list[Tensor]]:
    """Return a function that finds a copy's 4-bit trained weights: linear weights of swapped shapes."""
    shapes = {swap.shape for swap in plan.swaps} if plan.mode == "train" else set()

    def rounded(model: nn.Module) -> list[Tensor]:
        linear = (module for module in model.modules() if isinstance(module, nn.Linear))
        return [module.weight for module in linear if tuple(module.weight.shape) in shapes]

    return rounded


def _fused_experts(model: nn.Module, plan: Plan, task: Task) -> Callable[[nn.Module], None]:
    """Return a function that gives a copy's swapped experts the workspace of vbrt's kernels, see
    `expert_workspace.py`."""
    held = _held_experts(model, plan, task)

    def prepare(model: nn.Module) -> None:
        for module in model.modules():
            if type(module) in held:
                module.forward = partial(held[type(module)].forward, module, module.forward)

    return prepare


def _held_experts(model: nn.Module, plan: Plan, task: Task) -> dict[type[nn.Module], HeldExperts]:
    swaps = {type(model.get_submodule(swap.site.module)): swap for swap in plan.routed}
    return {kind: HeldExperts.of(swap, plan, task) for kind, swap in swaps.items()}


# -- training from the tiers ------------------------------------------------------------------------------------------


def _streamed(model: nn.Module, plan: Plan) -> Callable[[nn.Module], None]:
    """Return a function that makes a copy's swapped layers compute with bf16 weights, uncounted: the plan counts
    them."""
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
    """Forward of routed experts that allocates the inputs and outputs of their products, without computing."""
    pairs = pairs_among((*args, *kwargs.values())) or x.numel() // x.shape[-1]
    stacked = [p for p in module.parameters(recurse=False) if p.dim() > 2 and not p.requires_grad]
    return _Routed.apply(x, leaving.anchor, stacked, pairs, leaving)


class _Leaving:
    """Device-side gradient buffers for D2H copies, allocated on first use."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._buffers: list[Tensor] = []
        self.anchor = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)

    def of(self, weight: Tensor) -> Tensor:
        """Return a buffer for a weight's gradient."""
        while len(self._buffers) < _BUFFERS:
            self._buffers.append(weight.new_empty(self._largest))
        return self._buffers[0][: weight.numel()].view(weight.shape)


class _Streamed(torch.autograd.Function):
    """x [..., K] times a streamed weight [N, K] ([K, N] if transposed); the gradient goes into a buffer."""

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
    """Rows [..., K] of a streamed table [N, K]; the gradient is dense, and copied into a buffer."""

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
    """Rows [..., K] through streamed routed experts: inputs and outputs of all pairs' products in the forward; in the
    backward, which recomputes them, also their gradients and those of all stacked weights."""

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
    """Allocate inputs and outputs of all pairs' products."""
    return [x.new_empty((pairs, size), dtype=torch.bfloat16) for weight in stacked for size in weight.shape[1:]]
