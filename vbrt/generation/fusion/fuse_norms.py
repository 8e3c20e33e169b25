"""Fusion of RMS norms: six torch operators become one launch, with the residual add before them."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from vbrt.generation.fusion.step_graph import StepGraph
from vbrt.kernels.cuda.horizontal_fusion import EPS, Forms, matches
from vbrt.kernels.cuda.step_ops import NORM_ROW
from vbrt.kernels.operator_trace import StepRecorder
from vbrt.kernels.reference import ACTIVATIONS, activate
from vbrt.kernels.step import NormRule, normed, summed

__all__ = ["eager_forms", "join_norms"]

_aten = torch.ops.aten


class _NormForm(NamedTuple):
    """One way to write an RMS norm: traced input, gain (None without) and result, and its `NormRule` fields."""

    given: Node
    gain: Node | None
    result: Node
    shift: float
    rounds: bool


def _by_root(wide: Tensor) -> Tensor:
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)


def _by_power(wide: Tensor) -> Tensor:
    return wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + EPS, -0.5)


#: (gain applied to the fp32 quotient, by x's dtype; offset added to the gain; quotient rounded before the gain?)
_WRITTEN: tuple[tuple[Callable[[Tensor, Tensor, torch.dtype], Tensor], float, bool], ...] = (
    (lambda v, gain, dtype: gain * v.to(dtype), 0.0, True),  # Llama, Qwen
    (lambda v, gain, dtype: v.to(dtype) * gain, 0.0, True),
    (lambda v, gain, dtype: (gain * v).to(dtype), 0.0, False),  # gpt-oss, OLMo 2
    (lambda v, gain, dtype: (v * gain).to(dtype), 0.0, False),
    (lambda v, gain, dtype: (v * gain.float()).to(dtype), 0.0, False),  # Gemma 3n
    (lambda v, gain, dtype: (v * (1.0 + gain.float())).to(dtype), 1.0, False),  # Gemma
    (lambda v, gain, dtype: v.to(dtype), 0.0, True),
)


@functools.cache
def _norm_forms(dtype: torch.dtype) -> list[_NormForm]:
    """All variants traced to torch operators, those with a gain first."""
    return [
        _NormForm(*_traced(lambda x, g, w=write, q=quotient: w(q(x.to(torch.float32)), g, x.dtype), dtype), *rule)
        for write, *rule in _WRITTEN
        for quotient in (_by_root, _by_power)
    ]


def _traced(function: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Node, Node | None, Node]:
    x, gain = (torch.zeros(*shape, dtype=dtype, device="cpu") for shape in ((1, 8), (8,)))
    with torch.no_grad(), StepRecorder() as recorder:
        y = function(x, gain)
    nodes = {id(tensor): node for node, tensor in recorder.given.items()}
    return nodes[id(x)], nodes.get(id(gain)), recorder.node_of(y)


@functools.cache
def eager_forms() -> Forms:
    """Gates and bf16 norms as eager operators, patterns for `join_layers`."""
    gates = {name: _gate(name) for name in ACTIVATIONS if name != "none"}
    return Forms(gates, [form[:3] for form in _norm_forms(torch.bfloat16) if form.gain is not None and not form.shift])


def _gate(name: str) -> tuple[Node, Node]:
    given, _, result = _traced(lambda x, gain: activate(x, name), torch.bfloat16)
    return given, result


# -- finding them -----------------------------------------------------------------------------------------------------


def join_norms(step: StepGraph) -> None:
    """Fuse RMS norms, with a residual add before them if there is one."""
    roots = step.calls(_aten.rsqrt.default, _aten.pow.Tensor_Scalar)
    for root in roots:
        if root.target is _aten.rsqrt.default or root.args[1] == -0.5:
            found = next((match for y in _results(root) for match in [_match(step, y)] if match), None)
            if found is None:
                step.kept["a reciprocal root that is not part of a known RMS norm"] += 1
            else:
                _replace(step, *found)


def _results(root: Node) -> Iterator[Node]:
    """Candidate results of the norm that a root belongs to, the farthest first."""
    rows: list[list[Node]] = [[root]]
    for _ in range(4):
        rows.append([user for node in rows[-1] for user in node.users if user.op == "call_function"])
    for row in reversed(rows[1:]):
        yield from dict.fromkeys(row)


def _match(step: StepGraph, y: Node) -> tuple[Node, Node, NormRule] | None:
    """Return (result, x, rule) of a matching norm."""
    if not hasattr(y.meta.get("val"), "dtype") or not y.meta["val"].dtype.is_floating_point:
        return None
    for form in _norm_forms(y.meta["val"].dtype):
        found: dict[Any, Any] = {}
        if not matches(y, form.result, found):
            continue
        x, gain = found[form.given], form.gain and found[form.gain]
        if _is_norm(step, y, x, gain):
            return y, x, NormRule(gain, found[EPS], form.shift, form.rounds)
    return None


def _is_norm(step: StepGraph, y: Node, x: Node, gain: Node | None) -> bool:
    value, given = y.meta["val"], x.meta["val"]
    k = value.shape[-1]
    if value.shape != given.shape or value.dtype != given.dtype or k > NORM_ROW or not step.is_fixed(x, gain, y):
        return False
    if gain is None:
        return True
    weight = gain.meta["val"]
    return gain.op == "placeholder" and weight.dtype == value.dtype and weight.shape == (k,) and weight.is_contiguous()


def _replace(step: StepGraph, y: Node, x: Node, rule: NormRule) -> None:
    value = y.meta["val"].new_empty(*y.meta["val"].shape)
    if not _is_sum(step, x):
        step.replace(y, step.call(y, normed, (x, rule), value))
        step.joined["norm"] += 1
        return
    both = step.call(x, summed, (*x.args, rule), (value, value))
    step.replace(y, step.item(both, 1))
    step.replace(x, step.item(both, 0))
    step.joined["sum and norm"] += 1


def _is_sum(step: StepGraph, node: Node) -> bool:
    """True for a sum of two contiguous tensors of one shape and dtype."""
    if node.target is not _aten.add.Tensor or node.kwargs or not all(isinstance(a, Node) for a in node.args):
        return False
    values = [n.meta["val"] for n in (node, *node.args)]
    return len({(v.shape, v.dtype) for v in values}) == 1 and values[0].is_contiguous() and step.is_fixed(*node.args)
