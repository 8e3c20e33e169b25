"""Recorded routing on a benchmark's shape: side by side, repeated, and refused by name where it does not fit."""

import json
import shutil

import pytest
import torch

pytest.importorskip("transformers")

from scripts import bench_tables, experts_decode, experts_table
from scripts.committed import EXPERTS
from scripts.experts_decode import layers_of, recorded, rows
from scripts.recorded_routing import mapped
from scripts.routing_tables import origin, routed_case, trace_of
from tests.scripts.test_experts_decode import CPU, TINY
from vbrt import ArgumentError
from vbrt.residency.access_trace import PASS
from vbrt.residency.routing_file import read_routing, write_routing
from vbrt.residency.routing_trace import Routed, RoutedLayer, Routing, generate_routing

BALANCED = EXPERTS / "balanced.routing"


def routed(routing):
    return [record for record in routing.records if isinstance(record, Routed)]


def small(path, *, layers=2, experts=4, top_k=1, tokens=12):
    shape = [RoutedLayer(f"layer.{n}", experts, top_k) for n in range(layers)]
    write_routing(generate_routing(shape, tokens=tokens), path)
    return path


def test_a_recording_of_the_same_shape_is_followed_as_it_is():
    recording = read_routing(BALANCED)
    found = mapped(BALANCED, recording.layers, 100)
    assert routed(found.routing) == routed(recording)[:400] and found.about["repeated"] == 1


def test_recorded_layers_stand_side_by_side_and_are_repeated_with_shuffled_ids():
    layers = layers_of(48)
    found = recorded(BALANCED, 48).routing
    assert found.tokens == experts_decode.traced_tokens() and found.layers == tuple(layers)
    assert {len({*record.tokens[0]}) for record in routed(found)} == {8}
    assert max(expert for record in routed(found) for expert in record.tokens[0]) < 96
    first, again = (found.only(n) for n in (0, 2))  # both of recorded layers 0 and 1
    assert routed(first) != routed(again)
    reused = [
        [len({*a.tokens[0]} & {*b.tokens[0]}) for a, b in zip(routed(layer)[:-1], routed(layer)[1:], strict=True)]
        for layer in (first, again)
    ]
    assert reused[0] == reused[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 3}, "3 experts a token; model.layers.0.mlp.experts has 2, expected a divisor"),
        ({"experts": 5}, "2 layers of 5 experts side by side, 1 a token each; model.layers.0.mlp.experts has 8"),
        ({"tokens": 3}, "3 tokens decoded one by one; expected at least 12"),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_name(tmp_path, changes, message):
    path = small(tmp_path / "small.routing", **changes)
    with pytest.raises(ArgumentError, match=message):
        mapped(path, layers_of(3, **TINY), 12)


def test_layers_of_different_shapes_are_refused(tmp_path):
    layers = RoutedLayer("wide", 8, 1), RoutedLayer("narrow", 4, 1)
    write_routing(Routing(layers, (PASS, Routed(0, ((1,),)), Routed(1, ((1,),)))), tmp_path / "two.routing")
    with pytest.raises(ArgumentError, match=r"its layers differ \(wide 1 of 8, narrow 1 of 4\)"):
        mapped(tmp_path / "two.routing", layers_of(2, **TINY), 1)


def test_prompts_are_left_out(tmp_path):
    layer, tokens = RoutedLayer("layer", 4, 1), [((0,), (1,)), ((2,),), ((3,),)]
    records = tuple(item for token in tokens for item in (PASS, Routed(0, token)))
    write_routing(Routing((layer,), records), tmp_path / "one.routing")
    found = mapped(tmp_path / "one.routing", [layer], 2)
    assert [record.tokens for record in routed(found.routing)] == [((2,),), ((3,),)]


def test_rows_follow_the_recording_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(experts_decode, "WARM", 1)
    monkeypatch.setattr(experts_decode, "COUNTED", 2)
    recording, followed = recorded(small(tmp_path / "small.routing"), 3, **TINY), []
    monkeypatch.setattr(experts_decode, "decode", watched(experts_decode.decode, followed))
    done = list(rows(3, [], torch.device("cpu"), gpu="1GiB", how="eager", recording=recording, **TINY))
    assert [row["routing"] for row in done] == ["recorded"] * 2 and routed_case(done[0]).endswith(", recorded routing")
    assert followed == [recording.routing] * 2


def watched(decode, followed):
    def watch(model, trace, **options):
        followed.append(trace.routing)
        return decode(model, trace, **options)

    return watch


def test_the_generated_routing_is_named_as_well():
    assert origin({"case": "a"}) == "generated" == next(rows(1, [], CPU, gpu="1GiB", **TINY))["routing"]
    about = recorded(BALANCED, 48).about
    assert "32 experts are never chosen" in trace_of({"recording": about}) and "generated" in trace_of({})


def test_tables_have_the_rows_of_a_recorded_run_beside_the_generated_ones(tmp_path, monkeypatch):
    results = tmp_path / "results"
    shutil.copytree(experts_table._RESULTS, results)
    run = json.loads((results / "experts-decode-nvidia-h200.json").read_text())
    run["recording"] = recorded(BALANCED, 48).about
    run["rows"] = [row | {"routing": "recorded"} for row in run["rows"]]
    path = results / "experts-decode-recorded-nvidia-h200.json"
    path.write_text(json.dumps(run))
    monkeypatch.setattr(experts_table, "_RESULTS", results)
    rows = [line for line in experts_table.costs().splitlines() if "recorded routing" in line]
    assert [row.split(" | ")[1] for row in rows] == ["50%", "25%", "10%"]
    section = bench_tables.decode_table(path)
    assert section[0].endswith(", recorded routing") and "balanced.routing" in section[2]
    assert sum(", recorded routing |" in line for line in section) == len(run["rows"])
