"""Routed experts in the snapshot: the table by layer, the table by expert, and JSON."""

import json
import re
from dataclasses import replace

import pytest

from tests.report.test_stats import layer, printed, snapshot
from vbrt.errors import ArgumentError, FormatError
from vbrt.report.expert_counters import ExpertCounts, ExpertsStats
from vbrt.report.stats import Stats

NAME = "model.layers.1.mlp.experts"


def counts():
    return ExpertCounts(hits=(3, 0, 1), misses=(1, 0, 0), bytes_moved=(4096, 0, 0), last=(5, 0, 9), passes=9)


def with_experts(each=None):
    """Two plain layers and two of routed experts, one that has not run yet."""
    ran = ExpertsStats(128, 40, "host", scans=2, cached=10, tokens=10, touched=80, compared=72, reused=32, each=each)
    idle = ExpertsStats(128, 0, "host", 0, 0, 0, 0, 0, 0)
    moe = {NAME: replace(layer(3), experts=ran), "model.layers.2.mlp.experts": replace(layer(4), experts=idle)}
    plain = snapshot(2)
    return replace(plain, layers=dict(plain.layers) | moe)


def test_layers_of_routed_experts_have_a_table_of_their_own():
    lines = with_experts().table(width=132, each=True).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("routed experts"))
    assert lines[start] == "routed experts · decides host"
    head, _, first, second, _, total = lines[start + 1 : start + 7]
    names = ["layer", "on cpu", "touched a token", "reuse", "hit rate", "moved", "scans", "from cache"]
    assert re.split(r"  +", head.strip()) == names
    cells = [NAME, "40/128", "8.0", "44.4 %", "60.0 %", "168.0 KiB", "2", "10"]
    assert re.split(r"  +", first.strip()) == cells
    assert re.split(r"  +", second.strip())[1:5] == ["0/128", "-", "-", "66.7 %"]
    assert re.split(r"  +", total.strip()) == ["2 layers", "40/256", "44.4 %", "63.6 %", "336.0 KiB"]


def test_a_model_without_experts_has_no_such_table():
    assert "routed experts" not in str(snapshot(3))


@pytest.mark.parametrize("width", [40, 80])
def test_the_table_stays_within_the_width(width):
    assert max(map(len, printed(with_experts(), width))) <= width


def test_experts_survive_json_with_and_without_their_columns():
    for stats in (with_experts(), with_experts(counts())):
        data = json.loads(json.dumps(stats.to_dict()))
        assert Stats.from_dict(data) == stats
        of_layer = data["layers"][NAME]["experts"]
        assert of_layer["reuse"] == pytest.approx(32 / 72) and of_layer["touched_a_token"] == 8.0
        assert ("each" in of_layer) is (stats is not None and stats.layers[NAME].experts.each is not None)


def test_damaged_experts_are_refused_by_their_place():
    data = with_experts(counts()).to_dict()
    data["layers"][NAME]["experts"]["each"]["hits"] = [1]
    with pytest.raises(FormatError, match=re.escape(f"stats.layers.{NAME}.experts = ")):
        Stats.from_dict(data)
    del data["layers"][NAME]["experts"]["scans"]
    with pytest.raises(FormatError, match="experts = "):
        Stats.from_dict(data)


def test_experts_one_by_one_are_a_table_for_who_asked():
    rows = str(with_experts(counts()).experts(NAME)).splitlines()
    assert rows[0].split() == ["expert", "hits", "misses", "hit", "rate", "moved", "last", "use"]
    assert rows[1].split() == ["0", "3", "1", "75.0", "%", "4.0", "KiB", "4", "passes", "before"]
    assert rows[2].split() == ["1", "0", "0", "-", "0", "B", "never"]
    assert rows[3].split()[-2:] == ["last", "pass"]


def test_who_has_not_asked_for_them_is_told_how():
    with pytest.raises(ArgumentError, match=re.escape("stats(experts=True)")):
        with_experts().experts(NAME)
    with pytest.raises(ArgumentError, match=re.escape(f"routed experts: {NAME}")):
        with_experts(counts()).experts("lm_head")
