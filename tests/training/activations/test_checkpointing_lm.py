"""Activations of transformers' models, whose forward makes a cache of keys and values while it trains, too."""

import pytest
import torch

import vbrt
from tests.training.activations.test_checkpointing import same

transformers = pytest.importorskip("transformers")

WIDE = {"vocab_size": 96, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**WIDE, intermediate_size=96, num_key_value_heads=2)
    ),
    # hands its blocks the cache by position
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=96, n_embd=64, n_head=4, n_layer=3, n_positions=64)
    ),
}


def padded_batch():
    ids = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def trained(kind, activations, *, lora):
    """The loss of a padded batch and its gradients."""
    torch.manual_seed(0)
    settings = {"training": {"activations": activations}, "weights": {"min_parameters": 0}}
    vb = vbrt.wrap(MODELS[kind]().train(), "fp4" if lora else "train", **settings)
    vb.materialize()
    if lora:
        peft = pytest.importorskip("peft")
        torch.manual_seed(1)
        peft.get_peft_model(vb, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    loss = vb(**padded_batch()).loss
    loss.backward()
    return [loss, *(p.grad for p in vb.parameters() if p.requires_grad)], vb.stats()


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lora", [False, True], ids=["train", "lora"])
@pytest.mark.parametrize("kind", MODELS)
def test_blocks_that_run_twice_append_no_keys_twice(kind, lora):
    kept, _ = trained(kind, "keep", lora=lora)
    for activations in ("recompute", "offload", "64KiB"):
        got, stats = trained(kind, activations, lora=lora)
        assert same(got, kept)
        assert any("fill no KV cache" in reason for reason in stats.fallbacks), stats.fallbacks
