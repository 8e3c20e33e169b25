"""Candidates for advice: ways to run a task, each planned, estimated and timed.

They vary format, resident share of pages, batch, context, checkpointing, autocast and adapters. The model is traced
once per task; budgets and shares are then arithmetic.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from vbrt.config import Machine, VBConfig, load_config
from vbrt.config.load_config import OVERRIDDEN
from vbrt.config.parse_budgets import size_text
from vbrt.errors import ConfigError
from vbrt.estimation.advice.choices import Choice, Nearest
from vbrt.estimation.advice.cost_model import CostModel
from vbrt.estimation.advice.machine_rates import Rates
from vbrt.estimation.advice.step_time import predict
from vbrt.estimation.memory.estimate_report import Estimate
from vbrt.estimation.memory.extrapolation import whole_trace
from vbrt.estimation.memory.fake_trace import Trace
from vbrt.estimation.memory.gpu_share import SLACK, besides, endless, leased_bytes
from vbrt.estimation.memory.planned_estimate import bare_model, estimate_of
from vbrt.estimation.memory.planned_weights import held_alike
from vbrt.estimation.memory.task import Task
from vbrt.estimation.memory.traced_checkpointing import asked_of
from vbrt.libraries.transformers_api import checkpointing_switch
from vbrt.model.planner import make_plan
from vbrt.report.progress import Progress
from vbrt.residency.activation_plan import KEEP
from vbrt.residency.plan import Plan

__all__ = ["Asked", "candidates", "nearest"]

_ROOM = 0.97  # share of free memory to plan for; the rest is for the allocator
_PRESETS = ("dense", "exact", "fp4")
_SMALLER = ("nf4", "mxfp4")  # smaller than fp4, with more rounding
_FINER = ("mxint8",)  # larger than fp4, with less rounding
_INT8 = {"compute": {"int8": True}}  # int8 activations for few tokens on a CPU
_EIGHT_BITS = {"training": {"moments": "8bit"}}
_SHARES = (0.75, 0.5, 0.25, 0.0)  # resident shares of pages; 0: all are streamed
_PASSING = 3  # room for streaming, in largest layers: the computing one and the prefetched ones
_LONGEST = 1 << 20  # longest context to try, in tokens
_WIDEST = 256  # largest batch to try
_WORTH = 1.1  # gain in tokens a second that a larger batch must bring
_LORA = 16
_AUTO = 0.8  # share of free host memory that a budget "auto" takes
_GROWN = 6  # attempts to enlarge a machine until a way fits
_SSD = {"ssd": {"enabled": True, "path": "~/.cache/vbrt/pages"}}


@dataclass(frozen=True, slots=True)
class _Way:
    """Way to run a task: preset (None: unwrapped), resident share of its pages (None: as many as fit), display name,
    changes to the preset, and whether it is tried in one size only."""

    task: Task
    preset: str | None = None
    share: float | None = None
    said: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    alone: bool = False

    @property
    def config(self) -> VBConfig | None:
        return None if self.preset is None else load_config(self.preset, **self.changes)

    @property
    def name(self) -> str:
        return self.said or self.preset or "unwrapped"


@dataclass
class Asked:
    """Model and machine of a request; traces are cached per task. cost_model: by default the one that ships."""

    model: nn.Module
    machine: Machine
    rates: Rates
    cost_model: CostModel | None = None

    def __post_init__(self) -> None:
        self._bare: dict[int, nn.Module] = {}
        self._traces: dict[tuple[Task, str | int, Hashable], Trace] = {}

    def on(self, machine: Machine) -> "Asked":
        """Return the same model on another machine, sharing the traces."""
        other = Asked(self.model, machine, self.rates, self.cost_model)
        other._bare, other._traces = self._bare, self._traces
        return other

    def bare(self, task: Task) -> nn.Module:
        """Return the meta model with the task's adapters."""
        if task.lora not in self._bare:
            self._bare[task.lora] = bare_model(self.model, task)
        return self._bare[task.lora]

    def choice(self, way: _Way) -> Choice:
        """Return a candidate with memory and time, or with the reason why it does not fit."""
        found = Choice(way.name, way.task, way.config, preset=way.preset, share=way.share)
        try:
            estimate = self._estimate(way)
        except _NoRoom as error:
            return replace(found, missing=(error.tier, error.nbytes))
        except ConfigError as error:
            return replace(found, why=_reason(error, way.config))
        found = replace(found, config=estimate.config)
        if estimate.missing:
            return replace(found, found=estimate, missing=next(iter(estimate.missing.items())))
        speed = predict(self.bare(way.task), estimate, self.rates, cost_model=self.cost_model)
        return replace(found, found=estimate, speed=speed)

    def found(self, task: Task, config: VBConfig | None) -> Estimate:
        """Return a task's estimate under a config; None: unwrapped. Raises ConfigError: budgets are impossible."""
        bare = self.bare(task)
        plan = None if config is None else make_plan(bare, config, self.machine, charge_kept=False)
        return self._found(bare, task, config, plan)

    def beside(self, way: _Way) -> tuple[Plan | None, int]:
        """Return the plan on a machine with unlimited memory, and the task's bytes besides pages (see `gpu_share`)."""
        bare, config, much = self.bare(way.task), way.config, endless(self.machine)
        plan = None if config is None else make_plan(bare, config, much, charge_kept=False)
        found = self._found(bare, way.task, config, plan)
        return plan, sum(besides(found).values())

    def room(self) -> tuple[str, int]:
        """Return the computing tier, and its bytes that may be filled."""
        gpu = self.machine.gpu_free_bytes
        return ("cpu", int(self.machine.cpu_available_bytes * _ROOM)) if gpu is None else ("gpu", int(gpu * _ROOM))

    def _estimate(self, way: _Way) -> Estimate:
        config = way.config
        if config is None:
            return self.found(way.task, None)
        plan, beside = self.beside(way)
        config = self._with_budget(config, plan, beside, way.share)
        try:
            found = self.found(way.task, config)
        except ConfigError:
            if not self.machine.ssd_free_bytes:
                raise
            found = None
        if self.machine.ssd_free_bytes and (found is None or found.missing):  # exceeds host memory: spill to the drive
            found = self.found(way.task, load_config(config, tiers=_SSD))
        return found

    def _with_budget(self, config: VBConfig, plan: Plan, beside: int, share: float | None) -> VBConfig:
        """Return the config with the budget that the task leaves for pages. Raises _NoRoom."""
        (tier, room), largest = self.room(), plan.largest_layer_bytes
        budget = min(room - beside, leased_bytes(plan) + SLACK)
        if budget < largest:
            raise _NoRoom(tier, largest - budget)
        if share is not None:
            budget = min(budget, max(int(share * leased_bytes(plan)), _PASSING * largest))
        return load_config(config, tiers={plan.compute_tier: {"budget": size_text(budget)}})

    def _found(self, bare: nn.Module, task: Task, config: VBConfig | None, plan: Any) -> Estimate:
        activations = KEEP if plan is None else asked_of(config, plan.compute_tier)
        key = task, activations, held_alike(bare, plan, task)
        if key not in self._traces:
            self._traces[key] = whole_trace(bare, task, plan, activations)
        return estimate_of(bare, task, config, self.machine, plan, self._traces[key])


class _NoRoom(ConfigError):
    """A tier cannot hold a task besides its pages, plus one layer of pages."""

    def __init__(self, tier: str, nbytes: int) -> None:
        super().__init__(f"the {tier} lacks {nbytes} bytes")
        self.tier, self.nbytes = tier, nbytes


def _reason(error: ConfigError, config: VBConfig | None) -> str:
    """Return the fact that a message states, without the config's name and what would do: both are advise's own."""
    source = "" if config is None else config.source
    return str(error).removeprefix(source).removeprefix(OVERRIDDEN).removeprefix(": ").partition("; ")[0]


# -- enumeration ------------------------------------------------------------------------------------------------------


def candidates(asked: Asked, task: Task, *, longest: bool = False) -> Iterator[Choice]:
    """Yield the candidates, least compromise first.

    With `longest`, each at the longest context that fits; otherwise also with fewer resident pages, and in larger
    batches (in training only for the first that fits).
    """
    answered = False
    ways = list(_ways(asked, task))
    with Progress("comparing configs", len(ways), unit="configs") as work:
        for way in ways:
            work.at(way.name)
            choice = asked.choice(way)
            if choice.fits and choice.found.refused:  # an untraced one cannot be scaled
                yield choice
            elif longest and choice.fits:
                yield _longest(asked, choice, way)
            else:
                yield choice
                if choice.fits and not way.alone:
                    yield from _with_less(asked, choice, way)
                    if not (answered and task.trains):
                        yield from _wider(asked, choice, way)
                    answered = True
            work.done()


def nearest(asked: Asked, task: Task, *, lossless: bool = False) -> Nearest | None:
    """Return the way that lacks the least memory, where nothing fits; None: more memory would not help any."""
    found = []
    for way in _ways(asked, task):
        for lacks in ({}, _resident_lacks(asked, way)):
            choice = None if lacks is None else _enlarged(asked, way, lacks)
            if choice is not None and (choice.lossless or not lossless):
                traced = dict.fromkeys(lacks, 0)
                for row in choice.found.rows:
                    traced[row.tier] = traced.get(row.tier, 0) + row.nbytes * (row.source == "traced")
                found.append(Nearest(way.name, lacks, all(n < traced[tier] for tier, n in lacks.items())))
    return min(found, key=lambda each: sum(each.lacks.values()), default=None)


def _enlarged(asked: Asked, way: _Way, lacks: dict[str, int]) -> Choice | None:
    """Enlarge a machine until a way fits, adding what it lacked to `lacks`; None: it never fits."""
    for _ in range(_GROWN):
        choice = asked.on(_larger(asked.machine, lacks)).choice(way)
        missing = None if choice.fits else choice.missing or _host_lacks(asked, way, lacks)
        if missing is None:
            return choice if choice.fits else None
        tier, nbytes = missing
        lacks[tier] = lacks.get(tier, 0) + int(nbytes / _ROOM) + 1
    return None


def _resident_lacks(asked: Asked, way: _Way) -> dict[str, int] | None:
    """Return the bytes that the computing tier lacks to hold all pages of a way; None: unwrapped, or it holds them."""
    if way.preset is None:
        return None
    tier, room = asked.room()
    plan, beside = asked.beside(way)
    lacks = beside + leased_bytes(plan) + SLACK - room
    return {tier: int(lacks / _ROOM) + 1} if lacks > 0 else None


def _host_lacks(asked: Asked, way: _Way, lacks: Mapping[str, int]) -> tuple[str, int] | None:
    """Return the host memory whose lack makes a plan fail; None: it fails for another reason."""
    machine = _larger(asked.machine, lacks)
    choice = asked.on(_larger(machine, {"cpu": 1 << 50})).choice(way)
    found = choice.found
    takes = 0 if found is None else int((found.tiers.get("cpu", 0) - found.spare_bytes) / _AUTO)
    return ("cpu", takes - machine.cpu_available_bytes) if takes > machine.cpu_available_bytes else None


def _larger(machine: Machine, lacks: Mapping[str, int]) -> Machine:
    """Return a machine with so many more bytes in its tiers."""
    names = {"gpu": ("gpu_free_bytes", "gpu_total_bytes"), "cpu": ("cpu_available_bytes", "cpu_total_bytes")}
    grown = {name: (getattr(machine, name) or 0) + n for tier, n in lacks.items() for name in names.get(tier, ())}
    if "ssd" in lacks:
        grown["ssd_free_bytes"] = (machine.ssd_free_bytes or 0) + lacks["ssd"]
    return replace(machine, **grown)


def _ways(asked: Asked, task: Task) -> Iterator[_Way]:
    return _trained(asked, task) if task.trains else _run(asked, task)


def _run(asked: Asked, task: Task) -> Iterator[_Way]:
    """Yield inference unwrapped, and with each preset."""
    for preset in (None, *_PRESETS):
        yield _Way(task, preset)
    gpu = asked.machine.gpu_total_bytes is not None
    if gpu and asked.rates.fp8 and task.kind == "prefill":
        yield _Way(task, "fp8", alone=True)
    for preset in (*_SMALLER, *_FINER):
        yield _Way(task, preset, alone=True)
    if not gpu and task.kind == "decode":
        yield _Way(task, "fp4", said="fp4, activations in int8", changes=_INT8, alone=True)


def _trained(asked: Asked, task: Task) -> Iterator[_Way]:
    """Yield training in order of compromise: all weights, all from the tiers, adapters on ever smaller weights."""
    model, on_gpu = asked.model, asked.machine.gpu_total_bytes is not None
    tasks = list(_options(model, task))
    for word, each in tasks:
        yield _Way(each, said=f"all weights{word}")
    for word, each in tasks:
        if on_gpu and (each.mixed or next(model.parameters()).dtype == torch.bfloat16):
            yield _Way(each, "full", said=f"all weights, from the tiers{word}")
            said = f"all weights, from the tiers, 8-bit moments{word}"
            yield _Way(each, "full", said=said, changes=_EIGHT_BITS, alone=True)
    rank = task.lora or _LORA
    for preset in (None, *_PRESETS, "nf4"):
        for word, each in tasks:
            yield _Way(
                each.but(lora=rank),
                preset,
                said=f"LoRA {rank} on {preset or 'the plain model'}{word}",
                alone=preset in _SMALLER,
            )


def _options(model: nn.Module, task: Task) -> Iterator[tuple[str, Task]]:
    """Yield the training options that a model supports: their words, and the task with them."""
    fp32 = any(p.dtype == torch.float32 for p in model.parameters())
    for mixed in (False, True) if fp32 and not task.mixed else (task.mixed,):
        for saves in (False, True) if checkpointing_switch(model) is not None else (False,):
            word = (", bf16 autocast" if mixed else "") + (", checkpointing" if saves else "")
            yield word, task.but(mixed=mixed, checkpointing=saves or task.checkpointing)


def _with_less(asked: Asked, choice: Choice, way: _Way) -> Iterator[Choice]:
    """Yield a way with ever fewer resident pages: less memory, more time."""
    plan = choice.found.plan
    if plan is None or way.task.trains:
        return
    most = min(1.0, plan.budgets[plan.compute_tier] / max(1, leased_bytes(plan)))
    for share in _SHARES:
        words = f"{100 * share:.0f} % of the pages" if share else "pages pass through"
        if share < most - 0.1:
            less = asked.choice(replace(way, share=share, said=f"{way.name}, {words}"))
            if less.fits and less.found.peak_bytes < choice.found.peak_bytes:
                yield less


def _wider(asked: Asked, choice: Choice, way: _Way) -> Iterator[Choice]:
    """Yield a way in the largest batches that fit, with all pages resident and with streamed ones."""
    batch, before = way.task.batch, choice
    plan, one = asked.beside(way)
    _, two = asked.beside(replace(way, task=way.task.but(batch=2 * batch)))
    each, room = max(1, (two - one) // batch), asked.room()[1]
    pages = (0,) if plan is None else (leased_bytes(plan) + SLACK, _PASSING * plan.largest_layer_bytes)
    for taken in pages:
        most = batch + max(0, room - taken - one) // each
        wide = min(_WIDEST, most) // batch
        wide = batch << max(0, wide.bit_length() - 1)
        while wide > before.task.batch:
            found = asked.choice(replace(way, task=way.task.but(batch=wide), said=f"{way.name}, batch {wide}"))
            if found.fits:
                if found.speed.tokens_s >= _WORTH * before.speed.tokens_s:
                    yield found
                    before = found
                break
            wide //= 2


def _longest(asked: Asked, choice: Choice, way: _Way) -> Choice:
    """Return a choice at the longest context that fits, found by doubling."""
    context = way.task.context * 2
    while context <= _LONGEST:
        further = asked.choice(replace(way, task=way.task.but(context=context)))
        if not further.fits:
            break
        choice, context = further, context * 2
    return replace(choice, longest=True)
