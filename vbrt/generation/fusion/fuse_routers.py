"""Fusion of MoE routers: softmax, top-k and normalization become one launch."""

from typing import Any

import torch
from torch.fx import Node

from vbrt.generation.fusion.step_graph import StepGraph
from vbrt.kernels.cuda.step_ops import MOST_EXPERTS
from vbrt.kernels.step import RouteRule, routed

__all__ = ["join_routers"]

_aten = torch.ops.aten
_MOST_CHOSEN = 32


def join_routers(step: StepGraph) -> None:
    """Replace softmax, top-k and normalization on router logits."""
    for node in step.calls(_aten.topk.default):
        found = _of_softmax(node) or _of_logits(node)
        if found is None:
            step.kept["a top-k that is not part of a known router"] += 1
            continue
        logits, result, rule = found
        if not _fits(step, logits, rule):
            step.kept["router logits that the kernel does not support"] += 1
            continue
        items = {user.args[1]: user for user in node.users}
        call = step.call(node, routed, (logits, rule), (result.meta["val"], node.meta["val"][1]))
        step.replace(result, step.item(call, 0))
        if 1 in items:
            step.replace(items[1], step.item(call, 1))
        step.joined["router"] += 1


def _fits(step: StepGraph, logits: Node, rule: RouteRule) -> bool:
    value = logits.meta["val"]
    dense = len(value.shape) == 2 and value.strides[-1] == 1
    return dense and value.shape[-1] <= MOST_EXPERTS and rule.k <= _MOST_CHOSEN and step.is_fixed(logits)


def _is_largest(node: Node) -> bool:
    """True for a sorted top-k of the largest along the last dimension."""
    last = len(node.args[0].meta["val"].shape) - 1
    dim, largest, ordered = (*node.args[2:], -1, True, True)[:3] if len(node.args) < 5 else node.args[2:5]
    return not node.kwargs and dim in (-1, last) and largest is True and ordered is True


def _sole(node: Any, target: Any) -> Node | None:
    """The node's only user, if it calls `target`."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


def _of_softmax(node: Node) -> tuple[Node, Node, RouteRule] | None:
    """Match top-k of softmax, optionally renormalized and cast: (logits, weights, rule)."""
    probabilities = node.args[0]
    if probabilities.target is not _aten._softmax.default or not _is_largest(node):
        return None
    logits, dim = probabilities.args[0], probabilities.args[1]
    if dim not in (-1, len(logits.meta["val"].shape) - 1) or probabilities.meta["val"].dtype is not torch.float32:
        return None
    if logits.target is _aten._to_copy.default and set(logits.kwargs) == {"dtype"}:
        logits = logits.args[0]
    values = next((user for user in node.users if user.args[1] == 0), None)
    if values is None:
        return None
    result, renormalized = _divided(values)
    cast = _sole(result, _aten._to_copy.default)
    if cast is not None and set(cast.kwargs) == {"dtype"}:
        result = cast
    if not renormalized and len(values.users) > 1 and result is not values:
        return None
    return logits, result, RouteRule(node.args[1], True, renormalized, result.meta["val"].dtype)


def _divided(values: Node) -> tuple[Node, bool]:
    """(quotient, True) if the values are divided by their sum, else (values, False)."""
    total = next((user for user in values.users if user.target is _aten.sum.dim_IntList), None)
    if total is None or total.args[1:] not in (([-1], True), ([1], True)) or len(values.users) != 2:
        return values, False
    quotient = _sole(total, _aten.div.Tensor)
    return (quotient, True) if quotient is not None and quotient.args == (values, total) else (values, False)


def _of_logits(node: Node) -> tuple[Node, Node, RouteRule] | None:
    """Match softmax of top-k logits, as in gpt-oss: (logits, weights, rule)."""
    values = next((user for user in node.users if user.args[1] == 0), None)
    if values is None or not _is_largest(node):
        return None
    result = _sole(values, _aten._softmax.default)
    if result is None or result.args[1] not in (-1, len(values.meta["val"].shape) - 1):
        return None
    return node.args[0], result, RouteRule(node.args[1], False, False, result.meta["val"].dtype)
