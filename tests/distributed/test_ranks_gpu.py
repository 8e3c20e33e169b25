"""Ranks with a GPU each, and NCCL, in cases that ranks on CPUs go through as well."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed import cases
from tests.distributed.ranks import Ranks, RanksFailed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes two GPUs")]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Ranks of a mixed group that does not outlive the test: NCCL's part of it is aborted."""
    ranks = Ranks(2, timeout_s=10, backend="cpu:gloo,cuda:nccl")
    yield ranks
    ranks.close()


def test_a_damaged_page_stops_both_ranks_with_its_rank_and_layer(ranks: Ranks, tmp_path: Path):
    other, own = ranks(cases.broken, path=str(tmp_path), how="damage", whose=1, device="cuda")
    assert own.startswith("model.layers.1.mlp.up_proj#dense: ") and "damaged" in own
    assert other.startswith("rank 1 has failed: TierError: model.layers.1.mlp.up_proj#dense: ")


def test_a_rank_that_hangs_is_named_with_the_layer_where_it_does(ranks: Ranks, tmp_path: Path):
    other, own = ranks(cases.broken, path=str(tmp_path), how="hang", whose=1, device="cuda")
    assert other.startswith("rank 1 hangs in pass 2 at model.layers.1.mlp.up_proj for ")
    assert own != "computed on"


def test_a_rank_that_ends_is_named(ranks: Ranks, tmp_path: Path):
    ranks.begin(cases.broken, path=str(tmp_path), how="end", whose=1, device="cuda")
    with pytest.raises(RanksFailed) as failed:
        ranks.end()
    assert failed.value.errors == [None, ("died", "")]
    assert failed.value.values[0].startswith("rank 1 hangs in pass ")  # where it last told that it was


def test_a_rank_that_hangs_between_recorded_steps_is_named(ranks: Ranks, tmp_path: Path):
    cases.llama().save_pretrained(tmp_path)
    other, own = ranks(cases.asleep_between_recorded_steps, path=str(tmp_path), whose=1)
    assert other["replays"] > 12 and other["told"].startswith("rank 1 hangs in pass ")
    assert own["told"] != "computed on"


@pytest.mark.parametrize(("format", "speculate"), [("nvfp4", False), ("exact", "auto")])
def test_ranks_generate_in_step_from_files_that_they_have_read_together(
    ranks: Ranks, tmp_path: Path, format: str, speculate: str | bool
):
    cases.llama().save_pretrained(tmp_path)
    asked = {"path": str(tmp_path), "format": format, "speculate": speculate}
    found = ranks(cases.generated_by_ranks_of_two_minds, **asked)
    assert all(r["equal"] for r in found) and found[0] == found[1]
    assert found[0]["rounds" if speculate else "captured"] > 3
