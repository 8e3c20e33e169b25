"""Routed experts in mode "full": each stacked parameter is one weight, with the bits of resident training."""

import contextlib
import copy
import functools

import pytest
import torch
from torch import nn

import vbrt
from tests.models import qwen3_moe
from tests.training.full.full_models import Masters
from tests.zoo.experts import DECORATED, SPECIAL, Holder, called, experts_module, routed, special_module
from vbrt.training.full.full_experts import FullExperts

EXPERTS = "model.layers.1.mlp.experts"
KIB = 1024


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True)


def gpt_oss(*, experts: str = "eager") -> nn.Module:
    """A GptOssForCausalLM: experts that are kept transposed, with biases, which stay on the device."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(5)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2}
    model = GptOssForCausalLM(GptOssConfig(**sizes, **heads)).to(torch.bfloat16)
    model.set_experts_implementation(experts)
    return model


def wrap(model, tmp_path=None, budget: int = 1 << 20, **settings):
    tiers = {"cpu": {"budget": budget}, "ssd": {"enabled": True, "path": str(tmp_path)}} if tmp_path else {}
    return vbrt.wrap(model, "full", optimizer=adamw, tiers=tiers, weights={"min_parameters": 0}, **settings)


def train(model, optimizer, loop: str = "", steps: int = 3) -> list[float]:
    """Two passes a step, of few tokens: most experts get none in a pass, and some in a step."""
    found, draw = [], torch.Generator().manual_seed(2)
    for _ in range(steps):
        for last in (False, True):
            ids = torch.randint(128, (1, 4), generator=draw)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            begins = last and loop == "stepping" and hasattr(model, "stepping")
            with model.stepping() if begins else contextlib.nullcontext():
                loss.backward()
            found.append(loss.item())
        if not begins:
            optimizer.step()
        model.zero_grad()
    return found


MODELS = {
    "qwen3": functools.partial(qwen3_moe, experts="eager"),
    "qwen3, grouped": functools.partial(qwen3_moe, experts="grouped_mm"),
    "gpt-oss": gpt_oss,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "loop", "budget"),
    [
        ("qwen3", "", 0),
        ("qwen3, grouped", "stepping", 250 * KIB),
        ("gpt-oss", "recomputed", 0),
        ("gpt-oss", "", 250 * KIB),
    ],
)
def test_models_train_as_with_resident_masters(tmp_path, no_fsync, name, loop, budget):
    model = MODELS[name]().train()
    if loop == "recomputed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    twin = copy.deepcopy(model)
    by = Masters(twin, adamw)
    vb = wrap(model, tmp_path if budget else None, budget)
    assert isinstance(vb.module.get_submodule(EXPERTS), FullExperts) and f"{EXPERTS}.down_proj" in vb.registry
    assert "qwen3" not in name or not any("experts" in skipped for skipped in vb.plan.skipped)
    assert train(vb, vb.optimizer, loop) == train(twin, by, loop)
    assert all(torch.equal(p, m) for p, (_, m) in zip(vb.unwrap().parameters(), by.pairs, strict=True))
    assert type(model.get_submodule(EXPERTS)) is type(twin.get_submodule(EXPERTS))


def test_experts_without_tokens_decay_as_rows_of_a_stacked_parameter_do():
    layer = experts_module("Qwen3MoeExperts", dtype=torch.bfloat16, implementation="eager").requires_grad_()
    x, ids, weights = routed(layer, dtype=torch.bfloat16)
    vb = wrap(Holder(layer))
    before = layer.gate_up_proj.weight.master()
    for few in (ids.clamp(max=1), ids):  # in the second step all have tokens
        vb(x, few, weights).float().square().sum().backward()
        assert not layer.gate_up_proj.grad[2:].any() or few is ids
        vb.step()
        if few is not ids:
            assert torch.equal(layer.gate_up_proj.weight.master()[2:], before[2:] * (1 - 1e-2 * 0.1))
        vb.zero_grad()
    assert vb.stats().updates.steps == 2


def _sampled(names, sample):
    return [pytest.param(n, marks=() if n in sample else pytest.mark.exhaustive) for n in names]


@pytest.mark.parametrize("name", _sampled([*DECORATED, *SPECIAL], ("LongcatFlashExperts", "JetMoeParallelExperts")))
def test_every_class_of_experts_trains_as_resident(name):
    special = name in SPECIAL
    plain = (special_module if special else experts_module)(name, dtype=torch.bfloat16).requires_grad_().train()
    args = called(name, 6, dtype=torch.bfloat16) if special else routed(plain, dtype=torch.bfloat16)
    model, twin = Holder(plain), Holder(copy.deepcopy(plain))
    vb = wrap(model)
    if name == "DbrxExperts":
        assert "stay dense in mode" in vb.plan.skipped["experts.mlp"].reason
        return
    assert isinstance(model.experts, FullExperts)
    by = Masters(twin, adamw)
    for _ in range(2):
        found = []
        for one, optimizer in ((vb, vb.optimizer), (twin, by)):
            first, *rest = args
            x = first.clone().requires_grad_()
            y = one(x, *rest)
            y.float().square().sum().backward()
            optimizer.step()
            one.zero_grad()
            found.append((y, x.grad))
        assert all(map(torch.equal, *found))
    assert all(torch.equal(p, m) for p, (_, m) in zip(vb.unwrap().parameters(), by.pairs, strict=True))


def test_a_module_in_fp32_trains_under_autocast_as_resident():
    plain = experts_module("Qwen3MoeExperts", implementation="eager").requires_grad_().train()
    twin = copy.deepcopy(plain)
    vb = wrap(Holder(plain))
    optimizer, (x, ids, weights) = adamw(twin.parameters()), routed(twin)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            y = vb(x, ids, weights)
            expected = twin(x, ids, weights)
        assert torch.equal(y, expected)
        for one, out, by in ((vb, y, vb.optimizer), (twin, expected, optimizer)):
            out.square().sum().backward()
            by.step()
            one.zero_grad()
    assert all(torch.equal(v, vb.state_dict()[f"experts.{name}"]) for name, v in twin.state_dict().items())
    with pytest.raises(vbrt.WrapError, match=r"its input is torch\.float32"):
        vb(x, ids, weights)


def test_checkpoints_and_state_dicts_have_whole_parameters(tmp_path):
    one, other = (wrap(MODELS["qwen3"]().train(), *tiers) for tiers in ((), (tmp_path / "pages", 250 * KIB)))
    train(one, one.optimizer)
    one.save_checkpoint(tmp_path / "run")
    other.load_checkpoint(tmp_path / "run")
    assert train(one, one.optimizer) == train(other, other.optimizer)
    whole = one.state_dict()
    assert whole[f"{EXPERTS}.gate_up_proj"].shape == (8, 64, 64)
    other.load_state_dict({name: value + 1 for name, value in whole.items()})
    assert torch.equal(other.state_dict()[f"{EXPERTS}.down_proj"], whole[f"{EXPERTS}.down_proj"] + 1)
    with pytest.raises(
        vbrt.WrapError, match=r"experts.gate_up_proj: save: .* one page with the matrices of all experts"
    ):
        one.save(tmp_path / "planes")


def test_frozen_experts_stream_and_stay():
    plain = experts_module("Qwen3MoeExperts", dtype=torch.bfloat16)
    twin = copy.deepcopy(plain)
    vb = wrap(Holder(plain))
    assert isinstance(plain, FullExperts)
    grads = []
    for one in (vb, twin):
        x, ids, weights = routed(twin, dtype=torch.bfloat16)
        one(x.requires_grad_(), ids, weights).float().square().sum().backward()
        grads.append(x.grad)
    vb.step()
    assert torch.equal(*grads)
    assert torch.equal(vb.state_dict()["experts.down_proj"], twin.down_proj.float()) and plain.down_proj.grad is None


def test_a_weight_that_was_updated_after_the_forward_is_refused():
    plain = experts_module("Qwen3MoeExperts", dtype=torch.bfloat16).requires_grad_().train()
    vb = wrap(Holder(plain))
    args = routed(plain, dtype=torch.bfloat16)
    late = vb(*args).float().sum()
    vb(*args).float().sum().backward()
    vb.step()
    with pytest.raises(vbrt.WrapError, match="updated between forward and backward"):
        late.backward()
