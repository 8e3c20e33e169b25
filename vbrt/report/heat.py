"""Heat maps of routed experts: a row for each layer, a cell for each expert, for a timeline's page.

There are thousands of cells. Those of one shade are one path, and runs of equal cells one stroke of it, so that the
page stays small; what a cell counts is shown under the pointer by a few lines of script, which read the numbers that
are in the page anyway. `experts.html` is the template.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import groupby
from string import Template

from vbrt.report.experts import ExpertCounts

__all__ = ["LayerHeat", "expert_maps", "heat_between", "shade_bounds"]

_SHADES = 8
_WIDTH_PX, _LEAST_PX, _MOST_PX, _LEAST_HEIGHT_PX = 960, 3, 24, 6
_TEXT_PX, _LETTER_PX = 14, 7  # the height of a label, and the width of a letter


@dataclass(frozen=True, slots=True)
class LayerHeat:
    """What the experts of a layer have counted: leases of their pages that moved nothing, and those that did."""

    layer: str
    hits: tuple[int, ...]
    misses: tuple[int, ...]

    @property
    def touches(self) -> tuple[int, ...]:
        """All leases, by expert."""
        return tuple(map(sum, zip(self.hits, self.misses, strict=True)))


def heat_between(layer: str, before: ExpertCounts | None, after: ExpertCounts) -> LayerHeat:
    """Return what was counted from one moment to another; counts that began in between are taken whole."""
    same = before is not None and all(map(int.__le__, before.hits + before.misses, after.hits + after.misses))
    hits = tuple(map(int.__sub__, after.hits, before.hits)) if same else after.hits
    return LayerHeat(layer, hits, tuple(map(int.__sub__, after.misses, before.misses)) if same else after.misses)


def shade_bounds(most: int) -> list[int]:
    """Return the least count of each shade, ascending from 1. Each is a multiple of the one before: most experts are
    touched a few times, and some very often."""
    return sorted({round(most ** (shade / _SHADES)) for shade in range(_SHADES)}) if most else []


def expert_maps(layers: Sequence[LayerHeat]) -> str:
    """Return three maps as a part of a page: touches, hits and misses; "" without layers."""
    if not layers:
        return ""
    maps = [
        _map("touches", [layer.touches for layer in layers], layers),
        _map("hits", [layer.hits for layer in layers], layers),
        _map("misses", [layer.misses for layer in layers], layers),
    ]
    data = {"layers": [layer.layer for layer in layers], "hits": [layer.hits for layer in layers]}
    data |= {"misses": [layer.misses for layer in layers]}
    text = json.dumps(data, separators=(",", ":"))
    for letter in "<>&":  # neither HTML nor XML may see them
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    template = Template((files("vbrt.report") / "experts.html").read_text("utf-8"))
    return template.substitute(maps="\n".join(maps), data=text)


def _map(kind: str, rows: Sequence[Sequence[int]], layers: Sequence[LayerHeat]) -> str:
    columns = max(map(len, rows))
    wide = min(_MOST_PX, max(_LEAST_PX, _WIDTH_PX // columns))
    high = max(_LEAST_HEIGHT_PX, min(wide, _TEXT_PX))
    labels = _short_names([layer.layer for layer in layers])
    left = _LETTER_PX * max(map(len, labels)) + 12
    bounds = shade_bounds(max(map(max, rows)))
    width, height = columns * wide, len(rows) * high
    size = f'width="{left + width + 30}" height="{height + _TEXT_PX + 8}"'
    grid = f'data-left="{left}" data-wide="{wide}" data-high="{high}"'  # for the script
    return "\n".join(
        (
            f'<figure class="{kind}"><figcaption>{kind}{_legend(bounds, max(map(max, rows)))}</figcaption>',
            f'<svg role="img" aria-label="{kind} by layer and expert" {size} {grid}>',
            *_row_labels(labels, left, high),
            *_column_labels(columns, left, wide, height),
            f'<g transform="translate({left} 0) scale({wide} {high})">',
            f'<path class="s0" d="{_strokes([0 if len(row) else None] * len(row) for row in rows)}"/>',
            *_shades(rows, bounds),
            "</g></svg></figure>",
        )
    )


def _shades(rows: Sequence[Sequence[int]], bounds: Sequence[int]) -> Iterator[str]:
    shaded = [[sum(count >= bound for bound in bounds) for count in row] for row in rows]
    for shade in range(1, len(bounds) + 1):
        strokes = _strokes([0 if cell == shade else None for cell in row] for row in shaded)
        if strokes:
            yield f'<path class="s{_spread(shade, len(bounds))}" d="{strokes}"/>'


def _strokes(rows: "Iterator[list[int | None]]") -> str:
    """Return a stroke along the middle of each run of cells that are not None."""
    parts = []
    for y, row in enumerate(rows):
        x = 0
        for drawn, run in groupby(row, lambda cell: cell is not None):
            length = len(list(run))
            if drawn:
                parts.append(f"M{x} {y}.5h{length}")
            x += length
    return "".join(parts)


def _spread(shade: int, shades: int) -> int:
    """Return the colour of a shade where there are few of them: the last one is the strongest."""
    return -(-shade * _SHADES // shades)


def _legend(bounds: Sequence[int], most: int) -> str:
    ends = [*(bound - 1 for bound in bounds[1:]), *([most] if bounds else [])]
    ranges = [("0", 0)]
    for shade, (first, last) in enumerate(zip(bounds, ends, strict=True), 1):
        ranges.append((str(first) if first == last else f"{first}–{last}", _spread(shade, len(bounds))))
    keys = "".join(
        f'<span><svg width="12" height="12"><path class="s{c}" d="M0 6h12"/></svg>{r}</span>' for r, c in ranges
    )
    return f'<span class="legend">{keys}</span>'


def _row_labels(labels: Sequence[str], left: int, high: int) -> Iterator[str]:
    step = -(-_TEXT_PX // high)
    for y in range(0, len(labels), step):
        yield f'<text class="row" x="{left - 6}" y="{y * high + high / 2 + 4:g}">{escape(labels[y])}</text>'


def _column_labels(columns: int, left: int, wide: int, height: int) -> Iterator[str]:
    room = -(-(_LETTER_PX * (len(str(columns)) + 1)) // wide)  # columns that a number takes
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, columns) if step >= room)
    for x in range(0, columns, step):
        yield f'<text class="column" x="{left + x * wide + wide / 2:g}" y="{height + _TEXT_PX}">{x}</text>'


def _short_names(names: Sequence[str]) -> list[str]:
    """Return what tells the names of layers apart: the parts between dots in which not all of them agree."""
    parts = [name.split(".") for name in names]
    if len(names) < 2 or len({len(own) for own in parts}) > 1:
        return list(names)
    differ = [i for i, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
    return [".".join(own[i] for i in differ) for own in parts]
