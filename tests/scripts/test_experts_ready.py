"""The script that times the encoding of experts, on a model that a CPU encodes in no time."""

import pytest
import torch

pytest.importorskip("transformers")

from scripts import experts_ready

TINY = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2}


def test_a_row_says_how_many_dense_bytes_became_pages_in_which_time():
    (row,) = experts_ready.rows(2, torch.device("cpu"), **TINY)
    assert row["home"] == "cpu" and row["pages"] == row["at_home"] == 2 * (8 + 4)  # experts, and attention
    experts, attention = 8 * (2 * 32 * 64 + 64 * 32), 2 * (64 * 64 + 32 * 64)
    assert row["dense_gb"] == pytest.approx(2 * 2 * (experts + attention) / 1e9)
    assert row["dense_gb_per_s"] == pytest.approx(row["dense_gb"] / row["seconds"])
