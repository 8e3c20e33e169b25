"""Joining layers that read one tensor into one launch: a pass over the graphs of torch.compile.

    step = torch.compile(model, options=vbrt.compile_options("reduce-overhead"))

`horizontal_fusion.py` has what is joined. For inductor's own kernel of a norm the layers behind it would wait.

The graph has an activation or a norm as inductor's decompositions of this torch leave it, so it is compared with what
they make of the same expression. The road not taken: a pass before decomposition, where `nn.SiLU` is one node but the
layers are not yet operators.

Of the guards that a graph checks at each call those on tiles are dropped: what the tiles are, and that they stay where
they are, is in a string of the layer, whose guard is kept.
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

_PLANES = "_vb_page"  # the attribute by which a layer holds planes that never move


def compile_options(mode: str = "default") -> dict[str, Any]:
    """`torch.compile(..., options=)` that does what `mode` does and joins 4-bit layers of one input.

    A gated pair of them, activation(gate) * up, becomes one launch that rounds once, so its last bits are not those of
    the eager model.

    mode: as of torch.compile: "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs".
    """
    own = {torch_api.PASS_OPTION: JoinSiblings(), torch_api.GUARD_OPTION: wanted_guards}
    return {**torch_api.options_of_mode(mode), **own}


def wanted_guards(guards: Sequence[Any]) -> list[bool]:
    """Which of dynamo's guards to keep: all but those of the tensors that `Weight.show` gives to layers."""
    return [not torch_api.guards_attribute(guard, _PLANES) for guard in guards]


class JoinSiblings(torch_api.graph_pass_base()):  # type: ignore[misc]  # a class that only inductor has
    """Replaces `vbrt::fp4_linear` calls on one x by `vbrt::fp4_gated`, or by `vbrt::fp4_linears` for up to three."""

    def __init__(self) -> None:
        _forms()  # traced here and not while a graph is being compiled

    def __call__(self, graph: Graph) -> None:
        join_layers(graph, _forms())
        for op in {node.target for node in graph.nodes if getattr(node.target, "namespace", None) == "vbrt"}:
            torch_api.never_lower(op)  # of what it has not traced

    def uuid(self) -> Any:
        """The pass's part of the key of cached graphs: the files that decide what is joined."""
        return torch_api.hash_of_files((__file__, horizontal_fusion.__file__, linear.__file__, fused_linear.__file__))


@functools.cache
def _forms() -> Forms:
    """What inductor's decompositions of this torch make of activations and norms, for bf16."""
    return Forms(_gates(), _norms())


def _gates() -> dict[str, tuple[Node, Node]]:
    """Activation -> (its input, its result) in a graph as inductor decomposes it, for bf16."""
    y = torch.empty(1, 8, dtype=torch.bfloat16, device="cpu")
    names = (name for name in ACTIVATIONS if name != "none")
    return {name: _traced(functools.partial(activate, activation=name), y) for name in names}


def _norms() -> list[tuple[Node, Node, Node]]:
    """(Input, gain, result) of an RMS norm with `EPS` as torch has it, and as Hugging Face's models write it."""

    def written_out(x: Tensor, gain: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)

    gain = torch.empty(8, dtype=torch.bfloat16, device="cpu")
    shapes = ((1, 8), (1, 1, 8))  # the sum's dimension is counted from the front
    forms = (lambda x, gain: F.rms_norm(x, gain.shape, gain, EPS), written_out)
    return [_traced(form, gain.new_empty(shape), gain) for form in forms for shape in shapes]


def _traced(fn: Callable[..., Tensor], *inputs: Tensor) -> tuple[Node, ...]:
    """The inputs and the result of what inductor's decompositions make of a function."""
    graph = make_fx(fn, torch_api.decompositions(), tracing_mode="fake")(*inputs).graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add_.Scalar):
        node.target = torch.ops.aten.add.Scalar  # as functionalization, which has been there before, leaves it
    return *graph.find_nodes(op="placeholder"), *graph.output_node().all_input_nodes
