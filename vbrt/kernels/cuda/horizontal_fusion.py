"""Horizontal fusion: layers that share an input become one launch, in a graph of operators.

Query, key and value projections, or gate and up projections, are separate layers in a model; the graph shows their
common input. One launch instead of two or three saves launch gaps, and layers too small to fill a GPU fill it together.
Applies to resident 4-bit layers without a bias, for up to 8 tokens: more make a launch long enough anyway. Gate and up
projections read only by activation(gate) * up become one launch with the multiplication as epilogue, for as many tokens
as its kernel supports; it rounds once, where the graph rounded both results and the activation. A residual sum and its
RMS norm before such layers become one launch, which overlaps with those layers loading their first weights. With one
token and a layer before the sum, even that launch is fused: the layer adds the residual, multiplies by the norm's gain
and computes sums of squares, from which the next layers derive the norm's factor.

The form of an activation or a norm depends on the graph's origin: torch.compile decomposes operators (`graph_pass.py`),
a captured step has torch's own (`vbrt/generation/fusion/fuse_step.py`). So nodes are compared with the same expression
traced there: `Forms`.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from vbrt.kernels.cuda.e2m1.fused_linear import GATED_TOKENS, MOST_SIBLINGS, NORM_ROW, SIBLING_TOKENS, gates_in_one
from vbrt.kernels.cuda.e2m1.tiles import ROWS

__all__ = ["EPS", "Forms", "join_layers", "matches"]

EPS = 0.125  # placeholder for any number in traced patterns


class Forms(NamedTuple):
    """Patterns of expressions in graphs of one origin.

    Attributes:
        gates: activation -> (input, result).
        norms: (input, gain, result) of each way to write an RMS norm with `EPS`.
    """

    gates: Mapping[str, tuple[Node, ...]]
    norms: Sequence[tuple[Node, ...]]


def join_layers(graph: Graph, forms: Forms) -> None:
    """Replace `vbrt::fp4_linear` calls on one x by `vbrt::fp4_gated`, or by `vbrt::fp4_linears` for up to three, and
    sums with norms around them. Nodes have `meta["val"]`: shape, dtype, device."""
    products = graph.find_nodes(op="call_function", target=torch.ops.vbrt.fp4_linear.default)
    for x in dict.fromkeys(node.args[0] for node in products):
        _norm(graph, x, forms)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
        _gate(graph, node, forms)
    place = {node: at for at, node in enumerate(graph.nodes)}
    families: dict[Any, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.vbrt.fp4_linear.default):
        x, _, scale, _, format, _, _ = node.args
        if _can_join(node):
            families.setdefault((x, scale is None, format), []).append(node)
    for nodes in families.values():
        # the fused call is at the first layer, so all weights must exist by then
        early = [n for n in nodes if all(place[t] < place[nodes[0]] for t in n.args[1:3] if t is not None)]
        for at in range(0, len(early) - 1, MOST_SIBLINGS):
            _join(graph, early[at : at + MOST_SIBLINGS])
    for node in graph.find_nodes(op="call_function", target=torch.ops.vbrt.normed_sum.default):
        _share(graph, node)


def _tokens(node: Node) -> int:
    """Tokens of a product that can be fused with others; 0 for other nodes, and for a dynamic number."""
    if node.target is not torch.ops.vbrt.fp4_linear.default:
        return 0
    x, _, _, bias, _, _, activation = node.args
    k = _k(x)
    tokens = x.meta["val"].numel() // k if isinstance(k, int) and k else None
    return tokens if isinstance(tokens, int) and bias is None and activation == "none" else 0


def _k(x: Node) -> Any:
    """Columns of a layer's input."""
    return x.meta["val"].shape[-1]


def _can_join(node: Node) -> bool:
    return 0 < _tokens(node) <= SIBLING_TOKENS


def matches(node: Any, traced: Node, found: dict[Any, Any]) -> bool:
    """True if a node computes the traced expression; fills `found` with the node of each traced one, and the number in
    place of `EPS`."""
    if not isinstance(node, Node):
        return False
    if traced in found:
        return found[traced] is node
    found[traced] = node
    if traced.op == "placeholder":
        return True
    alike = node.target == traced.target and len(node.args) == len(traced.args) and node.kwargs == traced.kwargs
    return alike and all(
        matches(ours, theirs, found) if isinstance(theirs, Node) else _same(ours, theirs, found)
        for ours, theirs in zip(node.args, traced.args, strict=True)
    )


def _same(ours: Any, theirs: Any, found: dict[Any, Any]) -> bool:
    if theirs == EPS and isinstance(ours, float):
        found[EPS] = ours
        return True
    return ours == theirs


def _norm(graph: Graph, y: Any, forms: Forms) -> None:
    """Replace a sum of two tensors with its RMS norm by one launch, if `y` is one."""
    for given, gain, result in forms.norms:
        found: dict[Any, Any] = {}
        if not matches(y, result, found):
            continue
        total, gain, eps = found.pop(given), found.pop(gain), found.pop(EPS)
        inner = set(found.values())
        if _is_sum(total) and _is_gain(gain, total) and all(u in inner for n in inner - {y} for u in n.users):
            with graph.inserting_before(total):
                both = graph.call_function(torch.ops.vbrt.normed_sum.default, (*total.args, gain, eps))
            both.meta["val"] = [total.meta["val"], y.meta["val"]]
            _replace(graph, y, operator.getitem, (both, 1))
            for node in reversed([node for node in graph.nodes if node in inner]):
                graph.erase_node(node)
            _replace(graph, total, operator.getitem, (both, 0))
        return


def _share(graph: Graph, both: Node) -> None:
    """Fuse a sum and its norm into the layer before, except the norm's factor, which the layers after apply.

    For one token, if one summand is a layer's result that nothing else reads, and only layers read y.
    """
    *summed, gain, eps = both.args
    parts = {node.args[1]: node for node in both.users}
    value, y = both.meta["val"][0], parts.get(1)
    n = value.shape[-1]
    if y is None or value.numel() != n or n % 8 or not all(_can_share(user, y) for user in y.users):
        return
    for layer, other in (summed, summed[::-1]):
        if layer is not other and _tokens(layer) == 1 and len(layer.users) == 1 and layer.args[5] == n:
            break
    else:
        return
    x, tiles, scale, _, format, _, _ = layer.args
    with graph.inserting_before(both):
        made = graph.call_function(torch.ops.vbrt.fp4_residual.default, (x, tiles, scale, other, gain, format, n))
        squares = graph.call_function(operator.getitem, (made, 2))
    squares.meta["val"] = value.new_empty(-(-n // ROWS), dtype=torch.float32)
    made.meta["val"] = [*both.meta["val"], squares.meta["val"]]
    for user in list(y.users):
        if user.target is torch.ops.vbrt.fp4_linear.default:
            _join(graph, [user])
    for user in list(y.users):
        user.args = (*user.args, squares, eps)
    both.replace_all_uses_with(made)
    graph.erase_node(both)
    graph.erase_node(layer)


def _can_share(user: Node, y: Node) -> bool:
    """True for one or several layers that can apply a norm's factor to their x."""
    several = user.target in (torch.ops.vbrt.fp4_linears.default, torch.ops.vbrt.fp4_gated.default)
    return (several or _can_join(user)) and user.args[0] is y and user.all_input_nodes.count(y) == 1


def _is_sum(node: Node) -> bool:
    """True for a sum of two bf16 tensors of one shape, within the kernel's limits on rows and columns."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or not all(isinstance(a, Node) for a in node.args):
        return False
    value, *others = (n.meta["val"] for n in (node, *node.args))
    alike = all(other.shape == value.shape and other.dtype is torch.bfloat16 for other in others)
    k = value.shape[-1]
    return alike and isinstance(value.numel(), int) and k <= NORM_ROW and 0 < value.numel() <= GATED_TOKENS * k


def _is_gain(node: Node, total: Node) -> bool:
    """True for a bf16 parameter, which exists wherever the launch is inserted."""
    value = node.meta["val"]
    fits = value.shape == total.meta["val"].shape[-1:] and value.is_contiguous()
    return fits and node.op == "placeholder" and value.dtype is torch.bfloat16


def _gate(graph: Graph, product: Node, forms: Forms) -> None:
    """Replace activation(gate) * up by one launch, if `product` is one."""
    for first, up in (product.args, product.args[::-1]):
        for name, (given, result) in forms.gates.items():
            found: dict[Node, Node] = {}
            if not isinstance(up, Node) or not matches(first, result, found):
                continue
            gate, inner = found[given], {*found.values(), up}
            if _are_gated(gate, up) and all(user is product or user in inner for n in inner for user in n.users):
                x, *_, format, n, _ = gate.args
                args = (x, _weights([gate, up]), format, n, name)
                _replace(graph, product, torch.ops.vbrt.fp4_gated.default, args)
                for node in reversed([node for node in graph.nodes if node in inner]):
                    graph.erase_node(node)
                return


def _are_gated(gate: Node, up: Node) -> bool:
    tokens = _tokens(gate)
    if gate is up or not tokens or not _tokens(up):
        return False
    (x, _, scale, _, format, n, _), (other, _, other_scale, _, other_format, other_n, _) = gate.args, up.args
    alike = (x, scale is None, format, n) == (other, other_scale is None, other_format, other_n)
    return alike and gates_in_one(x.meta["val"].dtype, tokens, n, _k(x))


def _weights(layers: Sequence[Node]) -> list[Node]:
    """Pages of the layers, or tiles and scale of layers that have them separately."""
    return [part for layer in layers for part in layer.args[1:3] if part is not None]


def _replace(graph: Graph, node: Node, target: Any, args: tuple[Any, ...]) -> None:
    with graph.inserting_before(node):
        new = graph.call_function(target, args)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _join(graph: Graph, siblings: list[Node]) -> None:
    x, *_, format, _, _ = siblings[0].args
    args = (x, _weights(siblings), format, [node.args[5] for node in siblings])
    with graph.inserting_before(siblings[0]):
        call = graph.call_function(torch.ops.vbrt.fp4_linears.default, args)
        call.meta["val"] = [node.meta["val"] for node in siblings]
    for at, node in enumerate(siblings):
        _replace(graph, node, operator.getitem, (call, at))
