"""Plots of commands, as SVG or PNG, with matplotlib, which is optional."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vbrt.cli.options import writing
from vbrt.errors import VBError
from vbrt.host.safe_files import check_writable

__all__ = ["bars", "check_plot"]

Bars = Mapping[str, Mapping[str, float]]
"""label of a bar -> part -> length."""


def check_plot(path: Path) -> None:
    """Raise VBError: matplotlib is missing, another suffix, or a file that cannot be written."""
    if path.suffix not in (".svg", ".png"):
        raise VBError(f"--plot {path}: ends in {path.suffix!r}; expected .svg or .png")
    try:
        import matplotlib  # noqa: F401 - optional
    except ModuleNotFoundError as error:
        raise VBError("--plot needs matplotlib; pip install matplotlib") from error
    with writing("--plot", path):
        check_writable(path)


def bars(path: Path, panels: Sequence[tuple[str, Bars]], unit: str) -> None:
    """Draw panels of stacked horizontal bars; write them to `path`, .svg or .png.

    Raises VBError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    heights = [1 + 0.35 * len(rows) for _, rows in panels]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "vbrt"}):
        figure = Figure(figsize=(8, sum(heights)), layout="constrained")
        every = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
        for axes, (title, rows) in zip(every, panels, strict=True):
            _panel(axes, title, rows, unit)
        with writing("--plot", path):
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(axes: Any, title: str, rows: Bars, unit: str) -> None:
    parts = list(dict.fromkeys(name for row in rows.values() for name in row))
    begun = dict.fromkeys(rows, 0.0)
    for name in parts:
        lengths = [row.get(name, 0.0) for row in rows.values()]
        axes.barh(list(rows), lengths, left=list(begun.values()), label=name)
        begun = {label: begun[label] + length for label, length in zip(rows, lengths, strict=True)}
    axes.invert_yaxis()
    axes.set(title=title, xlabel=unit)
    if len(parts) > 1:
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
