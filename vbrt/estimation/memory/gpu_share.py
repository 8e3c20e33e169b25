"""`gpu_memory`: the budget for pages that keeps a whole process within its share of the GPU.

The share less CUDA's context, unswapped parameters, KV cache, temporaries and the allocator's fragments, as estimated
for a task, is the budget. A config is settled once, before it is planned: afterwards it has `tiers.gpu.budget` alone.
"""

import functools
import warnings
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from vbrt.config import Machine, VBConfig, compute_tier, load_config, with_tier_budget
from vbrt.config.budgets import CONTEXT_BYTES
from vbrt.config.parse_budgets import parse_share, size_text
from vbrt.config.value_checks import shown, wrong
from vbrt.errors import ArgumentError, ConfigError, NoRoomError
from vbrt.estimation.memory.estimate_report import Estimate
from vbrt.estimation.memory.extrapolation import whole_trace
from vbrt.estimation.memory.fake_trace import Trace
from vbrt.estimation.memory.planned_estimate import bare_model, estimate_of
from vbrt.estimation.memory.planned_weights import held_alike
from vbrt.estimation.memory.task import Task
from vbrt.estimation.memory.traced_checkpointing import asked_of
from vbrt.host import accelerator
from vbrt.model.machine_memory import this_machine
from vbrt.model.planner import make_plan, noting_tables, with_tables_if_needed
from vbrt.residency.byte_text import format_bytes
from vbrt.residency.plan import GpuRoom, Plan

__all__ = ["SLACK", "GpuShare", "besides", "endless", "leased_bytes", "settle_budget", "share_of"]

SLACK = 64 << 20  # alignment of page slots
_FRAGMENTS = 768 << 20  # allocator fragmentation (reserved minus allocated: 0.1 to 0.6 GiB), at most
_KEPT = "parameters that are not swapped"
#: rows of an estimate, by what they say here
_PURPOSES = {"not swapped": _KEPT, "workspace": "cuBLAS", "rests": "remainders of blocks"}
_SMALL = 200  # shares below 1/_SMALL of all are summed up
_TRIES = 4  # budgets tried until the estimate fits
_UNUSED = 1 / 32  # of the share, that may be left: a plan with fewer pages on the GPU may allocate less beside them


@dataclass(frozen=True, slots=True)
class GpuShare:
    """Settled config.

    Attributes:
        note: what the share holds, by purpose; "" where no share was asked for.
        kept_bytes: unswapped parameters that it counts.
        tables: lookup tables that the config holds in the tiers because there is no room for them beside the rest.
        traces: of the task, by `held_alike`.
        room: the share; None where none was asked for.
    """

    config: VBConfig
    note: str = ""
    kept_bytes: int = 0
    traces: Mapping[Hashable, Trace] = field(default_factory=dict)
    tables: tuple[str, ...] = ()
    room: GpuRoom | None = None

    def noted(self, plan: Plan) -> Plan:
        """Return the plan with the note, and with the bytes that quantized files leave unswapped beyond it."""
        more = plan.kept_bytes - self.kept_bytes
        beyond = f"; the files leave {format_bytes(more)} more unswapped, beyond that" if more > 0 else ""
        plan = replace(noting_tables(plan, self.tables), gpu_room=self.room)
        return replace(plan, notes=(*plan.notes, self.note + beyond)) if self.note else plan


def settle_budget(model: nn.Module, config: VBConfig, machine: Machine | None = None) -> GpuShare:
    """Return the config for a machine (default: this one): `gpu_memory` or `budget` become the budget of the tier that
    computes.

    Raises:
        ConfigError: there is no GPU, the GPU is smaller, or the model cannot be traced.
        NoRoomError: the share is too small, with the bytes by purpose.
    """
    if config.gpu_memory is None and config.budget is None:
        return GpuShare(config)
    machine = machine or this_machine(config)
    if config.gpu_memory is None:
        return GpuShare(with_tier_budget(config, compute_tier(config, machine)))
    _check_gpu(config, machine)
    own = sum(p.nbytes for p in model.parameters() if p.device.type == accelerator.TYPE)
    machine = replace(machine, gpu_free_bytes=machine.gpu_free_bytes + own)  # they leave the GPU for their pages
    others = max(0, accelerator.memory_allocated() - own)  # other models of this process
    kind = "decode" if callable(getattr(model, "generate", None)) else "prefill"
    task = Task(kind) if config.context is None else Task(kind, context=config.context)
    return share_of(bare_model(model, task), config, machine, task, others=others)


def share_of(bare: nn.Module, config: VBConfig, machine: Machine, task: Task, *, others: int = 0) -> GpuShare:
    """Return the config for a task of a bare model on a machine, beside `others` bytes of the process.

    Raises as `settle_budget`.
    """
    if config.gpu_memory is None:
        return GpuShare(with_tier_budget(config, compute_tier(config, machine)))
    _check_gpu(config, machine)
    made = functools.partial(_share_of, bare, machine=machine, task=task, others=others)
    found, tables = with_tables_if_needed(bare, config, made)
    return replace(found, tables=tables)


def _share_of(bare: nn.Module, config: VBConfig, *, machine: Machine, task: Task, others: int) -> GpuShare:
    fixed = {"CUDA's context": CONTEXT_BYTES, "other tensors of this process": others}
    asked, free = _asked_bytes(config, machine), machine.gpu_free_bytes + sum(fixed.values())
    settled, much, traces = replace(config, gpu_memory=None, context=None), endless(machine), {}
    found = _estimate(bare, task, settled, much, traces)
    if found.refused:
        raise wrong(
            _where(config), config.gpu_memory,
            f"what {type(bare).__name__} takes beside its pages cannot be estimated: {found.refused}; "
            'set the budget of the pages alone: budget = "6GiB"',
        )  # fmt: skip
    room, largest, every = min(asked, free), found.plan.largest_layer_bytes, leased_bytes(found.plan) + SLACK
    fitting = None
    for _ in range(_TRIES):
        takes = fixed | besides(found)
        budget = min(room - sum(takes.values()), every)
        if budget * 99 < largest * 100:  # its text is rounded down
            takes["the largest layer's pages"] = largest
            break
        tried = load_config(settled, tiers={"gpu": {"budget": size_text(budget)}})
        found = _estimate(bare, task, tried, much, traces)
        takes = {"pages": _page_bytes(found)} | fixed | besides(found)
        if sum(takes.values()) <= room:
            fitting = tried, found, takes
            if budget == every or room - sum(takes.values()) <= _UNUSED * room:
                break
    if fitting is None:
        raise NoRoomError(_too_small(config, task, takes, room))
    settled, found, takes = fitting
    held = f"; {format_bytes(free)} of it are free now" if free < asked else ""
    note = (
        f"gpu_memory = {shown(config.gpu_memory)} ({format_bytes(asked)}){held}: an estimated "
        f"{format_bytes(sum(takes.values()))} at {_tokens(task)}: {_listed(takes)}"
    )
    passing = sum(row.nbytes for row in found.rows if row.name == "temporaries" and row.tier == found.compute_tier)
    settled = replace(settled, source=config.source)
    return GpuShare(
        settled, note, found.plan.kept_bytes, traces, room=GpuRoom(asked, passing, task.batch * task.context)
    )


def besides(found: Estimate) -> dict[str, int]:
    """Return the bytes of the computing tier besides pages, by purpose, including further calls of `generate` and the
    allocator's fragments."""
    rows = [row for row in found.rows if row.tier == found.compute_tier]
    takes = {_PURPOSES.get(row.name, row.name): row.nbytes for row in rows if row.name != "pages" and row.nbytes}
    steady = sum(row.nbytes for row in rows if row.source == "counted" and row.name != "workspace")
    workspaces = max((held.get("workspace", 0) for held in found.parts.values()), default=0)
    passing = found.again_bytes - steady - workspaces  # temporaries fragment the allocator
    if found.again_bytes > found.peak_bytes:
        takes["captured steps"] = found.again_bytes - found.peak_bytes
    if found.plan is not None and found.compute_tier == "gpu":
        takes["the allocator's fragments"] = min(passing, _FRAGMENTS)
    return takes


def leased_bytes(plan: Plan) -> int:
    """Return the bytes of pages leased by the computing tier, if they fit."""
    return sum(page.nbytes for swap in plan.swaps for page in swap.pages if not page.by_rows)


def endless(machine: Machine) -> Machine:
    """Return the machine with unlimited memory."""
    much = 1 << 50
    gpu = None if machine.gpu_total_bytes is None else much
    return Machine(gpu, gpu, much, much, machine.ssd_free_bytes)


def _estimate(
    bare: nn.Module, task: Task, config: VBConfig, machine: Machine, traces: dict[Hashable, Trace]
) -> Estimate:
    """Estimate a task; plans under which it allocates the same share a trace. Raises ConfigError: its inputs are
    unknown."""
    plan = make_plan(bare, config, machine, charge_kept=False)
    key = held_alike(bare, plan, task)
    try:
        if key not in traces:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a model that cannot be traced, which is refused
                traces[key] = whole_trace(bare, task, plan, asked_of(config, plan.compute_tier))
    except ArgumentError as error:
        raise ConfigError(f"{_where(config)}: {error}") from error
    return estimate_of(bare, task, config, machine, plan, traces[key])


def _page_bytes(found: Estimate) -> int:
    return sum(row.nbytes for row in found.rows if row.tier == found.compute_tier and row.name == "pages")


def _check_gpu(config: VBConfig, machine: Machine) -> None:
    """Raise ConfigError: no GPU computes, or it is smaller than the share."""
    if machine.gpu_total_bytes is None:
        raise wrong(
            _where(config), config.gpu_memory,
            f"torch {torch.__version__} sees no GPU here: leave it out to compute on the CPU, where "
            'budget = "6GiB" is the room for pages in its memory, or install a build of torch for your GPU',
        )  # fmt: skip
    asked, gib = _asked_bytes(config, machine), 1 << 30
    nominal = -(-machine.gpu_total_bytes // gib) * gib  # drivers report a little less than the card's name says
    if asked > nominal:
        total = size_text(machine.gpu_total_bytes)
        raise wrong(_where(config), config.gpu_memory, f'the GPU has {total} in all; expected no more, or e.g. "90%"')


def _asked_bytes(config: VBConfig, machine: Machine) -> int:
    share = parse_share(config.gpu_memory, where=_where(config))
    return int(share.amount * machine.gpu_total_bytes if share.kind == "fraction" else share.amount)


def _where(config: VBConfig) -> str:
    return f"{config.source}: gpu_memory"


def _tokens(task: Task) -> str:
    tokens = f"{task.context} + {task.new} tokens" if task.kind == "decode" else f"{task.context} tokens"
    return f"{task.batch} × {tokens}" if task.batch > 1 else tokens


def _listed(takes: Mapping[str, int]) -> str:
    """Return bytes by purpose as text, the largest first; small ones are summed up."""
    large = {name: nbytes for name, nbytes in takes.items() if nbytes * _SMALL >= sum(takes.values())}
    ranked = sorted(large.items(), key=lambda item: -item[1])
    rest = sum(takes.values()) - sum(large.values())
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in [*ranked, ("others", rest)] if nbytes)


def _too_small(config: VBConfig, task: Task, takes: Mapping[str, int], room: int) -> str:
    kept = takes.get(_KEPT, 0) * 4 >= sum(takes.values())
    more = ", or tables and heads in the tiers (weights.embeddings = true, weights.keep_head = false)" if kept else ""
    needed = size_text(sum(takes.values()) * 101 // 100)
    return (
        f"{_where(config)} = {shown(config.gpu_memory)}; {format_bytes(room)} are too little for {_tokens(task)}, "
        f"which take {format_bytes(sum(takes.values()))}: {_listed(takes)}; expected at least {shown(needed)}, a "
        f"shorter context (context = {task.context}){more}"
    )
