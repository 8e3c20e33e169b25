"""The recorded routing of a trained model: what it says is what docs/measurements.md says of it."""

import json

import pytest

import vbrt
from scripts import bench_tables, committed, routing
from scripts.routing_tables import routing_table
from vbrt.residency.access_trace import PASS
from vbrt.residency.routing_trace import Routed, RoutedLayer, Routing

RESULT = json.loads(routing.RESULT.read_text())


def test_reuse_is_counted_token_by_token():
    layer = RoutedLayer("experts", 20, 2)
    tokens = [(0, 1), (1, 2), (3, 4), (0, 2), *[(5, 6)] * 9]
    found = Routing((layer,), tuple(item for token in tokens for item in (PASS, Routed(0, (token,)))))
    (got,) = routing.reuse(found)
    assert got["next"] == (1 + 0 + 0 + 0 + 8 * 2) / 24
    assert got["within"] == (2 + 1 + 0 + 0 + 2) / 10  # of the first five tokens, which have eight behind them
    assert got["busiest"] == 18 / 26 and got["used"] == 7


@pytest.mark.parametrize("run", routing.RUNS)
def test_recordings_are_those_of_the_committed_results(run):
    found = routing.recording(run)
    assert found.tokens == RESULT["tokens"] == 8192 and len(found.layers) == RESULT["layers"]
    assert routing._reuse(found.only(2)) == RESULT["runs"][run]["reuse"][2]


def test_hit_rates_are_those_of_the_committed_results():
    found = routing.recording("balanced")
    got = vbrt.simulate("lru", found, int(0.25 * found.page_bytes)).hit_rate
    assert got == RESULT["runs"]["balanced"]["hits"]["lru"][1]


def test_experts_of_a_layer_are_kept_better_than_by_lru_where_room_is_short():
    for run in routing.RUNS:
        hits = RESULT["runs"][run]["hits"]
        assert all(ours > lru for ours, lru in zip(hits["experts, layer"][:2], hits["lru"][:2], strict=True))


def test_balancing_spreads_and_costs_reuse():
    balanced, free = (RESULT["runs"][run]["reuse"] for run in routing.RUNS)
    for key, more, less in (("busiest", free, balanced), ("next", free, balanced), ("used", balanced, free)):
        assert sum(layer[key] for layer in more) > sum(layer[key] for layer in less), key


def test_the_model_routes_as_it_was_recorded():
    """But for ties that another machine's sums decide otherwise."""
    got = routing.record(committed.with_experts(), committed.held_out(), 256).records
    want = routing.recording("balanced").records[: len(got)]
    assert len(got) == 256 * 5 and sum(a == b for a, b in zip(got, want, strict=True)) > 0.97 * len(got)


def test_the_table_is_that_of_the_committed_results():
    assert "\n".join(routing_table(routing.RESULT)) in bench_tables.DOCS.read_text()
