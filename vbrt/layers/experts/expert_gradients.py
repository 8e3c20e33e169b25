"""Gradients through frozen routed experts: of hidden states, routing weights, biases, norms and adapters' factors.

Nothing of the weights' size is saved. The backward pass leases the pages again, in chunks like a scan, and recomputes
each chunk's contribution on decoded weights, by the implementation that the module's config names. Blocks that are
recorded are checkpointed: what is computed again there is kept, as the backward follows at once.

Rejected: differentiable products on pages. They would save the first product of the recomputation, but do not support
modules' own gates and norms.

Legend: T tokens, k experts a token, P = T k pairs, H hidden.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from vbrt.errors import WrapError
from vbrt.host import accelerator
from vbrt.layers.experts.adapted_experts import Adapters, adapters_of, with_adapters
from vbrt.layers.experts.library_experts import UNHEARD, ExpertsView, implementation_of
from vbrt.layers.experts.protocols import ExpertsModule, LeasedExperts
from vbrt.layers.experts.run_experts import chunks_of, keeps_decoded, leased_experts, run_experts
from vbrt.layers.experts.touched_experts import Routed, local_ids, pairs_of
from vbrt.layers.weights.linear_product import pass_precision, precision
from vbrt.libraries.peft_api import Factors

__all__ = ["autocast_of", "forward_experts", "kept_parameters"]


def forward_experts(layer: ExpertsModule, *args: Any) -> Tensor:
    """Return the layer's output for its arguments; gradients flow to x, the routing weights and kept parameters."""
    routed, adapters = Routed(*args), adapters_of(layer)
    layer.handle.forwards += 1
    if torch.is_grad_enabled():
        kept = kept_parameters(layer)
        terms = [(name, term.scale) for name, of in adapters.items() for term in of]
        factors = [factor for of in adapters.values() for term in of for factor in (term.left, term.right)]
        inputs = (routed.x, routed.weights, *kept.values(), *factors)
        if any(tensor.requires_grad for tensor in inputs):
            if keeps_decoded(layer, adapters):
                return run_experts(layer, routed, fetches=True, adapters=adapters)
            y = _Recomputed.apply(layer, (tuple(kept), terms), routed.ids, *inputs)
            beside = getattr(type(layer), "beside_experts", None)
            if beside is None:
                return y
            added = beside(layer, routed)  # is in y: only its gradient counts
            return y + (added - added.detach())
    with torch.no_grad():
        return run_experts(layer, routed, adapters=adapters)


def _adapters_of(terms: Sequence[tuple[str, float]], factors: Sequence[Tensor]) -> Adapters:
    """Return the terms of adapters, given their names and scales, and the factors of all."""
    adapters: dict[str, list[Factors]] = {}
    for (name, scale), left, right in zip(terms, factors[::2], factors[1::2], strict=True):
        adapters.setdefault(name, []).append(Factors(left, right, scale))
    return adapters


def kept_parameters(layer: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that are not in the tiers, biases and norms, by name."""
    return dict(nn.Module.named_parameters(layer))


def autocast_of(device: str) -> contextlib.AbstractContextManager:
    """Return this thread's autocast state, for the backward pass, which runs in another thread."""
    return torch.autocast(
        device,
        torch.get_autocast_dtype(device),
        enabled=torch.is_autocast_enabled(device),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )


class _Recomputed(Function):
    """Output of a layer with recomputation in the backward pass; differentiable any number of times."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: ExpertsModule,
        named: tuple[tuple[str, ...], Sequence[tuple[str, float]]],
        ids: Tensor,
        x: Tensor,
        weights: Tensor,
        *others: Tensor,
    ) -> Tensor:
        """named: the kept parameters, and the adapters' terms with their scales; others: these parameters, and two
        factors of each term."""
        ctx.layer, ctx.handle, ctx.generation, (ctx.names, ctx.terms) = (
            layer,
            layer.handle,
            layer.handle.generation,
            named,
        )
        ctx.autocast, ctx.precision = autocast_of(x.device.type), pass_precision()
        ctx.named, ctx.implementation = implementation_of(layer)
        ctx.save_for_backward(ids, x, weights, *others)
        adapters = _adapters_of(ctx.terms, others[len(ctx.names) :])
        return run_experts(layer, Routed(x, ids, weights), fetches=True, adapters=adapters)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ids, *inputs = ctx.saved_tensors
        again = torch.is_grad_enabled()  # for the derivative of a derivative
        if not again:
            inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
        kept = slice(2, 2 + len(ctx.names))
        inputs[kept] = _read_by_modules(ctx, inputs[kept])
        needed = ctx.needs_input_grad[3:]
        wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
        sums: list[Tensor | None] = [None] * len(wanted)
        handle = ctx.handle.still(ctx.generation)
        touched = leased_experts(ctx.layer, ids, decoded=True)
        with precision(ctx.precision), ctx.autocast:
            for chunk in chunks_of(handle, touched, scan=True, precision=ctx.precision) if touched else ():
                with handle.lease(chunk, ctx.precision) as leased:  # matrices may be views of its pages
                    part = _whole if ctx.named in UNHEARD and len(chunk) == len(touched) else _rows
                    y, own_dy = part(ctx, leased, ids, inputs, dy)
                    found = torch.autograd.grad(y, wanted, own_dy, create_graph=again, allow_unused=True)
                sums = [_sum(old, new) for old, new in zip(sums, found, strict=True)]
        grads = iter(torch.zeros_like(w) if g is None else g for g, w in zip(sums, wanted, strict=True))
        return None, None, None, *(next(grads) if need else None for need in needed)


def _sum(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    return new if old is None else old if new is None else old + new


def _whole(ctx: Any, leased: LeasedExperts, ids: Tensor, inputs: Sequence[Tensor], dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of all touched experts, [T, H], and its gradient."""
    x, weights = inputs[:2]
    view, local_Tk = _view(ctx, leased, inputs), local_ids(ids, ctx.handle.spec.experts, leased.experts)
    with torch.enable_grad():
        y_TH = ctx.implementation(view, x, local_Tk, weights)
        return y_TH, dy.to(y_TH.dtype)


def _rows(ctx: Any, leased: LeasedExperts, ids: Tensor, inputs: Sequence[Tensor], dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted output rows of some experts' pairs, [p, H], and their gradient."""
    x, weights = inputs[:2]
    view, local_Tk = _view(ctx, leased, inputs), local_ids(ids, ctx.handle.spec.experts, leased.experts)
    pairs_P, k = pairs_of(local_Tk, len(leased.experts)), local_Tk.shape[1]
    with torch.enable_grad():
        x_PH, weights_P1 = x[pairs_P // k], weights.reshape(-1, 1)[pairs_P]
        y_PH = ctx.implementation(view, x_PH, local_Tk.reshape(-1, 1)[pairs_P], weights_P1)
        return y_PH, dy[pairs_P // k].to(y_PH.dtype)


def _view(ctx: Any, leased: LeasedExperts, inputs: Sequence[Tensor]) -> ExpertsView:
    """Return the module's view of the leased experts, with adapters' terms.

    Where gradients are enabled, for a later derivative, it holds no view of the leased pages.
    """
    kept, factors = inputs[2 : 2 + len(ctx.names)], inputs[2 + len(ctx.names) :]
    held = leased.parameters()
    if torch.is_grad_enabled():
        held = {name: weight.clone() for name, weight in held.items()}
    with torch.enable_grad():
        held = with_adapters(held, _adapters_of(ctx.terms, factors), leased.experts)
        held |= _of_experts(dict(zip(ctx.names, kept, strict=True)), leased.experts)
    view = ExpertsView(ctx.layer, held, None)
    view.num_experts = len(leased.experts)
    return view


def _read_by_modules(ctx: Any, kept: Sequence[Tensor]) -> list[Tensor]:
    """Return kept parameters, those of modules within the layer as these read them.

    Raises:
        WrapError: such a parameter is not the one that the forward had.
    """
    own, names = kept_parameters(ctx.layer), ctx.names
    for name, tensor in zip(names, kept, strict=True):
        if "." in name and own[name].data_ptr() != tensor.data_ptr():
            raise WrapError(
                f"{ctx.handle.spec.name}: its {name} was replaced between forward and backward (as functional_call "
                "does); run the backward pass where the forward ran"
            )
    return [own[name] if "." in name else tensor for name, tensor in zip(names, kept, strict=True)]


def _of_experts(kept: Mapping[str, Tensor], experts: Sequence[int]) -> dict[str, Tensor]:
    """Return the rows of biases that some experts have."""
    own = {name: tensor for name, tensor in kept.items() if "." not in name}
    if all(len(tensor) == len(experts) for tensor in own.values()):
        return own
    index = torch.tensor(experts, dtype=torch.int64, device="cpu")
    return {name: tensor[accelerator.sent(index, tensor.device)] for name, tensor in own.items()}
