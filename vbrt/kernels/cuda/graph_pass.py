"""Graph pass for torch.compile: fuses 4-bit layers that share an input into one launch.

    step = torch.compile(model, options=vbrt.compile_options("reduce-overhead"))

`horizontal_fusion.py` has the patterns. Layers after a norm are not fused with inductor's own norm kernel, for which
they would wait.

Activations and norms appear in the graph as this torch's inductor decompositions leave them, so the patterns are traced
with the same decompositions. The road not taken: a pass before decomposition, where `nn.SiLU` is one node but the
layers are not yet operators.

Dynamo's guards on tiles are dropped: a string attribute of the layer, whose guard is kept, says what the tiles are and
that they are resident.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from vbrt.kernels.cuda import horizontal_fusion
from vbrt.kernels.cuda.e2m1 import fused_linear, linear
from vbrt.kernels.cuda.horizontal_fusion import EPS, Forms, join_layers
from vbrt.kernels.reference import ACTIVATIONS, activate
from vbrt.libraries import torch_api

__all__ = ["JoinSiblings", "compile_options"]

_PLANES = "_vb_page"  # attribute by which a layer holds resident planes


def compile_options(mode: str = "default") -> dict[str, Any]:
    """Return `torch.compile(..., options=)` that equal `mode` plus fusion of 4-bit layers that share an input.

    A gated pair, activation(gate) * up, becomes one launch that rounds once, so its last bits differ from the eager
    model.

    mode: as of torch.compile: "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs".
    """
    own = {torch_api.PASS_OPTION: JoinSiblings(), torch_api.GUARD_OPTION: wanted_guards}
    return {**torch_api.options_of_mode(mode), **own}


def wanted_guards(guards: Sequence[Any]) -> list[bool]:
    """Which of dynamo's guards to keep: all but those of the tensors that `Weight.show` gives to layers."""
    return torch_api.guards_beside(guards, _PLANES)


class JoinSiblings(torch_api.graph_pass_base()):  # type: ignore[misc]  # a class that only inductor has
    """Replaces `vbrt::fp4_linear` calls on one x by `vbrt::fp4_gated`, or by `vbrt::fp4_linears` for up to three."""

    def __init__(self) -> None:
        _forms()  # traced here, not during a graph's compilation

    def __call__(self, graph: Graph) -> None:
        join_layers(graph, _forms())
        for op in {node.target for node in graph.nodes if getattr(node.target, "namespace", None) == "vbrt"}:
            torch_api.never_lower(op)  # operators that it has not traced

    def uuid(self) -> Any:
        """Cache key of the pass: a hash of the files that define it."""
        return torch_api.hash_of_files((__file__, horizontal_fusion.__file__, linear.__file__, fused_linear.__file__))


@functools.cache
def _forms() -> Forms:
    """Activations and norms as inductor decomposes them, for bf16."""
    return Forms(_gates(), _norms())


def _gates() -> dict[str, tuple[Node, Node]]:
    """Activation -> (input, result), as inductor decomposes it, for bf16."""
    y = torch.empty(1, 8, dtype=torch.bfloat16, device="cpu")
    names = (name for name in ACTIVATIONS if name != "none")
    return {name: _traced(functools.partial(activate, activation=name), y) for name in names}


def _norms() -> list[tuple[Node, Node, Node]]:
    """(Input, gain, result) of an RMS norm with `EPS`: torch's own, and as written in Hugging Face's models."""

    def written_out(x: Tensor, gain: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)

    gain = torch.empty(8, dtype=torch.bfloat16, device="cpu")
    shapes = ((1, 8), (1, 1, 8))  # the mean's dimension is normalized to a positive one
    forms = (lambda x, gain: F.rms_norm(x, gain.shape, gain, EPS), written_out)
    return [_traced(form, gain.new_empty(shape), gain) for form in forms for shape in shapes]


def _traced(fn: Callable[..., Tensor], *inputs: Tensor) -> tuple[Node, ...]:
    """Inputs and result of a function, traced with inductor's decompositions."""
    graph = make_fx(fn, torch_api.decompositions(), tracing_mode="fake")(*inputs).graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add_.Scalar):
        node.target = torch.ops.aten.add.Scalar  # as functionalization, which ran before, leaves it
    return *graph.find_nodes(op="placeholder"), *graph.output_node().all_input_nodes
