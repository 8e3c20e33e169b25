"""Lossless experts of which the device decides, with stand-ins for its kernels: always the plain module's bits."""

import copy
import ctypes
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.generation.fusion.tape_cases import Tape
from tests.layers.experts import tables
from tests.layers.experts.beside_gpu import wrap_beside
from tests.models import qwen3_moe, wrap
from tests.zoo import experts as zoo
from tests.zoo.experts import DECORATED, Holder, experts_module
from vbrt.errors import TierError
from vbrt.host import accelerator
from vbrt.kernels.cuda.experts import residency
from vbrt.kernels.cuda.fine import merge
from vbrt.layers.experts import VBExperts, gathered_experts, why_waits
from vbrt.layers.experts import run_experts as compute
from vbrt.layers.experts.kernels_product import KernelsProduct
from vbrt.layers.experts.run_experts import run_experts
from vbrt.layers.experts.touched_experts import Routed
from vbrt.tiers.storage.memory_tiers import Buffer

pytest.importorskip("transformers")
EXPERTS, PAGE = 16, 12288
IMPLEMENTATIONS = ["batched_mm", "grouped_mm"]


@pytest.fixture(params=["dense", "exact", "exact, coded"])
def decided(request, monkeypatch):
    """Wraps a model whose experts a device cache of so many slots a layer holds."""
    monkeypatch.setattr(Buffer, "pinned", True)
    monkeypatch.setattr(residency, "_launch", tables.launch)
    monkeypatch.setattr(merge, "merge_experts", tables.merge_experts)
    monkeypatch.setattr(gathered_experts.devices, "refusal", lambda device, needs: None)
    monkeypatch.setattr(accelerator, "is_current_stream_capturing", lambda: False)

    def wrapped(model, slots, scope="layer", layers=2):
        vb = wrap_beside(monkeypatch, model, request.param, room=slots * layers + 2)  # one token's experts pass through
        vb.stack.levels[0].policy.scope = scope
        vb._attachment.expert_cache.follow()
        assert vb._attachment.expert_cache.fallbacks == []
        assert all(layer.handle.deciding.by == "gpu" for layer in vb.module.modules() if isinstance(layer, VBExperts))
        return vb

    return wrapped


@pytest.fixture
def unheard(monkeypatch):
    """Nobody may ask which experts are touched."""

    def refused(*_):
        raise AssertionError("the host hears which experts are touched")

    return lambda: monkeypatch.setattr(compute, "Heard", refused)


def bytes_of(address, nbytes):
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def layer_of(model):
    return model.model.layers[1].mlp.experts  # whose slots do not begin where the arena does


def routed(tokens, top_k=2, dtype=torch.bfloat16):
    """Hidden states, ids, weights."""
    torch.manual_seed(tokens)
    ids = torch.stack([torch.randperm(EXPERTS) for _ in range(max(1, tokens))])[:tokens, :top_k]
    return Routed(torch.randn(tokens, 64, dtype=dtype), ids, torch.rand(tokens, top_k).to(dtype))


def both(layer, module, given):
    return tuple(one(given.x, given.ids, given.weights) for one in (layer, module))


@pytest.mark.sample(4)
@torch.no_grad()
@pytest.mark.parametrize("scope", ["layer", "model"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("together", [256 << 20, 3 * PAGE])
def test_passes_of_any_size_give_the_bits_of_the_plain_module(decided, monkeypatch, scope, implementation, together):
    monkeypatch.setattr("vbrt.residency.expert_leases._CHUNK_BYTES", together)
    plain = qwen3_moe(count=EXPERTS, experts=implementation)
    for slots in (2, 5, EXPERTS):
        vb = decided(copy.deepcopy(plain), slots, scope)
        layer = layer_of(vb.module)
        passes = (1, 2, 1, 3, 7, 1, 8, 40, 1)
        for tokens in passes:
            assert torch.equal(*both(layer, layer_of(plain), routed(tokens))), (slots, tokens)
        stats = vb.stats()
        experts = stats.layers[layer.handle.spec.name].experts
        assert experts.decides == "gpu" and why_waits(layer.handle) == "" and "decides" not in str(stats.fallbacks)
        at_once = min(EXPERTS - 1, slots * (1 if scope == "layer" else 2))
        assert experts.scans == sum(2 * tokens > at_once for tokens in passes), slots


@torch.no_grad()
@pytest.mark.parametrize("decided", ["exact", "exact, coded"], indirect=True)
def test_layers_whose_fine_pages_differ_share_slots_that_take_the_largest(decided):
    plain = qwen3_moe(count=EXPERTS)
    weight = plain.model.layers[1].mlp.experts.gate_up_proj
    weight *= torch.where(torch.rand_like(weight) < 0.2, 40.0, 1.0)  # many escapes
    vb = decided(copy.deepcopy(plain), 5, "model")
    cache = layer_of(vb.module).handle.deciding.cache.cache
    assert len(set(cache.slot_bytes.values())) == 2 and len(cache._pools) == 1
    for tokens in (1, 3, 2, 40, 1, 8):
        for ours, theirs in zip(vb.module.model.layers, plain.model.layers, strict=True):
            assert torch.equal(*both(ours.mlp.experts, theirs.mlp.experts, routed(tokens))), tokens


@torch.no_grad()
@pytest.mark.parametrize("scope", ["layer", "model"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("together", [256 << 20, 3 * PAGE])
def test_prompts_that_pass_by_the_cache_have_the_bits_of_the_plain_module(
    decided, monkeypatch, scope, implementation, together
):
    monkeypatch.setattr("vbrt.residency.expert_leases._CHUNK_BYTES", together)
    plain = qwen3_moe(count=EXPERTS, experts=implementation, layers=4)
    vb = decided(copy.deepcopy(plain), 5, scope, layers=4)
    ours, theirs = ([block.mlp.experts for block in model.model.layers] for model in (vb.module, plain))
    cached = ours[0].handle.deciding.cache
    assert cached.cache.has_ring and cached.passes(routed(40).ids) is (scope == "layer")  # a pool of all takes them
    for tokens in (40, 1, 12, 90, 2, 40):
        for layer, module in zip(ours, theirs, strict=True):
            assert torch.equal(*both(layer, module, routed(tokens))), tokens
    held = cached.cache.resident()
    for layer in ours:
        layer(*(getattr(routed(40), name) for name in ("x", "ids", "weights")))
    assert cached.cache.resident() == held
    outside = routed(12)
    outside.ids.fill_(EXPERTS)
    for layer in (*ours, *theirs):
        layer._is_expert_parallel = True
    assert torch.equal(*both(ours[1], theirs[1], outside))
    vb.close()


@torch.no_grad()
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("together", [256 << 20, 5 * PAGE, PAGE])
def test_the_host_hears_no_experts_where_one_lease_takes_them(decided, unheard, monkeypatch, implementation, together):
    monkeypatch.setattr("vbrt.residency.expert_leases._CHUNK_BYTES", together)
    plain = qwen3_moe(count=EXPERTS, experts=implementation)
    layer = layer_of(decided(copy.deepcopy(plain), EXPERTS).module)
    unheard()
    for tokens in (0, 1, 3, 7):
        given = routed(tokens)
        with Tape():  # which refuses what waits for a result
            got = run_experts(layer, given)
        assert torch.equal(got, layer_of(plain)(given.x, given.ids, given.weights)), tokens
    with pytest.raises(AssertionError, match="the host hears"):
        run_experts(layer, routed(8))


@torch.no_grad()
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("slots", [3, EXPERTS])
@pytest.mark.parametrize("together", [256 << 20, 3 * PAGE])
def test_ids_of_no_expert_are_passed_over(decided, monkeypatch, implementation, slots, together):
    monkeypatch.setattr("vbrt.residency.expert_leases._CHUNK_BYTES", together)
    plain = qwen3_moe(count=EXPERTS, experts=implementation)
    layer = layer_of(decided(copy.deepcopy(plain), slots).module)
    layer._is_expert_parallel = layer_of(plain)._is_expert_parallel = True  # which have such ids
    for tokens in (1, 3, 7, 20):
        given = routed(tokens)
        given.ids[-1] = given.ids[0, 1] = EXPERTS
        assert torch.equal(*both(layer, layer_of(plain), given)), tokens


#: plain, interleaved with bias, transposed, without gate, with a norm behind
CLASSES = ("Qwen3MoeExperts", "GptOssExperts", "AriaExperts", "NemotronHExperts", "MuseSparkExperts")


@pytest.mark.sample(5)
@torch.no_grad()
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", [name for name in CLASSES if name in DECORATED])
def test_experts_of_every_layout_give_the_bits_of_the_plain_module(decided, monkeypatch, name, implementation):
    plain = experts_module(name, dtype=torch.bfloat16, implementation=implementation)
    for slots in (4, 8):
        layer = decided(Holder(copy.deepcopy(plain)), slots, layers=1).module.experts
        for together in (256 << 20, 3 * layer.handle.pages[0].nbytes):
            monkeypatch.setattr("vbrt.residency.expert_leases._CHUNK_BYTES", together)
            for tokens in (1, 2, 3, 20):
                args = zoo.routed(plain, tokens, dtype=torch.bfloat16)
                assert torch.equal(layer(*args), plain(*args)), (slots, together, tokens)


@torch.no_grad()
def test_biases_and_norms_of_rows_are_applied(decided, monkeypatch):
    monkeypatch.setattr("vbrt.residency.expert_leases._CHUNK_BYTES", 3 * PAGE)
    for implementation in IMPLEMENTATIONS:
        plain = qwen3_moe(count=EXPERTS, experts=implementation)
        vb = decided(copy.deepcopy(plain), 7)
        for module in (layer_of(vb.module), layer_of(plain)):
            torch.manual_seed(1)
            module.has_bias, module.has_post_expert_norm = True, True
            module.gate_up_proj_bias = nn.Parameter(torch.randn(EXPERTS, 64).bfloat16(), requires_grad=False)
            module.down_proj_bias = nn.Parameter(torch.randn(EXPERTS, 64).bfloat16(), requires_grad=False)
            module.post_expert_norm = nn.RMSNorm(64, dtype=torch.bfloat16)
        for tokens in (1, 3, 20):
            assert torch.equal(*both(layer_of(vb.module), layer_of(plain), routed(tokens))), (implementation, tokens)


@torch.no_grad()
def test_autocast_and_other_dtypes_compute_as_the_plain_module_does(decided):
    for implementation in IMPLEMENTATIONS:
        plain = qwen3_moe(count=EXPERTS, experts=implementation)
        layer = layer_of(decided(copy.deepcopy(plain), 6).module)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for tokens in (1, 5, 20):
                assert torch.equal(*both(layer, layer_of(plain), routed(tokens, dtype=torch.float32))), tokens


@torch.no_grad()
def test_what_the_device_cannot_gather_the_host_leases_beside_its_cache_and_names(decided):
    plain = qwen3_moe(count=EXPERTS)
    vb = decided(copy.deepcopy(plain), 4)
    layer, module = layer_of(vb.module), layer_of(plain)
    run_experts(layer, routed(1))
    for model in (vb.module, plain):
        model.set_experts_implementation("eager")
    assert "the implementation eager asks which experts are touched: the host leases" in why_waits(layer.handle)
    for tokens in (1, 3, 20):
        assert torch.equal(*both(layer, module, routed(tokens))), tokens
    for model in (vb.module, plain):
        model.set_experts_implementation("grouped_mm")
        model.float()
    held = f"held as {layer.handle.spec.label} in torch.bfloat16, and cast to torch.float32"
    assert held in why_waits(layer.handle)
    for tokens in (1, 20):
        assert torch.equal(*both(layer, module, routed(tokens, dtype=torch.float32))), tokens


def test_gradients_flow_where_the_device_decides(decided):
    plain = qwen3_moe(count=EXPERTS)
    vb = decided(copy.deepcopy(plain), 5)
    for tokens in (1, 20):
        found = []
        for module in (layer_of(vb.module), layer_of(plain)):
            given = routed(tokens)
            x, weights = given.x.requires_grad_(), given.weights.requires_grad_()
            y = module(x, given.ids, weights)
            found.append((y.detach(), *torch.autograd.grad(y.float().square().sum(), (x, weights))))
        assert torch.equal(found[0][0], found[1][0])
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@torch.no_grad()
def test_budgets_reads_and_new_weights_leave_outputs_right(decided):
    plain = qwen3_moe(count=EXPERTS)
    vb = decided(copy.deepcopy(plain), 6)
    layer, module, cache = layer_of(vb.module), layer_of(plain), vb._attachment.expert_cache
    run_experts(layer, routed(7))
    assert torch.equal(layer.down_proj, module.down_proj)
    before = vb.stats().layers[layer.handle.spec.name]
    cache.reset()
    assert layer.handle.deciding.by == "host" and torch.equal(*both(layer, module, routed(7)))
    cache.follow()
    assert layer.handle.deciding.by == "gpu" and torch.equal(*both(layer, module, routed(7)))
    assert vb.stats().layers[layer.handle.spec.name].misses > before.misses > 0
    for one in (layer, module):
        one.down_proj.mul_(2)
    assert torch.equal(*both(layer, module, routed(7)))
    cache.follow()
    assert layer.handle.deciding.by == "gpu" and torch.equal(*both(layer, module, routed(7)))
    assert torch.equal(vb.unwrap().model.layers[1].mlp.experts.down_proj, module.down_proj)


@torch.no_grad()
def test_scans_are_refused_within_a_capture(decided, monkeypatch):
    layer = layer_of(decided(qwen3_moe(count=EXPERTS), 6).module)

    class OnGpu(torch.Tensor):
        is_cuda = True

    given = routed(20)
    monkeypatch.setattr(accelerator, "is_current_stream_capturing", lambda: True)
    with pytest.raises(TierError, match="the host hears which experts 40 ids name, and cannot in a CUDA graph"):
        run_experts(layer, Routed(given.x, given.ids.as_subclass(OnGpu), given.weights))


@torch.no_grad()
def test_exact_experts_that_no_kernel_merges_stay_with_the_host_which_is_said(monkeypatch):
    monkeypatch.setattr(accelerator, "is_current_stream_capturing", lambda: False)
    plain = qwen3_moe(count=EXPERTS)
    vb = wrap_beside(monkeypatch, copy.deepcopy(plain), "quantile+exact", room=8)
    cache, layer = vb._attachment.expert_cache, layer_of(vb.module)
    cache.follow()
    assert layer.handle.deciding.by == "host" and "quantile has levels of its own" in cache.fallbacks[0]
    assert "the host leases the experts that tokens are sent to" in why_waits(layer.handle)
    assert torch.equal(*both(layer, layer_of(plain), routed(3)))


@torch.no_grad()
@pytest.mark.parametrize("format", ["nvfp4", "nf4", "mxint8"])
def test_parts_of_a_prompt_by_the_kernels_are_the_whole(format, monkeypatch):
    """Pages that pass by a cache, multiplied on a CPU where they lie."""
    monkeypatch.setattr(Buffer, "pinned", True)
    monkeypatch.setattr(residency, "_launch", tables.launch)
    monkeypatch.setattr(accelerator, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("vbrt.model.expert_cache.why_host", lambda handle: "")
    plain = qwen3_moe(count=EXPERTS, dtype=torch.float32, layers=4)
    whole = wrap(copy.deepcopy(plain), format)
    vb = wrap_beside(monkeypatch, copy.deepcopy(plain), format, room=22)
    vb._attachment.expert_cache.follow()
    add, parts = KernelsProduct.add_passing, []

    def on_pages(product, part, pages):
        page = pages.layout.nbytes
        held = [bytes_of(at, page) if e in part.experts else None for e, at in enumerate(pages.addresses.tolist())]
        parts.append(len(part.experts))
        add(product, part, replace(pages, pages=held))

    monkeypatch.setattr(KernelsProduct, "add_passing", on_pages)
    for ours, theirs in zip(vb.module.model.layers, whole.module.model.layers, strict=True):
        cached = ours.mlp.experts.handle.deciding.cache
        given = routed(40, dtype=torch.float32)
        assert cached.passes(given.ids)
        got, want = both(ours.mlp.experts, theirs.mlp.experts, given)
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-6)
    assert len(parts) > 8 and max(parts) < EXPERTS
    vb.close()
