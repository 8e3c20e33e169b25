"""Extrapolation of a whole model's trace from a few blocks of each kind."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from vbrt.estimation.memory.fake_trace import Trace, Untraceable, trace
from vbrt.estimation.memory.planned_weights import held_by
from vbrt.estimation.memory.task import Task
from vbrt.host.logger import warn
from vbrt.model.repeated_blocks import Stack, stacks_of
from vbrt.residency.activation_plan import KEEP, OFFLOAD
from vbrt.residency.plan import Plan

__all__ = ["STAGES", "whole_trace"]

_TRACED = 3  # blocks traced per kind (the first differ); one more gives a block's increment
#: stages of a step, by task
STAGES = {"decode": ("prompt", "step"), "prefill": ("pass",), "train": ("forward", "backward", "optimizer")}
_BLOCK = 256  # length bucket of the captured cache, in tokens, see vbrt.generation.static.length_buckets


def whole_trace(model: nn.Module, task: Task, plan: Plan | None, activations: str | int = KEEP) -> Trace:
    """Trace a model on the meta device, with the KV cache at its final length.

    Args:
        activations: in training, the mode of `training.activations`, or their budget in bytes.

    A model that cannot run on fake tensors gives an empty trace with the reason, and a warning.
    """
    try:
        if isinstance(activations, int):
            return _bounded(model, task, plan, activations)
        return _traced(model, task, plan, activations)
    except Untraceable as error:
        warn(f"{error}; until then, only weights and pages are counted", stacklevel=2)
        stages = STAGES[task.kind]
        return Trace(dict.fromkeys(stages, 0), {}, refused=str(error))


def _bounded(model: nn.Module, task: Task, plan: Plan | None, room: int) -> Trace:
    """Trace training under an activation budget: keep everything if that fits, else fill the budget."""
    kept = _traced(model, task, plan, KEEP)
    if kept.rows.get("activations", 0) <= room:
        return kept
    parked = _traced(model, task, plan, OFFLOAD)
    more = max(0, room - parked.rows["activations"])
    peaks = {phase: n + more * phase.startswith(("forward", "backward")) for phase, n in parked.peaks.items()}
    return replace(parked, peaks=peaks, rows=dict(parked.rows) | {"activations": parked.rows["activations"] + more})


def _traced(model: nn.Module, task: Task, plan: Plan | None, activations: str) -> Trace:
    held = replace(held_by(model, plan, task), activations=activations)
    stacks = stacks_of(model)
    least = {stack.name: {kind: min(n, _TRACED) for kind, n in stack.count.items()} for stack in stacks}
    base = total = trace(model, task, _chosen(stacks, least), held)
    for stack in stacks:
        for kind, count in stack.count.items():
            if count > _TRACED:
                more = least | {stack.name: least[stack.name] | {kind: _TRACED + 1}}
                other = trace(model, task, _chosen(stacks, more), held)
                total = _further(total, base, other, count - _TRACED)
    return _grown(total, task, by_blocks=plan is not None)


def _further(total: Trace, base: Trace, other: Trace, times: int) -> Trace:
    """Add the difference between two traces `times` times."""

    def added(to: Mapping[Any, int], before: Mapping[Any, int], after: Mapping[Any, int]) -> dict[Any, int]:
        return {key: n + times * (after.get(key, before[key]) - before[key]) for key, n in to.items()}

    growth = total.growth + times * (other.growth - base.growth)
    named = ("peaks", "rows", "work", "cache")
    sums = {name: added(*(getattr(of, name) for of in (total, base, other))) for name in named}
    return replace(total, growth=growth, **sums)


def _grown(traced: Trace, task: Task, *, by_blocks: bool) -> Trace:
    """Return the trace with the KV cache of all tokens; a captured cache is rounded up to length buckets."""
    if task.kind != "decode":
        return traced
    tokens = task.context + task.new
    tokens = -(-tokens // _BLOCK) * _BLOCK if by_blocks else tokens
    further = traced.growth * max(0, tokens - task.context - 2)
    steps = {phase: n + further * phase.startswith("step") for phase, n in traced.peaks.items()}
    once = traced.rows["KV cache"]
    rows = dict(traced.rows) | {"KV cache": once + further}
    return replace(traced, peaks=steps, rows=rows, room=tokens - task.context - 2)


def _chosen(stacks: Iterable[Stack], counts: Mapping[str, dict[int, int]]) -> dict[str, tuple[Stack, list[int]]]:
    return {stack.name: (stack, stack.chosen(counts[stack.name])) for stack in stacks}
