"""PEFT's target_parameters on routed experts in the tiers: the results, gradients and files of the plain model."""

import copy

import pytest
import torch
from torch import nn

import vbrt
from tests.models import TOKENS, config, qwen3_moe, wrap
from vbrt.layers.experts import VBExperts, run_experts

peft = pytest.importorskip("peft")

TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FORMATS = ["dense", "nvfp4", "mxint8"]


def adapted(model: nn.Module, *, seed: int = 2, rank: int = 2, **how: object) -> nn.Module:
    torch.manual_seed(seed)
    config = {"target_modules": ["q_proj"], "target_parameters": TARGETS, "init_lora_weights": False} | how
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, **config))


def decoded(vb) -> nn.Module:
    """A plain model with the weights as they are held."""
    plain = copy.deepcopy(qwen3_moe(dtype=next(vb.parameters()).dtype))
    plain.load_state_dict({name: tensor.clone() for name, tensor in vb.state_dict().items()})
    return plain


def step(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same_step(model: nn.Module, plain: nn.Module) -> None:
    (loss, grads), (want_loss, want) = step(model), step(plain)
    assert loss == pytest.approx(want_loss, rel=1e-6) and grads.keys() == want.keys()
    assert sum("experts" in name for name in grads) == 8 and all(grad.any() for grad in grads.values())
    for name, grad in grads.items():
        torch.testing.assert_close(grad, want[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_step_is_that_of_the_plain_model_with_the_held_weights(format, implementation):
    vb = wrap(qwen3_moe(dtype=torch.float32), format).materialize()
    plain = decoded(vb)
    for model in (vb.module, plain):
        model.set_experts_implementation(implementation)
    same_step(adapted(vb.module), adapted(plain))


def test_of_many_pairs_all_experts_at_home_are_leased_without_asking_which_are_touched(monkeypatch):
    vb = wrap(qwen3_moe(dtype=torch.float32), "nvfp4").materialize()
    plain = adapted(decoded(vb))
    models = adapted(vb.module), plain

    def asks(ids, experts):
        raise AssertionError("the host asks for the touched experts")

    monkeypatch.setattr(run_experts, "touched_experts", asks)
    with pytest.raises(AssertionError, match="asks"):
        step(models[0])  # 24 pairs, of 8 experts
    monkeypatch.setattr(run_experts, "_NEARLY_ALL", 3)
    experts = vb.stats().layers["model.layers.0.mlp.experts"]
    same_step(*models)
    assert vb.stats().layers["model.layers.0.mlp.experts"].hits - experts.hits == 2 * 8  # a forward, a backward


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["dense", "exact", "nvfp4", "mxint8", "nf4", "t3"])
@pytest.mark.parametrize("home", ["gpu", "cpu"])
def test_many_leased_experts_are_decoded_to_the_bits_of_each(format, home):
    vb = vbrt.wrap(
        qwen3_moe(dtype=torch.bfloat16, count=16).cuda(), {"weights": config(format)["weights"]}
    ).materialize()
    handle = vb.module.model.layers[-1].mlp.experts.handle
    vb.runtime.open_stores()
    vb.stack.rehome(dict.fromkeys(handle.keys, home))
    assert handle.at_home == (home == "gpu")
    for experts in (range(16), [1, 4, 15]):
        with handle.lease(experts) as leased:
            for name, part in zip(handle.spec.parameters, handle.spec.parts, strict=True):
                each = [leased.matrix(part, position) for position in range(len(experts))]
                assert torch.equal(leased.parameters()[name], torch.stack(each))
    vb.close()


def test_nothing_is_decoded_whole_and_no_weight_becomes_a_parameter(monkeypatch):
    vb = wrap(qwen3_moe(dtype=torch.float32), "nvfp4").materialize()
    names = {name for name, _ in vb.named_parameters()}

    def whole(self, name):
        raise AssertionError(f"{name} is decoded whole")

    monkeypatch.setattr(VBExperts, "_by_operator", whole)
    model = adapted(vb.module)
    step(model)
    assert {name for name, _ in vb.named_parameters() if "lora" not in name} == {
        name.replace("q_proj.bias", "q_proj.base_layer.bias") for name in names
    }


def test_experts_that_stream_from_files_train_their_adapters(tmp_path):
    model = qwen3_moe(dtype=torch.float32)
    plan = vbrt.make_plan(model, vbrt.load_config("dense", weights={"min_parameters": 0}))
    tiers = {"gpu": {"enabled": False}, "cpu": {"budget": plan.page_bytes * 2 // 3}}
    tiers["ssd"] = {"enabled": True, "path": str(tmp_path)}
    vb = vbrt.wrap(copy.deepcopy(model), "dense", weights={"min_parameters": 0}, tiers=tiers).materialize()
    assert any(page.home == "ssd" for swap in vb.plan.swaps for page in swap.pages)
    same_step(adapted(vb.module), adapted(model))
    vb.close()


def test_checkpointed_blocks_recompute_with_their_adapters():
    vb, plain = wrap(qwen3_moe(dtype=torch.float32), "dense").materialize(), qwen3_moe(dtype=torch.float32)
    models = adapted(vb.module), adapted(plain)
    for model in models:
        model.train()
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    same_step(*models)


def test_a_model_that_has_adapters_already_is_wrapped_with_them():
    model = adapted(qwen3_moe(dtype=torch.float32))
    plain = copy.deepcopy(model)
    vb = vbrt.wrap(model, "dense", weights={"min_parameters": 0, "exclude": ["*lora*"]}).materialize()
    assert any(swap.experts for swap in vb.plan.swaps)
    same_step(vb, plain)


def test_adapters_are_switched_disabled_merged_and_unloaded():
    vb, plain = wrap(qwen3_moe(dtype=torch.float32), "dense").materialize(), qwen3_moe(dtype=torch.float32)
    models = [adapted(model, target_modules=[]) for model in (vb.module, plain)]
    for model in models:
        torch.manual_seed(5)
        config = peft.LoraConfig(r=3, target_modules=[], target_parameters=TARGETS, init_lora_weights=False)
        model.add_adapter("other", config)

    def same(**tolerance):
        with torch.no_grad():
            one, other = (model(input_ids=TOKENS).logits for model in models)
        torch.testing.assert_close(one, other, **tolerance or {"rtol": 0, "atol": 0})
        return one

    first = same()
    for model in models:
        model.set_adapter("other")
    assert not torch.equal(first, same())
    with models[0].disable_adapter(), models[1].disable_adapter():
        bare = same()
    for model in models:
        model.merge_adapter()
    merged = same()
    assert not torch.equal(merged, bare)
    for model in models:
        model.unmerge_adapter()
    same(rtol=1e-4, atol=1e-5)
    unloaded = [model.merge_and_unload() for model in models]
    assert isinstance(unloaded[0].model.layers[0].mlp.experts, VBExperts)
    models = unloaded
    same(rtol=1e-4, atol=1e-5)


def test_adapters_are_saved_and_loaded_as_those_of_plain_experts(tmp_path):
    vb, plain = wrap(qwen3_moe(dtype=torch.float32), "dense").materialize(), qwen3_moe(dtype=torch.float32)
    trained = adapted(vb.module)
    trained.save_pretrained(tmp_path)
    with torch.no_grad():
        want = trained(input_ids=TOKENS).logits
        other = wrap(qwen3_moe(dtype=torch.float32), "dense").materialize()
        for model in (plain, other.module):
            loaded = peft.PeftModel.from_pretrained(model, tmp_path)
            assert torch.equal(loaded(input_ids=TOKENS).logits, want)


def test_generated_tokens_are_those_of_the_plain_model_and_steps_say_why_they_are_eager():
    vb, plain = wrap(qwen3_moe(dtype=torch.float32), "dense").materialize(), qwen3_moe(dtype=torch.float32)
    models = adapted(vb.module).eval(), adapted(plain).eval()
    given = {"max_new_tokens": 8, "do_sample": False}
    one, other = (model.generate(input_ids=TOKENS[:1], **given) for model in models)
    assert torch.equal(one, other)


def test_a_compiled_model_trains_its_adapters():
    vb, plain = wrap(qwen3_moe(dtype=torch.float32), "dense").materialize(), qwen3_moe(dtype=torch.float32)
    model = adapted(vb.module)
    model.model.model.layers[0].mlp = torch.compile(model.model.model.layers[0].mlp, backend="eager")
    loss, grads = step(model)
    want_loss, want = step(adapted(plain))
    assert loss == pytest.approx(want_loss, rel=1e-6)
    for (name, grad), other in zip(sorted(grads.items()), (want[name] for name in sorted(want)), strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-7, msg=name)
