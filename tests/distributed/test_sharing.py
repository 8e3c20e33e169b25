"""Pages of which each rank keeps a part: bits, memory, and what goes wrong on one rank is raised by name on all."""

import pytest

from tests.distributed import sharing
from tests.distributed.ranks import Ranks, RanksFailed


def messages(ranks: Ranks, case, **kwargs) -> list[str]:
    """What each rank raised, all of them TierErrors."""
    with pytest.raises(RanksFailed) as failed:
        ranks(case, **kwargs)
    assert [error and error[0] for error in failed.value.errors] == ["TierError"] * len(failed.value.errors)
    return [message for _, message in failed.value.errors]


@pytest.mark.parametrize("preset", ["exact", "dense"])
def test_pages_in_parts_have_the_bits_of_the_model_and_take_a_share_of_the_memory(two_ranks: Ranks, preset: str):
    for r in two_ranks(sharing.same_bits, preset=preset):
        assert r["equal"] and r["resident"] and r["unwrapped"]
        assert r["links"] == {"ssd>cpu"} and r["share"] == 0.5


def test_a_damaged_part_is_named_with_its_rank_on_all_ranks(two_ranks: Ranks):
    for message in messages(two_ranks, sharing.damaged, rank=1):
        assert "#dense: the part of rank 1 does not hold the bytes" in message and "model.layers." in message


def test_ranks_with_other_weights_or_another_order_are_told_apart(two_ranks: Ranks):
    assert all("ranks 0 and 1 hold other weights" in message for message in messages(two_ranks, sharing.other_weights))
    for message in messages(two_ranks, sharing.other_order):
        assert "model.layers.0.mlp.gate_proj#dense: rank 0 took it where rank 1 took" in message


def test_a_rank_that_ends_stops_the_other(tmp_path):
    ranks = Ranks(2, timeout_s=5)
    try:
        with pytest.raises(RanksFailed) as failed:
            ranks(sharing.dies, rank=1)
        first, second = failed.value.errors
        assert first[0] == "TierError" and "a rank has ended or does not answer" in first[1] and second[0] == "died"
    finally:
        ranks.close()
