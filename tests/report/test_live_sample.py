"""Live samples: speeds between them, and how they are read."""

import json
from dataclasses import replace

import pytest

from vbrt.errors import FormatError
from vbrt.report.live_sample import History, LiveSample, RuntimeNow, TierNow
from vbrt.report.live_view import frame, frame_lines, frame_svg, plain_line

GIB = 1 << 30


def runtime(step: int = 0, **changes) -> RuntimeNow:
    """A runtime after `step` seconds of 100 leases, 2 GB and 20 tokens each."""
    now = RuntimeNow(
        models={"LlamaForCausalLM": 20 * step},
        policy="scheduled",
        tiers={"gpu": TierNow(6 * GIB, 8 * GIB, 7 * GIB, 300), "cpu": TierNow(10 * GIB, 64 * GIB, 10 * GIB, 448)},
        moved={"cpu>gpu": 2_000_000_000 * step},
        hits=75 * step,
        misses=25 * step,
        prefetched=20 * step,
        wait_us=50_000 * step,
        waits={"model.layers.#.mlp.up_proj": 40_000 * step, "model.layers.#.self_attn.q_proj": 10_000 * step},
        work={"tokens written": 20 * step, "tokens read": 0, "tokens trained": 0, "images": 0, "steps": 0},
    )
    return replace(now, **changes)


def sample(up_s: float, *runtimes: RuntimeNow) -> LiveSample:
    return LiveSample(4711, "serve.py --port 8000", up_s, runtimes)


def history(*samples: LiveSample) -> History:
    found = History()
    for one in samples:
        found.add(one)
    return found


def running(seconds: int = 30, **changes) -> History:
    return history(*(sample(float(second), runtime(second, **changes)) for second in range(seconds)))


def test_a_sample_goes_through_json_and_another_version_is_refused_by_name():
    one = sample(3.5, runtime(2), runtime(1, caches={"kv": 5}, unseen=2))
    data = json.loads(json.dumps(one.to_dict()))
    assert LiveSample.from_dict(data) == one and one.names == ["LlamaForCausalLM"] * 2
    named = {**data, "command": "a\x1b[2Jb", "runtimes": [{**data["runtimes"][0], "models": {"c\nd": 1}}]}
    assert LiveSample.from_dict(named).command == "a?[2Jb" and LiveSample.from_dict(named).names == ["c?d"]
    with pytest.raises(FormatError, match="of version 9; this vbrt reads version 1"):
        LiveSample.from_dict({**data, "version": 9})
    for wrong in (None, [], {}, {**data, "runtimes": 3}, {**data, "runtimes": [{}]}, {**data, "pid": "x"}):
        with pytest.raises(FormatError, match="expected what LiveSample"):
            LiveSample.from_dict(wrong)


def test_speeds_are_differences_over_the_time_between():
    rates = running().rates(0)
    assert rates.bytes_per_s == {"cpu>gpu": pytest.approx(2e9)} and rates.leases_per_s == pytest.approx(100)
    assert (rates.hit_rate, rates.ahead, rates.wait_share) == pytest.approx((0.75, 0.20, 0.05))
    assert rates.work_per_s == {"tokens written": pytest.approx(20)}
    assert list(rates.waits) == ["model.layers.#.mlp.up_proj", "model.layers.#.self_attn.q_proj"]


def test_speeds_forget_what_is_long_ago_and_counts_that_go_back_are_no_speed():
    stalled = running()
    for second in range(30, 60):
        stalled.add(sample(float(second), runtime(29)))
    assert stalled.rates(0).work_per_s == {"tokens written": 0.0} and stalled.rates(0).hit_rate is None
    stalled.add(sample(60.0, runtime(3)))  # layers are gone, and their counts with them
    rates = stalled.rates(0)
    assert rates.bytes_per_s == {"cpu>gpu": 0.0} and rates.leases_per_s == 0 and rates.wait_share == 0
    assert len(stalled._samples) < 15
    stalled.add(sample(61.0))  # no runtime any more: a new history
    assert stalled.last.runtimes == () and "no model is wrapped" in plain_line(stalled)


def test_a_frame_fits_the_terminal_and_says_what_there_is():
    now = running(caches={"chat": GIB}, unseen=3, leases="replayed as a programme")
    for width in (40, 80, 200):
        assert max(len(line) for line, _ in frame_lines(now, width)) <= width
    text = frame(now, 80).plain
    for part in (
        "process 4711 · 29 s · serve.py",
        "LlamaForCausalLM · scheduled policy",
        "20.0 tokens/s written · 20.0 passes/s",
        "6.0 GiB of 8.0 GiB",
        "75.0 %",
        "95.0 %   of 100 leases/s, 20.0 % by prefetch",
        "2.00 GB/s   54.0 GiB so far",
        "5.0 %   of the time",
        "4.0 %   model.layers.#.mlp.up_proj",
        "KV cache  chat: 1.0 GiB",
        "without 3 layers of experts, whose hits the GPU counts",
        "replayed as a programme",
    ):
        assert part in text, part
    assert text.index("up_proj") < text.index("q_proj")
    assert frame(now, 80, ascii_only=True).plain.isascii()
    short = frame(now, 80, height=6).plain.splitlines()
    assert len(short) == 6 and "more lines" in short[-1]
    assert "20.0 tokens/s written" in plain_line(now) and "\n" not in plain_line(now)


def test_a_first_sample_has_counts_and_no_speeds():
    first = history(sample(1.0, runtime(5)))
    assert first.rates(0).wait_share is None and first.rates(0).work_per_s == {}
    text = frame(first, 80).plain
    assert "100 passes so far" in text and "95.0 %   of 500 leases so far" in text and "tokens/s" not in text
    assert "0.0" not in plain_line(first).replace("6.0", "").replace("8.0", "").replace("10.0", "").replace("64.0", "")


def test_training_pipelines_and_slow_images_have_lines_of_their_own():
    trained = running(policy="none", tiers={}, moved={}, hits=0, misses=0)
    text = frame(trained, 80).plain
    assert "weights train" in text and "waiting" not in text and "hits" not in text
    models = [{"text_encoder": 2, "transformer": 2 * s, "vae": s // 20} for s in range(30)]
    drawn = history(
        *(sample(float(s), runtime(s, models=models[s], work={"decodes": s // 20, "steps": 2 * s})) for s in range(30))
    )
    text = frame(drawn, 120).plain
    assert "0.10 decodes/s · 2.0 steps/s" in text and "2.0 passes/s transformer" in text


def test_a_picture_is_svg():
    picture = frame_svg([sample(0.0, runtime(0)), sample(2.0, runtime(2))])
    assert picture.startswith("<svg") and "LlamaForCausalLM" in picture and "vbrt&#160;top" not in picture[:100]
