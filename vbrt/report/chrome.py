"""A timeline in Chrome's trace format, for Perfetto and chrome://tracing."""

from dataclasses import asdict

from vbrt.report.timeline import Span, Timeline

__all__ = ["chrome_trace", "span_details"]


def chrome_trace(timeline: Timeline) -> dict:
    """Return plain data in Chrome's trace format: complete events in microseconds, a thread for each row."""
    origin = min((span.start_us for span in timeline.spans), default=0.0)
    events: list[dict] = [_named("process_name", 0, "vbrt")]
    for row, (name, spans) in enumerate(timeline.lanes()):
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
                "args": span_details(span),
            }
            for span in spans
        ]
    other = asdict(timeline.totals)
    if timeline.experts:
        other["experts"] = [asdict(layer) for layer in timeline.experts]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _named(what: str, row: int, name: str) -> dict:
    return {"ph": "M", "name": what, "pid": 0, "tid": row, "args": {"name": name}}


def span_details(span: Span) -> dict:
    """Return what a span moved, and how fast."""
    if ">" not in span.row:
        return {"page": span.page} if span.page else {}
    return {"page": span.page, "bytes": span.nbytes, "GB/s": round(span.nbytes / max(span.us, 1e-3) / 1e3, 3)}
