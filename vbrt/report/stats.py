"""Counters of a wrapped model: a frozen snapshot of integers.

    print(vb.stats())                  # a table: a row for each kind of layer, the longest wait first
    print(vb.stats().table(each=True)) # every layer
    vb.stats().to_dict()               # plain data, for JSON; Stats.from_dict takes it back
    vb.stats().layers["fc1"].hit_rate
    vb.stats(experts=True).experts("model.layers.0.mlp.experts")   # hits, misses, bytes and last use of each expert

A hit is a lease of a page that moved no bytes. A page staged ahead of its use is a miss that was `prefetched`.
`wait_us` is what the host's threads have waited; how long the device did is known of recorded passes only
(`vb.timeline`), of which `timeline` has the last recording's totals.
"""

import html
import io
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self, get_origin

from vbrt.config.argument_checks import check_whole
from vbrt.errors import ArgumentError, FormatError
from vbrt.report.activation_counters import ActivationStats
from vbrt.report.expert_counters import ExpertCounts, ExpertsStats
from vbrt.report.kv_counters import CacheStats
from vbrt.report.layer_groups import sums_by_name
from vbrt.report.openmetrics import metrics_lines
from vbrt.report.speculation_counters import SpeculationStats
from vbrt.report.stats_table import table_lines
from vbrt.report.timeline import TimelineTotals
from vbrt.report.training_counters import UpdateStats
from vbrt.residency.access_counts import PhaseCounts

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["LayerStats", "Stats", "StepCounts", "TierStats"]

_STR_WIDTH = 100  # str() knows no terminal


@dataclass(frozen=True, slots=True)
class LayerStats:
    """One VB layer. Bytes are by plane or by link ("ssd>cpu"); times in microseconds; the rest are counts. `experts`:
    of a layer of routed experts."""

    format: str
    kernel: str
    materialized: bool
    home: str
    resident: bool
    plane_bytes: Mapping[str, int]
    forwards: int
    weight_reads: int
    hits: int
    misses: int
    prefetched: int
    bytes_moved: Mapping[str, int]
    wait_us: int
    separation_hits: int = 0
    separation_refreshes: int = 0
    clipped_share: float = 0.0
    experts: ExpertsStats | None = None

    @property
    def hit_rate(self) -> float | None:
        """Hits over page leases; None before the first."""
        leases = self.hits + self.misses
        return self.hits / leases if leases else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data with the hit rate."""
        data = asdict(replace(self, experts=None)) | {"hit_rate": self.hit_rate}
        return data | {"experts": self.experts.to_dict()} if self.experts else data

    @classmethod
    def read(cls, data: Mapping[str, Any], where: str) -> Self:
        """Read what `to_dict` returned. Raises FormatError with `where` in front."""
        values = _values(cls, data, where)
        return cls(**values, experts=_part(ExpertsStats, data.get("experts"), f"{where}.experts"))


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier, in bytes and pages. `resident_pages` counts pages whose bytes are there now, homes included."""

    budget_bytes: int
    held_bytes: int
    peak_bytes: int
    home_pages: int
    resident_pages: int


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Decode steps of `generate`: `captured` were replayed, as CUDA graphs or on a CPU as tapes; `eager` ran Python.

    `recordings` were made, in `record_us` microseconds; `reasons` counts eager steps by why they were. `joined` counts,
    over all recordings, what became one launch or call, and `unjoined` what looked like it and did not, by the reason.
    `held_bytes`: of the caches that recordings know by address, and of the results of tapes. `not_ahead` counts what
    could not be compiled ahead of its first launch, by why.
    """

    captured: int = 0
    eager: int = 0
    recordings: int = 0
    record_us: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    joined: Mapping[str, int] = field(default_factory=dict)
    unjoined: Mapping[str, int] = field(default_factory=dict)
    held_bytes: int = 0
    not_ahead: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: "StepCounts") -> "StepCounts":
        numbers = (a + b for a, b in zip(self._numbers(), other._numbers(), strict=True))
        *counts, late = (dict(Counter(a) + Counter(b)) for a, b in zip(self._counts(), other._counts(), strict=True))
        return StepCounts(*numbers, *counts, self.held_bytes + other.held_bytes, late)

    def _numbers(self) -> tuple[int, int, int, int]:
        return self.captured, self.eager, self.recordings, self.record_us

    def _counts(self) -> tuple[Mapping[str, int], ...]:
        return self.reasons, self.joined, self.unjoined, self.not_ahead

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `dataclasses.asdict` gives of it."""
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of a wrapped model; building it costs time in the number of VB layers only.

    `dense_bytes` is the model as it came, `kept_bytes` what was not swapped; `device_bytes` is what the computing
    device holds now of both (budgeted pages, shells that still hold their dense weight, kept parameters).
    `timeline` is what the last `vb.timeline` measured; None before the first. `policy` is "none" where weights train.
    `phases` counts the passes of each phase and their page leases; leases between two passes count for the first.
    `speculation` counts the rounds of `generate(speculate=...)`; None before the first.
    `steps` counts the decode steps of `generate`.
    `caches`: of keys and values (`vbrt.KVCache`), whose bytes are in `tiers` too.
    `leases` says who decides them where pages move: a programme, or the policy one by one, and why.
    `missed` says what becomes of routed experts that are missing on the computing device, where some are not fetched.
    `activations`: what blocks keep for the backward pass; None where `training.activations` is "keep".
    `updates`: what updates cost a model that trains from the tiers.
    `libraries`: the C kernels that this process has loaded, and for which CPUs: {"linear": "prebuilt (avx2)"}, or
        "built here (avx2)"; empty before the first was needed.
    `untested`: libraries that this process has imported and that are newer than vbrt was tested with; nothing is off
        because of that.
    """

    policy: str
    compute_tier: str
    passes: int
    layers: Mapping[str, LayerStats]
    tiers: Mapping[str, TierStats]
    dense_bytes: int
    kept_bytes: int
    device_bytes: int
    fallbacks: tuple[str, ...] = field(default=())
    timeline: TimelineTotals | None = None
    phases: Mapping[str, PhaseCounts] = field(default_factory=dict)
    speculation: SpeculationStats | None = None
    steps: StepCounts = field(default_factory=StepCounts)
    caches: Mapping[str, CacheStats] = field(default_factory=dict)
    leases: str = ""
    activations: ActivationStats | None = None
    updates: UpdateStats | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)
    missed: str = ""
    untested: tuple[str, ...] = field(default=())

    @property
    def hits(self) -> int:
        """Page leases that moved nothing."""
        return sum(layer.hits for layer in self.layers.values())

    @property
    def misses(self) -> int:
        """Page leases for which bytes moved."""
        return sum(layer.misses for layer in self.layers.values())

    @property
    def hit_rate(self) -> float | None:
        """Hits over page leases of all layers; None before the first."""
        leases = self.hits + self.misses
        return self.hits / leases if leases else None

    @property
    def wait_us(self) -> int:
        """Time that forwards have waited for pages, in microseconds."""
        return sum(layer.wait_us for layer in self.layers.values())

    @property
    def bytes_moved(self) -> dict[str, int]:
        """Bytes by link, such as {"ssd>cpu": 123}."""
        return sums_by_name(layer.bytes_moved for layer in self.layers.values())

    @property
    def virtual_capacity(self) -> float:
        """Bytes of the dense model over bytes held on the computing device; 2.0 is a device twice as large."""
        return self.dense_bytes / max(self.device_bytes, 1)

    def experts(self, layer: str) -> ExpertCounts:
        """Return the counters of each expert of a layer; printed, it is a table.

        Raises:
            ArgumentError: no layer of routed experts has this name, or the snapshot was taken without `experts=True`.
        """
        found = self.layers.get(layer)
        if found is None or found.experts is None:
            names = ", ".join(name for name, of in self.layers.items() if of.experts is not None)
            raise ArgumentError(f"experts({layer!r}): expected a layer of routed experts: {names or 'there is none'}")
        if found.experts.each is None:
            raise ArgumentError(
                f"experts({layer!r}): this snapshot has no experts one by one; take stats(experts=True)"
            )
        return found.experts.each

    def to_dict(self) -> dict:
        """Return plain data with the totals; `json.dumps` takes it."""
        layers = {name: layer.to_dict() for name, layer in self.layers.items()}
        totals = {
            name: getattr(self, name)
            for name in ("hits", "misses", "hit_rate", "wait_us", "bytes_moved", "virtual_capacity")
        }
        return {
            "policy": self.policy,
            "compute_tier": self.compute_tier,
            "passes": self.passes,
            **totals,
            "dense_bytes": self.dense_bytes,
            "kept_bytes": self.kept_bytes,
            "device_bytes": self.device_bytes,
            "tiers": {name: asdict(tier) for name, tier in self.tiers.items()},
            "fallbacks": list(self.fallbacks),
            "layers": layers,
            "timeline": asdict(self.timeline) if self.timeline else None,
            "phases": {phase: {**asdict(of), "hit_rate": of.hit_rate} for phase, of in self.phases.items()},
            "speculation": self.speculation.to_dict() if self.speculation else None,
            "steps": asdict(self.steps),
            "caches": {name: asdict(of) for name, of in self.caches.items()},
            "leases": self.leases,
            "missed": self.missed,
            "activations": asdict(self.activations) if self.activations else None,
            "updates": asdict(self.updates) if self.updates else None,
            "libraries": dict(self.libraries),
            "untested": list(self.untested),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read a snapshot that `to_dict` made, also after a round trip through JSON; totals are computed again.

        Raises:
            FormatError: a key is missing or of the wrong type, named.
        """
        data = _mapping(data, "stats")
        values = _values(
            cls,
            {"phases": {}, "caches": {}, "leases": "", "missed": "", "libraries": {}, "untested": (), **data},
            "stats",
        )
        values["layers"] = {
            name: LayerStats.read(_mapping(item, f"stats.layers.{name}"), f"stats.layers.{name}")
            for name, item in values["layers"].items()
        }
        for key, part in (("tiers", TierStats), ("phases", PhaseCounts), ("caches", CacheStats)):
            values[key] = {
                name: part(**_values(part, _mapping(item, f"stats.{key}.{name}"), f"stats.{key}.{name}"))
                for name, item in values[key].items()
            }
        for key in ("fallbacks", "untested"):
            values[key] = tuple(map(str, values[key]))
        values["steps"] = _part(StepCounts, data.get("steps", {}), "stats.steps")
        values["timeline"] = _part(TimelineTotals, data.get("timeline"), "stats.timeline")
        values["activations"] = _part(ActivationStats, data.get("activations"), "stats.activations")
        values["updates"] = _part(UpdateStats, data.get("updates"), "stats.updates")
        values["speculation"] = _part(SpeculationStats, data.get("speculation"), "stats.speculation")
        return cls(**values)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """Print as rich does: a table as wide as the terminal allows, and the totals below it."""
        yield from _rendered(table_lines(self, options.max_width))

    def __str__(self) -> str:
        return self.table()

    def table(self, *, width: int = _STR_WIDTH, each: bool = False) -> str:
        """Return the snapshot as text: with `each` a row for every layer instead of one for each kind."""
        from rich.console import Console, Group

        check_whole(width, "table(): width")
        out = io.StringIO()
        Console(file=out, width=width, color_system=None).print(Group(*_rendered(table_lines(self, width, each=each))))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def metrics(self) -> str:
        """Return the snapshot as OpenMetrics text; see `vbrt.report.openmetrics`."""
        return "\n".join(metrics_lines(self)) + "\n"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.table(width=120))}</pre>"


def _rendered(lines: "Iterable[tuple[str, str]]") -> "RenderResult":
    """Yield lines and their styles as rich prints them."""
    from rich.segment import Segment
    from rich.text import Text

    for line, style in lines:
        if style:
            yield Text(line, "bold" if style == "bold" else "")  # a long line goes on in the next
        else:
            yield Segment(f"{line}\n")


# -- reading a snapshot -----------------------------------------------------------------------------------------------

_KINDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    Mapping: "a table",
    tuple: "a list",
}


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise FormatError(f"{where} is {type(value).__name__}; expected a table, as Stats.to_dict() makes it")
    return value


def _values(cls: type, data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the constructor arguments of a dataclass out of `data`, checked; other keys (totals) are ignored."""
    values = {}
    for f in fields(cls):
        kind = get_origin(f.type) or f.type
        if kind not in _KINDS:  # `timeline` and `experts`, which may be absent
            continue
        if f.name not in data:
            raise FormatError(f"{where}.{f.name} is missing; expected {_KINDS[kind]}, as Stats.to_dict() writes it")
        value = data[f.name]
        if not isinstance(value, _accepted(kind)) or isinstance(value, bool) is not (kind is bool):
            raise FormatError(f"{where}.{f.name} = {value!r:.80}; expected {_KINDS[kind]}")
        values[f.name] = value
    return values


_Part = type[ActivationStats] | type[TimelineTotals] | type[ExpertsStats] | type[SpeculationStats] | type[StepCounts]


def _part(kind: _Part, data: Any, where: str) -> Any:
    """Return a part of a snapshot that may be absent."""
    try:
        return None if data is None else kind.from_dict(data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{where} = {data!r:.80}; expected what Stats.to_dict() writes") from error


def _accepted(kind: type) -> tuple[type, ...]:
    return {float: (int, float), tuple: (list, tuple)}.get(kind, (kind,))
