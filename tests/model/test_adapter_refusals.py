"""PEFT's adapters that would train nothing: refused by name."""

import pytest
import torch
from torch import nn

from tests.models import TOKENS, qwen3_moe, wrap
from vbrt.errors import WrapError

peft = pytest.importorskip("peft")

NAME = "model.layers.0.mlp.experts"


def adapted(model: nn.Module, *modules: str) -> nn.Module:
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    how = {"target_modules": list(modules), "target_parameters": names, "init_lora_weights": False}
    torch.manual_seed(2)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, **how))


def step(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:target_parameters")
@pytest.mark.parametrize("materialized", [False, True])
def test_adapters_on_experts_in_the_tiers_that_peft_does_not_find_are_refused_by_name(materialized, monkeypatch):
    monkeypatch.setattr("vbrt.layers.experts.experts_layer.asks_for_parameters", lambda: False)
    vb = wrap(qwen3_moe(dtype=torch.float32), "nvfp4")
    if materialized:
        vb.materialize()
    model = adapted(vb.module, "q_proj")
    with pytest.raises(WrapError, match=rf"{NAME}\.gate_up_proj: target_parameters of PEFT .*weights\.exclude"):
        step(model)


def test_excluded_experts_take_adapters_as_in_a_plain_model():
    vb = wrap(qwen3_moe(dtype=torch.float32), "dense", exclude=["*.experts"]).materialize()
    loss, grads = step(adapted(vb.module, "q_proj"))
    want_loss, want = step(adapted(qwen3_moe(dtype=torch.float32), "q_proj"))
    assert loss == pytest.approx(want_loss, rel=1e-6) and grads.keys() == want.keys()
    assert any("experts" in name for name in grads)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, want[name])


def test_other_adapters_pass():
    vb = wrap(qwen3_moe(dtype=torch.float32), "nvfp4").materialize()
    model = peft.get_peft_model(vb.module, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert step(model)[1]


@pytest.mark.parametrize("materialized", [False, True])
def test_a_block_that_peft_saves_is_refused_by_name_where_its_layers_would_not_train(materialized):
    vb = wrap(qwen3_moe(dtype=torch.float32), "dense")
    if materialized:
        vb.materialize()
    how = {"target_modules": ["q_proj"], "modules_to_save": ["layers.1.self_attn"]}
    model = peft.get_peft_model(vb.module, peft.LoraConfig(r=2, **how))
    for _ in range(2):
        with pytest.raises(
            WrapError, match=r"^model\.layers\.1\.self_attn: modules_to_save .* q_proj .*weights\.exclude"
        ):
            step(model)


def test_a_block_that_peft_has_saved_is_loaded_for_inference(tmp_path):
    def block(model):
        how = {"target_modules": ["layers.0.self_attn.q_proj"], "modules_to_save": ["layers.1.self_attn"]}
        return peft.get_peft_model(model, peft.LoraConfig(r=2, **how))

    plain = block(qwen3_moe(dtype=torch.float32))
    with torch.no_grad():
        plain.base_model.model.model.layers[1].self_attn.modules_to_save["default"].o_proj.weight.mul_(2)
        plain.save_pretrained(tmp_path)
        expected = plain(TOKENS).logits
        loaded = peft.PeftModel.from_pretrained(wrap(qwen3_moe(dtype=torch.float32), "dense").module, tmp_path)
        assert torch.equal(loaded(TOKENS).logits, expected)
