"""Training wrapped models under DDP and FSDP2."""

import pytest

from tests.distributed import training_cases as cases
from tests.distributed.ranks import Ranks, RanksFailed
from tests.matrix import matrix


@matrix(how=("ddp", "fsdp2"), mode=("infer", "train"))
def test_gradients_are_the_mean_over_all_ranks_batches(two_ranks: Ranks, how: str, mode: str):
    for found, error in two_ranks(cases.gradients, how=how, mode=mode):
        assert found == {"infer": 8, "train": 35}[mode] and error < 1e-5


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("fsdp1", "FullyShardedDataParallel (FSDP1) flattens the parameters"),
        ("shells", "call vb.materialize() first"),
        ("moved", "a weight that trains through 4 bits; keep such weights out of it"),
    ],
)
def test_what_cannot_be_is_refused_by_the_layers_name(two_ranks: Ranks, how: str, says: str):
    with pytest.raises(RanksFailed) as failed:
        two_ranks(cases.refused, how=how)
    for kind, text in failed.value.errors:
        assert kind == "WrapError" and text.startswith("model.layers.") and says in text
