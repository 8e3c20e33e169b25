"""Counters of a wrapped model: a frozen snapshot of integers.

    print(vb.stats())                  # a table: a row for each kind of layer, the longest wait first
    print(vb.stats().table(each=True)) # every layer
    print(vb.stats(verbose=True))      # also captures, fusion, pages and loaded kernels
    vb.stats().to_dict()               # plain data, for JSON; Stats.from_dict takes it back
    vb.stats().layers["fc1"].hit_rate
    vb.stats(experts=True).experts("model.layers.0.mlp.experts")   # hits, misses, bytes and last use of each expert

A hit is a page lease that moved no bytes. A prefetched page is a miss that also counts as `prefetched`; `waited` are
the other misses. A product that the CPU computes where the page lies leases nothing and counts as `computed`.
`ready_rate`, which tables print as hit rate, counts hits and prefetched pages. `wait_us` is the waiting time of host
threads; that of the device is known for recorded passes only (`vb.timeline`): `timeline` has the totals of the last
recording.
"""

import html
import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vbrt.config.argument_checks import check_whole
from vbrt.errors import ArgumentError
from vbrt.host.terminal import text_width
from vbrt.report.expert_counters import ExpertCounts
from vbrt.report.openmetrics import metrics_lines
from vbrt.report.stats_data import LayerStats, StatsData, StepCounts, TierStats
from vbrt.report.stats_table import table_lines

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["LayerStats", "Stats", "StepCounts", "TierStats"]

_STR_WIDTH = 100  # where no terminal is known


@dataclass(frozen=True, slots=True)
class Stats(StatsData):
    """A snapshot of a wrapped model; building it costs time in the number of VB layers only.

    `dense_bytes`: of the original model; `kept_bytes`: of its unswapped parameters; `device_bytes`: held on the
        computing device now (budgeted pages, dense weights of layers not encoded yet, unswapped parameters).
    `timeline`: totals of the last `vb.timeline`; None before the first. `policy` is "none" if weights train.
    `phases`: passes and page leases by phase; a lease between two passes counts for the first.
    `speculation`: rounds of `generate(speculate=...)`; None before the first.
    `steps`: decode steps of `generate`.
    `caches`: KV caches (`vbrt.KVCache`), whose bytes are also part of `tiers`.
    `leases`: whether a precomputed programme of page moves is replayed, or the reason; "" if no page moves.
    `missed`: placement of missed routed experts, if some are computed on the CPU instead of fetched.
    `hosted`: which weights the CPU computes where they lie in decode steps, and by which rates; "" for none.
    `activations`: activation memory for the backward pass; None with `training.activations` = "keep".
    `updates`: cost of optimizer updates in the tiers.
    `libraries`: loaded C kernels and their instruction sets: {"linear": "prebuilt (avx2)"}, or "built here (avx2)";
        empty before the first use.
    `untested`: imported libraries newer than vbrt was tested with; nothing is disabled because of that.
    `verbose`: `print` shows counters of mechanisms, too; not part of `to_dict`.
    """

    def experts(self, layer: str) -> ExpertCounts:
        """Return the counters by expert of a layer; printed, they are a table.

        Raises:
            ArgumentError: no layer of routed experts has this name, or the snapshot was taken without `experts=True`.
        """
        found = self.layers.get(layer)
        if found is None or found.experts is None:
            names = ", ".join(name for name, of in self.layers.items() if of.experts is not None)
            raise ArgumentError(f"experts({layer!r}): expected a layer of routed experts: {names or 'there is none'}")
        if found.experts.each is None:
            raise ArgumentError(
                f"experts({layer!r}): this snapshot has no experts one by one; take stats(experts=True)"
            )
        return found.experts.each

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """Print as rich does: a table as wide as the terminal allows, and the totals below it."""
        yield from _rendered(table_lines(self, options.max_width, verbose=self.verbose))

    def __str__(self) -> str:
        return self.table(width=text_width(_STR_WIDTH))

    def table(self, *, width: int = _STR_WIDTH, each: bool = False, verbose: bool | None = None) -> str:
        """Return the snapshot as text.

        Args:
            width: in characters.
            each: a row for every layer instead of one for each kind.
            verbose: with counters of mechanisms; by default as `stats(verbose=...)` said.
        """
        from rich.console import Console, Group

        check_whole(width, "table(): width")
        out = io.StringIO()
        lines = table_lines(self, width, each=each, verbose=self.verbose if verbose is None else verbose)
        Console(file=out, width=width, color_system=None).print(Group(*_rendered(lines)))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def metrics(self) -> str:
        """Return the snapshot as OpenMetrics text; see `vbrt.report.openmetrics`."""
        return "\n".join(metrics_lines(self)) + "\n"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.table(width=120))}</pre>"


def _rendered(lines: "Iterable[tuple[str, str]]") -> "RenderResult":
    """Yield styled lines as rich renderables."""
    from rich.segment import Segment
    from rich.text import Text

    for line, style in lines:
        if style:
            yield Text(line, "bold" if style == "bold" else "")  # rich wraps a long line
        else:
            yield Segment(f"{line}\n")
