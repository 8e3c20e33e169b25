"""Fusion for CPU steps: layers sharing an input become one C call, and so does a gate."""

from collections import defaultdict
from typing import Any

import torch
from torch.fx import Node

from vbrt.generation.fusion.fuse_norms import eager_forms
from vbrt.generation.fusion.step_graph import StepGraph
from vbrt.kernels.cpu.small_batch_linear import Few, products
from vbrt.kernels.cuda.horizontal_fusion import matches
from vbrt.kernels.step import gated, projected
from vbrt.layers.experts.captured_cpu import experts_at_rest, resting_experts
from vbrt.layers.experts.experts_layer import encoded_forward
from vbrt.layers.weights.linear_product import linear_on_planes, linear_without_grad, resting_product

__all__ = ["join_gates", "join_products", "join_projections"]

_SMALL_MATRIX, _FEW_ROWS = 1 << 17, 2  # weight elements and tokens that one thread multiplies
_aten = torch.ops.aten


def join_products(step: StepGraph) -> None:
    """Bypass leases for layers whose pages never move, and fuse those that share an input."""
    families: dict[Any, list[tuple[Node, Few]]] = defaultdict(list)
    for node in step.calls(linear_without_grad):
        handle, x, bias = node.args
        resting = resting_product(handle)
        if resting is None or x.meta["val"].device != handle.device:
            continue
        few = _few(handle, node)
        if few is None:
            kernels, planes = resting
            args = (handle, kernels, x, planes, bias)
            step.replace(node, step.call(node, linear_on_planes, args, node.meta["val"]))
            step.graph.erase_node(node)
        else:
            families[x, few.form, few.rounded].append((node, few))
    for node in step.calls(encoded_forward):
        _rest(step, node)
    for family in families.values():
        few_of = dict(family)
        for nodes in step.mergeable(list(few_of)):
            args = (tuple(map(few_of.get, nodes)), nodes[0].args[1], tuple(node.args[2] for node in nodes))
            step.merge(nodes, products, args)
            step.joined["layers of one input"] += len(nodes) > 1


def _rest(step: StepGraph, node: Node) -> None:
    """Bypass leases for experts whose pages never move."""
    layer, x, ids, *_ = node.args
    if len(node.args) != 4 or len(x.meta["val"].shape) != 2 or x.meta["val"].dtype is not layer.handle.dtype:
        return
    resting = resting_experts(layer, ids.meta["val"].numel())
    if resting is not None:
        call = step.call(node, experts_at_rest, (resting, *node.args[1:]), node.meta["val"], effect=True)
        step.replace(node, call)
        step.graph.erase_node(node)


def _few(handle: Any, node: Node) -> Few | None:
    """Return the layer's small-batch product, if it supports this x and bias."""
    _, x, bias = node.args
    short, value = handle.held.small_batch, x.meta["val"]
    if short is None or not isinstance(short.few, Few):
        return None
    few = short.few
    given = [value] if bias is None else [value, bias.meta["val"]]
    fits = all(form.dtype is few.form[2] and _is_dense(form) for form in given)
    fits = fits and (bias is None or given[1].shape == (few.outputs,))
    return few if fits and 0 < value.numel() <= few.most else None


def _is_dense(form: Any) -> bool:
    """True if contiguous; strides of size-1 dimensions are arbitrary."""
    step = 1
    for size, stride in zip(reversed(form.shape), reversed(form.strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def join_projections(step: StepGraph) -> None:
    """Replace small dense products of few tokens, where torch's call overhead exceeds the compute time."""
    for node in step.calls(_aten.mm.default):
        x, turned = node.args
        weight = turned.args[0] if turned.target is _aten.t.default else None
        if weight is None or weight.op != "placeholder" or not step.is_fixed(x, weight):
            continue
        forms = [part.meta["val"] for part in (x, weight)]
        small = forms[1].numel() <= _SMALL_MATRIX and forms[0].shape[0] <= _FEW_ROWS
        if small and forms[0].dtype is forms[1].dtype and all(map(_is_dense, forms)):
            step.replace(node, step.call(node, projected, (x, weight), node.meta["val"]))
            step.joined["small product"] += 1


def join_gates(step: StepGraph) -> None:
    """Fuse activation(gate) * up."""
    for node in step.calls(_aten.mul.Tensor):
        found = _gate(node)
        if found is None or not step.is_fixed(*found[:2]):
            continue
        value = node.meta["val"]
        step.replace(node, step.call(node, gated, found, value.new_empty(*value.shape)))
        step.joined["gate"] += 1


def _gate(node: Node) -> tuple[Node, Node, str] | None:
    for first, up in (node.args, node.args[::-1]):
        for name, (given, result) in eager_forms().gates.items():
            found: dict[Any, Any] = {}
            if isinstance(up, Node) and matches(first, result, found) and _alike(node, found[given], up):
                return found[given], up, name
    return None


def _alike(*nodes: Node) -> bool:
    return len({(node.meta["val"].shape, node.meta["val"].dtype) for node in nodes}) == 1
