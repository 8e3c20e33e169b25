"""A device cache of experts follows the GPU's budget, with stand-ins for its kernels, and captures stay valid."""

import copy

import pytest
import torch

from tests.layers.experts import tables
from tests.layers.experts.beside_gpu import wrap_beside
from tests.layers.experts.test_hosted_experts import _at
from tests.models import qwen3_moe
from vbrt.config.budgets import CONTEXT_BYTES
from vbrt.errors import TierError
from vbrt.host import accelerator
from vbrt.kernels.cuda.experts import residency
from vbrt.kernels.cuda.fine import merge
from vbrt.layers.experts import ExpertsHandle, gathered_experts
from vbrt.layers.experts.device_cache import DeviceCache
from vbrt.layers.experts.residency_owner import CachedLayer
from vbrt.model import expert_cache, runtime
from vbrt.model.auto_budget import GpuBalance
from vbrt.residency.plan import GpuRoom
from vbrt.tiers.storage.memory_tiers import Buffer

pytest.importorskip("transformers")
EXPERTS, LAYERS, TOP = 16, 3, 2


@pytest.fixture
def cached(monkeypatch):
    """Wraps a model whose cache has so many slots a layer, or, for None, room for so many of the largest pages that
    plans say; returns it, its cache, and the bytes of a slot of each layer."""
    monkeypatch.setattr(Buffer, "pinned", True)
    monkeypatch.setattr(residency, "_launch", tables.launch)
    monkeypatch.setattr(merge, "merge_experts", tables.merge_experts)
    monkeypatch.setattr(gathered_experts.devices, "refusal", lambda device, needs: None)
    monkeypatch.setattr(accelerator, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(runtime, "with_freed", lambda machine, tier, nbytes: machine)
    monkeypatch.setattr(runtime, "resolve_budget", lambda config, machine, tier: getattr(config.tiers, tier).budget)

    def wrapped(slots, format="exact", model=None, more=0, room=40):
        model = qwen3_moe(count=EXPERTS, layers=LAYERS) if model is None else model
        vb = wrap_beside(monkeypatch, model, format, room=room)
        handles = [handle for handle in vb._attachment.registry.handles if isinstance(handle, ExpertsHandle)]
        row = sum(max(page.nbytes for page in h.pages[:: h.planes]) for h in handles)
        row += sum(max(page.nbytes for page in h.pages[1::2]) for h in handles if h.spec.fine)
        passes = max(sum(page.nbytes for page in h.pages[: TOP * h.planes]) for h in handles)
        if slots is not None:
            vb.stack.set_budget("gpu", slots * row + passes + more)
        vb.runtime.budgets = {"gpu": vb.stack.levels[0].tier.capacity_bytes, **vb.runtime.budgets}
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


def test_free_memory_is_followed_from_what_pages_take_where_plans_say_more(cached, monkeypatch):
    """Plans have upper bounds of fine planes: what a budget has beyond all pages is no room that they can give."""
    vb, caches, row = cached(None, model=qwen3_moe(count=EXPERTS, layers=1), room=2 * EXPERTS)
    want, budget, pages = outputs(vb), vb.runtime.budgets["gpu"], vb.runtime.page_bytes
    assert pages < budget and caches._cache.slots(0) == EXPERTS
    vb.runtime.balance = balance = GpuBalance(budget, GpuRoom(CONTEXT_BYTES + budget, 2 * row, 0))
    monkeypatch.setattr(accelerator, "mem_get_info", lambda: (1 << 40, 1 << 40))
    monkeypatch.setattr(accelerator, "memory_stats_as_nested_dict", dict)
    monkeypatch.setattr(runtime, "is_capturing", lambda: False)
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(accelerator, name, lambda: pages)
    vb.runtime.follow_free_memory(3 * row + budget - pages)
    assert vb.runtime.budgets["gpu"] == pages - 5 * row and vb.stack.levels[0].tier.held_bytes <= pages - 5 * row
    assert caches.lives and torch.equal(outputs(vb), want)
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(accelerator, name, lambda: 0)
    balance.look_soon()
    vb.runtime.follow_free_memory()
    assert vb.runtime.budgets["gpu"] == pages and balance.active
    assert not caches.lives and all(page.home == 0 for page in vb.stack.pages.values())
    assert torch.equal(outputs(vb), want)


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("tokens", [3, 40])
def test_slots_change_no_bit_of_experts_in_4_bits(cached, monkeypatch, tokens, ring):
    """In one lease, in parts that pass by the cache, or in those of captured steps; on a GPU, these round rows that a
    lease sums as they are."""
    if not ring:
        monkeypatch.setattr(DeviceCache, "has_ring", False)
    monkeypatch.setattr(expert_cache, "why_host", lambda handle: "")
    monkeypatch.setattr(CachedLayer, "at", _at)
    vb, caches, row = cached(12, "nvfp4")
    torch.manual_seed(0)
    steps = [torch.randint(0, 60, (tokens, 1)) for _ in range(6)]
    budget, seen = vb.runtime.budgets["gpu"], []
    with torch.no_grad():
        want = [vb(input_ids=ids).logits for ids in steps]
        for less in (2, 6, 9, 3, 0):
            vb.set_budget("gpu", budget - less * row)
            seen.append(caches._cache.slots(0))
            assert all(torch.equal(vb(input_ids=ids).logits, one) for ids, one in zip(steps, want, strict=True))
    assert seen == [10, 6, 3, 9, 12]


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
