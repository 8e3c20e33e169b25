"""vb.timeline: what it measures, the two files that it writes, and that nothing is recorded unless it is asked for."""

import json
import re
import threading
import time
from dataclasses import FrozenInstanceError
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import vbrt
from tests.models import mlp, wrap, wrap_streamed
from tests.report.test_chrome_trace import check_trace
from vbrt.errors import ConfigError, FormatError, TierError, WrapError
from vbrt.report.stats import Stats
from vbrt.report.timeline import COMPUTE, OPTIMIZER, PASS, WAIT, Span, Timeline

X = torch.linspace(-1, 1, 192).reshape(3, 64)

# two layers; a's page was read before the pass was over, b's came late, and what the next pass needs runs on after it
SPANS = (
    Span(PASS, PASS, 0, 100),
    Span(WAIT, "a#coarse + a#fine", 0, 10),
    Span(COMPUTE, "a#coarse + a#fine", 10, 30),
    Span("cpu>gpu", "b#coarse", 20, 60, 40_000),
    Span(WAIT, "b#coarse", 30, 60),
    Span("ssd>cpu", "b#coarse", 40, 70, 10_000),
    Span("ssd>cpu", "a#fine", 50, 80, 30_000),
    Span(COMPUTE, "b#coarse", 60, 95),
    Span("cpu>gpu", "a#coarse", 90, 130, 20_000),
)


@pytest.fixture
def slow(tmp_path, monkeypatch):
    """A wrapper whose six layers are read from files, 5 ms each."""
    vb = wrap_streamed(mlp(), "dense", tmp_path / "pages").materialize()
    ssd = vb.stack.levels[-1].tier
    get = ssd.get

    def late(room: object, out: torch.Tensor, *, key: str) -> None:
        time.sleep(0.005)
        get(room, out, key=key)

    monkeypatch.setattr(ssd, "get", late)
    with vb:
        yield vb


def recorded(vb: vbrt.VBModelWrapper, path: Path, passes: int = 1) -> Timeline:
    with vb.timeline(path) as recording, torch.no_grad():
        for _ in range(passes):
            vb(X)
    return recording.timeline


def of_row(timeline: Timeline, row: str) -> list[Span]:
    return [span for span in timeline.spans if span.row == row]


# -- totals -----------------------------------------------------------------------------------------------------------


def test_totals_of_known_spans():
    totals = Timeline(SPANS).totals
    assert totals.recorded_us == 100 and totals.wait_share == pytest.approx(0.4)
    fast, drive = totals.links["cpu>gpu"], totals.links["ssd>cpu"]
    assert (fast.nbytes, fast.busy_us, fast.gb_per_s) == (60_000, 80, pytest.approx(0.75))
    assert fast.busy_share == pytest.approx(0.5)  # 40 of the 80 µs, and 10 of the other 40
    assert (drive.nbytes, drive.busy_us, drive.gb_per_s) == (40_000, 40, pytest.approx(1.0))  # 40 to 80: they overlap
    assert drive.busy_share == pytest.approx(0.4)
    assert (totals.layers["a"].compute_us, totals.layers["a"].wait_us) == (20, 10)
    assert totals.layers["a"].bytes_moved == {"ssd>cpu": 30_000, "cpu>gpu": 20_000}
    assert (totals.layers["b"].compute_us, totals.layers["b"].wait_us) == (35, 30)


def test_waits_of_two_threads_at_one_time_count_once_in_the_share_and_twice_in_their_layers():
    both = Timeline((Span(WAIT, "a#dense", 0, 60), Span(WAIT, "b#dense", 20, 80), Span(COMPUTE, "b#dense", 80, 100)))
    assert both.wait_share == pytest.approx(0.8)
    assert sum(layer.wait_us for layer in both.layers.values()) == 120


def test_a_recording_without_spans_has_totals():
    totals = Timeline(()).totals
    assert (totals.recorded_us, totals.wait_share, totals.links, totals.layers) == (0, 0.0, {}, {})


def test_no_two_spans_of_a_lane_overlap():
    lanes = dict(Timeline(SPANS).lanes())
    assert list(lanes) == [PASS, COMPUTE, WAIT, "cpu>gpu", "ssd>cpu", "ssd>cpu (2)"]
    for spans in lanes.values():
        assert all(a.end_us <= b.start_us for a, b in pairwise(spans))


def test_a_timeline_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Timeline(SPANS).spans = ()


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_trace_nests_compute_and_waits_in_their_pass_and_keeps_the_rules_of_the_format(slow, tmp_path):
    timeline = recorded(slow, tmp_path / "out.json")
    text = (tmp_path / "out.json").read_text("utf-8")
    spans = [event for event in check_trace(text) if event["ph"] == "X" and event["cat"] not in ("model", "idle")]
    assert len(spans) == len(timeline.spans)
    (whole,) = (event for event in spans if event["cat"] == PASS)
    for event in spans:
        if event["cat"] in (COMPUTE, WAIT):
            assert whole["ts"] <= event["ts"] and event["ts"] + event["dur"] <= whole["ts"] + whole["dur"] + 0.01
    copy = next(event for event in spans if event["cat"] == "ssd>cpu")
    assert copy["args"].keys() == {"page", "bytes", "GB/s"} and copy["args"]["page"] in slow.stack.pages
    assert copy["args"]["GB/s"] == pytest.approx(copy["args"]["bytes"] / copy["dur"] / 1e3, abs=2e-3)
    assert json.loads(text)["otherData"]["wait_share"] == timeline.wait_share


def test_a_recording_says_what_ran(slow, tmp_path):
    ran = recorded(slow, tmp_path / "out.html").ran
    (model,) = ran.models
    assert "Sequential" in model and "6 layers in dense" in model
    assert ran.settings["weights"]["format"] == "dense" and ran.config == "dict"
    assert ran.versions["torch"] == torch.__version__ and "cores" in ran.machine
    assert abs((datetime.now(UTC) - datetime.fromisoformat(ran.date)).total_seconds()) < 60
    assert '"ran":{"models":["Sequential' in (tmp_path / "out.html").read_text("utf-8")


@pytest.mark.parametrize("suffix", [".html", ".json"])
def test_a_block_in_which_nothing_runs_leaves_a_file_all_the_same(suffix, tmp_path):
    with wrap(mlp()).timeline(tmp_path / f"out{suffix}") as recording:
        pass
    assert recording.timeline.spans == () and (tmp_path / f"out{suffix}").stat().st_size > 100


@pytest.mark.parametrize("name", ["out.svg", "out", "out.json.gz", ".html"])
def test_another_suffix_is_refused_before_anything_runs(name, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(name)) as error:
        wrap(mlp()).timeline(tmp_path / name)
    assert ".html" in str(error.value) and ".json" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "folder.html").mkdir()
    for path in (tmp_path / "missing" / "out.html", tmp_path / "folder.html"):
        with pytest.raises(ConfigError, match=re.escape(str(path))):
            wrap(mlp()).timeline(str(path))


# -- what is measured -------------------------------------------------------------------------------------------------


def test_waits_for_slow_reads_show_up(slow, tmp_path):
    timeline = recorded(slow, tmp_path / "out.json", passes=2)
    reads = of_row(timeline, "ssd>cpu")
    assert len(reads) >= 2 and all(span.us >= 5_000 for span in reads)
    waits = {span.page: span.us for span in of_row(timeline, WAIT) if span.us > 4_000}
    assert {read.page for read in reads} >= set(waits) != set()
    # no share of the whole: how long the rest takes is up to the machine
    assert len(waits) * 4_000 / timeline.totals.recorded_us < timeline.wait_share <= 1
    link = timeline.links["ssd>cpu"]
    assert link.gb_per_s <= max(read.nbytes for read in reads) / 5_000 / 1e3
    assert link.busy_share == pytest.approx(sum(read.us for read in reads) / timeline.totals.recorded_us, rel=0.01)


def test_bytes_are_those_that_stats_count(slow, tmp_path):
    before = slow.stats().bytes_moved["ssd>cpu"]
    timeline = recorded(slow, tmp_path / "out.json", passes=3)
    assert timeline.links["ssd>cpu"].nbytes == slow.stats().bytes_moved["ssd>cpu"] - before > 0
    assert (
        sum(layer.bytes_moved.get("ssd>cpu", 0) for layer in timeline.layers.values())
        == timeline.links["ssd>cpu"].nbytes
    )


def test_resident_layers_are_recorded_too_and_results_do_not_change(tmp_path):
    vb = wrap(mlp(), "nvfp4").materialize()
    with torch.no_grad():
        want, hits = vb(X), vb.stats().hits
        assert vb.stack.at_rest
        with vb.timeline(tmp_path / "out.html") as recording:
            assert torch.equal(vb(X), want)
        assert vb.stack.at_rest and vb.stack.guard.recorder is None
        assert torch.equal(vb(X), want)
    assert vb.stats().hits - hits == 12
    computed = [span.layer for span in of_row(recording.timeline, COMPUTE)]
    assert computed == [str(i) for i in range(0, 12, 2)]
    assert recording.timeline.links == {} and all(layer.compute_us > 0 for layer in recording.timeline.layers.values())


def test_each_pass_is_a_span(tmp_path):
    passes = of_row(recorded(wrap(mlp()), tmp_path / "out.json", passes=3), PASS)
    assert len(passes) == 3
    assert all(a.end_us <= b.start_us for a, b in pairwise(passes))


def test_threads_record_beside_each_other(slow, tmp_path):
    def work() -> None:
        with torch.no_grad():
            vb(X)

    vb = slow
    with vb.timeline(tmp_path / "out.html") as recording:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    timeline = recording.timeline
    assert len(of_row(timeline, PASS)) == 3
    assert len(of_row(timeline, COMPUTE)) == len(of_row(timeline, WAIT)) == 18
    assert timeline.wait_share <= 1


def test_a_training_step_is_forward_backward_and_an_optimizers_step(tmp_path):
    vb, x = wrap(mlp()).materialize(), X.clone().requires_grad_()
    optimizer = torch.optim.SGD([x], lr=0.1)
    with vb.timeline(tmp_path / "out.json") as recording:
        for _ in range(2):
            vb(x).sum().backward()
            optimizer.step()
    optimizer.step()  # after the block: unseen
    timeline = recording.timeline
    assert len(of_row(timeline, COMPUTE)) == 24
    steps = sorted((*of_row(timeline, PASS), *of_row(timeline, OPTIMIZER)), key=lambda span: span.start_us)
    assert [span.page for span in steps] == ["forward", "backward", "SGD, 1 tensor"] * 2
    assert all(a.end_us <= b.start_us for a, b in pairwise(steps))
    assert set(timeline.layers) == {str(i) for i in range(0, 12, 2)}  # an optimizer is no layer


def test_passes_have_the_names_of_their_phases_and_leases_their_bytes(slow, tmp_path):
    with slow.timeline(tmp_path / "out.json") as recording, torch.no_grad():
        slow(X)
        with slow.phase("draft"):
            slow(X)
    assert [span.page for span in of_row(recording.timeline, PASS)] == ["prompt", "draft"]
    for span in of_row(recording.timeline, COMPUTE):
        assert span.nbytes == slow.stack.pages[span.page].nbytes


def test_a_compiled_model_is_recorded_by_its_leases(tmp_path):
    vb = wrap(mlp()).materialize()
    compiled = torch.compile(vb.module, fullgraph=True, backend="eager")
    with torch.no_grad(), vb.timeline(tmp_path / "out.json") as recording:
        compiled(X)
    assert len(of_row(recording.timeline, COMPUTE)) == 6 and recording.timeline.totals.recorded_us > 0


# -- off, and out of order --------------------------------------------------------------------------------------------


def test_nothing_is_recorded_when_it_is_off(slow, tmp_path, monkeypatch):
    def fail(*args, **options):
        raise AssertionError("recorded")

    for name in ("mark", "mark_on", "note", "lease", "begin_pass", "end_pass"):
        monkeypatch.setattr(f"vbrt.tiers.stack.event_recorder.Recorder.{name}", fail)
    with torch.no_grad():
        slow(X)
    stats = slow.stats()
    assert stats.timeline is None and "timeline" not in str(stats) and stats.to_dict()["timeline"] is None


def test_an_exception_leaves_what_was_recorded_and_is_raised(tmp_path):
    class Stop(Exception):
        pass

    def stop(module, args):
        raise Stop

    vb = wrap(mlp()).materialize()
    vb.registry["6"].register_forward_pre_hook(stop)
    with pytest.raises(Stop), torch.no_grad(), vb.timeline(tmp_path / "out.json") as recording:
        vb(X)
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "X"} - {"model", "idle"} == {"prompt", "0", "2", "4"}
    assert recording.timeline is not None and vb.stack.guard.recorder is None
    assert len(vb.module._forward_pre_hooks) == 1 and not vb.module._forward_hooks


def test_a_lease_that_fails_is_not_recorded_as_a_wait_and_the_error_is_raised(slow, tmp_path, monkeypatch):
    def broken(room, out, *, key):
        raise TierError(f"{key}: cannot read")

    monkeypatch.setattr(slow.stack.levels[-1].tier, "get", broken)
    with pytest.raises(TierError, match="cannot read"), slow.timeline(tmp_path / "a.html") as recording:
        slow(X)
        slow(X)
    assert len(of_row(recording.timeline, WAIT)) == len(of_row(recording.timeline, COMPUTE))
    assert (tmp_path / "a.html").stat().st_size > 100


def test_two_recordings_at_a_time_are_refused_and_the_first_goes_on(tmp_path):
    vb = wrap(mlp()).materialize()
    with vb.timeline(tmp_path / "a.json") as first:
        with pytest.raises(WrapError, match="recorded already"), vb.timeline(tmp_path / "b.json"):
            pass
        vb(X)
    assert len(of_row(first.timeline, COMPUTE)) == 6


def test_a_model_that_is_closed_inside_is_recorded_until_then(slow, tmp_path):
    with slow.timeline(tmp_path / "out.json") as recording, torch.no_grad():
        slow(X)
        slow.close()
    assert len(of_row(recording.timeline, COMPUTE)) == 6


# -- stats ------------------------------------------------------------------------------------------------------------


def test_stats_show_the_last_recording(slow, tmp_path):
    recorded(slow, tmp_path / "out.json", passes=2)
    timeline = recorded(slow, tmp_path / "out.json")
    stats = slow.stats()
    assert stats.timeline == timeline.totals
    text = str(stats)
    assert re.search(r"link ssd>cpu: .* in the last timeline \d+\.\d\d GB/s, idle \d+\.\d %", text)
    assert re.search(r"last timeline: \d+\.\d ms, \d+\.\d % of it waiting for pages", text)
    assert "timeline wait ms" in text


def test_stats_with_a_timeline_survive_json(slow, tmp_path):
    recorded(slow, tmp_path / "out.json")
    stats = slow.stats()
    data = json.loads(json.dumps(stats.to_dict()))
    assert Stats.from_dict(data) == stats
    del data["timeline"]["links"]
    with pytest.raises(FormatError, match=re.escape("stats.timeline = ")):
        Stats.from_dict(data)


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_copies_to_the_gpu_lie_on_the_copy_stream_and_beside_compute(tmp_path):
    width, depth = 4096, 12
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))).to(torch.bfloat16).eval()
        x = torch.randn(16_384, width, dtype=torch.bfloat16)
    with torch.no_grad():
        want, model = model(x), model.cpu()
    page = max(swap.page_bytes for swap in vbrt.make_plan(model, vbrt.load_config("dense")).swaps)
    room = {"gpu": {"budget": 4 * page}, "cpu": {"budget": (depth + 1) * page}}
    with vbrt.wrap(model, "dense", tiers=room) as vb, torch.no_grad():
        for _ in range(3):
            vb(x)
        torch.cuda.synchronize()
        before = vb.stats().bytes_moved["cpu>gpu"]
        with vb.timeline(tmp_path / "out.html") as recording:
            for _ in range(2):
                y = vb(x)
        timeline, moved = recording.timeline, vb.stats().bytes_moved["cpu>gpu"] - before
        assert torch.equal(y, want)
        print(vb.stats())
    copies, computed = of_row(timeline, "cpu>gpu"), of_row(timeline, COMPUTE)
    assert len(computed) == 2 * depth and timeline.links["cpu>gpu"].nbytes == moved > 0
    # one stream: one after the other, each as long as the link takes
    assert all(a.end_us <= b.start_us + 1 for a, b in pairwise(copies))
    assert 5 < timeline.links["cpu>gpu"].gb_per_s < 500
    beside = sum(any(c.start_us < s.end_us and s.start_us < c.end_us for c in computed) for s in copies)
    assert beside > len(copies) / 2
    # the device computed all the time that the spans say: 2 M N K operations each, and no GPU does 5e15 a second
    assert min(span.us for span in computed) > 2 * 16_384 * width * width / 5e15 * 1e6
    for span in of_row(timeline, WAIT) + computed:
        assert any(p.start_us - 1 <= span.start_us and span.end_us <= p.end_us + 1 for p in of_row(timeline, PASS))


@pytest.mark.gpu
def test_waits_on_the_gpu_are_measured_with_events(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).to(torch.bfloat16).eval()
    x = torch.randn(3, 512, device="cuda", dtype=torch.bfloat16)
    page = max(swap.page_bytes for swap in vbrt.make_plan(model, vbrt.load_config("dense")).swaps)
    with vbrt.wrap(model, "dense", tiers={"gpu": {"budget": 4 * page}}) as vb, torch.no_grad():
        for _ in range(3):
            vb(x)
        with vb.timeline(tmp_path / "out.json") as recording:
            with torch.cuda.stream(vb.stack.levels[0].stream):
                torch.cuda._sleep(100_000_000)  # cycles: tens of milliseconds, on the copy stream only
            host = time.perf_counter()
            vb(x)
            host = time.perf_counter() - host
    longest = max(of_row(recording.timeline, WAIT), key=lambda span: span.us)
    print(f"longest wait {longest.us / 1e3:.1f} ms on {longest.page}, the host was back after {host * 1e3:.1f} ms")
    assert longest.us > 20_000 and host < longest.us / 1e6  # the host went on: nothing was synchronized
    assert recording.timeline.wait_share > 0.5
