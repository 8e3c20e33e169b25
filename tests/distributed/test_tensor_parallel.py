"""Models that a parallel plan splits over ranks: each rank's pages are its parts, and outputs are those of the plan."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import cases
from tests.distributed.ranks import Ranks
from tests.models import qwen3_moe

MORE = pytest.mark.exhaustive
BLOCKED = ("nvfp4", "quantile", pytest.param("mxfp4", marks=MORE), pytest.param("nf4", marks=MORE))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    cases.llama().save_pretrained(path / "llama")
    cases.llama(tie_word_embeddings=True).save_pretrained(path / "tied")
    qwen3_moe().save_pretrained(path / "moe")
    return path


def check_parallel(results: list[dict], shape: tuple[int, int], *, exact: bool) -> None:
    count = len(results)
    assert [r["shard"] for r in results] == [
        ((shape[0], shape[1] // count), 1, rank, count, shape) for rank in range(count)
    ]
    for r in results:
        assert r["swapped"] == 14 and r["unwrapped"] and r["types"] == {"Parameter", "DTensor"}
        assert r["reads"] == (2, 0), "no layer decodes its weight for somebody else's product"
        assert r["equal"] or not exact
        assert r["error"] < 1e-6 and r["error_with_grad"] < (0.02 if exact else 1e-6)


@pytest.mark.parametrize("format", ["exact", "dense"])
def test_lossless_outputs_are_bit_for_bit_those_of_the_same_plan_unwrapped(two_ranks: Ranks, format: str):
    check_parallel(two_ranks(cases.same_as_unwrapped, format=format), (256, 256), exact=True)


@pytest.mark.parametrize("format", BLOCKED)
def test_four_bits_on_ranks_decode_to_the_parts_of_what_one_process_decodes(two_ranks: Ranks, format: str):
    results = two_ranks(cases.same_as_unwrapped, format=format, dtype="float32")
    check_parallel(results, (256, 256), exact=False)


@MORE
@pytest.mark.parametrize("format", ["exact", "nvfp4", "quantile"])
def test_four_ranks_hold_a_quarter_each(four_ranks: Ranks, format: str):
    dtype = "bfloat16" if format == "exact" else "float32"
    results = four_ranks(cases.same_as_unwrapped, format=format, dtype=dtype)
    check_parallel(results, (256, 256), exact=format == "exact")


@pytest.mark.parametrize("model", ["llama", "tied", "moe"])
def test_transformers_loads_a_split_model_into_planes_with_the_plans_own_outputs(
    two_ranks: Ranks, saved: Path, model: str
):
    for r in two_ranks(cases.loaded_like_unwrapped, path=str(saved / model), format="exact"):
        assert r["equal"] and r["tokens"] and r["reads"][1] == 0 and r["reads"][0] == 1
        part, whole = r["sites"]["model.layers.0.self_attn.q_proj"]
        assert part == (whole[0] // 2, whole[1])


def test_experts_are_spread_over_ranks_whole(two_ranks: Ranks, saved: Path):
    for r in two_ranks(cases.loaded_like_unwrapped, path=str(saved / "moe"), format="dense", ep_size=2):
        assert r["equal"] and r["tokens"] and r["reads"][1] == 0 and r["reads"][0] == 1
        assert r["sites"]["model.layers.0.mlp.experts"] == ((64, 64), (64, 64))


def test_experts_whose_outputs_are_added_only_where_their_parts_are_seen_stay_in_the_model(
    two_ranks: Ranks, saved: Path
):
    for r in two_ranks(cases.summed_where_parts_are_seen, path=str(saved / "moe")):
        assert r["equal"] and r["tokens"] and r["reads"][1] == 0
        assert "model.layers.0.self_attn.q_proj" in r["sites"] and "model.layers.0.mlp.experts" not in r["sites"]
        assert any("adds their outputs only while it sees the parts" in why for why in r["skipped"].values())


def test_a_step_is_recorded_with_its_sums_over_ranks_as_calls_that_run_again(two_ranks: Ranks, saved: Path):
    for r in two_ranks(cases.recorded_like_eager, path=str(saved / "llama")):
        assert r == {"equal": True, "refused": ""}


@pytest.mark.parametrize(("format", "speculate"), [("nvfp4", False), ("exact", "auto")])
def test_ranks_generate_in_step_whatever_each_has_timed(two_ranks: Ranks, saved: Path, format: str, speculate: Any):
    asked = {"path": str(saved / "llama"), "format": format, "speculate": speculate}
    found = two_ranks(cases.generated_by_ranks_of_two_minds, **asked)
    assert all(r["equal"] for r in found) and found[0] == found[1]
    assert found[0]["rounds" if speculate else "captured"] > 3


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("inputs", "inputs"),
        ("seeds", "tokens, from the same inputs; where they are drawn, torch.manual_seed is needed"),
    ],
)
def test_ranks_that_generate_apart_are_told(two_ranks: Ranks, saved: Path, what: str, said: str):
    start = f"ArgumentError: ranks compute one model together, and rank 1 has other {said}"
    assert all(
        told.startswith(start) for told in two_ranks(cases.generated_apart, path=str(saved / "llama"), what=what)
    )


def test_statistics_of_all_ranks_are_summed_on_the_first(two_ranks: Ranks):
    first, second = two_ranks(cases.counted)
    name = "model.layers.0.mlp.down_proj"
    assert second["all"] == second["own"]
    for count in ("hits", "misses"):
        assert first["all"][count] == first["own"][count] + second["own"][count]
    planes = [r["own"]["layers"][name]["plane_bytes"]["dense"] for r in (first, second)]
    assert first["all"]["layers"][name]["plane_bytes"]["dense"] == sum(planes)
    assert first["all"]["tiers"]["cpu"]["held_bytes"] == sum(
        r["own"]["tiers"]["cpu"]["held_bytes"] for r in (first, second)
    )
    assert first["all"]["passes"] == 1 and first["all"]["layers"][name]["forwards"] == 1 and name[:14] in first["text"]
