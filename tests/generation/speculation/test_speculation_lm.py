"""Self-speculation on the committed language model: what a trained model's coarse planes draft."""

import pytest
import torch

import vbrt

pytest.importorskip("transformers")
from scripts import committed
from scripts.speculate import as_gpt2, prompts_of


def test_a_trained_model_drafts_well_and_its_tokens_are_those_of_plain_decoding():
    model = as_gpt2(committed.dense(), torch.bfloat16)
    ids = prompts_of(committed.held_out(), 1)
    with vbrt.wrap(model, "exact", tiers={"gpu": {"enabled": False}}, weights={"min_parameters": 0}) as vb:
        for how in ({"do_sample": False}, {"do_sample": True, "top_k": 0, "seed": 2}):
            settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 18, "pad_token_id": 0, **how}
            plain = vb.generate(ids, **settings)
            assert torch.equal(vb.generate(ids, **settings, speculate=6), plain)
        counted = vb.stats().speculation
    assert counted.acceptance > 0.8 and counted.tokens_per_round > 3
