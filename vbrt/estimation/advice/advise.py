"""`vbrt.advise`: config, budgets and training options for a model, a task and a machine.

Every candidate is planned and estimated as it would run (`candidates.py`) and timed (`step_time.py`); candidates that
do not fit keep the reason (`choices.py`). Nothing is loaded.
"""

import functools
import os
from dataclasses import replace
from typing import Any

from torch import nn

from vbrt.config import Machine, load_config
from vbrt.config.argument_checks import check_instance, check_one_of
from vbrt.errors import ArgumentError
from vbrt.estimation.advice.candidates import Asked, candidates, nearest
from vbrt.estimation.advice.choices import Advice
from vbrt.estimation.advice.cost_model import CostModel, default_cost_model, read_cost_model
from vbrt.estimation.advice.data_sheets import sheets
from vbrt.estimation.advice.machine_rates import Rates, device_name, kept_rates, measure_rates
from vbrt.estimation.memory.estimate import as_task
from vbrt.estimation.memory.task import GOALS, Task
from vbrt.host import accelerator
from vbrt.model.machine_memory import this_machine

__all__ = ["advise"]


def advise(
    model: nn.Module,
    goal: str = "fastest",
    task: str | Task | None = None,
    *,
    machine: Machine | None = None,
    rates: Rates | None = None,
    cost_model: str | os.PathLike[str] | None = None,
    **sizes: Any,
) -> Advice:
    """Find the best way to run a model on a machine, before it is loaded.

    Args:
        model: as for `vbrt.estimate`.
        goal: "fastest": least time for the given batch, 4 bits allowed; "exact": the same, lossless only; "throughput":
            most tokens a second, larger batches included; "longest": the longest context; "train": a training step that
            fits, with the least compromise.
        task: "decode" (default; "train" with that goal) or "prefill"; `sizes` as for `vbrt.estimate`.
        machine: its memory (default: this machine's).
        rates: its speed (default: as stored by `vbrt tune --machine`, else measured now).
        cost_model: a TOML file of coefficients fitted to another machine, with the keys of
            vbrt/estimation/advice/cost_models/h200.toml (with a GPU) or zen4.toml (default: these).

    Raises:
        ArgumentError: an unknown goal, an impossible size, rates of a GPU for a machine without one (or the reverse),
            or a cost model of the other tier.
        ConfigError: a cost model that cannot be read, or whose keys are missing, unknown or wrong.
        WrapError: the model is wrapped.
    """
    check_instance(model, nn.Module, "advise(): model", "a torch.nn.Module")
    check_instance(machine, Machine | None, "advise(): machine", "a Machine, or None for this one")
    check_instance(rates, Rates | None, "advise(): rates", "Rates, or None for those that were measured")
    check_instance(cost_model, str | os.PathLike | None, "advise(): cost_model", "the path of a TOML file, or None")
    check_one_of(goal, GOALS, "advise(): goal")
    task = as_task(task or ("train" if goal == "train" else "decode"), sizes)
    machine = machine or this_machine(load_config("fp4"))
    costs = _cost_model(machine, cost_model)
    rates = rates or kept_rates() or _measured(machine)
    _check(machine, rates)
    asked = Asked(model, machine, rates, costs)
    choices = tuple(candidates(asked, task, longest=goal == "longest"))
    advice = Advice(type(model).__name__, goal, task, machine, rates, costs, choices)
    return advice if advice.fitting else replace(advice, nearest=nearest(asked, task, lossless=goal == "exact"))


def _cost_model(machine: Machine, path: str | os.PathLike[str] | None) -> CostModel:
    """Return the coefficients of the tier that computes. Raises ArgumentError: those of a file are of the other one."""
    tier = "cpu" if machine.gpu_total_bytes is None else "gpu"
    costs = default_cost_model(tier) if path is None else read_cost_model(path)
    if costs.computes_on != tier:
        raise ArgumentError(
            f'{os.fspath(path)}: computes_on = "{costs.computes_on}", and the machine that is asked about computes on '
            f'the {tier}; name a file with computes_on = "{tier}"'
        )
    return costs


def _measured(machine: Machine) -> Rates:
    """Measure this machine, in seconds. Raises ArgumentError: the question is about a machine with a GPU, and this has
    none."""
    if machine.gpu_total_bytes is not None and not accelerator.is_used():
        raise _no_rates(device_name())
    return _rates_here()


@functools.cache
def _rates_here() -> Rates:
    """Measure once per process."""
    return measure_rates()


def _no_rates(name: str) -> ArgumentError:
    return ArgumentError(
        f"a machine with a GPU, and the rates of one without, {name}; name a GPU whose data sheet says how fast it is "
        f"(--gpu): {', '.join(sheets())}; or say it yourself (--link, --memory, --tflops)"
    )


def _check(machine: Machine, rates: Rates) -> None:
    """Raise ArgumentError for a GPU's rates with a machine without one, or the reverse."""
    gpu = machine.gpu_total_bytes is not None
    if gpu and not rates.link_gb_s:
        raise _no_rates(rates.name)
    if not gpu and rates.link_gb_s:
        raise ArgumentError(
            f"the rates of a GPU, {rates.name}, and a machine without one; say how much memory it has (--gpu-memory "
            "24GiB), or leave the rates out"
        )
