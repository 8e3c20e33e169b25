"""Counters of a wrapped model: a frozen snapshot of integers.

    print(vb.stats())                  # a table: a row for each kind of layer, the longest wait first
    print(vb.stats().table(each=True)) # every layer
    print(vb.stats(verbose=True))      # also captures, fusion, pages and loaded kernels
    vb.stats().to_dict()               # plain data, for JSON; Stats.from_dict takes it back
    vb.stats().layers["fc1"].hit_rate
    vb.stats(experts=True).experts("model.layers.0.mlp.experts")   # hits, misses, bytes and last use of each expert

A hit is a lease of a page that moved no bytes. A page staged ahead of its use is a miss that was `prefetched`.
`wait_us` is what the host's threads have waited; how long the device did is known of recorded passes only
(`vb.timeline`), of which `timeline` has the last recording's totals.
"""

import html
import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vbrt.config.argument_checks import check_whole
from vbrt.errors import ArgumentError
from vbrt.report.expert_counters import ExpertCounts
from vbrt.report.openmetrics import metrics_lines
from vbrt.report.stats_data import LayerStats, StatsData, StepCounts, TierStats
from vbrt.report.stats_table import table_lines

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["LayerStats", "Stats", "StepCounts", "TierStats"]

_STR_WIDTH = 100  # str() knows no terminal


@dataclass(frozen=True, slots=True)
class Stats(StatsData):
    """A snapshot of a wrapped model; building it costs time in the number of VB layers only.

    `dense_bytes` is the model as it came, `kept_bytes` what was not swapped; `device_bytes` is what the computing
    device holds now of both (budgeted pages, shells that still hold their dense weight, kept parameters).
    `timeline` is what the last `vb.timeline` measured; None before the first. `policy` is "none" where weights train.
    `phases` counts the passes of each phase and their page leases; leases between two passes count for the first.
    `speculation` counts the rounds of `generate(speculate=...)`; None before the first.
    `steps` counts the decode steps of `generate`.
    `caches`: of keys and values (`vbrt.KVCache`), whose bytes are in `tiers` too.
    `leases`, where pages move: whether a precomputed order of them is replayed, and why not.
    `missed`: how routed experts are computed that miss on the computing device, where some are not fetched.
    `activations`: what blocks keep for the backward pass; None where `training.activations` is "keep".
    `updates`: what updates cost a model that trains from the tiers.
    `libraries`: the C kernels that this process has loaded, and for which CPUs: {"linear": "prebuilt (avx2)"}, or
        "built here (avx2)"; empty before the first was needed.
    `untested`: libraries that this process has imported and that are newer than vbrt was tested with; nothing is off
        because of that.
    `verbose`: `print` shows counters of mechanisms, too; not part of `to_dict`.
    """

    def experts(self, layer: str) -> ExpertCounts:
        """Return the counters of each expert of a layer; printed, it is a table.

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
        return self.table()

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
    """Yield lines and their styles as rich prints them."""
    from rich.segment import Segment
    from rich.text import Text

    for line, style in lines:
        if style:
            yield Text(line, "bold" if style == "bold" else "")  # a long line goes on in the next
        else:
            yield Segment(f"{line}\n")
