"""Stats as OpenMetrics text, read back by a strict reader of its own."""

import re
from dataclasses import replace

import pytest

from tests.report.test_expert_counters import NAME, with_experts
from tests.report.test_stats import snapshot
from vbrt.report.stats import StepCounts

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\[\\n"])*",?)*)\})? (\S+)')


def read(text):
    """Return {family: (kind, {labels: value})}; fails on what the format does not allow."""
    assert text.endswith("# EOF\n") and text.count("# EOF") == 1
    families, name = {}, ""
    for line in text.splitlines()[:-1]:
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in families and kind in ("counter", "gauge")
            families[name] = kind, {}
        elif line.startswith("# UNIT "):
            assert line.split(" ")[2] == name and name.endswith(f"_{line.split(' ')[3]}")
        elif line.startswith("# HELP "):
            assert line.split(" ")[2] == name
        else:
            sample, labels, value = SAMPLE.fullmatch(line).groups()
            kind, samples = families[name]
            assert sample == (f"{name}_total" if kind == "counter" else name) and labels not in samples
            samples[labels] = float(value)
    return families


def test_counters_and_gauges_say_what_the_snapshot_says():
    stats = replace(snapshot(12), steps=StepCounts(captured=5, eager=2))
    found = read(stats.metrics())
    assert sum(found["vbrt_page_hits"][1].values()) == stats.hits
    assert sum(found["vbrt_wait_seconds"][1].values()) == pytest.approx(stats.wait_us / 1e6)
    assert found["vbrt_moved_bytes"] == ("counter", {'link="ssd>cpu"': stats.bytes_moved["ssd>cpu"]})
    assert found["vbrt_tier_held_bytes"] == ("gauge", {'tier="cpu"': 1 << 29})
    assert found["vbrt_decode_steps"][1] == {'how="captured"': 5, 'how="eager"': 2}
    assert found["vbrt_fallbacks"][1] == {None: 0} and "vbrt_experts_resident" not in found


def test_layers_of_experts_have_samples_of_their_own():
    found = read(with_experts().metrics())
    assert found["vbrt_experts_resident"][1][f'layer="{NAME}"'] == 40


def test_odd_names_are_escaped():
    stats = snapshot(1)
    (layer,) = stats.layers.values()
    found = read(replace(stats, layers={'a"b\\c\nd': layer}).metrics())
    assert list(found["vbrt_page_hits"][1]) == [r'layer="a\"b\\c\nd"']
