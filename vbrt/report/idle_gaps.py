"""Idle time of a recording, by cause: reasons of each lease's wait, and gaps without compute.

A wait is split by the resource that its pages waited for:

| reason | while the wait lasts |
| --- | --- |
| drive | a page of the lease is being read from the drive; or none of them moves yet and the drive reads others first |
| link | a page of the lease is being copied over a link; or none of them moves yet and links copy others first |
| host | nothing moves that the lease waits for: the host had not decided, or not launched, what comes next |

Recorded time without compute and waits belongs to a pass ("model": unswapped modules, or Python between two layers), to
an optimizer, or to neither ("idle": between passes).
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from vbrt.report.timeline import COMPUTE, OPTIMIZER, PASS, WAIT, Span, Timeline

__all__ = ["IDLE", "MODEL", "Intervals", "WaitParts", "gaps", "shares", "wait_parts"]

MODEL, IDLE = "model", "idle"
_FILES = "ssd>"  # how links from the tier of files begin

Interval = tuple[float, float]


class WaitParts(NamedTuple):
    """A wait in microseconds, by reason."""

    drive_us: float = 0.0
    link_us: float = 0.0
    host_us: float = 0.0


class Intervals:
    """Disjoint time intervals, merged from overlapping ones."""

    def __init__(self, stretches: Iterable[Interval]) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []
        for start, end in sorted(stretches):
            if self.ends and start <= self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end)
            elif end > start:
                self.starts.append(start)
                self.ends.append(end)

    def __iter__(self) -> Iterator[Interval]:
        return zip(self.starts, self.ends, strict=True)

    def within(self, start: float, end: float) -> list[Interval]:
        """Return the parts between two moments."""
        first, last = bisect_right(self.ends, start), bisect_left(self.starts, end)
        return [(max(self.starts[i], start), min(self.ends[i], end)) for i in range(first, last)]

    def without(self, others: "Intervals") -> "Intervals":
        """Return what the others do not cover."""
        return Intervals(part for start, end in self for part in _holes(start, end, others))

    @property
    def us(self) -> float:
        """Covered time in microseconds."""
        return sum(self.ends) - sum(self.starts)


def _holes(start: float, end: float, others: Intervals) -> Iterator[Interval]:
    for taken, freed in others.within(start, end):
        if taken > start:
            yield start, taken
        start = freed
    if end > start:
        yield start, end


def wait_parts(timeline: Timeline) -> list[WaitParts]:
    """Return the reasons of each wait, in the order of the timeline's spans."""
    copies = [span for span in timeline.spans if ">" in span.row]
    moves: defaultdict[str, list[Span]] = defaultdict(list)
    for copy in copies:
        moves[copy.page].append(copy)
    drive = Intervals((copy.start_us, copy.end_us) for copy in copies if _from_files(copy))
    link = Intervals((copy.start_us, copy.end_us) for copy in copies if not _from_files(copy))
    return [_parts(wait, _own(wait, moves), (drive, link)) for wait in timeline.spans if wait.row == WAIT]


def _from_files(copy: Span) -> bool:
    return copy.row.startswith(_FILES)


def _own(wait: Span, moves: dict[str, list[Span]]) -> list[Span]:
    """Return the copies of a lease's own pages that were in flight while it waited."""
    found = []
    for page in pages_of(wait.page):
        own = moves.get(page, ())
        last = bisect_left(own, wait.end_us, key=lambda copy: copy.start_us) if own else 0
        found += [copy for copy in own[max(0, last - 4) : last] if copy.end_us > wait.start_us]
    return found


def pages_of(name: str) -> list[str]:
    """Return the keys of a lease's name (`event_recorder.page_names`): "a#coarse.0-1" is two pages."""
    keys = []
    for part in name.split(" + "):
        head, _, numbers = part.rpartition(".")
        if "#" in head and numbers[:1].isdecimal():
            keys += [f"{head}.{number}" for run in numbers.split(",") for number in _numbers(run)]
        else:
            keys.append(part)
    return keys


def _numbers(run: str) -> range:
    first, _, last = run.partition("-")
    return range(int(first), int(last or first) + 1)


def _parts(wait: Span, own: Sequence[Span], busy: tuple[Intervals, Intervals]) -> WaitParts:
    start, end = wait.start_us, wait.end_us
    if not own:
        return WaitParts(host_us=end - start)
    begun = max(start, min(copy.start_us for copy in own))  # until then its pages stood in a queue
    stretches = {True: [], False: []}
    for copy in own:
        stretches[_from_files(copy)].append((max(copy.start_us, start), min(copy.end_us, end)))
    drive = Intervals([*stretches[True], *busy[0].within(start, begun)])
    moving = Intervals([*drive, *stretches[False], *busy[1].within(start, begun)])
    return WaitParts(drive.us, moving.us - drive.us, max(0.0, end - start - moving.us))


def gaps(timeline: Timeline) -> list[Span]:
    """Return the recorded time without compute, waits and optimizers, in the order of time: MODEL in passes, IDLE
    between them."""
    passes = _of(timeline, PASS)
    rest = Intervals([timeline.window]).without(_of(timeline, COMPUTE, WAIT, OPTIMIZER))
    found = [Span(IDLE, IDLE, start, end) for start, end in rest.without(passes)]
    for start, end in rest:
        found += [Span(MODEL, MODEL, *part) for part in passes.within(start, end)]
    return sorted(found, key=lambda span: span.start_us)


def _of(timeline: Timeline, *rows: str) -> Intervals:
    return Intervals((span.start_us, span.end_us) for span in timeline.spans if span.row in rows)


def shares(timeline: Timeline, parts: Sequence[WaitParts], rest: Sequence[Span]) -> dict[str, float]:
    """Return the recorded time in microseconds by what happened: compute, drive, link, host, optimizer, model, idle.

    Compute comes first where threads overlap. Their sum is the recorded time.
    """
    compute = _of(timeline, COMPUTE)
    waits = _of(timeline, WAIT).without(compute)
    optimizer = Intervals(_of(timeline, OPTIMIZER).without(compute)).without(_of(timeline, WAIT))
    reasons = [sum(us) for us in zip(*parts, strict=True)] if parts else [0.0, 0.0, 0.0]
    scale = waits.us / max(sum(reasons), 1e-9)
    found = {COMPUTE: compute.us, "drive": reasons[0] * scale, "link": reasons[1] * scale, "host": reasons[2] * scale}
    found[OPTIMIZER] = optimizer.us
    for kind in (MODEL, IDLE):
        found[kind] = sum(gap.us for gap in rest if gap.row == kind)
    return found
