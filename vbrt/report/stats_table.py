"""Table of a snapshot, as wide as the terminal allows, with lines of totals below it.

A page that was prefetched counts as a hit in the rates here; `to_dict` counts it under `misses`, as the policies do.
Below the table stand lines that a user can act on: memory, hit rates, transfers, eager decode steps, fallbacks.
Counters of mechanisms without a setting (pages, captures, fusion, loaded kernels) need `stats(verbose=True)`.

Laid out here and not by rich, which takes half a millisecond a row: models have tens of thousands.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vbrt.report.kv_counters import CacheStats
from vbrt.report.layer_groups import by_kind
from vbrt.report.stats_data import LayerStats, StatsData, StepCounts
from vbrt.report.timeline import LayerTotals
from vbrt.residency.access_counts import PhaseCounts
from vbrt.residency.plan import format_bytes

__all__ = ["table_lines"]

_GAP = 2  # characters between columns
_NAME_WIDTH = 12  # minimum width of the name column


@dataclass(frozen=True, slots=True)
class _Column:
    """Column: one cell per layer, and a total. Columns of high rank are dropped first."""

    head: str
    cells: tuple[str, ...]
    total: str
    rank: int = 0
    text: bool = False

    @property
    def width(self) -> int:
        return max(len(line) for cell in (self.head, self.total, *self.cells) for line in cell.split("\n"))


def table_lines(
    stats: StatsData, width: int, *, each: bool = False, verbose: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the lines of a snapshot with their styles, "" for plain ones.

    Args:
        width: of the terminal, in characters.
        each: a row for every layer, instead of one for each kind, the longest wait first.
        verbose: with the counters of mechanisms that a user cannot set.
    """
    shown = stats if each else by_kind(stats)
    columns, shared = _hoist(_columns(shown))
    names, prefix = _names(tuple(shown.layers), len(stats.layers), columns, width)
    shared += [f"names begin with {prefix}"] if prefix else []
    title = "vbrt, training" if stats.policy == "none" else f"vbrt, {stats.policy} policy"
    yield " · ".join((title, _count(stats.passes, "pass", "passes"), *shared)), "title"
    if stats.layers:
        yield from _styled(_table(names, columns, width))
    yield from _experts_lines(stats, width)
    yield from ((line, "text") for line in _summary(stats, verbose=verbose))


def _styled(table: Sequence[str]) -> Iterator[tuple[str, str]]:
    head, *body, foot = table
    yield head, "bold"
    yield from ((line, "") for line in body)
    yield foot, "bold"


def _experts_lines(stats: StatsData, width: int) -> Iterator[tuple[str, str]]:
    """Yield the table of routed experts, if there are any, with one row per layer."""
    layers = {name: layer for name, layer in stats.layers.items() if layer.experts is not None}
    if not layers:
        return
    columns, shared = _hoist(_experts_columns(layers.values(), stats.compute_tier))
    names, prefix = _names(tuple(layers), len(layers), columns, width)
    shared += [f"names begin with {prefix}"] if prefix else []
    yield " · ".join(("routed experts", *shared)), "title"
    yield from _styled(_table(names, columns, width))


def _experts_columns(layers: Collection[LayerStats], tier: str) -> list[_Column]:
    of = [layer.experts for layer in layers]
    hits, misses = sum(layer.hits for layer in layers), sum(layer.misses for layer in layers)
    moved = [sum(layer.bytes_moved.values()) for layer in layers]
    reused, compared = sum(e.reused for e in of), sum(e.compared for e in of)
    held, experts, computed = (sum(getattr(e, name) for e in of) for name in ("resident", "experts", "computed"))
    return [
        _Column("decides", tuple(e.decides for e in of), "", 4, True),
        _Column(f"on {tier}", tuple(f"{e.resident}/{e.experts}" for e in of), f"{held}/{experts}", 0),
        _Column("touched a token", tuple(_number(e.touched_a_token) for e in of), "", 0),
        _Column("reuse", tuple(_percent(e.reuse) for e in of), _percent(reused / compared if compared else None), 0),
        _Column("hit rate", tuple(_percent(layer.hit_rate) for layer in layers), _percent(_rate(hits, misses)), 0),
        _Column("moved", tuple(map(format_bytes, moved)), format_bytes(sum(moved)), 1),
        _Column("scans", tuple(str(e.scans) for e in of), "", 2),
        _Column("from cache", tuple(str(e.cached) for e in of), "", 2),
        *([_Column("computed", tuple(str(e.computed) for e in of), str(computed), 0)] if computed else []),
        *([_Column("unleased", tuple(str(e.unleased) for e in of), "", 2)] if any(e.unleased for e in of) else []),
    ]


def _summary(stats: StatsData, *, verbose: bool) -> list[str]:
    """Return the lines below the table; fallbacks come last."""
    lines = [*_tier_lines(stats), *_phase_lines(stats.phases), *_link_lines(stats), *_cache_lines(stats)]
    if stats.speculation:
        lines.append(str(stats.speculation))
    if stats.activations:
        lines.append(str(stats.activations))
    if stats.updates:
        lines.append(str(stats.updates))
    if stats.timeline:
        recorded, waiting = f"{stats.timeline.recorded_us / 1e3:.1f} ms", _percent(stats.timeline.wait_share)
        lines.append(f"last timeline: {recorded}, {waiting} of it waiting for pages")
    dense, held, kept = map(format_bytes, (stats.dense_bytes, stats.device_bytes, stats.kept_bytes))
    unswapped = f" ({kept} not swapped: plan.skipped)" if stats.kept_bytes else ""
    lines.append(f"memory: {held} on {stats.compute_tier} for a model of {dense}{unswapped}")
    lines += _step_lines(stats)
    lines += _internal_lines(stats) if verbose else []
    lines += [f"fallback: {reason}" for reason in stats.fallbacks]
    return lines + [f"note: {newer}" for newer in stats.untested]


def _internal_lines(stats: StatsData) -> Iterator[str]:
    """Yield the counters of mechanisms that have no setting."""
    yield f"virtual capacity: {stats.virtual_capacity:.2f}x"
    for name, tier in stats.tiers.items():
        yield f"pages on {name}: {tier.resident_pages} resident, {tier.home_pages} of them homes"
    if stats.leases:
        yield f"moving pages: {stats.leases}"
    if stats.missed:
        yield f"missed experts: {stats.missed}"
    if stats.hosted:
        yield f"computed by the CPU where they lie: {stats.hosted}"
    if stats.updates:
        yield stats.updates.internals()
    fitted = [layer for layer in stats.layers.values() if layer.separation_hits or layer.separation_refreshes]
    if fitted:
        hits, fits = (sum(getattr(of, f"separation_{name}") for of in fitted) for name in ("hits", "refreshes"))
        clipped = _percent(max(layer.clipped_share for layer in fitted))
        yield f"separation: {hits} uses of cached scales, {fits} fits; at most {clipped} of a weight clipped"
    if stats.libraries:
        named = (f"{', '.join(names)} {origin}" for origin, names in _by_value(stats.libraries).items())
        yield f"C kernels: {'; '.join(named)}"
    yield from _capture_lines(stats.steps)


def _by_value(of: Mapping[str, str]) -> dict[str, list[str]]:
    """Return names by value."""
    found: dict[str, list[str]] = {}
    for name, value in of.items():
        found.setdefault(value, []).append(name)
    return found


def _step_lines(stats: StatsData) -> list[str]:
    steps = stats.steps
    if not steps.captured + steps.eager:
        return []
    lines = [f"decode steps: {steps.captured} captured, {steps.eager} eager"]
    return lines + [f"eager decode steps: {count} ({reason})" for reason, count in steps.reasons.items()]


def _capture_lines(steps: StepCounts) -> Iterator[str]:
    if steps.recordings:
        held = f", holding {format_bytes(steps.held_bytes)}" if steps.held_bytes else ""
        yield f"{_count(steps.recordings, 'capture', 'captures')} in {steps.record_us / 1e3:.0f} ms{held}"
    for cause, count in steps.causes.items():
        yield f"captures: {count} ({cause})"
    if steps.joined:
        yield "fused in captures: " + ", ".join(f"{count} {pattern}" for pattern, count in steps.joined.items())
    for reason, count in steps.unjoined.items():
        yield f"not fused: {count} ({reason})"
    for reason, count in steps.not_ahead.items():
        yield f"compiled at first launch: {count} ({reason})"


def _tier_lines(stats: StatsData) -> Iterator[str]:
    for name, tier in stats.tiers.items():
        held, budget, peak = map(format_bytes, (tier.held_bytes, tier.budget_bytes, tier.peak_bytes))
        yield f"tier {name}: {held} of {budget}, peak {peak}"


def _link_lines(stats: StatsData) -> Iterator[str]:
    for link, nbytes in stats.bytes_moved.items():
        timed = stats.timeline.links.get(link) if stats.timeline else None
        line = f"link {link}: {format_bytes(nbytes)}"
        if timed:
            line += f"; in the last timeline {timed.gb_per_s:.2f} GB/s, idle {_percent(1 - timed.busy_share)}"
        yield line


def _cache_lines(stats: StatsData) -> Iterator[str]:
    for name, of in stats.caches.items():
        held = ", ".join(f"{format_bytes(nbytes)} in {tier}" for tier, nbytes in of.tier_bytes.items() if nbytes)
        moved = ", ".join(f"{link} {format_bytes(nbytes)}" for link, nbytes in of.bytes_moved.items())
        yield (
            f"KV cache {name}: {of.tokens} tokens, {of.bits} bits, {_count(of.layers, 'layer', 'layers')}; "
            f"{held or 'empty'}; {_leases(of)}; {moved or 'nothing moved'}; waited {of.wait_us / 1e3:.1f} ms"
        )


def _columns(stats: StatsData) -> list[_Column]:
    if stats.policy == "none":
        return _training_columns(stats)
    layers = stats.layers.values()
    moved = sum(stats.bytes_moved.values())
    size = sum(sum(layer.plane_bytes.values()) for layer in layers)
    makers: list[tuple[str, Callable[[LayerStats], str], str, int, bool]] = [
        ("format", lambda layer: layer.format, "", 0, True),
        ("home", lambda layer: layer.home if layer.materialized else "(dense)", "", 0, True),
        ("kernel", lambda layer: layer.kernel or "-", "", 5, True),
        ("size", lambda layer: format_bytes(sum(layer.plane_bytes.values())), format_bytes(size), 0, False),
        ("forwards", lambda layer: str(layer.forwards), "", 4, False),
        ("hit", lambda layer: str(layer.hits), str(stats.hits), 0, False),
        ("prefetched", lambda layer: str(layer.prefetched), str(stats.prefetched), 0, False),
        ("waited", lambda layer: str(layer.waited), str(stats.waited), 0, False),
        *([("computed", lambda layer: str(layer.computed), str(stats.computed), 0, False)] if stats.computed else []),
        ("hit rate", lambda layer: _percent(layer.ready_rate), _percent(stats.ready_rate), 0, False),
        ("moved", lambda layer: format_bytes(sum(layer.bytes_moved.values())), format_bytes(moved), 2, False),
        ("wait ms", lambda layer: f"{layer.wait_us / 1e3:.1f}", f"{stats.wait_us / 1e3:.1f}", 1, False),
    ]
    columns = [_Column(head, tuple(map(cell, layers)), total, rank, text) for head, cell, total, rank, text in makers]
    return columns + ([_timeline_column(stats, stats.timeline.layers)] if stats.timeline else [])


def _training_columns(stats: StatsData) -> list[_Column]:
    """Return the columns of `mode = "train"`: no leases or moves, but counters of the separation engine."""
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


def _timeline_column(stats: StatsData, timed: Mapping[str, LayerTotals]) -> _Column:
    waits = [timed[name].wait_us if name in timed else None for name in stats.layers]
    cells = tuple("-" if wait is None else f"{wait / 1e3:.3f}" for wait in waits)
    return _Column("timeline wait ms", cells, f"{sum(filter(None, waits)) / 1e3:.3f}", 5)


def _hoist(columns: list[_Column]) -> tuple[list[_Column], list[str]]:
    """Return the columns that differ between layers, and the shared ones as text for the title."""
    same = [column for column in columns if column.total == "" and len(set(column.cells)) == 1]
    return [column for column in columns if column not in same], [f"{column.head} {column.cells[0]}" for column in same]


def _names(names: tuple[str, ...], count: int, columns: list[_Column], width: int) -> tuple[_Column, str]:
    """Return the column of layer names, of `count` layers in all, and the prefix that was stripped from all of them to
    save space."""
    full = _Column("layer", names, _count(count, "layer", "layers"), text=True)
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
    """Return the columns that fit: drop the highest ranks first, then fold names, then drop the last columns."""
    while _total_width([names, *columns]) > width and any(column.rank for column in columns):
        columns = [column for column in columns if column.rank < max(c.rank for c in columns)]
    while columns and _NAME_WIDTH + _GAP + _total_width(columns) > width:
        columns = columns[:-1]
    room = max(_NAME_WIDTH, width - sum(column.width + _GAP for column in columns))
    cells = tuple("\n".join(name[at : at + room] for at in range(0, len(name), room)) for name in names.cells)
    return [replace(names, cells=cells), *columns]


def _table(names: _Column, columns: list[_Column], width: int) -> list[str]:
    """Return the lines of the table: head, rows and foot between rules. Names that are too long are folded."""
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
    """Return one line per phase with page leases if there are several phases."""
    return [
        f"phase {phase}: {_count(of.passes, 'pass', 'passes')}, {_leases(of)}"
        for phase, of in phases.items()
        if len(phases) > 1 and of.hits + of.misses
    ]


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _rate(hits: int, misses: int) -> float | None:
    return hits / (hits + misses) if hits + misses else None


def _leases(of: PhaseCounts | CacheStats) -> str:
    waited = max(0, of.misses - of.prefetched)
    ready = _percent(_rate(of.hits + of.misses - waited, waited))
    return f"{of.hits} hit, {of.prefetched} prefetched, {waited} waited, hit rate {ready}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
