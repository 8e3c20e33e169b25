"""Experts held dense of which the device decides, with stand-ins for its kernels: the plain module's bits, always."""

import copy

import pytest
import torch

from tests.layers.experts import tables
from tests.layers.experts.beside_gpu import wrap_beside
from tests.models import qwen3_moe
from vbrt.errors import TierError
from vbrt.kernels.cuda.experts import residency
from vbrt.layers.experts import gathered, why_waits
from vbrt.layers.experts.compute import Routed, run_experts
from vbrt.tiers.memory import Buffer

pytest.importorskip("transformers")
EXPERTS = 16
IMPLEMENTATIONS = ["batched_mm", "grouped_mm"]


@pytest.fixture
def decided(monkeypatch):
    """Wraps a model whose experts a device cache of so many slots a layer holds."""
    monkeypatch.setattr(Buffer, "pinned", True)
    monkeypatch.setattr(residency, "_launch", tables.launch)
    monkeypatch.setattr(gathered.devices, "available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def wrapped(model, slots, scope="layer"):
        layers = model.config.num_hidden_layers
        vb = wrap_beside(monkeypatch, model, "dense", room=slots * layers + model.config.num_experts_per_tok)
        vb.stack.levels[0].policy.scope = scope
        vb._attachment.expert_cache.follow()
        assert vb._attachment.expert_cache.fallbacks == []
        return vb

    return wrapped


def layer_of(model):
    return model.model.layers[0].mlp.experts


def routed(tokens, top_k=2, experts=EXPERTS, dtype=torch.bfloat16):
    """Hidden states, ids with a sentinel among them, and weights."""
    torch.manual_seed(tokens)
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    return Routed(torch.randn(tokens, 64, dtype=dtype), ids, torch.rand(tokens, top_k).to(dtype))


@torch.no_grad()
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("slots", [2, 5, EXPERTS])
@pytest.mark.parametrize("together", [256 << 20, 3 * 12288])
def test_passes_of_any_size_give_the_bits_of_the_plain_module(decided, monkeypatch, implementation, slots, together):
    monkeypatch.setattr("vbrt.residency.expert_leases._CHUNK_BYTES", together)
    plain = qwen3_moe(count=EXPERTS, experts=implementation)
    vb, module = decided(copy.deepcopy(plain), slots), layer_of(plain)
    layer = layer_of(vb.model)
    for tokens in (1, 2, 1, 3, 7, 1, 8, 40, 1):
        given = routed(tokens)
        want = module(given.x, given.ids, given.weights)
        assert torch.equal(run_experts(layer, given), want), tokens
    experts = vb.stats().layers[layer.handle.spec.name].experts
    assert experts.decides == "gpu" and why_waits(layer.handle) == "" and not vb.stats().fallbacks
    assert experts.scans == (2 if slots == EXPERTS else 4 if slots == 5 else 5)
