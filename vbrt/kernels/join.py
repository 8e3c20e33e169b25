"""Layers that read one tensor, in one launch: a pass over the graphs of torch.compile.

    step = torch.compile(model, options=vbrt.compile_options("reduce-overhead"))

A query, key and value projection, or a gate and an up projection, are layers of their own in a model; of a compiled
graph their common input can be read off. One launch in place of two or three saves the gaps between them, and layers
too short to fill a GPU fill it together. Holds for 4-bit layers that never move, without a bias, for up to 8 tokens:
more tokens make a launch long enough not to care.

What a graph checks at each call, one token's time on the host, loses the tests of tiles: what they are, and that they
stay, is in a string of the layer, which is tested on.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from vbrt.kernels import fp4_linear

__all__ = ["JoinSiblings", "compile_options"]

_TOKENS, _LAYERS = 8, 3  # what `fp4_linear.linears` takes in one launch
_TENSOR = "._vb_page"


def compile_options(mode: str = "default") -> dict[str, Any]:
    """`torch.compile(..., options=)` that does what `mode` does and joins 4-bit layers of one input.

    mode: as of torch.compile: "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs".
    """
    own = {"post_grad_custom_pre_pass": JoinSiblings(), "guard_filter_fn": wanted_guards}
    return {**torch._inductor.list_mode_options(mode), **own}


def wanted_guards(guards: Sequence[Any]) -> list[bool]:
    """Which of dynamo's guards to keep: all but those of the tensors that `WeightHandle.show` gives to layers."""
    return [not guard.name.endswith(_TENSOR) for guard in guards]


class JoinSiblings(CustomGraphPass):
    """Replaces `vbrt::fp4_linear` calls on one x by one call of `vbrt::fp4_linears` for up to three of them."""

    def __call__(self, graph: Graph) -> None:
        place = {node: at for at, node in enumerate(graph.nodes)}
        families: dict[Any, list[Node]] = {}
        for node in graph.find_nodes(op="call_function", target=torch.ops.vbrt.fp4_linear.default):
            x, _, scale, _, format, _, k, _ = node.args
            if _can_join(node):
                families.setdefault((x, scale is None, format, k), []).append(node)
        for nodes in families.values():
            # all are computed where the first one is, so their weights must be there by then
            early = [n for n in nodes if all(place[t] < place[nodes[0]] for t in n.args[1:3] if t is not None)]
            for at in range(0, len(early) - 1, _LAYERS):
                _join(graph, early[at : at + _LAYERS])

    def uuid(self) -> Any:
        """What compiled graphs are cached under: this file."""
        return get_hash_for_files((__file__, fp4_linear.__file__))


def _can_join(node: Node) -> bool:
    x, _, _, bias, _, _, k, activation = node.args
    tokens = x.meta["val"].numel() // k if isinstance(k, int) and k else None
    return isinstance(tokens, int) and 0 < tokens <= _TOKENS and bias is None and activation == "none"


def _join(graph: Graph, siblings: list[Node]) -> None:
    if len(siblings) == 1:
        return
    x, _, _, _, format, _, k, _ = siblings[0].args
    tiles, scales, ns = ([node.args[i] for node in siblings] for i in (1, 2, 5))
    scales = [] if scales[0] is None else scales
    with graph.inserting_before(siblings[0]):
        joined = graph.call_function(torch.ops.vbrt.fp4_linears.default, (x, tiles, scales, format, ns, k))
        joined.meta["val"] = [node.meta["val"] for node in siblings]
        for at, node in enumerate(siblings):
            part = graph.call_function(operator.getitem, (joined, at))
            part.meta.update(node.meta)
            node.replace_all_uses_with(part)
    for node in siblings:
        graph.erase_node(node)
