"""Estimate of a bare model under a plan: rows by tier and the peak of each stage.

Weights are counted: the plan that wrapping would follow gives the pages of each tier. Everything else is traced: the
model runs on fake tensors (`fake_trace.py`) with a few of its equal blocks, and the rest is extrapolated.
"""

from torch import nn

from vbrt.config import Machine, VBConfig
from vbrt.errors import ArgumentError, LibraryError, WrapError
from vbrt.estimation.memory.estimate_report import Estimate, Row
from vbrt.estimation.memory.estimate_rows import more_parts, parts, stages, step_rows, swapped_parameters, weight_rows
from vbrt.estimation.memory.extrapolation import whole_trace
from vbrt.estimation.memory.fake_trace import Trace
from vbrt.estimation.memory.rank_share import part_of
from vbrt.estimation.memory.representative_blocks import meta_copy
from vbrt.estimation.memory.task import Task
from vbrt.estimation.memory.traced_checkpointing import asked_of
from vbrt.layers import SwappedLayer
from vbrt.libraries.peft_api import lora_on
from vbrt.residency.plan import Plan

__all__ = ["bare_model", "estimate_of", "lora_model"]


def bare_model(model: nn.Module, task: Task, ranks: int = 1, config: VBConfig | None = None) -> nn.Module:
    """Return a meta copy of a model with the task's adapters; with several ranks, one rank's shard.

    Raises WrapError: it is wrapped; with several ranks, also what `part_of` raises.
    """
    _check_plain(model)
    bare = meta_copy(model) if ranks == 1 else part_of(model, ranks, config)
    return lora_model(bare, task.lora) if task.lora else bare


def _check_plain(model: nn.Module) -> None:
    wrapped = next((name for name, module in model.named_modules() if isinstance(module, SwappedLayer)), None)
    if wrapped is not None:
        raise WrapError(f"{wrapped or 'the model'} is a VB layer already; estimate a model before it is wrapped")


def estimate_of(
    bare: nn.Module,
    task: Task,
    config: VBConfig | None,
    machine: Machine,
    plan: Plan | None,
    traced: Trace | None = None,
) -> Estimate:
    """Estimate a bare model under a plan; `traced` reuses an earlier trace of the same task."""
    if task.trains and plan is not None and plan.mode == "infer":
        for parameter in swapped_parameters(bare, plan):  # swapped weights are frozen
            parameter.requires_grad_(False)
    tier = _compute_tier(plan, machine)
    traced = traced or whole_trace(bare, task, plan, asked_of(config, tier))
    weights = weight_rows(bare, plan, config, machine, tier, task)
    held = {stage: parts(traced, stage) for stage in stages(traced)}
    more = more_parts(task, plan, machine, tier, held, traced)
    steady = {row.name: row.nbytes for row in weights if row.tier == tier}
    made = {stage: {**steady, **held[stage], **more[stage]} for stage in held}
    moments = tuple((stage, sum(of.values())) for stage, of in made.items())
    largest = max(moments, key=lambda moment: moment[1])[0]
    rows = [*weights, *step_rows(held[largest], task, tier, largest)]
    notes = {"workspace": "cuBLAS", "rests": "remainders up to 1 MiB that torch's allocator does not split off"}
    rows += [Row(name, tier, nbytes, "counted", notes[name]) for name, nbytes in more[largest].items()]
    rest = (traced.refused, made, traced.work, traced.rows.get("prompt in place", 0))
    return Estimate(type(bare).__name__, task, config, machine, tier, tuple(rows), moments, plan, *rest)


def _compute_tier(plan: Plan | None, machine: Machine) -> str:
    if plan is not None:
        return plan.compute_tier
    return "cpu" if machine.gpu_total_bytes is None else "gpu"


def lora_model(model: nn.Module, rank: int, *, device: str = "meta") -> nn.Module:
    """Return a model with PEFT's LoRA adapters on all linear layers except the head, created on `device`.

    Raises ArgumentError: peft is not installed, or finds nothing to adapt.
    """
    try:
        return lora_on(model, rank, meta=device == "meta")
    except LibraryError as error:
        raise ArgumentError(f"lora = {rank}: {error}") from error
    except ValueError as error:
        raise ArgumentError(f"lora = {rank}: peft has nothing to adapt in {type(model).__name__}: {error}") from error
