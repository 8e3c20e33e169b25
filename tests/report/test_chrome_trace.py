"""The trace for Perfetto, checked by the rules of the format.

"Trace Event Format" (Duca, Sinclair, Chromium project) names the fields of complete and metadata events. Perfetto's FAQ
("Why are overlapping events in JSON traces not displayed correctly?") adds that events of a thread must nest, and its
importer leaves out those that do not; times go into whole nanoseconds there.
"""

import json
import random
from itertools import pairwise

from vbrt.report.chrome_trace import chrome_trace
from vbrt.report.expert_heat import LayerHeat
from vbrt.report.run_header import Ran
from vbrt.report.timeline import COMPUTE, OPTIMIZER, PASS, WAIT, Span, Timeline

#: field -> types, of each phase of event that is written; all of them are required
FIELDS = {
    "X": {
        "name": str,
        "cat": str,
        "ph": str,
        "ts": (int, float),
        "dur": (int, float),
        "pid": int,
        "tid": int,
        "args": dict,
    },
    "M": {"name": str, "ph": str, "pid": int, "tid": int, "args": dict},
}
METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}


def check_trace(text):
    """Return the events of a trace; fail where it breaks a rule."""
    trace = json.loads(text)
    assert trace.keys() <= {"traceEvents", "displayTimeUnit", "otherData"} and trace["displayTimeUnit"] in ("ms", "ns")
    threads = {}
    for event in trace["traceEvents"]:
        rules = FIELDS[event["ph"]]
        assert event.keys() == rules.keys() and all(isinstance(event[name], kind) for name, kind in rules.items())
        if event["ph"] == "M":
            assert event["args"].keys() == {METADATA[event["name"]]}
        else:
            assert event["ts"] >= 0 and event["dur"] >= 0
            threads.setdefault(event["tid"], []).append([round(event["ts"] * 1e3), round(event["dur"] * 1e3)])
    for spans in threads.values():
        assert all(start + length <= after for (start, length), (after, _) in pairwise(sorted(spans)))
    return trace["traceEvents"]


def test_neighbours_that_touch_do_not_overlap_once_they_are_rounded():
    """Start and length rounded each by itself overlap by a nanosecond, here in every fourth pair."""
    draw, spans, now = random.Random(0), [], 1e6 / 3
    for _ in range(2000):
        then = now + draw.random() * 3
        spans.append(Span(COMPUTE, "a#dense", now, then, 5))
        now = then
    rounded = [(round(span.start_us, 3), round(span.us, 3)) for span in spans]
    assert any(round(start + us, 3) > after for (start, us), (after, _) in pairwise(rounded))
    events = check_trace(json.dumps(chrome_trace(Timeline(tuple(spans)))))
    assert sum(event["ph"] == "X" for event in events) == 2000


def test_a_trace_says_what_moved_what_waited_for_it_and_what_ran():
    spans = (
        Span(PASS, "decode", 0, 100),
        Span("cpu>gpu", "a#coarse", 0, 20, 40_000),
        Span("cpu>gpu", "b#coarse", 10, 30, 40_000),  # overlaps: a row of its own
        Span(WAIT, "a#coarse", 5, 25, 40_000),
        Span(COMPUTE, "a#coarse", 25, 90, 40_000),
        Span(OPTIMIZER, "AdamW, 2 tensors", 110, 120),
    )
    trace = chrome_trace(Timeline(spans, (LayerHeat("a", (1, 2), (3, 4)),), Ran(models=("Net",), commit="abc")))
    events = {(event["cat"], event["name"]): event for event in check_trace(json.dumps(trace)) if event["ph"] == "X"}
    assert events["cpu>gpu", "a"]["args"] == {"page": "a#coarse", "bytes": 40_000, "GB/s": 2.0}
    want = {"page": "a#coarse", "bytes": 40_000, "drive_us": 0, "link_us": 15, "host_us": 5}
    assert events["wait", "a"]["args"] == want
    assert (
        events["optimizer", "AdamW, 2 tensors"]["dur"] == 10
        and ("idle", "idle") in events
        and ("model", "model") in events
    )
    other = trace["otherData"]
    assert other["ran"]["models"] == ("Net",) and other["experts"][0]["misses"] == (3, 4) and other["wait_share"] > 0
    assert chrome_trace(Timeline(()))["otherData"].keys().isdisjoint({"ran", "experts"})
