"""A rank that fails stops all of them, and is named."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed import cases
from tests.distributed.ranks import Ranks, RanksFailed


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.exhaustive)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param, timeout_s=3 if request.param == 2 else 12)
    yield ranks
    ranks.close()


def test_a_damaged_page_stops_all_ranks_with_its_rank_and_layer(ranks: Ranks, tmp_path: Path):
    whose = len(ranks.processes) - 1
    *others, own = ranks(cases.broken, path=str(tmp_path), how="damage", whose=whose)
    assert own.startswith("model.layers.1.mlp.up_proj#dense: ") and "damaged" in own
    for other in others:
        assert other.startswith(f"rank {whose} has failed: TierError: model.layers.1.mlp.up_proj#dense: ")


def test_an_error_of_one_rank_alone_stops_all_before_its_next_pass_spoils_their_sums(ranks: Ranks, tmp_path: Path):
    whose = len(ranks.processes) - 1
    *others, own = ranks(cases.broken, path=str(tmp_path), how="raise", whose=whose)
    for other in others:
        assert other == f"rank {whose} has failed at model.layers.1.mlp.up_proj: ValueError: a user's own"
    assert own == f"the other ranks have stopped: {others[0]}"


def test_what_all_ranks_refuse_harms_none_and_other_configs_are_told(two_ranks: Ranks):
    for r in two_ranks(cases.refused_then_right, config_of_rank={0: "nvfp4", 1: "nvfp4"}):
        assert r == {"equal": True, "left": 1}
    for r in two_ranks(cases.refused_then_right, config_of_rank={0: "nvfp4", 1: "mxfp4"}):
        assert r["told"].startswith(
            "ArgumentError: ranks compute one model together, and rank 1 has other parts: model."
        )
        assert (
            "in mxfp4, fine none, where rank 0 has model.layers.0.self_attn.q_proj.weight 1 x (256, 256) in nvfp4"
            in (r["told"])
        )


def test_silence_is_counted_in_beats_and_a_closed_model_is_none(two_ranks: Ranks):
    (early, late), (own,) = two_ranks(cases.listened, how="silent")
    assert early == "" and late == "rank 1 does not answer for 16 s; it was last seen in pass 1"
    assert own == f"the other ranks have stopped: {late}"
    assert two_ranks(cases.listened, how="closed") == [["", ""], [""]]


def test_a_rank_that_waits_in_the_store_of_torch_is_heard(two_ranks: Ranks):
    assert two_ranks(cases.beats_beside_a_wait_for_another_rank) == [True, True]


@pytest.mark.parametrize("how", [pytest.param("hang", marks=pytest.mark.exhaustive), "wake"])
def test_a_rank_that_hangs_is_named_with_the_layer_where_it_does(ranks: Ranks, tmp_path: Path, how: str):
    whose = len(ranks.processes) - 1
    ranks.begin(cases.broken, path=str(tmp_path), how=how, whose=whose)
    *others, own = ranks.end()
    for other in others:
        assert other == f"rank {whose} has ended or hangs; it was last seen in pass 2 at model.layers.1.mlp.up_proj"
    assert own == f"the other ranks have stopped: {others[0]}", "it does not compute on once it wakes up"


def test_a_rank_that_ends_is_named(ranks: Ranks, tmp_path: Path):
    whose = len(ranks.processes) - 1
    ranks.begin(cases.broken, path=str(tmp_path), how="end", whose=whose)
    with pytest.raises(RanksFailed) as failed:
        ranks.end()
    *others, own = failed.value.errors
    assert own == ("died", "") and others == [None] * whose
    assert all(v.startswith(f"rank {whose} has ended or hangs; it was last seen in") for v in failed.value.values[:-1])


def test_a_rank_that_hangs_between_recorded_steps_is_named(ranks: Ranks, tmp_path: Path):
    cases.llama().save_pretrained(tmp_path)
    whose = len(ranks.processes) - 1
    *others, own = ranks(cases.asleep_between_recorded_steps, path=str(tmp_path), whose=whose)
    assert own["replays"] > 12
    for other in others:
        assert other["told"].startswith(f"rank {whose} has ended or hangs; it was last seen in pass ")
    assert own["told"].startswith("the other ranks have stopped: ")


@pytest.mark.parametrize("how", ["fails", "cannot", "hangs", "replays"])
def test_collectives_of_gpus_are_aborted_once_when_another_rank_is_not_well(two_ranks: Ranks, how: str):
    first, second = two_ranks(cases.aborted, how=how)
    assert first["calls"] == ["abort"] and f"vbrt: rank 0 stops: {first['verdict']}\n" in first["said"]
    if how in ("hangs", "replays"):
        assert first["verdict"].startswith("rank 1 hangs in pass 1") and first["verdict"].endswith("rank 0 is ahead")
        assert second["verdict"] == f"the other ranks have stopped: {first['verdict']}", "who is behind blames nobody"
        assert second["calls"] == ["abort"]
    else:
        assert first["verdict"] == "rank 1 has failed: TierError: model.layers.1: gone"
        assert ("cannot be aborted (no communicator), and end with their timeout" in first["said"]) == (how == "cannot")


def test_a_group_without_nccl_is_not_aborted(two_ranks: Ranks):
    first, _ = two_ranks(cases.aborted, how="gloo")
    assert first["verdict"].startswith("rank 1 has failed") and first["calls"] == [] and first["said"] == ""
