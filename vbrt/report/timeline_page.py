"""HTML page of a timeline: one self-contained file.

The page is `assets/timeline.html` with its style, its scripts and uPlot (MIT, `assets/uplot-*/LICENSE`) put in, and the
recording as JSON. Times are whole tenths of microseconds, a start as the step from the one before, and pages are named
once, so that a span takes some ten characters.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from html import escape
from importlib.resources import files
from itertools import chain, pairwise
from string import Template
from typing import Any

from vbrt.report.idle_gaps import IDLE, MODEL, WaitParts, gaps, shares, wait_parts
from vbrt.report.timeline import WAIT, Span, Timeline
from vbrt.residency.plan import format_bytes

__all__ = ["html_page", "page_data"]

_UPLOT = "uplot-1.6.32"
_SCRIPTS = ("data.js", "lanes.js", "charts.js", "tables.js", "experts.js", "page.js")
_PER_US = 10


def html_page(timeline: Timeline) -> str:
    """Return the self-contained page."""
    data = page_data(timeline)
    totals = timeline.totals
    return Template(_asset("timeline.html")).substitute(
        _assets(),
        recorded=f"{us / 1e6:.2f} s" if (us := totals.recorded_us) >= 1e6 else f"{us / 1e3:.1f} ms",
        waiting=f"{100 * totals.wait_share:.1f} %",
        links=escape(
            ", ".join(
                f"{name} moved {format_bytes(link.nbytes)} at {link.gb_per_s:.1f} GB/s"
                for name, link in totals.links.items()
            )
            or "no link moved anything"
        ),
        data=_in_script(json.dumps(data, separators=(",", ":"))),
    )


@cache
def _assets() -> Mapping[str, str]:
    return {
        "style": _asset(f"{_UPLOT}/uPlot.min.css") + _asset("timeline.css"),
        "licence": _asset(f"{_UPLOT}/LICENSE"),
        "uplot": _asset(f"{_UPLOT}/uPlot.iife.min.js"),
        "scripts": "\n".join(f"<script>\n{_asset(name)}</script>" for name in _SCRIPTS),
    }


def _asset(name: str) -> str:
    return files("vbrt.report").joinpath("assets", name).read_text("utf-8")


def _in_script(text: str) -> str:
    """Return JSON escaped for a script element: no layer name can end it or begin a comment."""
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def page_data(timeline: Timeline) -> dict[str, Any]:
    """Return the page's plain data; times are in tenths of microseconds from the first span on."""
    parts, rest = wait_parts(timeline), gaps(timeline)
    origin = min((span.start_us for span in timeline.spans), default=0.0)
    why = {id(span): part for span, part in zip(_waits(timeline), parts, strict=True)}
    lanes = [*timeline.lanes(), *([("rest", rest)] if rest else [])]
    items: dict[tuple[str, int], int] = {}
    totals = timeline.totals
    return {
        "perUs": _PER_US,
        "lanes": [_lane(name, spans, origin, items, why) for name, spans in lanes],
        "items": list(items),
        "window": [round((moment - origin) * _PER_US) for moment in timeline.window],
        "shares": {kind: round(us * _PER_US) for kind, us in shares(timeline, parts, rest).items()},
        "waitShare": totals.wait_share,
        "links": {name: asdict(link) for name, link in totals.links.items()},
        "layers": [[name, one.compute_us, one.wait_us, dict(one.bytes_moved)] for name, one in totals.layers.items()],
        "experts": [asdict(layer) for layer in timeline.experts],
        "ran": asdict(timeline.ran) if timeline.ran else None,
    }


def _waits(timeline: Timeline) -> list[Span]:
    return [span for span in timeline.spans if span.row == WAIT]


def _lane(
    name: str, spans: Sequence[Span], origin: float, items: dict[tuple[str, int], int], why: Mapping[int, WaitParts]
) -> dict[str, Any]:
    starts = [round((span.start_us - origin) * _PER_US) for span in spans]
    ends = [round((span.end_us - origin) * _PER_US) for span in spans]
    lane = {
        "name": name,
        "row": "rest" if spans and spans[0].row in (MODEL, IDLE) else spans[0].row if spans else name,
        "starts": [after - before for before, after in pairwise(chain([0], starts))],
        "lengths": [end - start for start, end in zip(starts, ends, strict=True)],
        "items": [items.setdefault((span.page, span.nbytes), len(items)) for span in spans],
    }
    if lane["row"] == WAIT:
        lane["why"] = [
            [round(us * _PER_US) for us in column] for column in zip(*(why[id(s)] for s in spans), strict=True)
        ]
    return lane
