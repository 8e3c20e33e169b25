"""Models with PEFT's adapters whose blocks transformers checkpoints, and a stand-in for CUDA graphs on a CPU."""

import types

import pytest
import torch

import vbrt
from vbrt.model.recorded_blocks import RecordedBlocks

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
IDS = torch.arange(2, 26).reshape(2, 12)


class Again:
    """Runs what was recorded again, without its counts: a graph runs no Python."""

    handles, ledger = (), None

    def __init__(self, device):
        pass

    def record(self, step, within):
        step()
        with within():
            step()
        recording = self.ledger.recording

        def replay():
            counts = [handle.forwards for handle in self.handles]
            self.ledger.recording = recording  # a graph has the addresses of what was leased
            try:
                step()
            finally:
                self.ledger.recording = None
            for handle, forwards in zip(self.handles, counts, strict=True):
                handle.forwards = forwards

        return types.SimpleNamespace(replay=replay)

    def release(self):
        pass


def llama(*, layers=3, **kinds):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES, num_hidden_layers=layers, vocab_size=64, tie_word_embeddings=False, **kinds
    )
    return transformers.LlamaForCausalLM(config).bfloat16()


def adapted(device="cpu", *, records=True, tiers=None, build=llama, preset="fp4", targets=None, policy=None, **kinds):
    """A model with adapters, of which blocks are checkpointed; recorded by the stand-in, or eager."""
    settings = {"weights": {"min_parameters": 1}, "tiers": tiers or {}, "policy": policy or {}}
    vb = vbrt.wrap(build(**kinds).to(device), preset, **settings).materialize()
    if device == "cpu":
        stands_in = {"handles": vb._attachment.registry.handles, "ledger": vb.stack.ledger}
        recorder = type("Recorder", (Again,), stands_in)
        vb._attachment.recorded = RecordedBlocks(vb.stack, captures=records, recorder=recorder)
    elif not records:
        vb._attachment.recorded.release()
    return vb, with_adapters(vb, **targets or {"target_modules": ["q_proj", "v_proj"]})


def with_adapters(model, **targets):
    """A model with adapters that train, of which blocks are checkpointed."""
    model.gradient_checkpointing_enable()
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **targets)
    adapted = peft.get_peft_model(model, config).train()
    adapted.enable_input_require_grads()
    return adapted


def weights_of(model):
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def trained(model, steps, between=lambda step: None, ids=IDS):
    """Losses of some steps."""
    optimizer, losses = torch.optim.AdamW(weights_of(model).values(), 1e-2), []
    for step in range(steps):
        between(step)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(one, other):
    others = weights_of(other)
    return all(torch.equal(weight, others[name]) for name, weight in weights_of(one).items())
