"""A rank that fails stops all of them, and is named."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed import cases
from tests.distributed.ranks import Ranks, RanksFailed


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(2, timeout_s=3)
    yield ranks
    ranks.close()


def test_a_damaged_page_stops_all_ranks_with_its_rank_and_layer(ranks: Ranks, tmp_path: Path):
    other, own = ranks(cases.broken, path=str(tmp_path), how="damage", whose=1)
    assert own.startswith("model.layers.1.mlp.up_proj#dense: ") and "damaged" in own
    assert other.startswith("rank 1 has failed: TierError: model.layers.1.mlp.up_proj#dense: ")


def test_a_rank_that_hangs_is_named_with_the_layer_where_it_does(ranks: Ranks, tmp_path: Path):
    ranks.begin(cases.broken, path=str(tmp_path), how="hang", whose=1)
    other, own = ranks.end()
    assert other == "rank 1 has ended or hangs; it was last seen in pass 2 at model.layers.1.mlp.up_proj"
    assert "rank 0" in own, "it does not compute on once it wakes up"


def test_a_rank_that_ends_is_named(ranks: Ranks, tmp_path: Path):
    ranks.begin(cases.broken, path=str(tmp_path), how="end", whose=1)
    with pytest.raises(RanksFailed) as failed:
        ranks.end()
    assert failed.value.errors[1] == ("died", "") and failed.value.errors[0] is None
    assert failed.value.values[0].startswith("rank 1 has ended or hangs; it was last seen in pass ")
