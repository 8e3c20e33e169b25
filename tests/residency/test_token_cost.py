"""The cost of a token with routed experts: bytes by home, tokens a second, hit rates of a routing."""

from dataclasses import replace

import pytest

from vbrt.errors import ConfigError
from vbrt.residency.plan import PageSpec, Plan, Swap
from vbrt.residency.routing_trace import RoutedLayer, generate_routing, plan_layers
from vbrt.residency.token_cost import fitted, simulated_hits, token_cost
from vbrt.residency.weight_site import WeightSite

MB = 10**6


def a_plan(homes: dict[str, str], *, gpu: int = 100, experts: int = 16, layers: int = 2) -> Plan:
    """Layers of experts of 10 MB, two a token, beside one other layer of 30 MB; the first layer's home may differ."""
    swaps = []
    for n in range(layers):
        home = homes.get(f"e{n}", homes["experts"])
        pages = tuple(PageSpec(f"e{n}#coarse.{e}", "coarse", 10 * MB, home, top_k=2) for e in range(experts))
        site = WeightSite(f"e{n}", (64, 64), matrices=experts)
        swaps.append(Swap(site, "bfloat16", 40 * MB, "nvfp4", "none", pages, experts=experts, top_k=2))
    other = PageSpec("other#coarse", "coarse", 30 * MB, homes["other"])
    swaps.append(Swap(WeightSite("other", (64, 64)), "bfloat16", 90 * MB, "nvfp4", "none", (other,)))
    return Plan(tuple(swaps), {}, {"gpu": gpu * MB, "cpu": 1000 * MB, "ssd": 1000 * MB})


def test_a_cold_token_loads_its_experts_of_all_layers():
    cost = token_cost(a_plan({"experts": "cpu", "other": "gpu"}))
    assert (cost.experts_bytes, cost.cold_bytes, cost.streamed_bytes) == (40 * MB, {"cpu": 40 * MB}, {})
    assert (cost.room_bytes, cost.all_bytes) == (70 * MB, 320 * MB)
    assert cost.loaded_bytes(0.75) == 10 * MB
    assert cost.tokens_per_s(0.0, {"cpu": 20.0}) == pytest.approx(500)
    assert cost.tokens_per_s(0.9, {"cpu": 20.0}) == pytest.approx(5000)


def test_experts_in_several_tiers_come_over_their_own_links():
    cost = token_cost(a_plan({"experts": "ssd", "e0": "cpu", "other": "gpu"}))
    assert cost.cold_bytes == {"cpu": 20 * MB, "ssd": 20 * MB}
    assert cost.tokens_per_s(0.0, {"cpu": 20.0, "ssd": 2.0}) == pytest.approx(1e3 / (1 + 10))
    resident = token_cost(a_plan({"experts": "gpu", "e0": "cpu", "other": "gpu"}, gpu=500))
    assert (resident.experts_bytes, resident.cold_bytes) == (40 * MB, {"cpu": 20 * MB})


def test_other_layers_below_keep_what_fits_and_stream_the_rest():
    cost = token_cost(a_plan({"experts": "cpu", "other": "cpu"}, gpu=100))
    assert (cost.streamed_bytes, cost.room_bytes) == ({}, 70 * MB)
    tight = token_cost(a_plan({"experts": "cpu", "other": "cpu"}, gpu=30))
    assert (tight.streamed_bytes, tight.room_bytes) == ({"cpu": 20 * MB}, 20 * MB)
    assert tight.tokens_per_s(1.0, {"cpu": 20.0}) == pytest.approx(1000)


def test_models_without_experts_have_no_such_cost_and_resident_ones_none():
    plan = a_plan({"experts": "gpu", "other": "gpu"}, gpu=500)
    assert token_cost(replace(plan, swaps=plan.swaps[2:])) is None
    assert token_cost(replace(plan, mode="train")) is None
    assert token_cost(plan).cold_bytes == {} and token_cost(plan).tokens_per_s(0.0) == float("inf")


def test_a_routing_is_fitted_to_the_pages_of_a_plan():
    plan = a_plan({"experts": "cpu", "other": "gpu"})
    routing = generate_routing([RoutedLayer("e1", 16, 2), RoutedLayer("e0", 16, 2)], tokens=40)
    own = fitted(routing, plan, source="--routing t")
    assert own.layers == plan_layers(plan)[::-1] and own.records == routing.records
    assert own.page_bytes == 320 * MB
    hits = simulated_hits(own, 160 * MB)
    assert set(hits) == {"lru", "experts, by layer", "experts, by model"} and all(0.3 < h < 1 for h in hits.values())
    assert simulated_hits(own, 320 * MB)["lru"] > simulated_hits(own, 60 * MB)["lru"]
    with pytest.raises(ConfigError, match="--routing t: it has e1 with 8 experts, this model has e0 with 16 experts"):
        fitted(generate_routing([RoutedLayer("e1", 8, 2)], tokens=1), plan, source="--routing t")
    with pytest.raises(ConfigError, match="it has no layer"):
        fitted(generate_routing([], tokens=1), plan, source="x")
