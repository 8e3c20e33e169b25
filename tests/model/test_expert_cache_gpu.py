"""The GPU decides which experts are resident: the same bits as where the host does, in a graph too, and counted."""

import pytest
import torch

import vbrt
from tests.models import qwen3_moe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
NAME = "model.layers.0.mlp.experts"
EXPERTS = 16
FORMATS = ["nvfp4", "dense", "nvfp4+exact"]
CASES = [
    ("nvfp4", None),
    ("dense", None),
    ("nvfp4+exact", None),
    ("mxfp4+exact", None),
    ("nvfp4", (8, 0)),
    ("nvfp4", (8, 9)),
    ("nvfp4", (12, 0)),
]


def _wrapped(
    format: str = "nvfp4", *, policy: str = "experts", share: float = 0.5, dtype: torch.dtype = torch.bfloat16
) -> vbrt.VBModelWrapper:
    """Experts live in host memory; a share of them finds room on the GPU beside everything else."""
    format, _, fine = format.partition("+")
    weights = {"format": format, "fine": fine or "none", "min_parameters": 0}
    settings = {"weights": weights, "policy": {"kind": policy}}
    settings["compute"] = {"where": "device"}  # the CPU's products round otherwise
    model = qwen3_moe(dtype=dtype, count=EXPERTS, layers=3)
    plan = vbrt.make_plan(model, vbrt.config.load_config(settings))
    experts = sum(swap.page_bytes for swap in plan.swaps if swap.experts)
    rest, token = plan.page_bytes - experts, plan.largest_layer_bytes
    settings["tiers"] = {"gpu": {"budget": int(rest + 2 * token + share * experts)}}
    return vbrt.wrap(model, settings)


def _tokens(model: torch.nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(0)
    prompt = torch.randint(0, 128, (1, 24), device="cuda")
    return [prompt, *(torch.randint(0, 128, (1, 1), device="cuda") for _ in range(40))]


@pytest.mark.parametrize(("format", "capability"), CASES, indirect=["capability"])
@pytest.mark.usefixtures("capability")
@torch.no_grad()
def test_the_gpu_and_the_host_give_the_same_bits_and_the_same_counts(format):
    outputs, stats = {}, {}
    for policy in ("experts", "lru"):
        vb = _wrapped(format, policy=policy)
        outputs[policy] = [vb(tokens).logits for tokens in _tokens(vb.module)]
        stats[policy] = vb.stats(experts=True).layers[NAME]
        vb.close()
    assert stats["experts"].experts.decides == "gpu" and stats["lru"].experts.decides == "host"
    for one, other in zip(outputs["experts"], outputs["lru"], strict=True):
        assert torch.equal(one, other)
    seen = [stats[policy].hits + stats[policy].misses for policy in ("experts", "lru")]
    assert seen[0] == seen[1] > 0
    assert sum(stats["experts"].experts.each.hits) == stats["experts"].hits


@pytest.mark.parametrize(("format", "capability"), CASES, indirect=["capability"])
@pytest.mark.usefixtures("capability")
@torch.no_grad()
def test_a_decode_step_is_one_graph_that_follows_its_routing(format):
    vb, other = _wrapped(format), _wrapped(format, policy="lru")
    steps = _tokens(vb.module)
    want = [other(tokens).logits for tokens in steps]
    for tokens in steps[:3]:
        vb(tokens)
    token = steps[3].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        vb.module(token, use_cache=False)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = vb.module(token, use_cache=False).logits
    before = vb.stats().layers[NAME].experts
    for tokens, expected in zip(steps[1:], want[1:], strict=True):
        token.copy_(tokens)
        graph.replay()
        assert torch.equal(logits, expected)
    after = vb.stats().layers[NAME].experts
    assert after.cached - before.cached == len(steps) - 1 and after.tokens > before.tokens
    assert before.compared < after.compared and 0 < after.reuse < 1 < after.touched_a_token
    with pytest.raises(vbrt.errors.TierError, match="a CUDA graph has recorded"):
        vb.set_budget("gpu", vb.plan.budgets["gpu"] + (1 << 20))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("capability", [(8, 6)], indirect=True)
@pytest.mark.usefixtures("capability")
@torch.no_grad()
def test_prompts_of_other_dtypes_are_multiplied_without_the_host(dtype):
    outputs = []
    for policy in ("experts", "lru"):
        vb = _wrapped(policy=policy, dtype=dtype)
        outputs.append(vb(torch.arange(4096, device="cuda").view(1, -1) % 128).logits)
        decides = vb.stats(experts=True).layers[NAME].experts.decides
        assert decides == ("gpu" if policy == "experts" else "host")
        vb.close()
    assert torch.equal(*outputs)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4", "mxint8"])
@torch.no_grad()
def test_prompts_that_pass_by_the_cache_have_the_bits_of_resident_experts(format):
    vb = _wrapped(format, share=0.4)
    prompts = [torch.randint(0, 128, (1, tokens), device="cuda") for tokens in (9, 40, 300, 1100)]
    got = [vb(prompt).logits for prompt in (*prompts, *prompts)]
    cache = next(iter(vb._attachment.expert_cache._handles.values())).deciding.cache
    assert cache.cache.has_ring and not cache.whole(prompts[1].new_zeros(40, 2))
    held = cache.cache.resident()
    vb(prompts[2])
    assert cache.cache.resident() == held  # what decoding keeps stays
    vb.set_budget("gpu", "1GiB")
    assert vb.stats().layers[NAME].home == "gpu"
    for prompt, one, other in zip(prompts, got, got[len(prompts) :], strict=False):
        assert torch.equal(one, vb(prompt).logits) and torch.equal(one, other)


@pytest.mark.parametrize("format", FORMATS)
@torch.no_grad()
def test_budgets_new_weights_and_reads_leave_the_outputs_right(format):
    vb = _wrapped(format)
    steps = _tokens(vb.module)
    want = [vb(tokens).logits for tokens in steps[:4]]
    vb.set_budget("gpu", int(vb.plan.budgets["gpu"] * 0.8))
    assert all(torch.equal(vb(tokens).logits, logits) for tokens, logits in zip(steps, want, strict=False))
    assert vb.stats().layers[NAME].experts.decides == "gpu"
    layer = vb.module.get_submodule(NAME)
    before = layer.down_proj.clone()
    layer.down_proj.mul_(2)
    changed = vb(steps[0]).logits
    assert not torch.equal(changed, want[0])
    layer.down_proj.copy_(before)
    vb(steps[0])
    assert torch.equal(vb(steps[0]).logits, want[0])
    assert vb.stats().layers[NAME].experts.decides == "gpu"
    vb.set_budget("gpu", "1GiB")
    assert torch.equal(vb(steps[0]).logits, want[0])
    assert vb.stats().layers[NAME].home == "gpu"
    dense = vb.unwrap()
    assert torch.equal(dense.get_submodule(NAME).down_proj, before)
