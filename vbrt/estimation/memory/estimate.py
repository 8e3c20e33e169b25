"""`vbrt.estimate`: memory of a task, before anything is loaded."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from vbrt.config import Machine, load_config
from vbrt.config.argument_checks import check_instance, check_whole
from vbrt.config.overrides import Config
from vbrt.errors import ArgumentError
from vbrt.estimation.memory.estimate_report import Estimate
from vbrt.estimation.memory.gpu_share import share_of
from vbrt.estimation.memory.planned_estimate import bare_model, estimate_of
from vbrt.estimation.memory.planned_weights import held_alike
from vbrt.estimation.memory.rank_share import rank_of
from vbrt.estimation.memory.task import Task
from vbrt.model.machine_memory import this_machine
from vbrt.model.planner import shown_plan

__all__ = ["as_task", "estimate"]


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
    asked = None if config is None else load_config(config)
    if isinstance(task, str) and asked is not None and asked.context is not None:
        sizes = {"context": asked.context} | sizes
    task = as_task(task, sizes)
    machine = machine or this_machine(asked or load_config("fp4"))
    bare = bare_model(model, task, ranks, asked)
    machine = machine if ranks == 1 else rank_of(machine, ranks)
    if asked is None:
        return estimate_of(bare, task, None, machine, None)
    share = share_of(bare, asked, machine, task)
    plan = share.noted(shown_plan(bare, share.config, machine))
    return estimate_of(bare, task, share.config, machine, plan, share.traces.get(held_alike(bare, plan, task)))


def as_task(task: str | Task, sizes: Mapping[str, Any]) -> Task:
    """Return the task with its sizes. Raises ArgumentError: an impossible value."""
    if isinstance(task, Task):
        return task.but(**sizes) if sizes else task
    unknown = sorted(set(sizes) - {f for f in Task.__dataclass_fields__ if f != "kind"})
    if unknown:
        known = ", ".join(f for f in Task.__dataclass_fields__ if f != "kind")
        raise ArgumentError(f"estimate(..., {unknown[0]}=...): no such argument of a task; expected one of {known}")
    return Task(task, **sizes)
