"""Budgets: how they are written, and how many bytes they are on a machine."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.config.words import refusal
from vbrt.config import Budget, Machine, VBConfig, assign, load_config, parse_budget, resolve_budgets, with_tier_budget
from vbrt.config.parse_budgets import size_text

GIB = 2**30
MACHINE = Machine(
    gpu_total_bytes=80 * GIB,
    gpu_free_bytes=70 * GIB,
    cpu_total_bytes=100 * GIB,
    cpu_available_bytes=50 * GIB,
    ssd_free_bytes=1000 * GIB,
)


@pytest.mark.parametrize(
    ("value", "budget"),
    [
        ("auto", Budget("auto")),
        (1, Budget("bytes", 1)),
        ("12345", Budget("bytes", 12345)),
        ("8GiB", Budget("bytes", 8 * GIB)),
        ("8 GB", Budget("bytes", 8 * 10**9)),
        ("8gb", Budget("bytes", 8 * 10**9)),
        ("512MiB", Budget("bytes", 512 * 2**20)),
        ("1.5 KiB", Budget("bytes", 1536)),
        ("0.1 KB", Budget("bytes", 100)),
        ("2TiB", Budget("bytes", 2**41)),
        ("40%", Budget("fraction", 0.4)),
        ("12.5 %", Budget("fraction", 0.125)),
        ("100%", Budget("fraction", 1.0)),
    ],
)
def test_budgets_are_read(value, budget):
    assert parse_budget(value, where="x") == budget


@pytest.mark.parametrize("value", ["8Gb", "8 Mib", "1.5Kb", "2Tb"])
def test_a_capital_prefix_with_a_small_b_is_bits(value):
    assert '"b" is for bits; expected bytes: "' in refusal(parse_budget, value, where="x")


@given(st.integers(0, 1 << 50))
def test_the_text_of_a_size_is_never_more_and_hardly_less(nbytes):
    read = parse_budget(size_text(nbytes), where="x").amount if nbytes else 0
    assert nbytes - max(nbytes, 90) / 90 <= read <= nbytes


def test_an_override_replaces_what_decided_the_budget_before():
    ways = {"gpu_memory": "12GB"}, {"budget": "6GiB"}, {"tiers": {"gpu": {"budget": "4GiB"}}}
    for before in ways:
        for after in ways:
            made = load_config(load_config("fp4", **before), **after)
            assert made == load_config("fp4", **after)
            text = [f"{key}={value}" for key, value in after.items() if key != "tiers"] or ["tiers.gpu.budget=4GiB"]
            assert assign(load_config("fp4", **before), text) == made
    assert load_config(load_config("fp4", gpu_memory="12GB", context=9), gpu_memory="8GB").context == 9
    assert load_config(load_config("fp4", gpu_memory="12GB", context=9), weights={"format": "nf4"}).context == 9


def test_budget_is_that_of_the_tier_that_computes():
    config = load_config("fp4", budget="6GiB", tiers={"cpu": {"budget": "30GiB"}})
    tiers = with_tier_budget(config, "gpu").tiers
    assert (tiers.gpu.budget, tiers.cpu.budget) == ("6GiB", "30GiB")
    tiers = with_tier_budget(config, "cpu").tiers
    assert (tiers.gpu.budget, tiers.cpu.budget) == ("auto", "6GiB")


def with_budgets(**tiers) -> VBConfig:
    return load_config({"tiers": tiers})


def test_auto_budgets_are_shares_of_what_is_free():
    config = with_budgets(ssd={"enabled": True, "path": "/pages"})
    budgets = {"gpu": 63 * GIB, "cpu": 40 * GIB, "ssd": 900 * GIB}
    assert resolve_budgets(config, MACHINE) == budgets
    assert list(resolve_budgets(config, MACHINE)) == ["gpu", "cpu", "ssd"]


def test_percentages_count_from_the_total_and_of_the_drive_from_what_is_free():
    config = with_budgets(
        gpu={"budget": "50%"}, cpu={"budget": "25%"}, ssd={"enabled": True, "path": "/pages", "budget": "10%"}
    )
    assert resolve_budgets(config, MACHINE) == {"gpu": 40 * GIB, "cpu": 25 * GIB, "ssd": 100 * GIB}


def test_bytes_are_taken_as_they_are_up_to_what_the_machine_has():
    config = with_budgets(gpu={"budget": "80GiB"}, cpu={"budget": 4096})
    assert resolve_budgets(config, MACHINE) == {"gpu": 80 * GIB, "cpu": 4096}


@pytest.mark.parametrize(
    ("tier", "words"),
    [
        ("gpu", "this machine has 80.00 GiB (85899345920 bytes);"),
        ("cpu", "this machine has 100.00 GiB (107374182400 bytes);"),
        ("ssd", "this machine has 1000.00 GiB (1073741824000 bytes) free;"),
    ],
)
def test_more_than_the_machine_has_is_refused(tier, words):
    extra = {"enabled": True, "path": "/pages"} if tier == "ssd" else {}
    config = VBConfig.from_dict({"tiers": {tier: {"budget": "1001GiB", **extra}}}, source="my.toml")
    assert refusal(resolve_budgets, config, MACHINE) == (
        f'my.toml: tiers.{tier}.budget = "1001GiB"; {words} expected no more than that, "auto" or a percentage'
    )


def test_without_a_gpu_the_gpu_tier_is_left_out():
    no_gpu = replace(MACHINE, gpu_total_bytes=None, gpu_free_bytes=None)
    assert resolve_budgets(with_budgets(gpu={"budget": "4000GiB"}), no_gpu) == {"cpu": 40 * GIB}


def test_disabled_tiers_are_left_out():
    assert list(resolve_budgets(with_budgets(gpu={"enabled": False}), MACHINE)) == ["cpu"]
    assert list(resolve_budgets(with_budgets(cpu={"enabled": False}), MACHINE)) == ["gpu"]


def test_a_machine_with_no_tier_to_compute_on_is_refused():
    no_gpu = replace(MACHINE, gpu_total_bytes=None, gpu_free_bytes=None)
    config = VBConfig.from_dict({"tiers": {"cpu": {"enabled": False}}}, source="my.toml")
    assert refusal(resolve_budgets, config, no_gpu) == (
        "my.toml: tiers.cpu.enabled = false, and this machine has no GPU; no tier is left to compute on, "
        "set tiers.cpu.enabled = true"
    )


def test_an_ssd_path_without_known_free_space_is_refused():
    config = VBConfig.from_dict({"tiers": {"ssd": {"enabled": True, "path": "/pages"}}}, source="my.toml")
    assert refusal(resolve_budgets, config, replace(MACHINE, ssd_free_bytes=None)) == (
        'my.toml: tiers.ssd.path = "/pages"; expected a directory on a drive whose free space is known'
    )


@given(
    st.sampled_from(["auto", "1%", "33.3%", "100%", 4096]), st.integers(4096, 2**50), st.floats(0, 1, exclude_max=True)
)
def test_a_budget_never_exceeds_what_the_machine_has(budget, total, free_share):
    machine = Machine(total, int(total * free_share), total, int(total * free_share))
    config = with_budgets(gpu={"budget": budget}, cpu={"budget": budget})
    assert all(0 <= nbytes <= total for nbytes in resolve_budgets(config, machine).values())


def test_a_peer_tier_has_the_memory_of_each_neighbour():
    several = replace(MACHINE, peers=3, peer_total_bytes=80 * GIB, peer_free_bytes=60 * GIB)

    def budget(machine: Machine, **peer) -> int | None:
        return resolve_budgets(load_config(tiers={"peer": peer}), machine).get("peer")

    assert budget(several) is None and budget(MACHINE, enabled="auto") is None
    assert budget(several, enabled=True) == 3 * 54 * GIB and budget(several, enabled="auto", budget="1GiB") == 3 * GIB
    assert "sees no other GPU" in refusal(budget, MACHINE, enabled=True)


def test_host_memory_that_ranks_share_is_that_of_each_times_their_number():
    four = replace(MACHINE, sharers=4, ranks_here=2, cpu_available_bytes=25 * GIB)
    shared = {"shared": True}
    assert resolve_budgets(load_config(tiers={"cpu": shared}), four)["cpu"] == 4 * 20 * GIB
    assert resolve_budgets(load_config(tiers={"cpu": {**shared, "budget": "3GiB"}}), four)["cpu"] == 12 * GIB
    said = refusal(resolve_budgets, load_config(tiers={"cpu": {**shared, "budget": "60GiB"}}), four)
    assert "has 50.00 GiB" in said and "for each of its 2 ranks" in said
    without = replace(MACHINE, gpu_total_bytes=None)
    assert "here the cpu computes" in refusal(resolve_budgets, load_config(tiers={"cpu": shared}), without)


def test_ranks_of_one_machine_and_of_one_gpu_divide_what_is_free_and_percentages():
    two = replace(MACHINE, ranks_here=4, ranks_on_gpu=2, gpu_free_bytes=35 * GIB, cpu_available_bytes=10 * GIB)
    whole, halved = (resolve_budgets(with_budgets(gpu={"budget": "50%"}), machine) for machine in (MACHINE, two))
    assert halved["gpu"] == whole["gpu"] // 2 and halved["cpu"] == 8 * GIB
    assert resolve_budgets(with_budgets(cpu={"budget": "40%"}), two)["cpu"] == 10 * GIB
    assert resolve_budgets(with_budgets(cpu={"budget": "40GiB"}), two)["cpu"] == 40 * GIB, "bytes are what is asked for"
