"""The heat map of experts and layers in a timeline's page: every cell once, in its shade, in a small page."""

import json
import re
from xml.etree import ElementTree

import pytest

from vbrt.report.chrome import chrome_trace
from vbrt.report.experts import ExpertCounts
from vbrt.report.heat import LayerHeat, expert_maps, heat_between, shade_bounds
from vbrt.report.html import html_page
from vbrt.report.timeline import COMPUTE, Span, Timeline
from vbrt.tiers.recorder import page_names


def heat(layers, experts):
    """Counts that differ from cell to cell, most of them small."""
    found = []
    for n in range(layers):
        touches = [(n * 31 + e * e * 7) % 11 * (1 + 40 * ((n + e) % 29 == 0)) for e in range(experts)]
        misses = [count // 3 for count in touches]
        hits = [count - missed for count, missed in zip(touches, misses, strict=True)]
        found.append(LayerHeat(f"model.layers.{n}.mlp.experts", tuple(hits), tuple(misses)))
    return tuple(found)


def page(experts):
    return html_page(Timeline((Span(COMPUTE, "a#coarse", 0, 1),), experts))


def parsed(text):
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))


def figures(root):
    return {figure.get("class"): figure for figure in root.iter("figure")}


def drawn(figure):
    """The colour of each cell, by row and column: the last one that was painted there."""
    cells = {}
    for path in figure.find("svg").iter("path"):
        for x, y, length in re.findall(r"M(\d+) (\d+)\.5h(\d+)", path.get("d")):
            cells |= {(int(y), int(x) + i): int(path.get("class")[1]) for i in range(int(length))}
    return cells


def ranges(figure):
    """Colour -> the counts that the legend gives it."""
    found = {}
    for key in figure.find("figcaption").iter("span"):
        if key.get("class") != "legend":
            first, _, last = key.find("svg").tail.partition("–")
            found[int(key.find("svg").find("path").get("class")[1])] = range(int(first), int(last or first) + 1)
    return found


@pytest.mark.parametrize(("layers", "experts"), [(1, 1), (3, 8), (4, 129)])
def test_every_cell_has_the_colour_that_the_legend_gives_its_count(layers, experts):
    recorded = heat(layers, experts)
    maps = figures(parsed(page(recorded)))
    for kind in ("touches", "hits", "misses"):
        cells, legend = drawn(maps[kind]), ranges(maps[kind])
        assert set(cells) == {(row, expert) for row in range(layers) for expert in range(experts)}
        for (row, expert), colour in cells.items():
            assert getattr(recorded[row], kind)[expert] in legend[colour]


def test_a_layer_of_fewer_experts_has_fewer_cells():
    few, many = heat(2, 4)[0], heat(2, 6)[1]
    cells = drawn(figures(parsed(page((few, many))))["touches"])
    assert {row: sum(cell[0] == row for cell in cells) for row in (0, 1)} == {0: 4, 1: 6}


@pytest.mark.parametrize("most", [0, 1, 2, 7, 8, 200, 100_000])
def test_shades_begin_at_one_and_rise(most):
    bounds = shade_bounds(most)
    assert bounds == sorted(set(bounds)) and len(bounds) <= 8
    assert bounds[:1] == [1] * bool(most) and all(bound <= most for bound in bounds)


def test_thousands_of_cells_make_a_small_page_that_is_the_same_each_time():
    recorded = heat(48, 128)
    text = page(recorded)
    assert len(text) < 250_000 and text == page(heat(48, 128))
    assert len(drawn(figures(parsed(text))["touches"])) == 6144


def test_the_page_needs_nothing_from_elsewhere_and_follows_the_readers_theme():
    text = page(heat(2, 4))
    assert not re.search(r"https?:|//|src=|href=|@import|url\(", text.replace("<!DOCTYPE html>", ""))
    assert text.count("prefers-color-scheme: dark") == 2
    light, dark = re.findall(r"^\.touches \{([^}]*)\}", text, re.M)
    assert light != dark and light.count("#") == dark.count("#") == 8


def test_the_numbers_under_the_pointer_are_the_counts():
    recorded = (LayerHeat("a.<b>&.experts", (1, 0), (2, 3)), *heat(1, 2))
    root = parsed(page(recorded))
    scripts = {script.get("type"): script.text for script in root.iter("script")}
    data = json.loads(scripts["application/json"])
    assert data["layers"][0] == "a.<b>&.experts" and data["hits"][0] == [1, 0] and data["misses"][0] == [2, 3]
    assert "<" not in scripts["application/json"] and "&" not in scripts["application/json"]
    code = scripts[None]
    assert "<" not in code and "&" not in code and 'getElementById("experts")' in code
    svg = figures(root)["hits"].find("svg")
    scale = svg.find("g").get("transform")
    assert scale == f"translate({svg.get('data-left')} 0) scale({svg.get('data-wide')} {svg.get('data-high')})"


def test_rows_are_named_by_what_tells_layers_apart():
    svg = figures(parsed(page(heat(40, 128))))["misses"].find("svg")
    rows = [text.text for text in svg.findall("text") if text.get("class") == "row"]
    assert rows == [str(n) for n in range(0, 40, 2)]
    columns = [int(text.text) for text in svg.findall("text") if text.get("class") == "column"]
    assert columns == list(range(0, 128, columns[1]))


def test_a_timeline_without_experts_has_no_map():
    text = page(())
    assert expert_maps(()) == "" and "figure" not in text and "<script" not in text


def test_the_trace_for_perfetto_has_the_counts_too():
    recorded = heat(2, 3)
    layers = chrome_trace(Timeline((), recorded))["otherData"]["experts"]
    assert [tuple(layer["hits"]) for layer in layers] == [layer.hits for layer in recorded]
    assert "experts" not in chrome_trace(Timeline(()))["otherData"]


def test_a_recording_counts_what_came_since_it_began():
    before = ExpertCounts((5, 0), (1, 1), (0, 0), (0, 0), 9)
    after = ExpertCounts((8, 0), (1, 4), (0, 0), (0, 0), 12)
    assert heat_between("a", before, after) == LayerHeat("a", (3, 0), (0, 3))
    anew = ExpertCounts((2, 0), (0, 1), (0, 0), (0, 0), 1)  # the layer was given other weights meanwhile
    assert heat_between("a", before, anew) == LayerHeat("a", (2, 0), (0, 1))


def test_a_lease_of_several_experts_is_named_by_their_numbers():
    layer = "model.layers.0.mlp.experts"
    keys = [f"{layer}#coarse.3", f"{layer}#fine.3", f"{layer}#coarse.17", "model.layers.0.q_proj#coarse"]
    assert page_names(keys) == f"{layer}#coarse.3,17 + {layer}#fine.3 + model.layers.0.q_proj#coarse"
    assert Span(COMPUTE, page_names(keys), 0, 1).layer == layer
    scan = [f"{layer}#coarse.{e}" for e in (*range(5, 100), 101, 103, 104)]
    assert page_names(scan) == f"{layer}#coarse.5-99,101,103-104" and page_names(()) == ""
