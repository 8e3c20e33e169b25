"""`vbrt.advise`: which config, which budgets and which options of training, for a model, a task and a machine.

Every candidate is planned and estimated as it would run (`estimate.py`) and timed (`speed.py`); what does not fit is
kept with the reason. Nothing is loaded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from vbrt.config import Machine, VBConfig, load_config
from vbrt.errors import ArgumentError, ConfigError
from vbrt.estimation.choices import Advice, Choice
from vbrt.estimation.estimate import as_task, bare_model, estimate_of
from vbrt.estimation.rates import Rates, kept_rates, measure_rates
from vbrt.estimation.report import Estimate
from vbrt.estimation.speed import predict
from vbrt.estimation.task import GOALS, Task
from vbrt.estimation.trace import Trace
from vbrt.estimation.whole import whole_trace
from vbrt.model.machine import this_machine
from vbrt.model.planner import make_plan
from vbrt.residency.plan import Plan

__all__ = ["advise"]

_ROOM = 0.97  # of what is free, that a plan may fill: the rest is the allocator's
_PRESETS = ("dense", "exact", "fp4")
_LONGEST = 1 << 20  # tokens of context that are tried, at most
_LORA = 16
_SLACK = 64 << 20  # slots of pages are aligned
_SSD = {"ssd": {"enabled": True, "path": "~/.cache/vbrt/pages"}}


def advise(
    model: nn.Module,
    goal: str = "fastest",
    task: str | Task | None = None,
    *,
    machine: Machine | None = None,
    rates: Rates | None = None,
    **sizes: Any,
) -> Advice:
    """Say how a model runs best on a machine, before it is loaded.

    Args:
        model: as for `vbrt.estimate`.
        goal: "fastest": least time, 4 bits allowed; "exact": the model's own bits; "longest": the most context;
            "train": the least that is given up for a training step that fits.
        task: "decode" (default; "train" with that goal) or "prefill"; `sizes` as for `vbrt.estimate`.
        machine: its memory (default: this machine's). rates: how fast it is (default: what `vbrt tune --machine` kept,
            else measured now).

    Raises:
        ArgumentError: an unknown goal, or an impossible size.
        VBError: as `vbrt.estimate`.
    """
    if goal not in GOALS:
        raise ArgumentError(f"goal = {goal!r}; expected one of {', '.join(map(repr, GOALS))}")
    task = as_task(task or ("train" if goal == "train" else "decode"), sizes)
    machine = machine or this_machine(load_config("fp4"))
    rates = rates or kept_rates() or measure_rates(keep=False)
    asked = _Asked(model, machine, rates)
    choices = tuple(_trained(asked, task) if task.trains else _run(asked, task, longest=goal == "longest"))
    return Advice(type(model).__name__, goal, task, machine, rates, choices)


@dataclass
class _Asked:
    """A model and a machine; traces are made once for each task."""

    model: nn.Module
    machine: Machine
    rates: Rates

    def __post_init__(self) -> None:
        self._bare: dict[int, nn.Module] = {}
        self._traces: dict[tuple[Task, bool], Trace] = {}

    def bare(self, task: Task) -> nn.Module:
        """Return the model without weights, with the task's adapters."""
        if task.lora not in self._bare:
            self._bare[task.lora] = bare_model(self.model, task)
        return self._bare[task.lora]

    def choice(self, name: str, task: Task, config: VBConfig | None) -> Choice:
        """Return a candidate with its memory and its time, or the reason why it cannot be."""
        try:
            found = self._estimate(task, config)
        except _NoRoom as error:
            return Choice(name, task, config, missing=(error.tier, error.nbytes))
        except ConfigError as error:
            return Choice(name, task, config, why=str(error))
        if found.missing:
            tier, nbytes = next(iter(found.missing.items()))
            return Choice(name, task, config, found, missing=(tier, nbytes))
        return Choice(name, task, config, found, predict(self.bare(task), found, self.rates))

    def _estimate(self, task: Task, config: VBConfig | None) -> Estimate:
        bare = self.bare(task)
        if config is None or config.mode == "train":
            return self._found(bare, task, config, None if config is None else make_plan(bare, config, self.machine))
        plan = make_plan(bare, config, _endless(self.machine), charge_kept=False)
        found = self._found(bare, task, config, plan)
        beside = sum(r.nbytes for r in found.rows if r.tier == found.compute_tier and r.name != "pages")
        config = _with_budget(config, self.machine, plan, beside)
        try:
            found = self._planned(bare, task, config)
        except ConfigError:
            if not self.machine.ssd_free_bytes:
                raise
        if found.missing and self.machine.ssd_free_bytes:  # more than host memory takes
            found = self._planned(bare, task, load_config(config, tiers=_SSD))
        return found

    def _planned(self, bare: nn.Module, task: Task, config: VBConfig) -> Estimate:
        return self._found(bare, task, config, make_plan(bare, config, self.machine, charge_kept=False))

    def _found(self, bare: nn.Module, task: Task, config: VBConfig | None, plan: Any) -> Estimate:
        if task.trains and not task.lora:  # what a plan freezes decides what is kept; PEFT freezes everything
            return estimate_of(bare, task, config, self.machine, plan)
        key = (task, plan is not None and not task.trains)
        if key not in self._traces:
            self._traces[key] = whole_trace(bare, task, plan)
        return estimate_of(bare, task, config, self.machine, plan, self._traces[key])


def _endless(machine: Machine) -> Machine:
    """Return the machine with room for anything: for what a task takes beside pages."""
    much = 1 << 50
    gpu = None if machine.gpu_total_bytes is None else much
    return Machine(gpu, gpu, much, much, machine.ssd_free_bytes)


class _NoRoom(ConfigError):
    """A tier cannot hold what a task takes beside pages, and one layer of those."""

    def __init__(self, tier: str, nbytes: int) -> None:
        super().__init__(f"the {tier} lacks {nbytes} bytes")
        self.tier, self.nbytes = tier, nbytes


def _with_budget(config: VBConfig, machine: Machine, plan: Plan, beside: int) -> VBConfig:
    """Return the config with the budget that the rest of the task leaves to pages. Raises _NoRoom."""
    tier = plan.compute_tier
    free = machine.gpu_free_bytes if tier == "gpu" else machine.cpu_available_bytes
    room = int(free * _ROOM) - beside
    if room < plan.largest_layer_bytes:
        raise _NoRoom(tier, plan.largest_layer_bytes - room)
    return load_config(config, tiers={tier: {"budget": min(room, plan.page_bytes + _SLACK)}})


# -- candidates -------------------------------------------------------------------------------------------------------


def _run(asked: _Asked, task: Task, *, longest: bool) -> Iterator[Choice]:
    """Yield inference as it is and with each preset; with `longest` at the most context that fits."""
    for name, config in (("unwrapped", None), *((preset, load_config(preset)) for preset in _PRESETS)):
        choice = asked.choice(name, task, config)
        if longest and choice.fits:
            choice = _longest(asked, choice, task)
        yield choice


def _longest(asked: _Asked, choice: Choice, task: Task) -> Choice:
    """Return a choice at the largest context, in doublings, that fits."""
    context = task.context * 2
    while context <= _LONGEST:
        further = asked.choice(choice.name, task.but(context=context), choice.config)
        if not further.fits:
            break
        choice, context = further, context * 2
    return replace(choice, longest=True)


def _trained(asked: _Asked, task: Task) -> Iterator[Choice]:
    """Yield training with ever more given up: everything trains, then adapters, on ever smaller weights."""
    variants: Sequence[tuple[str, Mapping[str, Any]]] = (("", {}), (", checkpointing", {"checkpointing": True}))
    for word, changes in variants:
        yield asked.choice(f"all weights{word}", task.but(**changes), None)
    rank = task.lora or _LORA
    for preset in (None, *_PRESETS):
        for word, changes in variants:
            config = None if preset is None else load_config(preset)
            name = f"LoRA {rank} on {preset or 'the plain model'}{word}"
            yield asked.choice(name, task.but(lora=rank, **changes), config)
