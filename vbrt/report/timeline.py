"""What recorded passes did, and when: spans of compute, waits and copies, their totals, and two ways to draw them.

    with vb.timeline("out.html") as recording:       # or "out.json", for chrome://tracing and Perfetto
        vb(x)
    recording.timeline.links["cpu>gpu"].gb_per_s     # what was moved over the time that the link was busy
    recording.timeline.wait_share

Recorded time runs from the first pass or lease to the end of the last one; time between passes is part of it. A link
may be busy beyond it, with pages that the next pass will need: their bytes count, its share does not grow by them.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Self

from vbrt.errors import ConfigError
from vbrt.host.files import open_regular
from vbrt.residency.plan import format_bytes

__all__ = [
    "COMPUTE",
    "PASS",
    "WAIT",
    "LayerTotals",
    "LinkTotals",
    "Span",
    "Timeline",
    "TimelineTotals",
    "check_timeline_path",
]

PASS, COMPUTE, WAIT = "pass", "compute", "wait"


@dataclass(frozen=True, slots=True)
class Span:
    """What a row (a pass, compute, wait, or a link such as "cpu>gpu") did for a page, in microseconds."""

    row: str
    page: str
    start_us: float
    end_us: float
    nbytes: int = 0

    @property
    def layer(self) -> str:
        """The layer that the page belongs to."""
        return self.page.split("#")[0]

    @property
    def us(self) -> float:
        """How long it took."""
        return self.end_us - self.start_us


@dataclass(frozen=True, slots=True)
class LinkTotals:
    """A link: `busy_us` counts copies that overlap once, `busy_share` is of the recorded time."""

    nbytes: int
    busy_us: int
    gb_per_s: float
    busy_share: float


@dataclass(frozen=True, slots=True)
class LayerTotals:
    """A layer, over all recorded passes; bytes by link."""

    compute_us: int = 0
    wait_us: int = 0
    bytes_moved: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TimelineTotals:
    """What `vb.stats()` shows of the last timeline. `wait_share` is the recorded time in which a lease waited."""

    recorded_us: int
    wait_share: float
    links: Mapping[str, LinkTotals]
    layers: Mapping[str, LayerTotals]

    @classmethod
    def from_dict(cls, data: Mapping) -> Self:
        """What `dataclasses.asdict` made of it. Raises TypeError, KeyError or AttributeError for anything else."""
        return cls(
            int(data["recorded_us"]),
            float(data["wait_share"]),
            {name: LinkTotals(**link) for name, link in data["links"].items()},
            {name: LayerTotals(**layer) for name, layer in data["layers"].items()},
        )


@dataclass(frozen=True)
class Timeline:
    """A recording, in the order of starts."""

    spans: tuple[Span, ...]

    @cached_property
    def window(self) -> tuple[float, float]:
        """The recorded time: start and end in microseconds."""
        own = [span for span in self.spans if span.row in (PASS, COMPUTE, WAIT)]
        if not own:
            return 0.0, 0.0
        return min(span.start_us for span in own), max(span.end_us for span in own)

    @cached_property
    def totals(self) -> TimelineTotals:
        """The sums over all spans."""
        start, end = self.window
        waits = [span for span in self.spans if span.row == WAIT]
        return TimelineTotals(
            round(end - start),
            _busy_us(waits, self.window) / max(end - start, 1e-9),
            {row: self._link(row) for row in self._rows() if ">" in row},
            self._layers(),
        )

    @property
    def links(self) -> Mapping[str, LinkTotals]:
        """By name, such as "cpu>gpu"."""
        return self.totals.links

    @property
    def layers(self) -> Mapping[str, LayerTotals]:
        """By name, in the order of their first span."""
        return self.totals.layers

    @property
    def wait_share(self) -> float:
        """Share of the recorded time in which a lease waited for its pages."""
        return self.totals.wait_share

    def _rows(self) -> list[str]:
        """Passes, compute and waits, then the links, the one nearest to the computing device first."""
        links = {span.row for span in self.spans} - {PASS, COMPUTE, WAIT}
        return [PASS, COMPUTE, WAIT, *sorted(links)]

    def _link(self, row: str) -> LinkTotals:
        spans, (start, end) = [span for span in self.spans if span.row == row], self.window
        nbytes, busy_us = sum(span.nbytes for span in spans), _busy_us(spans)
        return LinkTotals(
            nbytes,
            round(busy_us),
            nbytes / busy_us / 1e3 if busy_us else 0.0,
            _busy_us(spans, self.window) / max(end - start, 1e-9),
        )

    def _layers(self) -> dict[str, LayerTotals]:
        times: dict[str, dict[str, float]] = {}
        moved: dict[str, dict[str, int]] = {}
        for span in self.spans:
            if span.row == PASS:
                continue
            took = times.setdefault(span.layer, {})
            took[span.row] = took.get(span.row, 0.0) + span.us
            links = moved.setdefault(span.layer, {})
            if ">" in span.row:
                links[span.row] = links.get(span.row, 0) + span.nbytes
        return {
            layer: LayerTotals(round(took.get(COMPUTE, 0.0)), round(took.get(WAIT, 0.0)), moved[layer])
            for layer, took in times.items()
        }

    def lanes(self) -> list[tuple[str, list[Span]]]:
        """The rows to draw. Where spans overlap (several threads), what does not fit on the first goes below it."""
        lanes: list[tuple[str, list[Span]]] = []
        for row in self._rows():
            own: list[list[Span]] = [[]]
            for span in self.spans:
                if span.row == row:
                    _put(span, own)
            lanes += [(f"{row} ({i})" if i > 1 else row, lane) for i, lane in enumerate(own, 1)]
        return lanes

    def write(self, path: Path) -> None:
        """Into a file, in the format that its suffix names.

        Raises:
            ConfigError: another suffix, or the file cannot be written.
        """
        text = self.to_html() if _check_suffix(path) == ".html" else json.dumps(self.to_chrome())
        try:
            path.write_text(text, "utf-8")
        except OSError as error:
            raise _unwritable(path, error) from error

    def to_chrome(self) -> dict:
        """Plain data in Chrome's trace format: complete events in microseconds, a thread for each row."""
        origin = min((span.start_us for span in self.spans), default=0.0)
        events: list[dict] = [_named("process_name", 0, "vbrt")]
        for row, (name, spans) in enumerate(self.lanes()):
            events.append(_named("thread_name", row, name))
            events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": row, "args": {"sort_index": row}})
            events += [
                {
                    "ph": "X",
                    "name": span.layer,
                    "cat": span.row,
                    "pid": 0,
                    "tid": row,
                    "ts": round(span.start_us - origin, 3),
                    "dur": round(span.us, 3),
                    "args": _details(span),
                }
                for span in spans
            ]
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": asdict(self.totals)}

    def to_html(self) -> str:
        """One file with everything in it: totals, the rows as SVG, a table of the layers."""
        body = "\n".join((*_head(self.totals), _svg(self), *_table(self.totals)))
        return (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>vbrt timeline</title>'
            f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
        )


def check_timeline_path(path: str | os.PathLike) -> Path:
    """The path of a timeline, once it is sure that it can be written.

    Raises:
        ConfigError: a suffix other than .html and .json, or a file that cannot be written.
    """
    path = Path(path)
    _check_suffix(path)
    try:
        os.close(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))  # leaves what is there as it is
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def _check_suffix(path: Path) -> str:
    """ ".html" or ".json"; raises ConfigError for anything else."""
    if path.suffix not in (".html", ".json"):
        raise ConfigError(
            f"timeline: {str(path)!r} ends in {path.suffix!r}; expected .html (to look at) or .json "
            "(Chrome's trace format)"
        )
    return path.suffix


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"timeline: cannot write {str(path)!r}: {error.strerror or error}; name a file in a directory "
        "that is there and can be written"
    )


def _busy_us(spans: Iterable[Span], within: tuple[float, float] | None = None) -> float:
    """The time covered by the spans, which come in the order of their starts."""
    low, high = within or (float("-inf"), float("inf"))
    busy, covered = 0.0, low
    for span in spans:
        start, end = max(span.start_us, covered), min(span.end_us, high)
        busy += max(0.0, end - start)
        covered = max(covered, end)
    return busy


def _put(span: Span, lanes: list[list[Span]]) -> None:
    for lane in lanes:
        if not lane or lane[-1].end_us <= span.start_us:
            lane.append(span)
            return
    lanes.append([span])


# -- Chrome's trace format --------------------------------------------------------------------------------------------


def _named(what: str, row: int, name: str) -> dict:
    return {"ph": "M", "name": what, "pid": 0, "tid": row, "args": {"name": name}}


def _details(span: Span) -> dict:
    if ">" not in span.row:
        return {"page": span.page} if span.page else {}
    return {"page": span.page, "bytes": span.nbytes, "GB/s": round(span.nbytes / max(span.us, 1e-3) / 1e3, 3)}


# -- HTML -------------------------------------------------------------------------------------------------------------

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5em; color: #222; background: #fff }
h1 { font-size: 1.3em } .rows { overflow-x: auto; border: 1px solid #ccc }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .15em .8em; text-align: right }
th:first-child, td:first-child { text-align: left } tr:nth-child(even) td { background: #f4f4f4 }
svg { display: block } svg text { font-size: 12px; fill: #444 } .grid { stroke: #ddd }
.pass { fill: #bbb } .compute { fill: #2a7ab8 } .wait { fill: #d1495b } .link { fill: #3a9d5d }
rect:hover { stroke: #000; stroke-width: 1 }
"""
_LABEL_PX, _LANE_PX, _AXIS_PX = 110, 26, 22
_TICKS = 10


def _head(totals: TimelineTotals) -> Iterator[str]:
    yield "<h1>vbrt timeline</h1>"
    yield (
        f"<p>{totals.recorded_us / 1e3:.3f} ms recorded, {100 * totals.wait_share:.1f} % of them spent waiting for "
        "weights</p>"
    )
    yield from _html_table(
        ("link", "bytes", "GB/s while busy", "busy ms", "idle"),
        [
            (
                name,
                format_bytes(link.nbytes),
                f"{link.gb_per_s:.2f}",
                f"{link.busy_us / 1e3:.3f}",
                f"{100 * (1 - link.busy_share):.1f} %",
            )
            for name, link in totals.links.items()
        ],
    )


def _table(totals: TimelineTotals) -> Iterator[str]:
    links = list(totals.links)
    yield from _html_table(
        ("layer", "compute ms", "wait ms", *links),
        [
            (
                name,
                f"{layer.compute_us / 1e3:.3f}",
                f"{layer.wait_us / 1e3:.3f}",
                *(format_bytes(layer.bytes_moved.get(link, 0)) for link in links),
            )
            for name, layer in totals.layers.items()
        ],
    )


def _html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "<table><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    yield "</table>"


def _svg(timeline: Timeline) -> str:
    lanes = timeline.lanes()
    start = min((span.start_us for span in timeline.spans), default=0.0)
    span_us = max((span.end_us for span in timeline.spans), default=0.0) - start
    width = min(20_000, max(1_200, 12 * max(len(spans) for _, spans in lanes)))
    scale = width / max(span_us, 1e-9)
    height = _AXIS_PX + _LANE_PX * len(lanes)
    parts = [f'<div class="rows"><svg width="{_LABEL_PX + width + 60}" height="{height}">']
    parts += _grid(span_us, width, height)
    for i, (name, spans) in enumerate(lanes):
        y = _AXIS_PX + i * _LANE_PX
        parts.append(f'<text x="6" y="{y + 16}">{escape(name)}</text>')
        parts += [_rect(span, _LABEL_PX + (span.start_us - start) * scale, y + 3, span.us * scale) for span in spans]
    return "\n".join((*parts, "</svg></div>"))


def _grid(span_us: float, width: int, height: int) -> Iterator[str]:
    for tick in range(_TICKS + 1):
        x = _LABEL_PX + width * tick / _TICKS
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_AXIS_PX}" y2="{height}"/>'
        yield f'<text x="{x:.1f}" y="15">{span_us * tick / _TICKS / 1e3:.3f} ms</text>'


def _rect(span: Span, x: float, y: int, width: float) -> str:
    css = "link" if ">" in span.row else span.row
    rate = f", {format_bytes(span.nbytes)} at {_details(span)['GB/s']:.2f} GB/s" if ">" in span.row else ""
    title = f"{span.row} {span.page}: {span.us / 1e3:.3f} ms{rate}"
    return (
        f'<rect class="{css}" x="{x:.2f}" y="{y}" width="{max(width, 0.5):.2f}" height="{_LANE_PX - 6}">'
        f"<title>{escape(title)}</title></rect>"
    )
