"""A timeline as a page for a browser; `timeline.html` is its template."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from string import Template

from vbrt.report.chrome import span_details
from vbrt.report.heat import expert_maps
from vbrt.report.timeline import Span, Timeline, TimelineTotals
from vbrt.residency.plan import format_bytes

__all__ = ["html_page"]

_LABEL_PX, _LANE_PX, _AXIS_PX = 110, 26, 22
_TICKS = 10


def html_page(timeline: Timeline) -> str:
    """Return one page with everything in it: totals, the rows as SVG, heat maps of experts, a table of the layers."""
    totals = timeline.totals
    template = Template((files("vbrt.report") / "timeline.html").read_text("utf-8"))
    return template.substitute(
        recorded=f"{totals.recorded_us / 1e3:.3f}",
        waiting=f"{100 * totals.wait_share:.1f}",
        links="\n".join(_links(totals)),
        rows=_svg(timeline),
        experts=expert_maps(timeline.experts),
        layers="\n".join(_layers(totals)),
    )


def _links(totals: TimelineTotals) -> Iterator[str]:
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


def _layers(totals: TimelineTotals) -> Iterator[str]:
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
    rate = f", {format_bytes(span.nbytes)} at {span_details(span)['GB/s']:.2f} GB/s" if ">" in span.row else ""
    title = f"{span.row} {span.page}: {span.us / 1e3:.3f} ms{rate}"
    return (
        f'<rect class="{css}" x="{x:.2f}" y="{y}" width="{max(width, 0.5):.2f}" height="{_LANE_PX - 6}">'
        f"<title>{escape(title)}</title></rect>"
    )
