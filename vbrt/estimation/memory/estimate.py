"""`vbrt.estimate`: memory of a task, before anything is loaded.

Weights are counted: the plan that wrapping would follow gives the pages of each tier. Everything else is traced: the
model runs on fake tensors (`fake_trace.py`) with a few of its equal blocks, and the rest is extrapolated.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from vbrt.config import Machine, VBConfig, load_config
from vbrt.config.argument_checks import check_instance, check_whole
from vbrt.config.overrides import Config
from vbrt.errors import ArgumentError, LibraryError, WrapError
from vbrt.estimation.memory.estimate_report import Estimate, Row
from vbrt.estimation.memory.estimate_rows import more_parts, parts, stages, step_rows, swapped_parameters, weight_rows
from vbrt.estimation.memory.extrapolation import whole_trace
from vbrt.estimation.memory.fake_trace import Trace
from vbrt.estimation.memory.rank_share import part_of, rank_of
from vbrt.estimation.memory.representative_blocks import meta_copy
from vbrt.estimation.memory.task import Task
from vbrt.estimation.memory.traced_checkpointing import asked_of
from vbrt.layers import SwappedLayer
from vbrt.libraries.peft_api import lora_on
from vbrt.model.machine_memory import this_machine
from vbrt.model.planner import shown_plan
from vbrt.residency.plan import Plan

__all__ = ["as_task", "bare_model", "estimate", "estimate_of", "lora_model"]


def estimate(
    model: nn.Module,
    task: str | Task = "decode",
    config: Config = "fp4",
    *,
    machine: Machine | None = None,
    ranks: int = 1,
    **sizes: Any,
) -> Estimate:
    """Estimate the memory of a task on a machine, before the model is loaded.

    Args:
        model: as built under `torch.device("meta")`, or any other; it is not run and not changed.
        task: "decode", "prefill" or "train", or a `Task`; `sizes` are its other attributes: `batch=8, context=4096`.
        config: as for `vbrt.wrap`; None: the unwrapped model.
        machine: its memory (default: this machine's).
        ranks: number of ranks on one host, with a GPU each, over which the model's own `tp_plan` shards it; the
            estimate is for one of them, on its share of the machine. 1: the whole model.

    Returns:
        Rows by tier, each with the source of its figure, and the peak of each stage. For a model that cannot run on
            fake tensors, weights and pages alone, with a warning and `refused`.

    Raises:
        ArgumentError: an impossible value in the task, unknown inputs of the model's forward, or the model cannot be
            sharded over so many ranks.
        ConfigError: an invalid config, or impossible budgets for this model.
        WrapError: the model is wrapped.
    """
    check_instance(model, nn.Module, "estimate(): model", "a torch.nn.Module")
    check_instance(machine, Machine | None, "estimate(): machine", "a Machine, or None for this one")
    check_whole(ranks, "estimate(): ranks")
    task = as_task(task, sizes)
    asked = None if config is None else load_config(config)
    machine = machine or this_machine(asked or load_config("fp4"))
    bare = bare_model(model, task, ranks, asked)
    machine = machine if ranks == 1 else rank_of(machine, ranks)
    plan = None if asked is None else shown_plan(bare, asked, machine)
    return estimate_of(bare, task, asked, machine, plan)


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
    weights = weight_rows(bare, plan, machine, tier, task)
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


def as_task(task: str | Task, sizes: Mapping[str, Any]) -> Task:
    """Return the task with its sizes. Raises ArgumentError: an impossible value."""
    if isinstance(task, Task):
        return task.but(**sizes) if sizes else task
    unknown = sorted(set(sizes) - {f for f in Task.__dataclass_fields__ if f != "kind"})
    if unknown:
        known = ", ".join(f for f in Task.__dataclass_fields__ if f != "kind")
        raise ArgumentError(f"estimate(..., {unknown[0]}=...): no such argument of a task; expected one of {known}")
    return Task(task, **sizes)
