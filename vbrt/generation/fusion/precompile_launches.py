"""Ahead-of-time compilation of all kernels that a fused step launches, before its first run.

Each distinct call in the step graph is made once, on the given tensors, or on empty memory of the same form for results
of other calls. Nothing is launched (`vbrt.kernels.cuda.compiling`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from vbrt.generation.fusion.step_graph import StepGraph
from vbrt.kernels import step as kernels
from vbrt.kernels.cuda.compiling import Compilation, begin, noting
from vbrt.kernels.observers import unwatched
from vbrt.kernels.operator_trace import form_of, root_of
from vbrt.libraries.torch_api import OpOverload

__all__ = ["compile_launches"]

#: functions that launch vbrt kernels, independently of tensor values
_FUNCTIONS = {kernels.attended, kernels.normed, kernels.rotated, kernels.rotated_into, kernels.routed, kernels.summed}
_OPERATORS = ("vbrt::fp4_linear", "vbrt::fp4_linears", "vbrt::fp4_gated", "vbrt::fp4_residual", "vbrt::normed_sum")


def compile_launches(step: StepGraph) -> list[Compilation]:
    """Start to compile the step's kernels; return the compilations. Failures are counted in `step.kept`."""
    calls = {}
    for node in step.graph.nodes:
        if node.op == "call_function" and _launches(node.target):
            calls.setdefault((node.target, str(map_arg((node.args, node.kwargs), _kind(step)))), node)
    try:
        with noting() as found, unwatched():
            for node in calls.values():
                node.target(*map_arg(node.args, _stand_in(step)), **map_arg(node.kwargs, _stand_in(step)))
    except Exception as error:  # noqa: BLE001 - launches compile instead, and raise real errors
        step.kept[f"nothing was compiled ahead: {type(error).__name__}: {error}"] += 1
        return []
    begin(found)
    return found


def _launches(target: Any) -> bool:
    if isinstance(target, OpOverload):
        return target._schema.name in _OPERATORS
    return target in _FUNCTIONS


def _kind(step: StepGraph) -> Callable[[Node], str]:
    """Specialization key of a tensor argument: its form and 16-byte alignment."""
    return lambda node: f"{form_of(node)} {step.given[node].data_ptr() % 16 if node in step.given else 0}"


def _stand_in(step: StepGraph) -> Callable[[Node], Tensor]:
    """Stand-in argument: a given tensor itself, a view of its storage, or empty memory of a result's form."""

    def made(node: Node) -> Tensor:
        if node in step.given:
            return step.given[node]
        form, root = form_of(node), step.given.get(root_of(node))
        if root is not None:
            flat = torch.empty(0, dtype=form.dtype, device=form.device).set_(root.untyped_storage())
            return flat.as_strided(form.shape, form.strides)
        return torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=form.device)

    return made
