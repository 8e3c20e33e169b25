"""Plots of the docs, by matplotlib, as SVG whose bytes depend on the figures only."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# text stays text, and the same figures give the same bytes
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "vbrt", "font.family": "sans-serif", "axes.grid": True}


@dataclass(frozen=True, slots=True)
class Labels:
    """What stands above a plot and beside its axes."""

    title: str
    x: str
    y: str


def line_plot(path: Path, curves: Mapping[str, Mapping[float, float]], labels: Labels) -> None:
    """Draw a line for each curve of x -> y, from zero on, and write it to `path`."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots()
        for name, curve in curves.items():
            axes.plot(*zip(*sorted(curve.items()), strict=True), label=name)
        axes.set(title=labels.title, xlabel=labels.x, ylabel=labels.y, xlim=(0, None), ylim=(0, None))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
        axes.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None})
