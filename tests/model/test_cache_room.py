"""A device cache of experts follows the GPU's budget, with stand-ins for its kernels, and captures stay valid."""

import copy

import pytest
import torch

from tests.layers.experts import tables
from tests.layers.experts.beside_gpu import wrap_beside
from tests.models import qwen3_moe
from vbrt.errors import TierError
from vbrt.host import accelerator
from vbrt.kernels.cuda.experts import residency
from vbrt.kernels.cuda.fine import merge
from vbrt.layers.experts import ExpertsHandle, gathered_experts
from vbrt.model import runtime
from vbrt.tiers.storage.memory_tiers import Buffer

pytest.importorskip("transformers")
EXPERTS, LAYERS, TOP = 16, 3, 2


@pytest.fixture
def cached(monkeypatch):
    """Wraps a model whose cache has so many slots a layer; returns it, its cache, and the bytes of one of each."""
    monkeypatch.setattr(Buffer, "pinned", True)
    monkeypatch.setattr(residency, "_launch", tables.launch)
    monkeypatch.setattr(merge, "merge_experts", tables.merge_experts)
    monkeypatch.setattr(gathered_experts.devices, "refusal", lambda device, needs: None)
    monkeypatch.setattr(accelerator, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(runtime, "with_freed", lambda machine, tier, nbytes: machine)
    monkeypatch.setattr(runtime, "resolve_budget", lambda config, machine, tier: getattr(config.tiers, tier).budget)

    def wrapped(slots, format="exact", model=None, more=0):
        model = qwen3_moe(count=EXPERTS, layers=LAYERS) if model is None else model
        vb = wrap_beside(monkeypatch, model, format, room=40)
        handles = [handle for handle in vb._attachment.registry.handles if isinstance(handle, ExpertsHandle)]
        row = sum(max(page.nbytes for page in h.pages[:: h.planes]) for h in handles)
        row += sum(max(page.nbytes for page in h.pages[1::2]) for h in handles if h.spec.fine)
        passes = max(sum(page.nbytes for page in h.pages[: TOP * h.planes]) for h in handles)
        vb.stack.set_budget("gpu", slots * row + passes + more)
        vb.runtime.budgets = {"gpu": slots * row + passes + more, **vb.runtime.budgets}
        caches = vb._attachment.expert_cache
        caches.follow()
        assert caches.lives, caches.fallbacks
        return vb, caches, row

    return wrapped


def outputs(vb):
    torch.manual_seed(0)
    with torch.no_grad():
        return torch.cat([vb(input_ids=torch.randint(0, 60, (1, 1))).logits for _ in range(12)])


def test_slots_give_way_and_come_back_without_a_change_of_the_stack(cached):
    vb, caches, row = cached(8)
    want, budget, cache = outputs(vb), vb.runtime.budgets["gpu"], caches._cache
    changes, most, tier = vb.stack.ledger.changes, cache.capacity_bytes, vb.stack.levels[0].tier
    seen = []
    for less in (0, 1, 6, 15, 6, 0):  # thirds of a row
        vb.set_budget("gpu", budget - less * row // 3)
        seen.append(cache.slots(0))
        assert tier.held_bytes <= tier.capacity_bytes == budget - less * row // 3
        assert torch.equal(outputs(vb), want)
    assert seen == [8, 7, 6, 3, 6, 8] and cache.capacity_bytes == most
    assert caches._cache is cache and vb.stack.ledger.changes == changes
    assert vb.stats().layers["model.layers.0.mlp.experts"].experts.decides == "gpu"


def test_what_is_left_where_slots_of_layers_differ_ends_no_cache(cached):
    model = qwen3_moe(count=EXPERTS, layers=LAYERS)
    with torch.no_grad():
        weight = model.model.layers[2].mlp.experts.gate_up_proj
        weight *= torch.where(torch.rand_like(weight) < 0.2, 40.0, 1.0)  # many escapes, and so large fine pages
    _, caches, _ = cached(8, model=copy.deepcopy(model))
    small, _, large = caches._cache.slot_bytes.values()
    assert small < large
    vb, caches, row = cached(8, model=model, more=2 * small + (small + large) // 2)  # a slot more in two layers
    want, cache, budget = outputs(vb), caches._cache, vb.runtime.budgets["gpu"]
    assert [cache.slots(layer) for layer in range(3)] == [9, 9, 8]
    for less in (2, 0):
        vb.set_budget("gpu", budget - less * row)
        assert torch.equal(outputs(vb), want) and caches._cache is cache
    assert [cache.slots(layer) for layer in range(3)] == [9, 9, 8]


def test_a_cache_ends_where_a_budget_has_room_for_all_pages_or_for_more_slots(cached):
    vb, caches, row = cached(8)
    want, cache, budget = outputs(vb), caches._cache, vb.runtime.budgets["gpu"]
    vb.set_budget("gpu", budget + 2 * row)
    assert not caches.lives
    caches.follow()
    assert caches._cache.slots(0) == 10 and torch.equal(outputs(vb), want)
    vb.set_budget("gpu", EXPERTS * row)
    assert not caches.lives and all(page.home == 0 for page in vb.stack.pages.values())
    with pytest.raises(TierError, match="its device cache was closed"), cache.lease(0, torch.tensor([[1]])):
        pass


def test_a_cache_ends_where_captured_graphs_need_more_slots_than_a_budget_has(cached):
    vb, caches, row = cached(8)
    want, changes = outputs(vb), vb.stack.ledger.changes
    caches._cache._note_needed(0, torch.arange(7), scan=False)
    vb.set_budget("gpu", vb.runtime.budgets["gpu"] - row)
    assert caches.lives and caches._cache.slots(0) == 7
    caches._cache.recorded = True
    with pytest.raises(TierError, match="a CUDA graph has recorded"):
        vb.set_budget("gpu", vb.runtime.budgets["gpu"] - row)
    assert caches._cache.slots(0) == 7 and vb.stack.ledger.changes == changes
    caches.forget_recording()
    vb.set_budget("gpu", vb.runtime.budgets["gpu"] - row)
    assert not caches.lives and vb.stack.ledger.changes > changes
    caches.follow()
    assert caches._cache.slots(0) == 6 and torch.equal(outputs(vb), want)


def test_experts_held_dense_lie_in_one_piece_and_end_with_a_lower_budget(cached):
    vb, caches, row = cached(8, "dense")
    want, cache = outputs(vb), caches._cache
    assert len(cache._segments) == 1
    vb.set_budget("gpu", vb.runtime.budgets["gpu"] - 2 * row)
    assert not caches.lives
    caches.follow()
    assert caches._cache.slots(0) == 6 and torch.equal(outputs(vb), want)


def test_a_segment_that_finds_no_memory_leaves_those_before_it_in_use(cached, monkeypatch):
    vb, caches, row = cached(8)
    want, budget, cache = outputs(vb), vb.runtime.budgets["gpu"], caches._cache
    vb.set_budget("gpu", budget - 4 * row)
    tier, new = vb.stack.levels[0].tier, type(vb.stack.levels[0].tier)._new
    left = [2]

    def short(self, nbytes):
        left[0] -= 1
        if left[0] < 0:
            raise TierError("tier gpu: no room")
        return new(self, nbytes)

    monkeypatch.setattr(type(tier), "_new", short)
    with pytest.raises(TierError, match="no room"):
        vb.set_budget("gpu", budget)
    assert cache.slots(0) == 6 and vb.runtime.budgets["gpu"] == budget
    monkeypatch.setattr(type(tier), "_new", new)
    assert torch.equal(outputs(vb), want)
    vb.set_budget("gpu", budget)
    assert cache.slots(0) == 8 and torch.equal(outputs(vb), want)
