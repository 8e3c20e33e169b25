"""`vbrt.KVCache` on a CUDA device: pages in GPU memory, host memory and files."""

import copy

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

import vbrt
from tests.generation.kv.kv_stacks import layers_of
from vbrt.generation.kv.cache import KVLayer
from vbrt.generation.kv.quantized import KVShape, page_code
from vbrt.tiers import Level, MemoryTier, TierStack

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).cuda().eval()


@pytest.fixture(autouse=True)
def attention_without_cudnn():
    """cuDNN's attention to 811 tokens, of one query, is not the same each time: beside other processes the logits of
    two caches of transformers' own differ."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.backends.cuda.enable_cudnn_sdp(enabled)


def ids(count: int) -> torch.Tensor:
    return torch.randint(1, 512, (2, count), device="cuda", generator=torch.Generator("cuda").manual_seed(1))


def logits(model, cache, prompt: int = 700, steps: int = 150) -> list[torch.Tensor]:
    with torch.no_grad():
        found = [model(ids(prompt), past_key_values=cache).logits[:, -1:]]
        for _ in range(steps):
            found.append(model(found[-1].argmax(-1), past_key_values=cache).logits)
    return found


@pytest.mark.parametrize("home", ["gpu", "cpu", "pageable", "ssd"])
def test_logits_are_those_of_a_dynamic_cache(home, model, tmp_path):
    wanted = logits(model, DynamicCache())
    tiers = {"gpu": {"budget": "64MiB"}, "cpu": {"budget": "64MiB", "pinned": home != "pageable"}}
    if home == "ssd":
        tiers["cpu"]["budget"] = "4MiB"
        tiers["ssd"] = {"enabled": True, "path": str(tmp_path)}
    with vbrt.wrap(copy.deepcopy(model), "dense", tiers=tiers) as vb:
        if home == "ssd":
            blocker = vb.stack.levels[1].tier
            blocker.capacity_bytes = 0
        cache = vbrt.KVCache(vb, page=32, room=None if home == "gpu" else "2MiB")
        found = logits(vb, cache)
        assert [step for step, (a, b) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(a, b)] == []
        of = cache.stats()
        below = {"gpu": None, "pageable": "cpu"}.get(home, home)
        assert {tier for tier, nbytes in of.tier_bytes.items() if nbytes} == {"gpu", *([below] if below else [])}
        if below:
            assert of.prefetched >= 0.9 * of.misses > 100
        for tier in vb.stats().tiers.values():
            assert tier.held_bytes <= max(tier.budget_bytes, tier.peak_bytes)


@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_pages_stay_close_and_decode_as_on_the_cpu(bits, model):
    code = page_code(KVShape(2, 2, 32, 64, 64, torch.bfloat16), bits)
    keys, values = torch.randn(2, 2, 2, 96, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
    pages = code.encode(keys, values)
    assert torch.equal(pages.cpu(), code.encode(keys.cpu(), values.cpu()))
    for rows in (None, torch.tensor([1, 0, 1])):
        found = [tuple(x.new_empty(2 if rows is None else 3, 2, 96, 64) for x in (keys, values)) for _ in range(2)]
        code.decode(pages, found[0], rows if rows is None else rows.cuda())
        there = tuple(x.cpu() for x in found[1])
        code.decode(pages.cpu(), there, rows)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found[0], there, strict=True))
    wanted = torch.cat(logits(model, DynamicCache(), steps=0))
    with vbrt.wrap(model, "dense", tiers={"gpu": {"budget": "64MiB"}}) as vb, torch.no_grad():
        cache = vbrt.KVCache(vb, page=32, bits=bits)
        vb(ids(700)[:, :-1], past_key_values=cache)
        found = vb(ids(700)[:, -1:], past_key_values=cache).logits
        assert (found - wanted).float().norm() < 0.1 * wanted.float().norm()
        vb.unwrap()


def test_a_budget_change_moves_pages_between_passes(model):
    wanted = logits(model, DynamicCache(), steps=60)
    tiers = {"gpu": {"budget": "64MiB"}, "cpu": {"budget": "64MiB"}}
    with vbrt.wrap(copy.deepcopy(model), "dense", tiers=tiers) as vb, torch.no_grad():
        cache = vbrt.KVCache(vb, page=32)
        found = [vb(ids(700), past_key_values=cache).logits[:, -1:]]
        for step in range(60):
            if step % 20 == 10:
                vb.set_budget("gpu", ("7MiB", "9MiB", "64MiB")[step // 20])
            found.append(vb(found[-1].argmax(-1), past_key_values=cache).logits)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_large_extents_come_and_go_as_they_were(tmp_path):
    """Without a model in between: the link, the ring and the kernels as fast as they are."""
    gpu = torch.device("cuda", torch.cuda.current_device())
    stack = TierStack(
        [Level(MemoryTier("gpu", gpu, 1 << 30)), Level(MemoryTier("cpu", torch.device("cpu"), 1 << 30, pinned=True))]
    )
    layers = [KVLayer(layer) for layer in layers_of(stack, 4, room=192 << 20, page=256)]
    plain = [DynamicLayer() for _ in layers]
    for count in (6000, 6000, 6000, *[1] * 12, 300, *[1] * 12):
        results = []
        for layer, other in zip(layers, plain, strict=True):  # nothing waits within a pass
            new = torch.randn(2, 1, 8, count, 128, device=gpu).bfloat16().unbind(0)
            results.append((layer.update(*new), other.update(*new)))
        assert all(torch.equal(a, b) for pairs in results for a, b in zip(*pairs, strict=True))
    parts = layers[0].tokens.held.parts
    assert {part.extent.page.home for part in parts} == {0, 1}
    assert max(part.used for part in parts) > 1
    stack.close()
