"""Modules of routed experts in the tiers: what they compute, and what everybody else sees of them."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import vbrt
from tests.matrix import matrix
from tests.models import TOKENS, config, qwen3_moe, wrap
from vbrt.errors import FormatError, WrapError
from vbrt.layers.experts import VBExperts, run_experts

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
NAME = "model.layers.0.mlp.experts"


def _experts(model: nn.Module) -> nn.Module:
    return model.get_submodule(NAME)


def _streamed(model: nn.Module, format: str, path: Path) -> vbrt.VBModelWrapper:
    """All experts at home on the ssd, with host memory for what one token needs."""
    settings = config(format)
    settings["tiers"]["cpu"] = {"budget": vbrt.make_plan(model, vbrt.config.load_config(settings)).largest_layer_bytes}
    settings["tiers"]["ssd"] = {"enabled": True, "path": str(path)}
    return vbrt.wrap(model, settings)


@matrix(experts=IMPLEMENTATIONS, format=("dense", "exact"), dtype=(torch.bfloat16, torch.float32))
@torch.no_grad()
def test_lossless_experts_are_those_of_the_implementation_that_the_config_names(experts, format, dtype):
    plain = qwen3_moe(dtype=dtype, experts=experts)
    logits, tokens = plain(TOKENS).logits, plain.generate(TOKENS, max_new_tokens=6, do_sample=False)
    vb = wrap(qwen3_moe(dtype=dtype, experts=experts), format)
    assert isinstance(_experts(vb.module), VBExperts)
    assert torch.equal(vb(TOKENS).logits, logits)
    assert torch.equal(vb.generate(TOKENS, max_new_tokens=6, do_sample=False), tokens)


@matrix(experts=IMPLEMENTATIONS, format=("dense", "exact"), at_once=(1, 2))
@torch.no_grad()
def test_a_budget_for_few_experts_at_a_time_changes_no_bit(tmp_path, monkeypatch, experts, format, at_once):
    for dtype in (torch.bfloat16, torch.float32):
        logits = qwen3_moe(dtype=dtype, experts=experts)(TOKENS).logits
        vb = _streamed(qwen3_moe(dtype=dtype, experts=experts), format, tmp_path / str(dtype))
        monkeypatch.setattr(run_experts, "_experts_at_once", lambda handle, scan: at_once)
        assert torch.equal(vb(TOKENS).logits, logits)
        vb.close()


@matrix(format=("nvfp4", "mxfp4", "nf4", "quantile", "mxint8"))
@torch.no_grad()
def test_four_bits_compute_with_the_decoded_experts(format):
    vb = wrap(qwen3_moe(dtype=torch.float32, experts="eager"), format)
    vb.materialize()
    got = vb(TOKENS).logits
    torch.testing.assert_close(got, vb.unwrap()(TOKENS).logits, rtol=2e-3, atol=2e-3)


@torch.no_grad()
def test_one_page_for_each_expert_and_plane_holds_both_matrices():
    vb = wrap(qwen3_moe(), "exact")
    vb.materialize()
    swap = next(swap for swap in vb.plan.swaps if swap.name == NAME)
    assert (swap.experts, swap.top_k) == (8, 2)
    assert {page.key for page in swap.pages} == {
        f"{NAME}#{plane}.{e}" for plane in ("coarse", "fine") for e in range(8)
    }
    page = vb.stack.pages[f"{NAME}#coarse.3"]
    assert {field.name.partition(".")[0] for field in page.layout.fields} == {"up", "down"}
    assert not any("3-D" in skip.reason for skip in vb.plan.skipped.values())


@torch.no_grad()
def test_a_forward_leases_the_experts_of_its_tokens_only():
    vb = wrap(qwen3_moe(), "nvfp4")
    layer, x = _experts(vb.module), torch.randn(3, 64, dtype=torch.bfloat16)
    layer(x, torch.tensor([[1, 5], [5, 1], [1, 5]]), torch.rand(3, 2))
    touched = {key for key, page in vb.stack.pages.items() if page.hits + page.misses}
    assert touched == {f"{NAME}#coarse.1", f"{NAME}#coarse.5"}


@pytest.mark.parametrize("experts", IMPLEMENTATIONS)
@torch.no_grad()
def test_autocast_casts_what_it_casts_in_the_plain_module(experts):
    plain, vb = qwen3_moe(dtype=torch.float32, experts=experts), wrap(qwen3_moe(dtype=torch.float32, experts=experts))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(vb(TOKENS).logits, plain(TOKENS).logits)


def test_experts_that_are_asked_to_train_leave_the_tiers():
    vb = wrap(qwen3_moe(), "exact")
    vb.materialize()
    layer = _experts(vb.module)
    weights = layer.gate_up_proj.clone(), layer.down_proj.clone()
    with pytest.warns(UserWarning, match=f"{NAME} left the tiers to train"):
        layer.requires_grad_(True)
    assert type(layer).__name__ == "Qwen3MoeExperts"
    assert layer.gate_up_proj.requires_grad and layer.down_proj.requires_grad
    assert torch.equal(layer.gate_up_proj, weights[0]) and torch.equal(layer.down_proj, weights[1])


@torch.no_grad()
def test_tracers_see_the_plain_module_on_decoded_experts():
    from torch.fx.experimental.proxy_tensor import make_fx

    vb = wrap(qwen3_moe(), "exact")
    vb.materialize()
    layer, ids = _experts(vb.module), torch.tensor([[0, 1], [2, 3], [1, 5]])
    x, weights = torch.randn(3, 64, dtype=torch.bfloat16), torch.rand(3, 2, dtype=torch.bfloat16)
    y = layer(x, ids, weights)
    assert torch.equal(make_fx(lambda x, w: layer(x, ids, w))(x, weights)(x, weights), y)
    assert torch.equal(torch.func.vmap(lambda w: layer(x, ids, w))(weights[None])[0], y)


@torch.no_grad()
def test_what_would_compute_the_weights_of_something_else_is_refused_by_name():
    vb = wrap(qwen3_moe(), "exact")
    logits = vb(TOKENS).logits
    with pytest.raises(WrapError, match=rf"{NAME}: gate_up_proj_orig cannot take the place"):
        torch.nn.utils.prune.l1_unstructured(_experts(vb.module), "gate_up_proj", 0.3)
    assert torch.equal(vb(TOKENS).logits, logits)


@matrix(format=("dense", "nvfp4"), experts=IMPLEMENTATIONS)
@torch.no_grad()
def test_sentinel_ids_add_nothing(format, experts):
    plain, vb = _experts(qwen3_moe(experts=experts)), wrap(qwen3_moe(experts=experts), format)
    x, ids, weights = torch.randn(4, 64, dtype=torch.bfloat16), torch.randint(0, 8, (4, 2)), torch.rand(4, 2)
    layer = _experts(vb.module)
    layer._is_expert_parallel = plain._is_expert_parallel = True
    ids[1], ids[2, 0] = 8, 8
    masked = weights.masked_fill(ids == 8, 0.0)
    got = layer(x, ids, masked)
    assert not got[1].any()
    torch.testing.assert_close(got, layer(x, ids.clamp(max=7), masked), rtol=2e-2, atol=1e-3)
    if format == "dense":
        assert torch.equal(got, plain(x, ids, masked))


def test_gradients_reach_hidden_states_and_routing_weights():
    plain, vb = _experts(qwen3_moe(dtype=torch.float32)), wrap(qwen3_moe(dtype=torch.float32), "dense")
    ids, grads = torch.randint(0, 8, (5, 2)), []
    start, weights = torch.randn(5, 64), torch.rand(5, 2)
    for layer in (plain.requires_grad_(False), _experts(vb.module)):
        x, w = start.clone().requires_grad_(), weights.clone().requires_grad_()
        layer(x, ids, w).square().sum().backward()
        grads.append((x.grad, w.grad))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_reading_writing_and_assigning_a_parameter_is_as_on_the_plain_module():
    plain, vb = qwen3_moe(), wrap(qwen3_moe(), "exact")
    weights, logits = {name: t.clone() for name, t in plain.state_dict().items()}, plain(TOKENS).logits
    vb(TOKENS)
    layer = _experts(vb.module)
    assert torch.equal(layer.gate_up_proj, weights[f"{NAME}.gate_up_proj"])
    layer.down_proj.mul_(2)
    _experts(plain).down_proj.mul_(2)
    assert torch.equal(vb(TOKENS).logits, plain(TOKENS).logits)
    layer.down_proj = nn.Parameter(weights[f"{NAME}.down_proj"])
    assert torch.equal(vb(TOKENS).logits, logits)
    with pytest.raises(WrapError, match=r"experts\.down_proj: the new weight has shape \(1, 2\)"):
        layer.down_proj = nn.Parameter(torch.zeros(1, 2))


@matrix(format=("dense", "exact"))
@torch.no_grad()
def test_state_dicts_copies_pickles_and_unwrap_give_the_plain_weights(format):
    plain, vb = qwen3_moe(), wrap(qwen3_moe(), format)
    weights, logits = plain.state_dict(), plain(TOKENS).logits
    vb.materialize()
    assert vb.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in vb.state_dict().items())
    assert torch.equal(copy.deepcopy(vb)(TOKENS).logits, logits)
    assert torch.equal(pickle.loads(pickle.dumps(vb.module))(TOKENS).logits, logits)
    assert {name for name, _ in vb.module.named_parameters()} <= weights.keys()
    half = {name: tensor / 2 if "experts" in name else tensor for name, tensor in weights.items()}
    vb.load_state_dict(half)
    plain.load_state_dict(half)
    assert torch.equal(vb(TOKENS).logits, plain(TOKENS).logits)
    model = vb.unwrap()
    assert type(_experts(model)) is type(_experts(plain))
    assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)


@torch.no_grad()
def test_weights_that_functional_call_gives_count_for_that_call_only():
    plain, vb = qwen3_moe(), wrap(qwen3_moe(), "exact")
    logits = vb(TOKENS).logits
    name = f"{NAME}.down_proj"
    given = {name: plain.state_dict()[name] * 3}
    want = torch.func.functional_call(plain, given, (TOKENS,)).logits
    assert torch.equal(torch.func.functional_call(vb.module, given, (TOKENS,)).logits, want)
    assert torch.equal(vb(TOKENS).logits, logits)


@torch.no_grad()
def test_an_expert_that_cannot_be_encoded_is_named_and_nothing_changes():
    model = qwen3_moe()
    _experts(model).down_proj[5, 0, 0] = float("nan")
    vb = wrap(model, "nvfp4")
    with pytest.raises(FormatError, match=r"experts\.down_proj\[5\]: .* 1 NaN"):
        vb.materialize()
    assert not [key for key in vb.stack.pages if key.startswith(NAME)]
    _experts(model).down_proj[5, 0, 0] = 0.0
    assert vb(TOKENS).logits.isfinite().all()


@pytest.mark.sample(1)
@matrix(fullgraph=(True,), format=("nvfp4", "exact"))
@torch.no_grad()
def test_a_compiled_model_computes_as_the_eager_one(fullgraph, format):
    vb = wrap(qwen3_moe(layers=1), format)
    logits = vb(TOKENS).logits
    compiled = torch.compile(vb.module, backend="aot_eager", fullgraph=fullgraph)
    assert torch.equal(compiled(TOKENS).logits, logits)


@matrix(format=("dense", "exact", "nvfp4", "mxfp4", "quantile"))
@torch.no_grad()
def test_a_save_is_loaded_without_the_dense_model(tmp_path, format):
    vb = wrap(qwen3_moe(), format)
    logits = vb(TOKENS).logits
    vb.save(tmp_path)
    with torch.device("meta"):
        model = qwen3_moe()
    loaded = vbrt.load(tmp_path, model, tiers={"gpu": {"enabled": False}})
    assert torch.equal(loaded(TOKENS).logits, logits)
    assert [swap.name for swap in loaded.plan.swaps] == [swap.name for swap in vb.plan.swaps]


class _Counted(tuple):
    """Pages, and how often somebody walked them."""

    walks = 0

    def __iter__(self):
        _Counted.walks += 1
        return super().__iter__()


@torch.no_grad()
def test_a_pass_walks_no_pages_until_some_have_moved(tmp_path, monkeypatch):
    vb = _streamed(qwen3_moe(), "nvfp4", tmp_path)
    vb.materialize()
    handle = _experts(vb.module).handle
    handle.pages = _Counted(handle.pages)
    monkeypatch.setattr(_Counted, "walks", 0)
    assert handle.streams and handle.streams and _Counted.walks == 1
    vb.set_budget("cpu", "1GiB")  # all of them live there now
    walked = _Counted.walks
    assert not handle.streams and not handle.streams and _Counted.walks == walked + 1
    vb.close()
