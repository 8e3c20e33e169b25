"""Training wrapped models under DDP and FSDP2."""

import pytest

from tests.distributed import training_cases as cases
from tests.distributed.ranks import Ranks, RanksFailed
from tests.matrix import matrix


@matrix(how=("ddp", "fsdp2"), mode=("infer", "shells", "train"))
def test_gradients_are_the_mean_over_all_ranks_batches(two_ranks: Ranks, how: str, mode: str):
    for found, error in two_ranks(cases.gradients, how=how, mode=mode):
        assert found == {"infer": 8, "shells": 8, "train": 35}[mode] and error < 1e-5


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("fsdp1", "FullyShardedDataParallel (FSDP1) flattens the parameters"),
        ("moved", "a weight that trains through 4 bits; keep such weights out of it"),
        ("cut", "a weight that trains through 4 bits; keep such weights out of it"),
        ("cut shells", "a parallel plan comes before vbrt.wrap"),
        ("full under ddp", 'summed over ranks: DDP and FSDP need mode = "train"'),
        ("full under fsdp2", 'summed over ranks: DDP and FSDP need mode = "train"'),
    ],
)
def test_what_cannot_be_is_refused_by_the_layers_name(two_ranks: Ranks, how: str, says: str):
    with pytest.raises(RanksFailed) as failed:
        two_ranks(cases.refused, how=how)
    for kind, text in failed.value.errors:
        assert kind == "WrapError" and text.startswith("model.layers.") and says in text


@matrix(style=("replicate", "mla_kv_a_proj", "replicated_with_grad_allreduce"), mode=("train", "full"))
def test_forwards_that_a_plan_has_put_around_whole_weights_run_the_layer_in_training(
    two_ranks: Ranks, style: str, mode: str
):
    if mode == "full" and style == "replicated_with_grad_allreduce":
        with pytest.raises(RanksFailed, match="first: register_post_accumulate_grad_hook needs the values"):
            two_ranks(cases.styled, style=style, mode=mode)
        return
    for r in two_ranks(cases.styled, style=style, mode=mode):
        assert r == {"forwards": 1, "equal": True, "error": 0, "unwrapped": True}
