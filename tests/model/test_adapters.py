"""PEFT's target_parameters on routed experts: they work on plain experts, and are refused by name in the tiers."""

import pytest
import torch
from torch import nn

import vbrt
from tests.models import TOKENS, qwen3_moe, wrap
from vbrt.errors import WrapError
from vbrt.layers.experts import VBExperts

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
def test_adapters_on_experts_in_the_tiers_are_refused_by_name_at_the_next_pass():
    vb = wrap(qwen3_moe(dtype=torch.float32), "nvfp4").materialize()
    model = adapted(vb.module, "q_proj")
    with pytest.raises(WrapError, match=rf"{NAME}\.gate_up_proj: target_parameters of PEFT .*weights\.exclude"):
        step(model)


def test_experts_of_a_model_that_has_adapters_are_refused_by_name_once_they_are_encoded():
    vb = vbrt.wrap(adapted(qwen3_moe(dtype=torch.float32)), "fp4", weights={"min_parameters": 0, "exclude": ["*lora*"]})
    assert any(swap.experts for swap in vb.plan.swaps)
    vb.materialize()
    with pytest.raises(WrapError, match=r"mlp\.experts.*down_proj: .* while it lives in the tiers .*parametrizations"):
        step(vb)


def test_excluded_experts_take_adapters_as_in_a_plain_model():
    vb = wrap(qwen3_moe(dtype=torch.float32), "dense", exclude=["*.experts"]).materialize()
    loss, grads = step(adapted(vb.module, "q_proj"))
    want_loss, want = step(adapted(qwen3_moe(dtype=torch.float32), "q_proj"))
    assert loss == pytest.approx(want_loss, rel=1e-6) and grads.keys() == want.keys()
    assert any("experts" in name for name in grads)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, want[name])


@pytest.mark.filterwarnings("ignore:.*left the tiers")
def test_experts_that_are_not_encoded_yet_leave_the_tiers_for_adapters():
    vb = wrap(qwen3_moe(dtype=torch.float32), "dense")
    with pytest.warns(UserWarning, match=f"{NAME}: left the tiers"):
        loss, grads = step(adapted(vb.module))
    want_loss, want = step(adapted(qwen3_moe(dtype=torch.float32)))
    assert loss == pytest.approx(want_loss, rel=1e-6) and grads.keys() == want.keys()
    assert not any(isinstance(module, VBExperts) for module in vb.module.modules())


def test_other_adapters_pass():
    vb = wrap(qwen3_moe(dtype=torch.float32), "nvfp4").materialize()
    model = peft.get_peft_model(vb.module, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert step(model)[1]
