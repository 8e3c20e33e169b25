"""A sample of architectures, read by `from_pretrained` into planes. `scripts/sweep --loading` reads all of them."""

import pytest
import torch

pytest.importorskip("transformers")

from tests.zoo.loading import LOADING_CHECKS, check_loading

#: computes otherwise if a config says that it is quantized; keeps norms in fp32; experts apart and biases; files that
#: are cut to, or split by, the shapes of parameters; tied tables
SAMPLE = ("falcon_mamba", "flint", "gpt_oss", "inkling2_text", "lara_mini", "opt")


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_from_a_checkpoint_gives_the_bits_of_the_plain_load(name, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums have one order
    try:
        result = check_loading("causal", name, tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert result.reason == ""
    assert result.verdicts == dict.fromkeys(LOADING_CHECKS, "ok")
    assert result.swapped > 0 and result.tables_used > 0
