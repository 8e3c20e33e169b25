"""The plots of the docs."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")  # the GPU machines lack it

from scripts.plots import Labels, line_plot

CURVES = {"left": {0: 3.0, 50: 1.5, 97: 1.0}, "right": {97: 2.0, 10: 2.5}}


def drawn(path: Path) -> list[str]:
    line_plot(path, CURVES, Labels("A title", "steps", "loss"))
    return ["".join(text.itertext()) for text in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_a_plot_has_a_title_both_axes_a_legend_and_round_ticks(tmp_path):
    texts = drawn(tmp_path / "plot.svg")
    assert {"A title", "steps", "loss", "left", "right"} <= set(texts)
    assert {"0", "20", "40", "60", "80"} <= set(texts)


def test_the_same_figures_give_the_same_bytes(tmp_path):
    drawn(tmp_path / "one.svg")
    drawn(tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
