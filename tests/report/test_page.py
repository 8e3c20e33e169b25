"""The page of a timeline in Chromium without a window, driven by playwright; its trace in the parser of DevTools."""

import json

import pytest

from scripts.chromium import FLAGS, find_chromium
from vbrt.report.chrome_trace import chrome_trace
from vbrt.report.expert_heat import LayerHeat
from vbrt.report.run_header import Ran
from vbrt.report.timeline import COMPUTE, OPTIMIZER, PASS, ROUND, WAIT, Span, Timeline
from vbrt.report.timeline_page import html_page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install '.[test]')")
pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium on PATH (apt-get install chromium)")

NASTY = "</script><b>&.nasty"
SPANS, WIDE, HIGH = 60_000, 1200, 900


def recording():
    """Twenty thousand leases, each after its copy; the one in the middle waits for a millisecond longer."""
    spans, now = (
        [Span(ROUND, "3 tokens, 2 of 2 drafts right", 0, 40), Span(OPTIMIZER, "AdamW, 2 tensors", 40, 45)],
        50.0,
    )
    for i in range(SPANS // 3):
        layer = NASTY if i == SPANS // 6 else f"layers.{i % 100}.proj"
        there = now + 6 + 1000 * (layer == NASTY)
        spans.append(Span("cpu>gpu", f"{layer}#coarse", now + 1, there - 1, 300_000))
        spans.append(Span(WAIT, f"{layer}#coarse", now, there, 300_000))
        spans.append(Span(COMPUTE, f"{layer}#coarse", there, there + 9, 300_000))
        now = there + 10
    spans.append(Span(PASS, "decode", 50, now))
    heat = (LayerHeat("a.0.experts", (5, 0), (1, 2)), LayerHeat("a.1.experts", (0, 9), (0, 1)))
    ran = Ran(
        ("Net, 1 GiB dense",), 'preset "fp4"', {}, "a machine", {"torch": "2"}, "abc123", "2026-01-02T03:04:05+00:00"
    )
    return Timeline(tuple(sorted(spans, key=lambda span: span.start_us)), heat, ran)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_chromium(), args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "run.html"
    path.write_text(html_page(recording()), "utf-8")
    return path


@pytest.fixture
def page(browser, path):
    """The page; the test fails on what it asks for, and on errors in its console."""
    page = browser.new_page(viewport={"width": WIDE, "height": HIGH})
    asked, errors = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector("#lanes[data-to]")
    yield page
    page.wait_for_timeout(500)  # what it does late, such as the address
    assert errors == [] and asked == [path.as_uri()]
    page.close()


def view(page):
    """The stretch that is shown, in microseconds, once it is drawn."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return tuple(float(page.get_attribute("#lanes", f"data-{end}")) for end in ("from", "to"))


def lane(page, name):
    """The middle of a row of spans, in pixels of the window."""
    box = page.locator("#lanes .u-over").bounding_box()
    names = page.evaluate("vb.lanes.map(lane => lane.name)")
    return box["x"] + box["width"] / 2, box["y"] + box["height"] * (names.index(name) + 0.5) / len(names)


def test_a_page_of_many_spans_zooms_searches_and_tells_of_the_span_under_the_pointer(page):
    first, last = view(page)
    assert first == 0 and last > 300_000
    rows = page.evaluate("vb.lanes.length")
    assert 0 < int(page.get_attribute("#lanes", "data-drawn")) <= rows * WIDE  # a column of pixels at most once a row
    assert "decode" in page.inner_text("#ran") and "abc123" in page.inner_text("#ran")
    legend = page.inner_text("#legend")
    assert all(name in legend for name in ("pass: decode", "round of speculation", "optimizer", "waiting for the link"))

    assert page.inner_text("#waits tbody tr td").startswith("1.01 ms")  # the longest first
    page.locator("#waits tbody tr").first.click()
    low, high = view(page)
    assert high - low == pytest.approx(5 * 1006, rel=0.01)
    page.mouse.move(*lane(page, "wait"))
    tip = page.inner_text("#tip")
    assert NASTY in tip and "1.01 ms" in tip and "293.0 KiB" in tip and "waited for the link 1 ms" in tip

    page.mouse.wheel(0, -300)  # towards the pointer
    closer = view(page)
    assert low < closer[0] < closer[1] < high
    x, y = lane(page, "compute")
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 200, y)
    page.mouse.up()
    moved = view(page)
    assert moved[0] > closer[0] and moved[1] - moved[0] == pytest.approx(closer[1] - closer[0])

    page.keyboard.press("0")
    assert view(page) == (first, last)
    page.fill("#find", "layers.42. proj")
    assert page.inner_text("#found") == "600 spans, waits 1.2 ms"
    assert page.locator("#layers tbody tr").count() == 1
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert page.inner_text("#found") == "2 of 600 spans"
    low, high = view(page)
    assert low < 50 + 42 * 16 + 1 < high < 2000  # the copy of its first lease


def test_a_page_has_round_ticks_experts_both_themes_and_a_note_without_scripts(page, browser, path):
    ticks = page.evaluate("[0.5, 20, 2e3, 1e6].map(step => vb.ticks([0, 1, 2].map(i => i * step)))")
    assert ticks[0] == ["0.0 µs", "0.5 µs", "1.0 µs"] and ticks[1][2] == "40 µs"
    assert ticks[2] == ["0 ms", "2 ms", "4 ms"] and ticks[3] == ["0 s", "1 s", "2 s"]
    assert page.evaluate("vb.charts.plot.axes[0]._values")[1].split()[0] in ("20", "50", "100")

    assert page.locator("#experts canvas").count() == 3
    assert page.evaluate("[0, 1, 2, 200].map(vb.shadeBounds)") == [[], [1], [1, 2], [1, 2, 4, 7, 14, 27, 53, 103]]
    canvas = page.locator("#experts .hits canvas")
    canvas.scroll_into_view_if_needed()
    box, own = canvas.bounding_box(), canvas.evaluate("canvas => ({...canvas.dataset})")
    x = box["x"] + float(own["left"]) + 1.5 * float(own["wide"])
    page.mouse.move(x, box["y"] + 1.5 * float(own["high"]))
    assert page.inner_text("#tip") == "a.1.experts, expert 1\n10 touches, 9 hits, 1 misses, 90 % hits"

    light = canvas.evaluate("canvas => canvas.toDataURL()")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 27)"
    assert canvas.evaluate("canvas => canvas.toDataURL()") != light

    plain = browser.new_context(java_script_enabled=False).new_page()
    plain.goto(path.as_uri())
    assert "switched off here" in plain.inner_text("body") and "cpu>gpu moved" in plain.inner_text("noscript")
    assert not plain.is_visible("#app")


#: reads a trace as the Performance panel does; the rows of each thread: name, spans, their time in microseconds
READ_TRACE = """async text => {
  const { TraceModel } = await import("devtools://devtools/bundled/models/trace/trace.js");
  const model = TraceModel.Model.createWithAllHandlers();
  await model.parse(JSON.parse(text).traceEvents, { isFreshRecording: false, metadata: {} });
  const processes = [...model.parsedTrace(0).data.Renderer.processes.values()];
  return processes.flatMap(one => [...one.threads.values()]).map(thread => [
    thread.name, thread.entries.length, thread.entries.reduce((sum, entry) => sum + entry.dur, 0)]);
}"""


def test_devtools_reads_every_span_of_a_trace_in_its_row(browser):
    page = browser.new_page()
    try:
        page.goto("devtools://devtools/bundled/models/trace/trace.js", wait_until="commit")
    except playwright.Error:
        pytest.skip("this Chromium brings no DevTools, or keeps its parser of traces elsewhere")
    timeline = Timeline(recording().spans[:300])
    read = {name: (count, us) for name, count, us in page.evaluate(READ_TRACE, json.dumps(chrome_trace(timeline)))}
    page.close()
    for name, spans in timeline.lanes():
        count, us = read[name]
        assert count == len(spans) and us == pytest.approx(sum(span.us for span in spans), abs=0.01)
    assert set(read) == {name for name, _ in timeline.lanes()} | {"gaps"}
