"""Step graph: a traced step as an FX graph that fusion transforms, and an interpreter for it."""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from vbrt.kernels.operator_trace import Form, StepRecorder, root_of

__all__ = ["Program", "StepGraph", "last_uses"]

_MOST_MERGED = 8  # layers per call


class StepGraph:
    """The FX graph of a step during fusion.

    Attributes:
        graph, given, written: as of `StepRecorder`.
        same_bits: True if only bit-exact replacements are allowed.
        joined: pattern -> number of replacements.
        kept: reason -> number of rejected candidates.
    """

    def __init__(self, recorder: StepRecorder, *, same_bits: bool) -> None:
        self.graph: Graph = recorder.graph
        self.given, self.written, self.same_bits = recorder.given, recorder.written, same_bits
        self._give = recorder.give
        self.joined: Counter[str] = Counter()
        self.kept: Counter[str] = Counter()

    def with_given(self, given: Mapping[Node, Tensor]) -> "StepGraph":
        """Return the same step on other tensors: those in `given` replace its own."""
        other = copy.copy(self)
        other.given = {**self.given, **given}
        return other

    def placeholder_of(self, tensor: Tensor) -> Node | None:
        """Return the placeholder that stands for a tensor; None if the step does not read it."""
        return next((node for node, held in self.given.items() if held is tensor and node.users), None)

    def calls(self, *targets: Any) -> list[Node]:
        """Nodes that call one of these operators or functions, in order."""
        return [node for node in self.graph.nodes if node.op == "call_function" and node.target in targets]

    def places(self) -> dict[Node, int]:
        """Index of each node in execution order."""
        return {node: at for at, node in enumerate(self.graph.nodes)}

    def is_fixed(self, *nodes: Any) -> bool:
        """True if the step never writes to the memory of these results."""
        return all(not isinstance(node, Node) or root_of(node) not in self.written for node in nodes)

    def constant(self, tensor: Tensor) -> Node:
        """Add a placeholder for a tensor that a layer holds."""
        return self._give(tensor)

    def call(self, before: Node, function: Callable[..., Any], args: tuple, val: Any, *, effect: bool = False) -> Node:
        """Insert a call before a node; `val`: the Form of its result, or a tuple of them."""
        with self.graph.inserting_before(before):
            node = self.graph.create_node("call_function", function, args, {})
        node.meta.update(val=val, effect=effect)
        return node

    def item(self, of: Node, at: int) -> Node:
        """Insert an item of a call's tuple, right after it."""
        with self.graph.inserting_after(of):
            node = self.graph.call_function(_item, (of, at))
        node.meta["val"] = of.meta["val"][at]
        return node

    def replace(self, node: Node, other: Node) -> None:
        """Redirect all users of a node to another one of the same shape and dtype."""
        ours, theirs = node.meta["val"], other.meta["val"]
        if isinstance(ours, Form) and (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            raise AssertionError(f"{node}: {ours} replaced by {theirs}")
        node.replace_all_uses_with(other)

    def mergeable(self, layers: Sequence[Node]) -> list[list[Node]]:
        """Group calls (layer, x, bias) of one x, in order, up to `_MOST_MERGED` each, that can be made at the first
        one's place: x and biases exist there and are not written to."""
        early, late = list[Node](), list[Node]()
        for node in layers:
            _, x, bias = node.args
            there = bias is None or bias.op == "placeholder" or self._is_before(bias, layers[0])
            (early if there and self.is_fixed(x, bias) and len(early) < _MOST_MERGED else late).append(node)
        return [group for group in (early, *([one] for one in late)) if group]

    def _is_before(self, node: Node, other: Node) -> bool:
        places = self.places()
        return places[node] < places[other]

    def merge(self, nodes: Sequence[Node], function: Callable[..., Any], args: tuple) -> None:
        """Replace calls by one at the first one's place, which returns their results in order."""
        call = self.call(nodes[0], function, args, tuple(node.meta["val"] for node in nodes))
        for at, node in enumerate(nodes):
            self.replace(node, self.item(call, at))
            self.graph.erase_node(node)

    def drop_unused(self) -> None:
        """Dead-code elimination: remove unused nodes without effects."""
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users and not node.meta.get("effect"):
                self.graph.erase_node(node)


def _item(values: Sequence[Any], at: int) -> Any:
    return values[at]


class Program:
    """Interpreter of a step graph; frees results after their last use. `nbytes` of static buffers: none."""

    nbytes = 0

    def __init__(self, step: StepGraph, inputs: Sequence[Any]) -> None:
        """inputs: tensors that a call may substitute."""
        nodes = list(step.graph.nodes)
        self._given = {node: tensor for node, tensor in step.given.items() if node.users}
        by_id = {id(tensor): node for node, tensor in self._given.items()}
        self._inputs = [by_id.get(id(tensor)) for tensor in inputs]
        self._steps = [node for node in nodes if node.op == "call_function"]
        self._output = step.graph.output_node().args[0]
        self._last = last_uses(self._steps, self._output)

    def __len__(self) -> int:
        return len(self._steps)

    def calls(self) -> Counter[str]:
        """Number of calls by function name."""
        return Counter(getattr(node.target, "__name__", str(node.target)) for node in self._steps)

    def __call__(self, *inputs: Any) -> Any:
        """Run the step; return its outputs."""
        values = dict(self._given)
        for node, tensor in zip(self._inputs, inputs, strict=True):
            if node is not None:
                values[node] = tensor
        fetch = values.__getitem__
        for node in self._steps:
            values[node] = node.target(*map_arg(node.args, fetch), **map_arg(node.kwargs, fetch))
            for done in self._last.get(node, ()):
                del values[done]
        return map_arg(self._output, fetch)


def last_uses(steps: Sequence[Node], output: Any) -> dict[Node, list[Node]]:
    """Return, for each node, the results whose last use it is."""
    seen: set[Node] = set()
    map_arg(output, seen.add)
    last: dict[Node, list[Node]] = {}
    for node in reversed(steps):
        reads = [n for n in (*node.all_input_nodes, node) if n.op == "call_function" and n not in seen]
        seen.update(reads)
        last[node] = list(dict.fromkeys(reads))
    return last
