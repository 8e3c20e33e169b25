"""What a wrapped model has done: a frozen snapshot of integer counters.

    print(vb.stats())                  # a table
    vb.stats().to_dict()               # plain data, for JSON; Stats.from_dict takes it back
    vb.stats().layers["fc1"].hit_rate

A hit is a lease of a page that moved no bytes. A page staged ahead of its use is a miss that was `prefetched`.
`wait_us` is what the host's threads have waited; how long the device did is known of recorded passes only
(`vb.timeline`), of which `timeline` has the last recording's totals.
"""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self, get_origin

from vbrt.errors import FormatError
from vbrt.report.timeline import LayerTotals, TimelineTotals
from vbrt.residency.counts import PhaseCounts
from vbrt.residency.plan import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["LayerStats", "Stats", "TierStats"]

_STR_WIDTH = 132  # str() knows no terminal
_GAP = 2  # characters between columns
_NAME_WIDTH = 12  # of a layer, at least


@dataclass(frozen=True, slots=True)
class LayerStats:
    """One VB layer. Bytes are by plane or by link ("ssd>cpu"); times in microseconds; the rest are counts."""

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

    @property
    def hit_rate(self) -> float | None:
        """Hits over page leases; None before the first."""
        leases = self.hits + self.misses
        return self.hits / leases if leases else None


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier, in bytes and pages. `resident_pages` counts pages whose bytes are there now, homes included."""

    budget_bytes: int
    held_bytes: int
    peak_bytes: int
    home_pages: int
    resident_pages: int


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of a wrapped model; building it costs time in the number of VB layers only.

    `dense_bytes` is the model as it came, `kept_bytes` what was not swapped; `device_bytes` is what the computing
    device holds now of both (budgeted pages, shells that still hold their dense weight, kept parameters).
    `timeline` is what the last `vb.timeline` measured; None before the first. `policy` is "none" where weights train.
    `phases` counts the passes of each phase and their page leases; leases between two passes count for the first.
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
        total: dict[str, int] = {}
        for layer in self.layers.values():
            for link, nbytes in layer.bytes_moved.items():
                total[link] = total.get(link, 0) + nbytes
        return total

    @property
    def virtual_capacity(self) -> float:
        """Bytes of the dense model over bytes held on the computing device; 2.0 is a device twice as large."""
        return self.dense_bytes / max(self.device_bytes, 1)

    def to_dict(self) -> dict:
        """Plain data with the totals; `json.dumps` takes it."""
        layers = {name: {**asdict(layer), "hit_rate": layer.hit_rate} for name, layer in self.layers.items()}
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
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The snapshot that `to_dict` made, also after a round trip through JSON; totals are counted anew.

        Raises:
            FormatError: a key is missing or of the wrong type, named.
        """
        data = _mapping(data, "stats")
        values = _values(cls, {"phases": {}, **data}, "stats")
        for key, part in (("layers", LayerStats), ("tiers", TierStats), ("phases", PhaseCounts)):
            values[key] = {
                name: part(**_values(part, _mapping(item, f"stats.{key}.{name}"), f"stats.{key}.{name}"))
                for name, item in values[key].items()
            }
        values["fallbacks"] = tuple(map(str, values["fallbacks"]))
        values["timeline"] = _timeline(data.get("timeline"))
        return cls(**values)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """What rich prints: a table as wide as the terminal allows, and the totals of tiers and links below it."""
        from rich.segment import Segment
        from rich.text import Text

        columns, shared = _hoist(_columns(self))
        names, prefix = _names(self, columns, options.max_width)
        shared += [f"names begin with {prefix}"] if prefix else []
        title = "vbrt, training" if self.policy == "none" else f"vbrt, {self.policy} policy"
        yield Text(" · ".join((title, _count(self.passes, "pass", "passes"), *shared)))
        if self.layers:
            head, *body, foot = _table(names, columns, options.max_width)
            yield Text(head, "bold")
            yield from (Segment(f"{line}\n") for line in body)
            yield Text(foot, "bold")
        yield from map(Text, self._summary())

    def _summary(self) -> list[str]:
        lines = []
        for name, tier in self.tiers.items():
            held, budget, peak = map(format_bytes, (tier.held_bytes, tier.budget_bytes, tier.peak_bytes))
            lines.append(
                f"tier {name}: {held} held of {budget}, peak {peak}; {tier.resident_pages} pages, "
                f"{tier.home_pages} at home"
            )
        lines += _phase_lines(self.phases)
        for link, nbytes in self.bytes_moved.items():
            lines.append(f"link {link}: {format_bytes(nbytes)}")
            if self.timeline and link in self.timeline.links:
                timed = self.timeline.links[link]
                lines[-1] += f"; in the last timeline {timed.gb_per_s:.2f} GB/s, idle {_percent(1 - timed.busy_share)}"
        if self.timeline:
            lines.append(
                f"last timeline: {self.timeline.recorded_us / 1e3:.1f} ms, "
                f"{_percent(self.timeline.wait_share)} of them spent waiting"
            )
        fitted = [layer for layer in self.layers.values() if layer.separation_hits or layer.separation_refreshes]
        if fitted:
            lines.append(
                f"separation: {sum(layer.separation_hits for layer in fitted)} cache hits, "
                f"{sum(layer.separation_refreshes for layer in fitted)} fits, at most "
                f"{_percent(max(layer.clipped_share for layer in fitted))} clipped"
            )
        lines.append(
            f"virtual capacity {self.virtual_capacity:.2f}x: a model of {format_bytes(self.dense_bytes)} with "
            f"{format_bytes(self.device_bytes)} on the computing device ({format_bytes(self.kept_bytes)} not "
            "swapped)"
        )
        return lines + [f"fallback: {reason}" for reason in self.fallbacks]

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=_STR_WIDTH, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


# -- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table: a cell for each layer and one for the total. Where room is short the highest rank goes."""

    head: str
    cells: tuple[str, ...]
    total: str
    rank: int = 0
    text: bool = False

    @property
    def width(self) -> int:
        return max(len(line) for cell in (self.head, self.total, *self.cells) for line in cell.split("\n"))


def _columns(stats: Stats) -> list[_Column]:
    if stats.policy == "none":
        return _training_columns(stats)
    layers = stats.layers.values()
    moved, ahead = sum(stats.bytes_moved.values()), sum(layer.prefetched for layer in layers)
    size = sum(sum(layer.plane_bytes.values()) for layer in layers)
    makers: list[tuple[str, Callable[[LayerStats], str], str, int, bool]] = [
        ("format", lambda layer: layer.format, "", 0, True),
        ("home", lambda layer: layer.home if layer.materialized else "(dense)", "", 0, True),
        ("kernel", lambda layer: layer.kernel or "-", "", 5, True),
        ("size", lambda layer: format_bytes(sum(layer.plane_bytes.values())), format_bytes(size), 0, False),
        ("forwards", lambda layer: str(layer.forwards), "", 4, False),
        ("hits", lambda layer: str(layer.hits), str(stats.hits), 0, False),
        ("misses", lambda layer: str(layer.misses), str(stats.misses), 0, False),
        ("hit rate", lambda layer: _percent(layer.hit_rate), _percent(stats.hit_rate), 0, False),
        ("ahead", lambda layer: _share(layer.prefetched, layer.misses), _share(ahead, stats.misses), 3, False),
        ("moved", lambda layer: format_bytes(sum(layer.bytes_moved.values())), format_bytes(moved), 1, False),
        ("wait ms", lambda layer: f"{layer.wait_us / 1e3:.1f}", f"{stats.wait_us / 1e3:.1f}", 2, False),
    ]
    columns = [_Column(head, tuple(map(cell, layers)), total, rank, text) for head, cell, total, rank, text in makers]
    return columns + ([_timeline_column(stats, stats.timeline.layers)] if stats.timeline else [])


def _training_columns(stats: Stats) -> list[_Column]:
    """Nothing is leased and nothing moves; what counts is what the engine has done."""
    layers = stats.layers.values()
    size = sum(sum(layer.plane_bytes.values()) for layer in layers)
    hits, fits = (sum(getattr(layer, f"separation_{name}") for layer in layers) for name in ("hits", "refreshes"))
    makers: list[tuple[str, Callable[[LayerStats], str], str, int, bool]] = [
        ("format", lambda layer: layer.format, "", 0, True),
        ("home", lambda layer: layer.home, "", 0, True),
        ("size", lambda layer: format_bytes(sum(layer.plane_bytes.values())), format_bytes(size), 0, False),
        ("forwards", lambda layer: str(layer.forwards), "", 4, False),
        ("steps on kept scales", lambda layer: str(layer.separation_hits), str(hits), 1, False),
        ("fits", lambda layer: str(layer.separation_refreshes), str(fits), 0, False),
        ("clipped", lambda layer: _percent(layer.clipped_share), "", 0, False),
    ]
    return [_Column(head, tuple(map(cell, layers)), total, rank, text) for head, cell, total, rank, text in makers]


def _timeline_column(stats: Stats, timed: Mapping[str, LayerTotals]) -> _Column:
    waits = [timed[name].wait_us if name in timed else None for name in stats.layers]
    cells = tuple("-" if wait is None else f"{wait / 1e3:.3f}" for wait in waits)
    return _Column("timeline wait ms", cells, f"{sum(filter(None, waits)) / 1e3:.3f}", 5)


def _hoist(columns: list[_Column]) -> tuple[list[_Column], list[str]]:
    """The columns that differ between layers, and what the others say, once for all layers."""
    same = [column for column in columns if column.total == "" and len(set(column.cells)) == 1]
    return [column for column in columns if column not in same], [f"{column.head} {column.cells[0]}" for column in same]


def _names(stats: Stats, columns: list[_Column], width: int) -> tuple[_Column, str]:
    """The column of layer names, without what all of them begin with where there is little room; and what that is."""
    names, total = tuple(stats.layers), _count(len(stats.layers), "layer", "layers")
    full = _Column("layer", names, total, text=True)
    if _total_width([full, *columns]) <= width:
        return full, ""
    prefix = ""
    for level in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(level)) > 1:
            break
        prefix += f"{level[0]}."
    return replace(full, cells=tuple(name.removeprefix(prefix) for name in names)), prefix


def _total_width(columns: Sequence[_Column]) -> int:
    return sum(column.width for column in columns) + _GAP * (len(columns) - 1)


def _fitted(names: _Column, columns: list[_Column], width: int) -> list[_Column]:
    """The columns of a table of that width: the highest rank goes first. Where that is not enough, names are folded,
    and the last columns go."""
    while _total_width([names, *columns]) > width and any(column.rank for column in columns):
        columns = [column for column in columns if column.rank < max(c.rank for c in columns)]
    while columns and _NAME_WIDTH + _GAP + _total_width(columns) > width:
        columns = columns[:-1]
    room = max(_NAME_WIDTH, width - sum(column.width + _GAP for column in columns))
    cells = tuple("\n".join(name[at : at + room] for at in range(0, len(name), room)) for name in names.cells)
    return [replace(names, cells=cells), *columns]


def _table(names: _Column, columns: list[_Column], width: int) -> list[str]:
    """The lines of the table: head, rows and foot between rules. A name that is too long goes on in the next line.

    Laid out here and not by rich, which takes half a millisecond a row: models have tens of thousands.
    """
    every = _fitted(names, columns, width)
    pads = [(str.ljust if column.text else str.rjust, column.width) for column in every]
    rule = "─" * _total_width(every)

    def line(cells: Iterable[str]) -> str:
        parts = [pad(cell, width) for (pad, width), cell in zip(pads, cells, strict=True)]
        return (" " * _GAP).join(parts)

    rows = []
    for name, *cells in zip(*(column.cells for column in every), strict=True):
        first, *more = name.split("\n")
        rows += [line((first, *cells)), *more]
    return [line(column.head for column in every), rule, *rows, rule, line(column.total for column in every)]


def _phase_lines(phases: Mapping[str, PhaseCounts]) -> list[str]:
    """Return a line for each phase, where there is more than one."""
    return [
        f"phase {phase}: {_count(of.passes, 'pass', 'passes')}, {of.hits} hits, {of.misses} misses, "
        f"hit rate {_percent(of.hit_rate)}, ahead {_share(of.prefetched, of.misses)}"
        for phase, of in phases.items()
        if len(phases) > 1
    ]


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f} %"


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole}" if whole else "-"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


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
    """The constructor arguments of a dataclass out of `data`, checked; what else is in there (totals) is left out."""
    values = {}
    for f in fields(cls):
        kind = get_origin(f.type) or f.type
        if kind not in _KINDS:  # `timeline`, which may be absent
            continue
        if f.name not in data:
            raise FormatError(f"{where}.{f.name} is missing; expected {_KINDS[kind]}, as Stats.to_dict() writes it")
        value = data[f.name]
        if not isinstance(value, _accepted(kind)) or isinstance(value, bool) is not (kind is bool):
            raise FormatError(f"{where}.{f.name} = {value!r:.80}; expected {_KINDS[kind]}")
        values[f.name] = value
    return values


def _timeline(data: Any) -> TimelineTotals | None:
    try:
        return None if data is None else TimelineTotals.from_dict(data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"stats.timeline = {data!r:.80}; expected the totals that Stats.to_dict() writes") from error


def _accepted(kind: type) -> tuple[type, ...]:
    return {float: (int, float), tuple: (list, tuple)}.get(kind, (kind,))
