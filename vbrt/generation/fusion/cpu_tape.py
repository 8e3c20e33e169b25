"""CPU tape: a captured step with static buffers and prepared calls.

    tape = Tape(step, inputs)
    tape(*inputs)      # the step's outputs: always the same tensors, overwritten by each call

Done once, when the tape is built: views (addresses are static), arguments, buffer reuse among results with disjoint
lifetimes, and argument structures of calls that the C library serves. A torch operator remains as one call with `out=`.
A call of a Python function, such as a layer whose pages move, remains as it is; its result is copied to a static
buffer.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from vbrt.generation.fusion.step_graph import StepGraph
from vbrt.generation.fusion.step_rows import Given
from vbrt.kernels.cpu.prepared import Prepared
from vbrt.kernels.cpu.step import prepare, program
from vbrt.kernels.operator_trace import Form, form_of, kind_of
from vbrt.layers.experts.captured_cpu import experts_at_rest, prepare_experts
from vbrt.libraries.torch_api import OpOverload

__all__ = ["RowsTape", "Tape"]

_aten = torch.ops.aten
_COPIES = (_aten.clone.default, _aten._to_copy.default)
_ALIGNED = 64  # bytes of a cache line
Run = Callable[[], Any]


class Tape:
    """Runs a step graph on static addresses.

    Attributes:
        runs: its calls, in order.
        outputs: static results.
        nbytes: of the result buffers.
    """

    def __init__(self, step: StepGraph, inputs: Sequence[Any]) -> None:
        """inputs: the tensors that the step was captured with; calls must pass the same objects."""
        self._inputs = list(inputs)
        nodes = [node for node in step.graph.nodes if node.op == "call_function"]
        self._memory = _Memory(nodes, step.graph.output_node())
        self._values: dict[Node, Any] = dict(step.given)
        self._calls: Counter[str] = Counter()
        self._held: list[Any] = []
        self.runs: list[Run] = []
        self._prepared: dict[int, Prepared] = {}  # those of the runs that are one C call
        with torch.no_grad():
            for place, node in enumerate(nodes):
                self._add(node)
                self._memory.end(place)
            self.outputs = map_arg(step.graph.output_node().args[0], self._values.__getitem__)
        self.nbytes = self._memory.nbytes
        self._held.append(self._values)
        self._programs = list(self._joined())

    def __len__(self) -> int:
        return len(self.runs)

    def calls(self) -> Counter[str]:
        """Number of calls by function name."""
        return self._calls

    def __call__(self, *inputs: Any) -> Any:
        """Run the step; return its outputs, which the next call overwrites."""
        assert all(given is mine for given, mine in zip(inputs, self._inputs, strict=True)), "a tape knows addresses"
        for run in self._programs:
            run()
        return self.outputs

    def _joined(self) -> Iterator[Run]:
        """Yield the runs, those that follow each other in C as one."""
        for in_c, places in groupby(range(len(self.runs)), self._prepared.__contains__):
            if in_c:
                yield program([self._prepared[place] for place in places])
            else:
                yield from (self.runs[place] for place in places)

    # -- making it ----------------------------------------------------------------------------------------------------

    def _add(self, node: Node) -> None:
        args, kwargs = (map_arg(given, self._values.__getitem__) for given in (node.args, node.kwargs))
        target, is_operator = node.target, isinstance(node.target, OpOverload)
        if (is_operator and _is_view(target)) or _takes_part(node):
            self._values[node] = target(*args, **kwargs)
            return
        self._calls[getattr(target, "__name__", str(target))] += 1
        writes = kind_of(target).writes if is_operator else ()
        if writes:
            first = writes[0]
            self._values[node] = args[first] if isinstance(first, int) and first < len(args) else kwargs.get(first)
            self.runs.append(functools.partial(target, *args, **kwargs))
        elif not _gives_tensors(node):
            self.runs.append(functools.partial(target, *args, **kwargs))
        elif not self._add_prepared(node, args, kwargs):
            self._add_result(node, functools.partial(target, *args, **kwargs), args, kwargs)

    def _add_prepared(self, node: Node, args: tuple, kwargs: dict) -> bool:
        """Add a call of prepared C code; False if the C library does not serve it."""
        forms, empty = form_of(node), functools.partial(self._memory.empty, node)
        maker = prepare_experts if node.target is experts_at_rest else functools.partial(prepare, node.target)
        made = None if kwargs else maker(args, forms, empty)
        if made is None:
            return False
        self._held.append(made)
        self._values[node] = made.results[0] if isinstance(forms, Form) else made.results
        if made.call is not None:
            self._prepared[len(self.runs)] = made
        self.runs.append(made.run)
        return True

    def _add_result(self, node: Node, call: Run, args: tuple, kwargs: dict) -> None:
        """Add a call with its result in a static buffer: through `out=`, or copied."""
        forms = form_of(node)
        if not isinstance(forms, Form):
            results = tuple(None if form is None else self._memory.empty(node, form) for form in forms)
            self._values[node] = results
            self.runs.append(functools.partial(_copy_all, call, results))
            return
        result = self._values[node] = self._memory.empty(node, forms)
        out = _out_variant(node.target)
        if node.target in _COPIES:
            self.runs.append(functools.partial(result.copy_, args[0]))
        elif out is not None:
            self.runs.append(functools.partial(out, *args, **kwargs, out=result))
        else:
            self.runs.append(functools.partial(_copy, call, result))


def _copy(call: Run, result: Tensor) -> None:
    result.copy_(call())


def _copy_all(call: Run, results: Sequence[Tensor | None]) -> None:
    for result, given in zip(results, call(), strict=True):
        if result is not None:
            result.copy_(given)


def _gives_tensors(node: Node) -> bool:
    forms = node.meta.get("val")
    return isinstance(forms, Form) or (forms is not None and any(form is not None for form in forms))


def _is_view(operator: Any) -> bool:
    kind = kind_of(operator)
    return operator is _aten._unsafe_view.default or (kind.views and not kind.writes)


def _takes_part(node: Node) -> bool:
    """True for an item of a call's tuple of results."""
    return getattr(node.target, "__name__", "") in ("getitem", "_item")


@functools.cache
def _out_variant(operator: Any) -> Any:
    """Return the `out=` overload of a torch operator with one result; None if there is none."""
    if not isinstance(operator, OpOverload) or len(operator._schema.returns) != 1:
        return None
    mine = [(argument.name, str(argument.type)) for argument in operator._schema.arguments]
    for name in operator.overloadpacket.overloads():
        other = getattr(operator.overloadpacket, name)
        *given, last = other._schema.arguments or [None]
        if last is None or last.name != "out" or last.alias_info is None or str(last.type) != "Tensor":
            continue
        if [(argument.name, str(argument.type)) for argument in given] == mine:
            return other
    return None


class RowsTape:
    """Tapes of a captured step for several rows, each call for row after row; see `step_rows.py`."""

    def __init__(self, step: StepGraph, rows: Sequence[Given]) -> None:
        """rows: what each has in place of the step's own tensors."""
        self._tapes = [Tape(step.with_given(row), ()) for row in rows]

    def __call__(self) -> list[Any]:
        """Run the rows; return the outputs of each, which the next call overwrites."""
        for runs in zip(*(tape.runs for tape in self._tapes), strict=True):
            for run in runs:
                run()
        return [tape.outputs for tape in self._tapes]


# -- memory -----------------------------------------------------------------------------------------------------------


class _Memory:
    """Buffer allocator for results: a block is reused after the last read of its contents.

    Attributes: nbytes: of all blocks.
    """

    def __init__(self, nodes: Sequence[Node], output: Node) -> None:
        self.nbytes = 0
        self._groups = _groups_of_aliases(nodes)
        last: dict[Node, int] = {}
        for place, node in enumerate(nodes):
            for read in (node, *node.all_input_nodes):
                last[self._groups.get(read, read)] = place
        for node in output.all_input_nodes:
            last.pop(self._groups.get(node, node), None)
        self._ending: dict[int, list[Node]] = defaultdict(list)
        for group, place in last.items():
            self._ending[place].append(group)
        self._used: dict[Node, list[Tensor]] = defaultdict(list)
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def empty(self, node: Node, form: Form) -> Tensor:
        """Return a buffer for a result of a node."""
        span = 1 + sum((size - 1) * step for size, step in zip(form.shape, form.strides, strict=True))
        size = -(-max(span, 1) * form.dtype.itemsize // _ALIGNED) * _ALIGNED
        block = self._free[size].pop() if self._free[size] else self._new(size)
        self._used[self._groups.get(node, node)].append(block)
        return block.view(form.dtype).as_strided(form.shape, form.strides)

    def _new(self, size: int) -> Tensor:
        self.nbytes += size
        return torch.zeros(size, dtype=torch.uint8, device="cpu")

    def end(self, place: int) -> None:
        """Free the buffers whose last reader is the node at this place."""
        for group in self._ending.get(place, ()):
            for block in self._used.pop(group, ()):
                self._free[block.numel()].append(block)


def _groups_of_aliases(nodes: Sequence[Node]) -> dict[Node, Node]:
    """Node -> representative of its alias group: nodes whose results may share memory (union-find)."""
    above: dict[Node, Node] = {}

    def top(node: Node) -> Node:
        while above[node] is not node:
            above[node] = node = above[above[node]]
        return node

    for node in nodes:
        above[node] = node
        if _may_alias(node):
            for other in node.all_input_nodes:
                if other.op == "call_function":
                    above[top(other)] = top(node)
    return {node: top(node) for node in nodes}


def _may_alias(node: Node) -> bool:
    if isinstance(node.target, OpOverload):
        return _is_view(node.target) or bool(kind_of(node.target).writes)
    return _takes_part(node)
