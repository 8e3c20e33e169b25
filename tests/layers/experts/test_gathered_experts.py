"""Experts that the device gathers, with a stand-in for the kernel that copies their pages."""

from types import SimpleNamespace

import pytest
import torch

from tests import models
from vbrt.layers.experts.gathered_experts import gathered, ranked
from vbrt.layers.experts.touched_experts import Routed

pytest.importorskip("transformers")


def test_ids_are_ranked_and_each_expert_is_named_once():
    experts, local = ranked(torch.tensor([[5, 2], [2, 7], [-1, 8]]), 8)
    assert experts[:3].tolist() == [2, 5, 7] and local.tolist() == [[1, 0], [0, 2], [6, 6]]


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_gathered_experts_give_the_bits_of_the_plain_module(implementation, monkeypatch):
    plain = models.qwen3_moe(count=8, experts=implementation)
    vb = models.wrap(models.qwen3_moe(count=8, experts=implementation), "dense")
    layer, module = vb.module.model.layers[0].mlp.experts, plain.model.layers[0].mlp.experts
    vb.materialize()
    slots, keys = vb.stack.levels[0].slots, layer.handle.keys

    def pages_of(addresses, experts, nbytes):
        return torch.stack([slots[keys[e]].view for e in experts.tolist()])

    monkeypatch.setattr("vbrt.layers.experts.gathered_experts.gather_pages", pages_of)
    pages = SimpleNamespace(layout=layer.handle.pages[0].layout, addresses=None)
    for ids in ([[3, 1]], [[3, 1], [1, 6], [0, 3]]):
        ids = torch.tensor(ids)
        x, weights = torch.randn(len(ids), vb.module.config.hidden_size), torch.rand(ids.shape)
        routed = Routed(x.bfloat16(), ids, weights.bfloat16())
        with torch.no_grad():
            assert torch.equal(gathered(layer, routed, pages), module(routed.x, routed.ids, routed.weights))
