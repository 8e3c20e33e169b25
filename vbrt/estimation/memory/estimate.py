"""`vbrt.estimate`: the memory that a model takes for a task, before anything of it is loaded.

Weights are counted: the plan that wrapping would follow says which pages lie where. Everything else is traced: the
model runs on tensors without values (`fake_trace.py`), with a few of its equal blocks; their differences tell the rest.
"""

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from vbrt.config import Machine, VBConfig, load_config
from vbrt.config.argument_checks import check_instance, check_whole
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
    config: VBConfig | Mapping[str, Any] | str | os.PathLike | None = "fp4",
    *,
    machine: Machine | None = None,
    ranks: int = 1,
    **sizes: Any,
) -> Estimate:
    """Estimate the memory that a model takes for a task on a machine, before it is loaded.

    Args:
        model: as built under `torch.device("meta")`, or any other; it is not run and not changed.
        task: "decode", "prefill" or "train", or a `Task`; `sizes` are its other attributes: `batch=8, context=4096`.
        config: as for `vbrt.wrap`; None: the model as it is, unwrapped.
        machine: its memory (default: this machine's).
        ranks: of one host, with a GPU each, that the model's own `tp_plan` splits it over: what one of them takes, of
            its share of the machine. 1: the whole model.

    Returns:
        The rows, by tier, each with the source of its figure, and the largest moments of a step. Of a model that
        cannot run without values, weights and pages alone, with a warning and `refused`.

    Raises:
        ArgumentError: the task has an impossible value, nothing says what the model's forward takes, or the model
            cannot be split over so many ranks.
        ConfigError: the config is wrong; or budgets are impossible for this model.
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
    """Return a copy of a model without weights, with the adapters of the task; of several ranks what one of them has.

    Raises WrapError: it is wrapped; and what `part_of` raises, of several ranks.
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
    """Return the estimate of a bare model under a plan; `traced`, if the same task was traced before."""
    if task.trains and plan is not None and plan.mode == "infer":
        for parameter in swapped_parameters(bare, plan):  # what is swapped does not train
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
    notes = {"workspace": "of cuBLAS", "rests": "of 1 MiB and less, which torch's allocator does not split off"}
    rows += [Row(name, tier, nbytes, "counted", notes[name]) for name, nbytes in more[largest].items()]
    rest = (traced.refused, made, traced.work, traced.rows.get("prompt in place", 0))
    return Estimate(type(bare).__name__, task, config, machine, tier, tuple(rows), moments, plan, *rest)


def _compute_tier(plan: Plan | None, machine: Machine) -> str:
    if plan is not None:
        return plan.compute_tier
    return "cpu" if machine.gpu_total_bytes is None else "gpu"


def lora_model(model: nn.Module, rank: int, *, device: str = "meta") -> nn.Module:
    """Return a model with PEFT's adapters on all linear layers but the head, which are made on a device.

    Raises ArgumentError: peft is not installed, or it finds nothing to adapt.
    """
    try:
        return lora_on(model, rank, meta=device == "meta")
    except LibraryError as error:
        raise ArgumentError(f"lora = {rank}: {error}") from error
    except ValueError as error:
        raise ArgumentError(f"lora = {rank}: peft has nothing to adapt in {type(model).__name__}: {error}") from error


def as_task(task: str | Task, sizes: Mapping[str, Any]) -> Task:
    """Return the task that is named, with its sizes. Raises ArgumentError: an impossible value."""
    if isinstance(task, Task):
        return task.but(**sizes) if sizes else task
    unknown = sorted(set(sizes) - {f for f in Task.__dataclass_fields__ if f != "kind"})
    if unknown:
        known = ", ".join(f for f in Task.__dataclass_fields__ if f != "kind")
        raise ArgumentError(f"estimate(..., {unknown[0]}=...): no such size of a task; there are {known}")
    return Task(task, **sizes)
