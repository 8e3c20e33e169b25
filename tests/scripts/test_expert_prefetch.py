"""Prefetch of predicted experts: the cost model, the misses that it counts, and the committed recordings."""

import json

import pytest

import vbrt
from scripts import bench_tables, committed
from scripts import expert_prefetch as ahead
from scripts.routing import recording
from scripts.routing_tables import prefetch_table
from vbrt.residency.routing_trace import RoutedLayer, generate_routing

RESULT = json.loads(ahead.RESULT.read_text())


def test_pages_in_vain_cost_what_the_idle_link_does_not_hide():
    assert ahead.saved_pages(right=2, wrong=3, idle=0.0) == -3
    assert ahead.saved_pages(right=2, wrong=3, idle=4.0) == 1
    assert ahead.saved_pages(right=2, wrong=3, idle=9.0) == 2


def test_a_prefetch_breaks_even_where_its_pages_in_vain_fit_into_the_idle_time():
    assert ahead.break_even([(1, 2)]) == pytest.approx(2, abs=1e-3)
    assert ahead.break_even([(1, 0), (0, 1)]) == pytest.approx(0.5, abs=1e-3)
    assert ahead.break_even([(0, 0)]) is None


def test_misses_are_those_of_the_simulation():
    routing = generate_routing([RoutedLayer(f"layer.{n}", 16, 2) for n in range(3)], tokens=100)
    room = routing.page_bytes // 4
    found = list(ahead.accesses(routing, 100, room))
    assert sum(len(access.missed) for access in found) == vbrt.simulate("experts", routing, room).misses.total() > 50
    assert all(len(access.resident) <= 4 and not access.missed & access.resident for access in found)


def test_a_perfect_prediction_saves_all_and_a_wrong_one_nothing():
    routing = generate_routing([RoutedLayer(f"layer.{n}", 16, 2) for n in range(3)], tokens=100)
    chosen = ahead.selections(routing, 100)
    found = list(ahead.accesses(routing, 100, routing.page_bytes // 4))
    perfect = ahead.worth(found, chosen, most=2)
    assert ahead.recall(chosen, chosen, 2) == perfect["predicted"] == 1 and perfect["vain_per_saved"] == 0
    others = [[tuple(e for e in range(16) if e not in layer)[:2] for layer in token] for token in chosen]
    wrong = ahead.worth(found, others, most=2)
    assert ahead.recall(others, chosen, 2) == wrong["predicted"] == 0 and wrong["wait_saved"] < 0


def test_baselines_know_only_earlier_tokens():
    chosen = [[(0, 1), (2, 3)], [(0, 2), (2, 3)], [(0, 2), (4, 5)]]
    assert ahead.previous_token(chosen) == [[(), ()], *chosen[:2]]
    assert ahead.busiest(chosen, 1) == [[(), ()], [(0,), (2,)], [(0,), (2,)]]


def test_the_model_predicts_as_it_was_recorded():
    """But for ties that another machine's sums decide otherwise."""
    got = ahead.predictions(committed.with_experts(), committed.held_out(), 256)
    want = ahead.read_ahead(ahead.ahead_path("balanced"))[: len(got)]
    pairs = [pair for a, b in zip(got, want, strict=True) for pair in zip(a, b, strict=True)]
    assert len(pairs) == 256 * 4 and sum(a == b for a, b in pairs) > 0.97 * len(pairs)


@pytest.mark.parametrize("run", RESULT["runs"])
def test_recall_is_that_of_the_committed_results(run):
    ranked = ahead.read_ahead(ahead.ahead_path(run))
    chosen = ahead.selections(recording(run), len(ranked))
    assert ahead.recall(ranked, chosen, RESULT["top_k"]) == RESULT["runs"][run]["router"]["recall"]


def test_the_table_is_that_of_the_committed_results():
    assert "\n".join(prefetch_table(ahead.RESULT)) in bench_tables.DOCS.read_text()
