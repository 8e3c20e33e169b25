"""Rows of a captured step: consecutive steps computed in one pass, each with the bits of the step alone.

    rows = RowsProgram(graph, [{}, {ids: ids_1, position: position_1}])
    first, second = rows()

Each call of the step's graph is made for row after row, by the same kernel on tensors of the same shapes, before the
next call is made for any. So a weight is leased once for all rows, and a row's attention finds the keys that the rows
before it have written; those of later rows are masked slots to it, as whatever lies there is in a step. Calls that
depend on no tensor that differs between rows are made once.
"""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from vbrt.generation.fusion.step_graph import StepGraph, last_uses
from vbrt.kernels.operator_trace import kind_of, root_of
from vbrt.layers.weights.linear_product import linear_of_rows, linear_without_grad, linears_without_grad
from vbrt.libraries.torch_api import OpOverload

__all__ = ["Given", "RowsProgram", "current_row"]

Given = Mapping[Node, Tensor]
"""Placeholder -> the tensor that a row has in its place."""


class _Here(threading.local):
    row = 0


_here = _Here()


def current_row() -> int:
    """Index of the row that this thread computes in a pass over several; else 0."""
    return _here.row


class RowsProgram:
    """Interpreter of a step graph for several rows; frees results after their last use."""

    def __init__(self, step: StepGraph, rows: Sequence[Given]) -> None:
        """rows: what each has in place of the step's own tensors."""
        self._output = step.graph.output_node().args[0]
        nodes = [node for node in step.graph.nodes if node.op == "call_function"]
        varying = _varying(nodes, {node for row in rows for node in row})
        self._calls = [_Call(node, node in varying) for node in nodes]
        self._last = last_uses(nodes, self._output)
        given = {node: tensor for node, tensor in step.given.items() if node.users}
        self._rows = [{**given, **row} for row in rows]

    def __call__(self) -> list[Any]:
        """Run the rows; return the outputs of each."""
        values = [dict(given) for given in self._rows]
        try:
            for call in self._calls:
                self._run(call, values)
        finally:
            _here.row = 0
        return [map_arg(self._output, row.__getitem__) for row in values]

    def _run(self, call: "_Call", values: Sequence[dict[Node, Any]]) -> None:
        if call.varies:
            call.of_rows(values)
        else:
            result = call.result(values[0])
            for row in values:
                row[call.node] = result
        for done in self._last.get(call.node, ()):
            for row in values:
                del row[done]


class _Call:
    """A call of the graph. Attributes: varies: it depends on the row."""

    def __init__(self, node: Node, varies: bool) -> None:
        self.node, self.varies, self._target, self._kwargs = node, varies, node.target, node.kwargs
        self._args = node.args
        self._flat = not node.kwargs and not any(isinstance(arg, (tuple, list, dict, slice)) for arg in node.args)

    def _arguments(self, values: Mapping[Node, Any]) -> tuple:
        if self._flat:
            return tuple(values[arg] if type(arg) is Node else arg for arg in self._args)
        return map_arg(self._args, values.__getitem__)

    def result(self, values: Mapping[Node, Any]) -> Any:
        """Call it on the values of one row."""
        kwargs = map_arg(self._kwargs, values.__getitem__) if self._kwargs else {}
        return self._target(*self._arguments(values), **kwargs)

    def of_rows(self, values: Sequence[dict[Node, Any]]) -> None:
        """Call it for each row, and add the results to the rows' values."""
        if self._target in (linear_without_grad, linears_without_grad):
            layers, _, biases, *_ = self._arguments(values[0])
            xs = [row[self._args[1]] for row in values]
            if self._target is linear_without_grad:
                results = linear_of_rows(layers, xs, biases)
            else:
                ys = [linear_of_rows(handle, xs, bias) for handle, bias in zip(layers, biases, strict=True)]
                results = list(zip(*ys, strict=True))
            for row, result in zip(values, results, strict=True):
                row[self.node] = result
            return
        for index, row in enumerate(values):
            _here.row = index
            row[self.node] = self.result(row)
        _here.row = 0


def _varying(nodes: Sequence[Node], differing: Collection[Node]) -> set[Node]:
    """Return the nodes whose results depend on the row: by an argument, or by what is written into their memory."""
    varying, before = set(differing), -1
    while before != len(varying):
        before = len(varying)
        for node in nodes:
            if node not in varying and (root_of(node) in varying or any(n in varying for n in node.all_input_nodes)):
                varying.add(node)
            if node in varying:
                varying.update(root for root in _written(node) if root.op == "call_function")
    return varying


def _written(node: Node) -> Iterator[Node]:
    """Owners of the memory that a call writes to."""
    if not isinstance(node.target, OpOverload):
        return
    for place in kind_of(node.target).writes:
        arg = node.args[place] if isinstance(place, int) and place < len(node.args) else node.kwargs.get(place)
        if isinstance(arg, Node):
            yield root_of(arg)
