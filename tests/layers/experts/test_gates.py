"""gate_of names a Gate for what is known, and gives nothing for what is not."""

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from tests.matrix import matrix
from tests.zoo.experts import DECORATED, INNER, experts_module
from vbrt.kernels.experts import Gate, apply_gate
from vbrt.layers.experts.gates import act_gate, gate_of, kept_gate, own_gate

#: classes whose gate is no Gate of the kernels, with the reason
OWN = dict.fromkeys(("Inkling2Experts", "Inkling2LoopExperts"), "softcaps on both factors")
#: what differs from SwiGLU, at the config of tests/zoo/experts.py
SPECIAL = {
    "DeepseekV4Experts": Gate("silu", limit=0.5),
    "Glm5NextTextExperts": Gate("silu", limit=0.5),
    "HYV4Experts": Gate("silu", limit=0.5),
    "HYV4VLExperts": Gate("silu", limit=0.5),
    "GptOssExperts": Gate("silu", interleaved=True, alpha=1.702, limit=0.5, shift=1.0),
    "OpenAIPrivacyFilterExperts": Gate("silu", alpha=1.702, limit=0.5, shift=1.0),
    "MiniMaxM3VLExperts": Gate("silu", alpha=1.702, limit=0.5, shift=1.0),
    "NemotronHExperts": Gate("silu", gated=False),
}
#: those in the default run that differ, and one of the sixty that do not
SAMPLE = [*SPECIAL, *OWN, "BeamExperts", "MixtralExperts"]


def products(name: str, dtype: torch.dtype) -> torch.Tensor:
    width = INNER if name == "NemotronHExperts" else 2 * INNER
    return (torch.randn(64, width, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.exhaustive) for n in sorted(DECORATED)]
)
def test_the_gate_of_each_class_gives_what_its_own_function_gives(name: str) -> None:
    module = experts_module(name)
    gate = gate_of(module)
    assert gate == (None if name in OWN else SPECIAL.get(name, Gate("silu")))
    if gate is None:
        return
    for dtype, off in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        v = products(name, dtype)
        torch.testing.assert_close(apply_gate(v, gate), own_gate(module)(v), rtol=off, atol=off)


def test_every_class_in_the_tables_is_one_that_transformers_has() -> None:
    assert set(SAMPLE) <= set(DECORATED)
    assert len(DECORATED) >= 65


@matrix(act=["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "relu", "relu2", "linear"])
def test_activations_have_their_gate(act: str) -> None:
    module = experts_module("MixtralExperts", act=act)
    v, gate = products("MixtralExperts", torch.float32), gate_of(module)
    torch.testing.assert_close(apply_gate(v, gate), module._apply_gate(v), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("act", ["gelu_10", "mish", "sigmoid", "tanh", "relu6", "prelu"])
def test_an_activation_that_no_kernel_has_gives_no_gate(act: str) -> None:
    assert act in ACT2FN
    assert gate_of(experts_module("MixtralExperts", act=act)) is None


def test_a_quick_gelu_without_a_gate_gives_none() -> None:
    assert gate_of(experts_module("NemotronHExperts", act="quick_gelu")) is None


def test_a_function_that_an_instance_or_subclass_brings_gives_none() -> None:
    module = experts_module("MixtralExperts")
    module._apply_gate = lambda v: v.chunk(2, -1)[0]
    assert gate_of(module) is None

    class Halved(nn.SiLU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) / 2

    module = experts_module("MixtralExperts")
    module.act_fn = Halved()
    assert gate_of(module) is None


def test_a_kept_gate_follows_the_activation_its_hooks_and_the_modules_numbers() -> None:
    module = experts_module("GptOssExperts")
    assert kept_gate(module) == SPECIAL["GptOssExperts"]
    module.limit = 7.0
    assert kept_gate(module).limit == 7.0
    module = experts_module("MixtralExperts")
    assert kept_gate(module) == Gate("silu")
    module.act_fn = nn.GELU()
    assert kept_gate(module) == Gate("gelu") and kept_gate(module) is kept_gate(module)
    hook = module.act_fn.register_forward_hook(lambda *args: None)
    assert kept_gate(module) is None, "a hook that nothing would call"
    hook.remove()
    assert kept_gate(module) == Gate("gelu")
    module.act_fn.forward = torch.tanh
    assert kept_gate(module) is None


def test_a_library_whose_function_has_changed_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    module = experts_module("GptOssExperts")
    own = type(module)._apply_gate

    def changed(self: nn.Module, v: torch.Tensor) -> torch.Tensor:
        return own(self, v) * 1.01

    changed.__module__, changed.__qualname__ = own.__module__, own.__qualname__
    monkeypatch.setattr(type(module), "_apply_gate", changed)
    assert gate_of(module) is None


def test_a_class_that_writes_its_gate_out_may_use_ours() -> None:
    class Experts(nn.Module):
        _apply_gate = act_gate

        def __init__(self) -> None:
            super().__init__()
            self.act_fn = ACT2FN["gelu"]

    assert gate_of(Experts()) == Gate("gelu")
    assert gate_of(nn.Linear(2, 2)) is None
