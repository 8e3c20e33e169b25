"""Canonicalization and common-subexpression elimination of a step graph, before fusion patterns match."""

from typing import Any

import torch
from torch.fx import Node

from vbrt.generation.fusion.step_graph import StepGraph
from vbrt.kernels.operator_trace import root_of
from vbrt.libraries.torch_api import OpOverload

__all__ = ["join_repeated", "say_plainly"]

_aten = torch.ops.aten
_IN_PLACE = {
    _aten.div_.Tensor: _aten.div.Tensor,
    _aten.mul_.Tensor: _aten.mul.Tensor,
    _aten.add_.Tensor: _aten.add.Tensor,
}
#: cast arguments that equal the default
_DEFAULTS = {"layout": torch.strided, "pin_memory": False, "non_blocking": False, "memory_format": None}


def say_plainly(step: StepGraph) -> None:
    """Canonicalize: drop aliases, default arguments of casts, and in-place arithmetic on temporaries."""
    for node in step.calls(_aten.alias.default, _aten.detach.default):
        node.replace_all_uses_with(node.args[0])
    for node in step.calls(_aten.clone.default):
        (constant, *_), shown = node.args, step.graph.output_node() in node.users
        if (
            constant.op == "placeholder"
            and constant.meta.get("constant")
            and step.is_fixed(node, constant)
            and not shown
        ):
            node.replace_all_uses_with(constant)
    for node in step.calls(_aten._to_copy.default):
        same = _DEFAULTS | {"device": node.args[0].meta["val"].device}
        node.kwargs = {k: v for k, v in node.kwargs.items() if v is not None and (k not in same or v != same[k])}
    _functional(step)


def _functional(step: StepGraph) -> None:
    """Make in-place arithmetic on the step's own temporaries functional, where nothing else aliases them."""
    shared: dict[Node, list[Node]] = {}
    for node in step.graph.nodes:
        if node.op == "call_function" and "root" in node.meta:
            shared.setdefault(node.meta["root"], []).append(node)
    for root, nodes in shared.items():
        if root not in step.written or root in step.given or len(nodes) != 2 or nodes[0] is not root:
            continue
        write = nodes[1]
        values = {n.meta["val"].dtype for n in write.all_input_nodes}
        if write.target in _IN_PLACE and write.args[0] is root and values == {write.meta["val"].dtype}:
            write.target = _IN_PLACE[write.target]
            write.meta.update(root=write, effect=False)
            step.written.discard(root)


def join_repeated(step: StepGraph) -> None:
    """Common-subexpression elimination: positions, casts and views of the same tensors."""
    first: dict[Any, Node] = {}
    for node in step.graph.nodes:
        if node.op != "call_function" or node.meta.get("effect") or not isinstance(node.target, OpOverload):
            continue
        if not step.is_fixed(node, *node.all_input_nodes):
            continue
        same = first.setdefault(_key(node), node)
        if same is not node:
            node.replace_all_uses_with(same)
            step.joined["computed again"] += root_of(node) is node  # views launch nothing


def _key(node: Node) -> Any:
    """Equal keys: same value."""
    return node.target, repr((node.args, node.kwargs))
