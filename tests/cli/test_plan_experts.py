"""`vbrt plan` for models with routed experts: published models from their configs alone, and what a token costs."""

import json
from pathlib import Path

import pytest

from vbrt.cli import main as cli
from vbrt.residency.routing_file import write_routing
from vbrt.residency.routing_trace import RoutedLayer, generate_routing

pytest.importorskip("transformers")

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
MACHINE = ("--gpu-memory", "24GiB", "--ram", "512GiB", "--budget", "auto")  # for pages: nothing is estimated
GB = 10**9


def planned(capsys, name: str, *arguments: str) -> dict:
    assert cli.main(["plan", str(CONFIGS / f"{name}.json"), *MACHINE, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "preset", "layers", "experts", "page_mb", "all_gb", "cold_gb"),
    [
        ("mixtral-8x7b", "fp4", 32, 8, 99.1, 25.4, 6.34),
        ("qwen3-30b-a3b", "fp4", 48, 128, 2.65, 16.3, 1.02),
        ("gpt-oss-120b", "mxfp4", 36, 128, 13.2, 60.9, 1.90),
        ("deepseek-v3", "fp4", 58, 256, 24.8, 368, 11.5),
    ],
)
def test_published_models_are_planned_from_their_configs(
    capsys, name, preset, layers, experts, page_mb, all_gb, cold_gb
):
    plan = planned(capsys, name, "--config", preset)
    routed = [swap for swap in plan["swaps"] if swap["experts"]]
    pages = [page for swap in routed for page in swap["pages"]]
    assert len(routed) == layers and len(pages) == layers * experts == len({page["key"] for page in pages})
    assert {page["nbytes"] for page in pages} == {pages[0]["nbytes"]}
    assert pages[0]["nbytes"] == pytest.approx(page_mb * 1e6, rel=0.005)
    assert sum(page["nbytes"] for page in pages) == pytest.approx(all_gb * GB, rel=0.005)
    assert plan["experts"]["token_bytes"] == pytest.approx(cold_gb * GB, rel=0.005)
    assert routed[0]["dense_bytes"] * layers > 0.9 * plan["dense_bytes"]
    resident = {page["home"] for swap in plan["swaps"] if not swap["experts"] for page in swap["pages"]}
    assert resident == {"gpu"}
    fits = sum(page["nbytes"] for swap in plan["swaps"] for page in swap["pages"]) <= plan["budgets"]["gpu"]
    assert {page["home"] for page in pages} == ({"gpu"} if fits else {"cpu"})
    assert fits == (name == "qwen3-30b-a3b")


FETCH = ("--set", "experts.miss=fetch")


def test_a_token_of_qwen_costs_what_the_links_make_it_cost(capsys):
    cost = planned(capsys, "qwen3-30b-a3b", "--gpu-memory", "6GiB", "--link", "50", *FETCH)["experts"]
    cold = cost["cold_token_bytes"]
    assert cost["token_bytes"] == cold and cost["assumed_gb_per_s"] == {"cpu": 50.0}
    assert cost["tokens_per_s"]["0"] == pytest.approx(50 * GB / cold)
    assert cost["tokens_per_s"]["0.9"] == pytest.approx(500 * GB / cold)
    assert cost["streamed_bytes"] == 0 and cost["simulated_hit_rates"] == {}


def test_missed_experts_are_done_with_by_link_and_cpu_together(capsys):
    options = ("--gpu-memory", "6GiB", "--link", "50", "--host", "30", "--set")
    for miss, rate in (("compute", 30), ("auto", 80), ("fetch", 50)):
        cost = planned(capsys, "qwen3-30b-a3b", *options, f"experts.miss={miss}")["experts"]
        assert cost["tokens_per_s"]["0"] == pytest.approx(rate * GB / cost["cold_token_bytes"]) and cost["miss"] == miss
    model = str(CONFIGS / "qwen3-30b-a3b.json")
    assert cli.main(["plan", model, "--ram", "64GiB", "--budget", "auto", *options, "experts.miss=auto"]) == 0
    assert 'experts.miss = "auto": 80 GB/s of missed experts, with 30 on the CPU.' in capsys.readouterr().out


@pytest.mark.exhaustive
def test_the_table_says_what_it_assumes(capsys):
    model = str(CONFIGS / "qwen3-30b-a3b.json")
    assert cli.main(["plan", model, "--gpu-memory", "6GiB", "--ram", "8GiB", "--ssd", "100GiB", "--drive", "7"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "48 128 x 1536 x 2048" in out
    assert "A token needs 973.5 MiB of experts; the first one loads 973.5 MiB of them" in out
    assert "90% 97.3 MiB 68.6" in out and "By the links alone, with 7 GB/s from the ssd tier" in out
    assert cli.main(["plan", model, "--gpu-memory", "24GiB", "--ram", "64GiB"]) == 0
    assert "A token needs 973.5 MiB of experts; all live in the gpu tier." in capsys.readouterr().out


def test_a_recorded_routing_gives_hit_rates(capsys, tmp_path):
    layers = [RoutedLayer(f"model.layers.{n}.mlp.experts", 128, 8) for n in range(2)]
    write_routing(generate_routing(layers, tokens=40), tmp_path / "trace")
    options = ("--gpu-memory", "5GiB", "--routing", str(tmp_path / "trace"), *FETCH)
    cost = planned(capsys, "qwen3-30b-a3b", *options)["experts"]
    assert set(cost["simulated_hit_rates"]) == {"lru", "experts, by layer", "experts, by model"}
    assert set(cost["simulated_hit_rates"]) < set(cost["tokens_per_s"])
    rate = cost["simulated_hit_rates"]["experts, by layer"]
    assert cost["tokens_per_s"]["experts, by layer"] == pytest.approx(25 * GB / (1 - rate) / cost["cold_token_bytes"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--link", "fast"), "--link fast: expected gigabytes a second, such as 50"),
        (("--drive", "0"), "--drive 0: expected gigabytes a second"),
        (("--routing", "none"), "none: cannot read the routing: No such file"),
    ],
)
def test_wrong_rates_and_routings_are_refused(capsys, arguments, message):
    assert cli.main(["plan", str(CONFIGS / "mixtral-8x7b.json"), *MACHINE, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_routing_of_another_model_is_refused(capsys, tmp_path, config_json):
    write_routing(generate_routing([RoutedLayer("experts", 4, 2)], tokens=2), tmp_path / "trace")
    for model in (CONFIGS / "mixtral-8x7b.json", config_json):
        assert cli.main(["plan", str(model), *MACHINE, "--routing", str(tmp_path / "trace")]) == 2
        err = capsys.readouterr().err
        assert "it has experts with 4 experts" in err or "no layer of routed experts goes into the tiers" in err
