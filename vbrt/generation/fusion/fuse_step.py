"""Kernel fusion of a decode step, without torch.compile.

    step = joined(lambda: model(ids, past_key_values=cache).logits, same_bits=False)
    with torch.cuda.graph(graph):
        logits = step()

The step runs once, for real, under an operator trace (`vbrt/kernels/operator_trace.py`; 40 to 90 µs per operator).
Traced RMS norms, rotary embeddings, attention of few queries, routers and layers sharing an input are replaced by fused
launches with known arithmetic and roundings. The result is called like the step, and reads and writes the same tensors.

Like a CUDA graph, it repeats what the step did that one time: Python control flow is frozen. Where the trace cannot
stand for the step (control flow read a tensor's value, or the check of the result failed), the unchanged step is
returned, and the report says why.

| pattern | same bits as eager | what it replaces |
| --- | --- | --- |
| plain | yes | in-place arithmetic on temporaries, redundant cast arguments: so that other patterns match |
| repeated | yes | common subexpressions |
| layers | no | GPUs: 4-bit layers of one input, gated pairs, sums and norms: `kernels/cuda/horizontal_fusion.py` |
| posts | yes | on GPUs, layers of one input that the CPU computes |
| products | yes | on CPUs, layers sharing an input |
| gates | no | on CPUs, activation(gate) * up |
| small products | no | on CPUs, few tokens times small dense matrices, such as routers |
| norms | no | RMS norms, with the residual add before them |
| rotary | yes | rotary embedding of queries and keys, with head norms where norms may be replaced |
| cache | yes | writes of keys and values into a static cache |
| attention | no | attention of few queries to many keys |
| heads | yes | repeated keys and values (GQA) before batch-invariant attention |
| routers | no | softmax, top-k, normalization |
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from vbrt.generation.fusion.canonicalize import join_repeated, say_plainly
from vbrt.generation.fusion.fuse_attention import join_attention, join_cache_writes, join_rotary, share_heads
from vbrt.generation.fusion.fuse_cpu_layers import join_gates, join_products, join_projections
from vbrt.generation.fusion.fuse_norms import eager_forms, join_norms
from vbrt.generation.fusion.fuse_routers import join_routers
from vbrt.generation.fusion.precompile_launches import compile_launches
from vbrt.generation.fusion.step_graph import Program, StepGraph
from vbrt.host import accelerator
from vbrt.kernels.cpu import build
from vbrt.kernels.cuda import devices, step_ops
from vbrt.kernels.cuda.horizontal_fusion import join_layers
from vbrt.kernels.operator_trace import Form, StepRecorder, form_of
from vbrt.layers.experts.experts_layer import encoded_forward
from vbrt.layers.modules.compiled_forward import FEW_TOKENS, tiles_of_pass
from vbrt.layers.weights.linear_product import kernels_of_pass, linear_without_grad, linears_without_grad
from vbrt.libraries.torch_api import tree_leaves
from vbrt.tiers.schedule.graph_recorder import without_collections

__all__ = ["PATTERNS", "JoinReport", "Joined", "joined"]

_OWN = 4  # times the step's own run-to-run difference: then it is not reproducible, and there are no bits to keep
_TOLERANCE = 0.1  # relative to the result's norm: rounding is about a tenth of this, a wrong replacement ten times


class Pattern(NamedTuple):
    """A fusion pattern.

    Attributes:
        name: identifies it in `without`.
        same_bits: True if the replacement is bit-exact with the eager kernels.
        apply: transforms a graph and counts replacements.
        on: kinds of devices where it applies; "" where vbrt has no kernels.
    """

    name: str
    same_bits: bool
    apply: Callable[[StepGraph], None]
    on: tuple[str, ...] = ("gpu", "cpu")


@dataclass(frozen=True, slots=True)
class JoinReport:
    """Outcome of fusion.

    Attributes:
        joined: pattern -> number of replacements.
        kept: reason -> number of rejected candidates.
        operators: count in the traced step, views included, and in the fused one.
        seconds: trace, fusion and check, the step's own run included.
        error: largest relative error (of the norm) over the floating-point outputs; None: not compared.
        refused: why the step runs unfused; "" if it is fused.
        from_host: which H2D copy a CUDA graph would replay from freed host memory; "" if there is none. For an unfused
            step this is unknown and set to `refused`: Python numbers made into tensors are copied too, and become
            constants in a fused step only.
    """

    joined: Mapping[str, int] = field(default_factory=dict)
    kept: Mapping[str, int] = field(default_factory=dict)
    operators: tuple[int, int] = (0, 0)
    seconds: float = 0.0
    error: float | None = None
    refused: str = ""
    from_host: str = ""

    @property
    def unjoined(self) -> Mapping[str, int]:
        """Rejected candidates by reason; if the step runs unfused, that reason."""
        return {f"the step: {self.refused}": 1} if self.refused else self.kept


class Joined:
    """A fused step, called like the original. Keep it alive with a CUDA graph of it, which reads its constants.

    Attributes:
        run: a `Program`, or the step itself.
        report: what was fused.
        first: the step's result from the traced run.
        graph: what `run` runs; None for the step itself.
    """

    def __init__(self, run: Callable[..., Any], report: JoinReport, first: Any, graph: StepGraph | None = None) -> None:
        self.run, self.report, self.first, self.graph = run, report, first, graph

    def __call__(self, *inputs: Any) -> Any:
        """Run it; inputs have the shapes of the examples."""
        with torch.no_grad():
            return self.run(*inputs)


def _join_layers(step: StepGraph) -> None:
    """Replace 4-bit layers on resident planes by operators, and fuse those."""
    for node in step.calls(linear_without_grad):
        handle, x, bias = node.args
        tiles, value = tiles_of_pass(handle), x.meta["val"]
        if tiles is None:
            continue
        format, n, k, dtype, _ = tiles.form.split()
        if value.numel() > FEW_TOKENS * int(k) or value.dtype != getattr(torch, dtype) or value.device != handle.device:
            step.kept["a 4-bit layer of many tokens, or of another dtype"] += 1
            continue
        args = (x, step.constant(tiles.page), None, bias, format, int(n), "none")
        step.replace(node, step.call(node, torch.ops.vbrt.fp4_linear.default, args, node.meta["val"]))
        step.graph.erase_node(node)
    join_layers(step.graph, eager_forms())
    for name in ("fp4_linears", "fp4_gated", "fp4_residual", "normed_sum"):
        count = len(step.calls(getattr(torch.ops.vbrt, name).default)) if hasattr(torch.ops.vbrt, name) else 0
        if count:
            step.joined[_LAYER_JOINS[name]] += count


def _join_hosted(step: StepGraph) -> None:
    """Post layers of one input to the CPU together, where it computes them."""
    families: dict[Node, list[Node]] = {}
    for node in step.calls(linear_without_grad):
        if node.args[0].held.hosts:
            families.setdefault(node.args[1], []).append(node)
    for family in families.values():
        for nodes in step.mergeable(family):
            if len(nodes) > 1:
                handles, _, biases = zip(*(node.args for node in nodes), strict=True)
                step.merge(nodes, linears_without_grad, (handles, nodes[0].args[1], biases))
                step.joined["layers of one post"] += 1


_LAYER_JOINS = {
    "fp4_linears": "layers of one input",
    "fp4_gated": "gated pair",
    "fp4_residual": "layer, sum and norm",
    "normed_sum": "sum and norm before layers",
}

_EVERYWHERE = ("gpu", "cpu", "")

#: in order of application
PATTERNS = (
    Pattern("plain", True, say_plainly, _EVERYWHERE),
    Pattern("repeated", True, join_repeated, _EVERYWHERE),
    Pattern("layers", False, _join_layers, ("gpu",)),
    Pattern("posts", True, _join_hosted, ("gpu",)),
    Pattern("products", True, join_products, ("cpu", "")),
    Pattern("gates", False, join_gates, ("cpu",)),
    Pattern("small products", False, join_projections, ("cpu",)),
    Pattern("norms", False, join_norms),
    Pattern("rotary", True, join_rotary),
    Pattern("cache", True, join_cache_writes),
    Pattern("attention", False, join_attention),
    Pattern("heads", True, share_heads, ("gpu",)),
    Pattern("routers", False, join_routers),
)
_ALL = frozenset(pattern.name for pattern in PATTERNS)


def joined(
    step: Callable[..., Any],
    example_inputs: Sequence[Any] = (),
    *,
    same_bits: bool | None = None,
    without: Collection[str] = (),
    check: bool = True,
    program: Callable[[StepGraph, Sequence[Any]], Any] = Program,
    before_write: Callable[[Tensor], object] | None = None,
    accept: Callable[[StepGraph], None] = lambda graph: None,
) -> Joined:
    """Run a step once and return it fused.

    Args:
        step: returns a tensor, or tuples, lists and dicts of them. State it reads besides its inputs (parameters,
            caches, static inputs) must stay at the same addresses.
        example_inputs: of the step; later calls may pass other tensors of the same shapes.
        same_bits: True: apply bit-exact patterns only. None: as True, unless the step has 4-bit layers, which are not
            bit-exact anyway.
        without: names of patterns to skip.
        check: run the fused step as well and compare, from the same state: tensors that the step mutates are restored
            first, and caches get the same entries again.
        program: builds the runner from a graph and the example inputs.
        before_write: called with each pre-existing tensor that the step is about to mutate.
        accept: called with the traced graph before anything is replaced; may raise StepRefused.

    Raises: whatever the step raises, and StepRefused if `before_write` is given and the step cannot be captured.
    """
    with without_collections():
        return _joined(step, example_inputs, _How(same_bits, frozenset(without), check, program, before_write, accept))


class _How(NamedTuple):
    """Options of `joined`."""

    same_bits: bool | None
    without: frozenset[str]
    check: bool
    program: Callable[[StepGraph, Sequence[Any]], Any]
    before_write: Callable[[Tensor], object] | None
    accept: Callable[[StepGraph], None]


def _joined(step: Callable[..., Any], inputs: Sequence[Any], how: _How) -> Joined:
    start = time.perf_counter()
    with torch.no_grad(), StepRecorder(inputs, before_write=how.before_write) as recorder:
        first = step(*inputs)
    recorder.finish(first)
    if recorder.refused:
        seconds, why = time.perf_counter() - start, recorder.refused
        return Joined(step, JoinReport(seconds=seconds, refused=why, from_host=why), first)
    if how.same_bits is None:
        how = how._replace(same_bits=not _has_rounded_layers(recorder))
    from_host, graph = _from_host(recorder), StepGraph(recorder, same_bits=how.same_bits)
    how.accept(graph)
    before = len(recorder.graph.nodes) - len(recorder.given)
    if _change(graph, how.without) == "gpu":
        compile_launches(graph)
    program = how.program(graph, inputs)
    error = _error_of(program, recorder, inputs, first) if how.check else None
    if error is not None and not (error == 0.0 if how.same_bits else error < _TOLERANCE):
        why = f"the joined step's result differs from the step's by {error:.2g} of its norm"
        own = _error_of(step, recorder, inputs, first) if how.same_bits else 0.0
        if not 0.0 < own or error > _OWN * own:
            report = JoinReport(seconds=time.perf_counter() - start, refused=why, from_host=from_host or why)
            return _as_it_is(recorder, inputs, how, Joined(step, report, first))
        graph.kept[f"no bits to keep: the step's own differ from run to run, by {own:.2g} of its norm"] += 1
    seconds, counts = time.perf_counter() - start, (before, len(program))
    report = JoinReport(dict(graph.joined), dict(graph.kept), counts, seconds, error, from_host=from_host)
    return Joined(program, report, first, graph)


def _as_it_is(recorder: StepRecorder, inputs: Sequence[Any], how: _How, refused: Joined) -> Joined:
    """Fuse the step again with no pattern, if bits were lost by fusion; else return the refused one."""
    if not how.same_bits or how.without >= _ALL:
        return refused
    _restore(recorder)
    again = _joined(refused.run, inputs, how._replace(without=_ALL))
    report = replace(again.report, kept={**again.report.kept, f"everything: {refused.report.refused}": 1})
    return Joined(again.run, report, again.first, again.graph)


def _restore(recorder: StepRecorder) -> None:
    """Restore tensors that the step has mutated, such as counters."""
    for tensor, before in reversed(recorder.saved):
        tensor.copy_(before)


_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


def _from_host(recorder: StepRecorder) -> str:
    """Return the first copy from host memory to the device, whose address a replay would find freed; "" if none."""
    for node in recorder.graph.nodes:
        if any(form.device.type == accelerator.TYPE for form in _forms(node)) and any(map(_is_copied, _reads(node))):
            return f"{node.target} copies from host memory"
    return ""


def _reads(node: Node) -> Iterator[tuple[Node, Form]]:
    return ((node, form) for read in node.all_input_nodes for form in _forms(read))


def _is_copied(read: tuple[Node, Form]) -> bool:
    """False for a CPU scalar that is passed as a launch argument."""
    node, form = read
    return form.device.type == "cpu" and (form.numel() > 1 or node.target in _COPIES)


def _forms(node: Node) -> list[Form]:
    """Forms of a node's tensor results."""
    forms = form_of(node) if "val" in node.meta else None
    parts = [forms] if forms is None or isinstance(forms, Form) else list(forms)
    return [part for part in parts if part is not None]


def _has_rounded_layers(recorder: StepRecorder) -> bool:
    """True if the step has rounding layers: 4-bit ones, and coarse passes of `exact` weights."""
    layers = recorder.graph.find_nodes(op="call_function", target=linear_without_grad)
    experts = recorder.graph.find_nodes(op="call_function", target=encoded_forward)
    specs = [kernels_of_pass(node.args[0]).spec for node in layers] + [node.args[0].handle.spec for node in experts]
    return any(not (spec.lossless or spec.fine) for spec in specs)


def _change(graph: StepGraph, without: Collection[str]) -> str:
    """Apply the patterns for the step's device; return its kind, see `_kind_of_device`."""
    graph.drop_unused()
    device = _kind_of_device(graph)
    for pattern in PATTERNS:
        if device in pattern.on and pattern.name not in without and (pattern.same_bits or not graph.same_bits):
            pattern.apply(graph)
            graph.drop_unused()
    return device


def _kind_of_device(graph: StepGraph) -> str:
    """Return where fused kernels run: "gpu", "cpu", or "" where plain torch stands in for them."""
    found = {tensor.device for tensor in graph.given.values() if accelerator.is_device(tensor)}
    if not found:
        return "cpu" if build.refusal(torch.device("cpu"), "step") is None else ""
    refusals = {devices.refusal(device, step_ops.NEEDS) for device in found} - {None}
    if not refusals:
        return "gpu"
    graph.kept[f"everything: kernels: {min(refusals)}"] += 1
    return ""


def _error_of(program: Callable[..., Any], recorder: StepRecorder, inputs: Sequence[Any], first: Any) -> float | None:
    """Return the largest relative error of a run's floating-point outputs, from the traced run's initial state."""
    if recorder.random:
        return None
    _restore(recorder)
    with torch.no_grad():
        got = program(*inputs)
    pairs = zip(tree_leaves(got), tree_leaves(first), strict=True)
    floats = [(a, b) for a, b in pairs if isinstance(b, Tensor) and b.is_floating_point()]
    return max((_error(a, b) for a, b in floats), default=None)


def _error(got: Tensor, want: Tensor) -> float:
    if torch.equal(got, want):
        return 0.0
    difference = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    return float(difference) if bool(difference.isfinite()) else float("inf")
