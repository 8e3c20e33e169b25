"""Resident 4-bit experts in captured CPU steps: no leases, prepared kernel arguments."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from vbrt.kernels.cpu.fixed_experts import Experts, prepare_layer
from vbrt.kernels.cpu.prepared import Empty, Prepared
from vbrt.layers.experts.experts_layer import VBExperts
from vbrt.layers.experts.gates import kept_gate
from vbrt.layers.experts.leased_experts import pages_of
from vbrt.layers.experts.run_experts import run_experts
from vbrt.layers.experts.touched_experts import Routed
from vbrt.layers.weights.kernel_selection import rounding
from vbrt.layers.weights.linear_product import pass_precision

__all__ = ["Resting", "experts_at_rest", "prepare_experts", "resting_experts"]


class Resting(NamedTuple):
    """Resident layer, with its experts in the kernels' form."""

    layer: VBExperts
    experts: Experts

    def count(self, ids: Sequence[Sequence[int]]) -> None:
        """Count a forward, and hits as a lease of the touched experts would."""
        handle = self.layer.handle
        touched = sorted({expert for row in ids for expert in row if 0 <= expert < handle.spec.experts})
        handle.forwards += 1
        handle.routing.decode(touched, len(ids))
        for expert in touched:
            handle.pages[expert].hits += 1
        if handle.pages[0].tally is not None:
            handle.pages[0].tally.hits += len(touched)


def resting_experts(layer: VBExperts, pairs: int) -> Resting | None:
    """Return a resident layer, for few pairs; None if `encoded_forward` must lease or do more."""
    handle, kind = layer.handle, type(layer)
    spec, gate = handle.spec, kept_gate(layer)
    own = any(hasattr(kind, name) for name in ("rows_of_pages", "beside_experts"))
    if gate is None or own or getattr(layer, "has_post_expert_norm", False) or pairs >= spec.experts:
        return None
    if handle.device.type != "cpu" or spec.lossless or spec.fine or pass_precision() != "full":
        return None
    if not handle.stack.at_rest or not handle.pages or any(page.home for page in handle.pages):
        return None
    slots = handle.stack.levels[0].slots
    views = [slots[key].view for key in handle.keys if key in slots]
    if len(views) != spec.experts or not handle.stack.at_rest:
        return None
    up, down = (layer._parameters.get(f"{site.parameter}_bias") for site in spec.sites)
    rounded = rounding(handle.coder.spec.first, handle.device) == "int8"
    return Resting(layer, Experts(pages_of(handle, views), gate, up, down, rounded))


def experts_at_rest(resting: Resting, x_TH: Tensor, ids_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
    """The output of a layer."""
    resting.layer.handle.forwards += 1
    return run_experts(resting.layer, Routed(x_TH, ids_Tk, weights_Tk))


def prepare_experts(args: tuple, form: Any, empty: Empty) -> Prepared | None:
    """Return `experts_at_rest` on tensors of fixed address; None if C code does not support them."""
    resting, x_TH, ids_Tk, weights_Tk = args
    made = prepare_layer(resting.experts, x_TH, (ids_Tk, weights_Tk), form, empty)
    if made is None:
        return None

    def run() -> None:
        resting.count(ids_Tk.tolist())
        made.run()

    return Prepared(run, made.results, (resting, made))
