"""Joins of routers: softmax, the k largest and their normalization are one launch."""

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
    """Replace what a router does to its logits."""
    for node in step.calls(_aten.topk.default):
        found = _of_softmax(node) or _of_logits(node)
        if found is None:
            step.kept["a choice of the largest that is no known router's"] += 1
            continue
        logits, result, rule = found
        if not _fits(step, logits, rule):
            step.kept["a router of more experts or other logits than the kernel takes"] += 1
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
    """True for the k largest of the last dimension, sorted."""
    last = len(node.args[0].meta["val"].shape) - 1
    dim, largest, ordered = (*node.args[2:], -1, True, True)[:3] if len(node.args) < 5 else node.args[2:5]
    return not node.kwargs and dim in (-1, last) and largest is True and ordered is True


def _sole(node: Any, target: Any) -> Node | None:
    """The one user of a node, if it calls `target`."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


def _of_softmax(node: Node) -> tuple[Node, Node, RouteRule] | None:
    """(logits, weights, rule) where the k largest of a softmax are taken, perhaps divided by their sum, and cast."""
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
    """(the quotient, True) where values are divided by their sum, else (values, False)."""
    total = next((user for user in values.users if user.target is _aten.sum.dim_IntList), None)
    if total is None or total.args[1:] not in (([-1], True), ([1], True)) or len(values.users) != 2:
        return values, False
    quotient = _sole(total, _aten.div.Tensor)
    return (quotient, True) if quotient is not None and quotient.args == (values, total) else (values, False)


def _of_logits(node: Node) -> tuple[Node, Node, RouteRule] | None:
    """(logits, weights, rule) where a softmax is taken of the k largest logits, as gpt-oss does."""
    values = next((user for user in node.users if user.args[1] == 0), None)
    if values is None or not _is_largest(node):
        return None
    result = _sole(values, _aten._softmax.default)
    if result is None or result.args[1] not in (-1, len(values.meta["val"].shape) - 1):
        return None
    return node.args[0], result, RouteRule(node.args[1], False, False, result.meta["val"].dtype)
