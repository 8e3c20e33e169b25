"""Estimate as data, text and JSON."""

import html
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vbrt.config import Machine, VBConfig
from vbrt.estimation.memory.expert_workspace import heard_by_host
from vbrt.estimation.memory.task import Task
from vbrt.residency.byte_text import format_bytes
from vbrt.residency.memory_needs import machine_bytes
from vbrt.residency.plan import Plan

__all__ = ["AHEAD", "Estimate", "Row", "records"]

AHEAD = "updates ahead"  # row of memory that training takes only where it is free
_BAR = 40
#: bars' shades, in order
_SHADES = {
    "weights": "█",
    "optimizer": "▓",
    "gradients": "▞",
    "activations": "▒",
    "KV cache": "▓",
    "outputs": "▒",
    "temporaries": "░",
}
#: device memory outside torch's allocator
_CONTEXT = "CUDA's context and loaded kernels, 0.4 to 0.6 GiB, come on top; torch's allocator does not count them"


def records(task: Task, plan: Plan | None, tier: str) -> bool:
    """True if `generate` captures steps: on a GPU for wrapped models, unless the host needs each token's experts (see
    `layers.experts.why_waits`); on a CPU for models with lossy weights."""
    if task.kind != "decode" or plan is None:
        return False
    if tier != "gpu":
        return not all(swap.lossless for swap in plan.swaps)
    return not any(heard_by_host(swap, plan, task.batch * swap.top_k) for swap in plan.routed)


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes of one item in one tier; source of the figure: "counted" or "traced"."""

    name: str
    tier: str
    nbytes: int
    source: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory of a model for a task.

    Attributes:
        model: its class.
        config: of the wrapper; None: unwrapped.
        compute_tier: "gpu" or "cpu".
        rows: by tier, at the peak of a step.
        moments: stages of a step and their peak bytes, in the computing tier.
        plan: the wrapper's plan; None: unwrapped.
        refused: why tracing failed, so that only weights and pages are counted; "": traced.
        parts: per stage, the breakdown of its peak: steady rows, tensors that outlive an operator, temporaries.
        work: operations in a step of the plain model, as `Meter.work` has them.
        in_place_bytes: part of the prompt's KV cache that further calls of `generate` compute in the captured steps'
            own cache.
    """

    model: str
    task: Task
    config: VBConfig | None
    machine: Machine
    compute_tier: str
    rows: tuple[Row, ...]
    moments: tuple[tuple[str, int], ...]
    plan: Plan | None
    refused: str = ""
    parts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    work: Mapping[str, int] = field(default_factory=dict)
    in_place_bytes: int = 0

    @property
    def tiers(self) -> dict[str, int]:
        """Bytes by tier, at the peak."""
        totals: dict[str, int] = {}
        for row in self.rows:
            totals[row.tier] = totals.get(row.tier, 0) + row.nbytes
        return totals

    @property
    def peak_bytes(self) -> int:
        """Peak bytes in the computing tier: `torch.cuda.max_memory_allocated()` on a GPU."""
        return self.tiers[self.compute_tier]

    @property
    def spare_bytes(self) -> int:
        """Part of the host's bytes that training takes only where they are free: for updates before their step."""
        return sum(row.nbytes for row in self.rows if row.name == AHEAD)

    @property
    def recorded(self) -> bool:
        """True if `generate` captures steps."""
        return records(self.task, self.plan, self.compute_tier)

    @property
    def again_bytes(self) -> int:
        """Peak bytes in the computing tier during further calls of `generate`, when captured steps stay allocated with
        their KV cache and memory pool. Other tasks: `peak_bytes`."""
        if not self.recorded:
            return self.peak_bytes
        moments, prompt, step = dict(self.moments), self.parts["prompt"], self.parts["step"]
        pool = step["temporaries"] + step.get("restored weight", 0)
        workspace = step.get("workspace", 0) - prompt.get("workspace", 0)
        again = moments["prompt"] - self.in_place_bytes + workspace + step["KV cache"] + pool
        return max(self.peak_bytes, again, moments["step"] + pool)

    @property
    def missing(self) -> dict[str, int]:
        """Missing bytes by tier; empty if everything fits, including further calls of `generate`."""
        has, takes = machine_bytes(self.machine), self.tiers | {self.compute_tier: self.again_bytes}
        return {t: n - has[t] for t, n in takes.items() if has[t] is not None and n > has[t]}

    @property
    def fits(self) -> bool:
        """True if every tier of the machine has room."""
        return not self.missing

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        task = {key: value for key, value in asdict(self.task).items() if key != "step"}
        return {
            "model": self.model,
            "task": task,
            "config": None if self.config is None else self.config.to_dict(),
            "machine": asdict(self.machine),
            "peak_bytes": self.peak_bytes,
            "again_bytes": self.again_bytes,
            "tiers": self.tiers,
            "fits": self.fits,
            "missing": self.missing,
            "rows": [asdict(row) for row in self.rows],
            "refused": self.refused,
            "moments": dict(self.moments),
            "parts": {stage: dict(parts) for stage, parts in self.parts.items()},
        }

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.table(width=120))}</pre>"

    def table(self, *, width: int = 80) -> str:
        """Return rows and a bar per stage, as text."""
        return "\n".join(_lines(self, width))


def _bars(estimate: Estimate, room: int) -> Iterator[str]:
    """Yield a bar per stage, shaded by the breakdown of its peak, and the legend."""
    made = {stage: _shaded(estimate.parts.get(stage, {}), nbytes) for stage, nbytes in estimate.moments}
    longest = max(1, *(nbytes for _, nbytes in estimate.moments))
    for stage, nbytes in estimate.moments:
        bar, drawn, total = "", 0, 0
        for name, part in made[stage].items():
            total += part
            ends = round(room * total / longest)
            bar, drawn = bar + _SHADES[name] * (ends - drawn), ends
        yield f"  {stage:<12}{bar or _SHADES['weights']:<{room}}  {format_bytes(nbytes)}"
    used = [name for name in _SHADES if any(made[stage].get(name) for stage in made)]
    yield f"  {'':<12}{'  '.join(f'{_SHADES[name]} {name}' for name in used)}"


def _shaded(parts: Mapping[str, int], total: int) -> dict[str, int]:
    """Return bytes per shade; everything outside a step counts as weights."""
    named = {name: parts.get(name, 0) for name in _SHADES if name != "weights"}
    return {"weights": total - sum(named.values()), **named}


def _lines(estimate: Estimate, width: int) -> Iterator[str]:
    task = estimate.task
    how = "unwrapped" if estimate.config is None else estimate.config.source
    ranks = estimate.machine.ranks_here
    each = f", each of {ranks} ranks" if ranks > 1 else ""
    yield f"{estimate.model}, {how}: {task.kind}, batch {task.batch}, context {task.context}{each}"
    for tier, total in estimate.tiers.items():
        yield ""
        yield f"{tier:<28}{format_bytes(total):>10}"
        for row in sorted((r for r in estimate.rows if r.tier == tier and r.nbytes), key=lambda r: -r.nbytes):
            yield f"  {row.name:<26}{format_bytes(row.nbytes):>10}  {row.source}{', ' if row.note else ''}{row.note}"
    yield ""
    yield f"peaks of a {'step' if task.trains else 'call'}, in the {estimate.compute_tier} memory"
    room = max(8, min(_BAR, width - 28))
    yield from _bars(estimate, room)
    if estimate.again_bytes > estimate.peak_bytes:
        yield f"  {'further calls':<12}{'':<{room}}  {format_bytes(estimate.again_bytes)}, with captured steps"
    yield ""
    for tier, nbytes in estimate.missing.items():
        later = estimate.again_bytes - estimate.peak_bytes if tier == estimate.compute_tier else 0
        what = "the first call of generate fits, for further ones the" if nbytes < later else "the"
        yield f"DOES NOT FIT: {what} {tier} lacks {format_bytes(nbytes)}."
    if estimate.refused:
        yield f"NOT TRACED, only weights are counted: {estimate.refused}."
    elif estimate.fits:
        yield "It fits."
    if estimate.compute_tier == "gpu":
        yield f"{_CONTEXT}."
