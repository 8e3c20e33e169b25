"""Recorded passes: spans of compute, waits and copies, and their totals.

    with vb.timeline("out.html") as recording:       # or "out.json", for chrome://tracing and Perfetto
        vb(x)
    recording.timeline.links["cpu>gpu"].gb_per_s     # what was moved over the time that the link was busy
    recording.timeline.wait_share

Recorded time runs from the first pass or lease to the end of the last one; time between passes is part of it. A link
may be busy beyond it, with pages that the next pass will need: their bytes count, its share does not grow by them.
`vbrt.report.idle_gaps` splits waits by cause, `vbrt.report.timeline_files` writes timelines into files.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from vbrt.report.expert_heat import LayerHeat
from vbrt.report.run_header import Ran

__all__ = [
    "COMPUTE",
    "OPTIMIZER",
    "PASS",
    "ROUND",
    "WAIT",
    "LayerTotals",
    "LinkTotals",
    "Span",
    "Timeline",
    "TimelineTotals",
]

PASS, ROUND, OPTIMIZER, COMPUTE, WAIT = "pass", "round", "optimizer", "compute", "wait"
_NAMED = (PASS, ROUND, OPTIMIZER)  # rows whose spans have a name instead of a page


@dataclass(frozen=True, slots=True)
class Span:
    """Event of a row, with its page and times in microseconds.

    Attributes:
        row: a pass, a round of speculation, an optimizer's step, compute, wait, or a link such as "cpu>gpu".
        page: or pages of a lease, joined by " + "; the name of a pass (its phase), round or optimizer.
        nbytes: moved by a link, or of the leased pages.
    """

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
        """Length in microseconds."""
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
    """Totals of a recording. `wait_share` is the recorded time in which a lease waited."""

    recorded_us: int
    wait_share: float
    links: Mapping[str, LinkTotals]
    layers: Mapping[str, LayerTotals]

    @classmethod
    def from_dict(cls, data: Mapping) -> Self:
        """Read `dataclasses.asdict` of totals. Raises TypeError, KeyError or AttributeError for anything else."""
        return cls(
            int(data["recorded_us"]),
            float(data["wait_share"]),
            {name: LinkTotals(**link) for name, link in data["links"].items()},
            {name: LayerTotals(**layer) for name, layer in data["layers"].items()},
        )


@dataclass(frozen=True)
class Timeline:
    """A recording: spans in the order of their starts, heat maps of routed experts, and metadata of the run."""

    spans: tuple[Span, ...]
    experts: tuple[LayerHeat, ...] = ()
    ran: Ran | None = None

    @cached_property
    def window(self) -> tuple[float, float]:
        """The recorded time: start and end in microseconds."""
        own = [span for span in self.spans if ">" not in span.row]
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
        """Passes, rounds and optimizers if there are any, compute, waits, the links nearest to the computing device."""
        found = {span.row for span in self.spans}
        rare = [row for row in (ROUND, OPTIMIZER) if row in found]
        return [PASS, *rare, COMPUTE, WAIT, *sorted(row for row in found if ">" in row)]

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
            if span.row in _NAMED:
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
        """Return the rows to draw. Spans that overlap (several threads) go into further rows below the first."""
        lanes: list[tuple[str, list[Span]]] = []
        for row in self._rows():
            own: list[list[Span]] = [[]]
            for span in self.spans:
                if span.row == row:
                    _put(span, own)
            lanes += [(f"{row} ({i})" if i > 1 else row, lane) for i, lane in enumerate(own, 1)]
        return lanes


def _busy_us(spans: Iterable[Span], within: tuple[float, float] | None = None) -> float:
    """Return the time covered by the spans, which come in the order of their starts."""
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
