"""A timeline in Chrome's trace format, for Perfetto and chrome://tracing."""

from dataclasses import asdict

from vbrt.report.idle_gaps import WaitParts, gaps, wait_parts
from vbrt.report.timeline import WAIT, Span, Timeline

__all__ = ["chrome_trace"]


def chrome_trace(timeline: Timeline) -> dict:
    """Return plain data in Chrome's trace format: complete events in microseconds, a thread for each row.

    Perfetto leaves out an event that overlaps another of its thread, so times are rounded to its nanoseconds before
    lengths are taken: neighbours that touch still do.
    """
    origin = min((span.start_us for span in timeline.spans), default=0.0)
    events: list[dict] = [_named("process_name", 0, "vbrt")]
    waits = [span for span in timeline.spans if span.row == WAIT]
    why = {id(span): parts for span, parts in zip(waits, wait_parts(timeline), strict=True)}
    for row, (name, spans) in enumerate([*timeline.lanes(), ("gaps", gaps(timeline))]):
        events.append(_named("thread_name", row, name))
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": row, "args": {"sort_index": row}})
        for span in spans:
            start_ns, end_ns = (round((moment - origin) * 1e3) for moment in (span.start_us, span.end_us))
            event = {"ph": "X", "name": span.layer, "cat": span.row, "pid": 0, "tid": row}
            times = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
            events.append(event | times | {"args": _details(span, why.get(id(span)))})
    other = asdict(timeline.totals)
    if timeline.experts:
        other["experts"] = [asdict(layer) for layer in timeline.experts]
    if timeline.ran:
        other["ran"] = asdict(timeline.ran)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _named(what: str, row: int, name: str) -> dict:
    return {"ph": "M", "name": what, "pid": 0, "tid": row, "args": {"name": name}}


def _details(span: Span, why: WaitParts | None) -> dict:
    """Return the arguments of a span's event: pages, bytes, GB/s, reasons of a wait."""
    if "#" not in span.page and ">" not in span.row:
        return {}
    details = {"page": span.page, "bytes": span.nbytes}
    if ">" in span.row:
        details["GB/s"] = round(span.nbytes / max(span.us, 1e-3) / 1e3, 3)
    return details | ({name: round(us, 3) for name, us in why._asdict().items()} if why else {})
