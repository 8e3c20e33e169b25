"""The page of a timeline as a file: one, small, whatever layers are called. What it does: test_page.py."""

import json
import re
from html.parser import HTMLParser
from importlib.resources import files

from vbrt.report.expert_heat import LayerHeat
from vbrt.report.timeline import COMPUTE, PASS, WAIT, Span, Timeline
from vbrt.report.timeline_page import html_page, page_data

NASTY = '</script><script>alert("<!-- &amp;")</script>'


class Reader(HTMLParser):
    """The scripts of a page by type, as a browser cuts them, and what any element would load."""

    def __init__(self, text):
        super().__init__()
        self.scripts, self.loaded, self._kind = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "script":
            self._kind = dict(attrs).get("type", "code")
        self.loaded += [value for name, value in attrs if name in ("src", "href") and value != "data:,"]

    def handle_endtag(self, tag):
        self._kind = None

    def handle_data(self, data):
        if self._kind:
            self.scripts.append((self._kind, data))


def decoded(data):
    """(row, page, start, end, bytes) of each span, back from the page's columns."""
    found = []
    for lane in data["lanes"]:
        at = 0
        for step, length, item in zip(lane["starts"], lane["lengths"], lane["items"], strict=True):
            at += step
            found.append((lane["row"], *data["items"][item], at / data["perUs"], (at + length) / data["perUs"]))
    return found


def test_names_of_layers_do_not_end_the_script_that_holds_them():
    page = f"{NASTY}#dense"
    text = html_page(Timeline((Span(COMPUTE, page, 0, 1, 7), Span("ssd>cpu", page, 0, 1, 7))))
    kinds = [kind for kind, _ in Reader(text).scripts]
    assert kinds.count("application/json") == 1 and kinds.count("code") == 7
    (data,) = (json.loads(code) for kind, code in Reader(text).scripts if kind != "code")
    assert data["items"] == [[page, 7]] and data["layers"][0][0] == NASTY


def test_the_page_loads_nothing_and_carries_the_licence_of_the_library_in_it():
    text = html_page(Timeline(()))
    assert Reader(text).loaded == [] and not re.search(r"url\(|@import|\bimport\(|fetch\(|XMLHttpRequest", text)
    assert "default-src 'none'" in text
    (library,) = (folder for folder in (files("vbrt.report") / "assets").iterdir() if folder.is_dir())
    licence = (library / "LICENSE").read_text("utf-8")
    assert "MIT License" in licence and licence in text
    assert f"(v{library.name.removeprefix('uplot-')})" in (library / "uPlot.iife.min.js").read_text("utf-8")[:80]


def test_without_scripts_the_page_says_how_long_was_waited():
    spans = (
        Span(PASS, "decode", 0, 4000),
        Span(WAIT, "a#dense", 0, 1000),
        Span("cpu>gpu", "a#dense", 0, 1000, 50_000_000),
    )
    (note,) = re.findall(r"<noscript>(.*?)</noscript>", html_page(Timeline(spans)), re.S)
    assert (
        "4.0 ms" in note
        and "25.0 %" in note
        and "cpu>gpu" not in note
        and "cpu&gt;gpu moved 47.7 MiB at 50.0 GB/s" in note
    )


def test_a_page_has_every_span_to_a_tenth_of_a_microsecond_in_some_twenty_characters():
    spans, now = [], 12.3
    for i in range(4000):
        name = f"model.layers.{i % 40}.mlp.down_proj#coarse"
        spans += [Span(WAIT, name, now, now + 3.1, 900_000), Span(COMPUTE, name, now + 3.1, now + 20.4, 900_000)]
        now += 25.0
    timeline = Timeline(tuple(spans))
    data = page_data(timeline)
    found = [span for span in decoded(data) if span[0] != "rest"]
    tenths = lambda start, end: (round(start * 10), round(end * 10))  # noqa: E731
    want = [(s.row, s.page, s.nbytes, *tenths(s.start_us - 12.3, s.end_us - 12.3)) for s in spans]
    assert sorted((*of, *tenths(start, end)) for *of, start, end in found) == sorted(want)
    assert data["shares"]["idle"] > 0 and sum(data["shares"].values()) == round((spans[-1].end_us - 12.3) * 10)
    assert len(html_page(timeline)) - len(html_page(Timeline(()))) < 25 * 12_000  # spans, and the gaps between them


def test_experts_and_their_counts_are_in_the_page():
    data = page_data(Timeline((), (LayerHeat("a.experts", (1, 0), (2, 3)),)))
    assert data["experts"] == [{"layer": "a.experts", "hits": (1, 0), "misses": (2, 3)}] and data["ran"] is None
