"""Snapshot records: counters of layers, tiers and decode steps, their totals, and conversion to plain data."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self, get_origin

from vbrt.errors import FormatError
from vbrt.report.activation_counters import ActivationStats
from vbrt.report.expert_counters import ExpertsStats
from vbrt.report.kv_counters import CacheStats
from vbrt.report.speculation_counters import SpeculationStats
from vbrt.report.timeline import TimelineTotals
from vbrt.report.training_counters import UpdateStats
from vbrt.residency.access_counts import PhaseCounts

__all__ = ["LayerStats", "StatsData", "StepCounts", "TierStats", "sums_by_name"]


@dataclass(frozen=True, slots=True)
class LayerStats:
    """One VB layer. Bytes are by plane or by link ("ssd>cpu"), times in microseconds, the rest counts. `experts`: None
    for other layers than routed experts. `computed`: products of the CPU where the page lies, without a lease; those of
    experts are in `experts`."""

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
    computed: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Hits over page leases; None before the first."""
        leases = self.hits + self.misses
        return self.hits / leases if leases else None

    @property
    def waited(self) -> int:
        """Page leases that moved bytes and were not prefetched."""
        return max(0, self.misses - self.prefetched)

    @property
    def ready_rate(self) -> float | None:
        """Hits and prefetched pages over page leases; None before the first."""
        leases = self.hits + self.misses
        return 1 - self.waited / leases if leases else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data with the rates."""
        rates = {name: getattr(self, name) for name in ("waited", "hit_rate", "ready_rate")}
        data = asdict(replace(self, experts=None)) | rates
        return data | {"experts": self.experts.to_dict()} if self.experts else data

    @classmethod
    def read(cls, data: Mapping[str, Any], where: str) -> Self:
        """Inverse of `to_dict`. Raises FormatError with `where` in front."""
        values = _values(cls, {"computed": 0, **data}, where)
        return cls(**values, experts=_part(ExpertsStats, data.get("experts"), f"{where}.experts"))


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier, in bytes and pages. `resident_pages` counts pages with a copy there now, homes included."""

    budget_bytes: int
    held_bytes: int
    peak_bytes: int
    home_pages: int
    resident_pages: int


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Decode steps of `generate`: `captured` were replayed, as CUDA graphs or on a CPU as tapes; `eager` ran Python.

    `reasons`: eager steps by reason. `recordings`, `record_us`: captures, and their time in microseconds.
    `joined`: fused patterns over all captures; `unjoined`: rejected fusion candidates, by reason.
    `held_bytes`: caches whose addresses captures hold, and results of tapes.
    `not_ahead`: kernels that could not be compiled ahead of their first launch, by reason.
    `causes`: captures by cause: the first of their shapes, a KV cache that has outgrown its memory, pages that moved.
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
    causes: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: "StepCounts") -> "StepCounts":
        numbers = (a + b for a, b in zip(self._numbers(), other._numbers(), strict=True))
        *counts, late, causes = (
            dict(Counter(a) + Counter(b)) for a, b in zip(self._counts(), other._counts(), strict=True)
        )
        return StepCounts(*numbers, *counts, self.held_bytes + other.held_bytes, late, causes)

    def _numbers(self) -> tuple[int, int, int, int]:
        return self.captured, self.eager, self.recordings, self.record_us

    def _counts(self) -> tuple[Mapping[str, int], ...]:
        return self.reasons, self.joined, self.unjoined, self.not_ahead, self.causes

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`."""
        return cls(**data)


_COUNTS = ("hits", "misses", "prefetched", "waited", "computed", "hit_rate", "ready_rate")
_TOTALS = (*_COUNTS, "wait_us", "bytes_moved", "virtual_capacity")


@dataclass(frozen=True, slots=True)
class StatsData:
    """Fields of `Stats`, with totals and plain data; see there."""

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
    hosted: str = ""
    untested: tuple[str, ...] = field(default=())
    verbose: bool = field(default=False, compare=False)

    @property
    def hits(self) -> int:
        """Page leases that moved nothing."""
        return sum(layer.hits for layer in self.layers.values())

    @property
    def misses(self) -> int:
        """Page leases for which bytes moved."""
        return sum(layer.misses for layer in self.layers.values())

    @property
    def prefetched(self) -> int:
        """Page leases among the misses whose pages had been prefetched."""
        return sum(layer.prefetched for layer in self.layers.values())

    @property
    def computed(self) -> int:
        """Products that the CPU computed where the page lies, of all layers but routed experts."""
        return sum(layer.computed for layer in self.layers.values())

    @property
    def waited(self) -> int:
        """Page leases that moved bytes and were not prefetched."""
        return max(0, self.misses - self.prefetched)

    @property
    def ready_rate(self) -> float | None:
        """Hits and prefetched pages over page leases of all layers; None before the first."""
        leases = self.hits + self.misses
        return 1 - self.waited / leases if leases else None

    @property
    def hit_rate(self) -> float | None:
        """Hits over page leases of all layers; None before the first."""
        leases = self.hits + self.misses
        return self.hits / leases if leases else None

    @property
    def wait_us(self) -> int:
        """Waiting time of forwards for pages, in microseconds."""
        return sum(layer.wait_us for layer in self.layers.values())

    @property
    def bytes_moved(self) -> dict[str, int]:
        """Bytes by link, such as {"ssd>cpu": 123}."""
        return sums_by_name(layer.bytes_moved for layer in self.layers.values())

    @property
    def virtual_capacity(self) -> float:
        """Bytes of the dense model over bytes held on the computing device; 2.0 is a device twice as large."""
        return self.dense_bytes / max(self.device_bytes, 1)

    def to_dict(self) -> dict:
        """Return plain data with the totals; `json.dumps` takes it."""
        layers = {name: layer.to_dict() for name, layer in self.layers.items()}
        totals = {name: getattr(self, name) for name in _TOTALS}
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
            "hosted": self.hosted,
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
            {
                "phases": {},
                "caches": {},
                "leases": "",
                "missed": "",
                "hosted": "",
                "libraries": {},
                "untested": (),
                **data,
            }
            | {"verbose": False},
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


def sums_by_name(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sum of each name's counts."""
    total: Counter[str] = Counter()
    for of in counts:
        total.update(of)
    return dict(total)


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
    """Return the checked constructor arguments of a dataclass from `data`; other keys (totals) are ignored."""
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
    """Return an optional part of a snapshot."""
    try:
        return None if data is None else kind.from_dict(data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{where} = {data!r:.80}; expected what Stats.to_dict() writes") from error


def _accepted(kind: type) -> tuple[type, ...]:
    return {float: (int, float), tuple: (list, tuple)}.get(kind, (kind,))
