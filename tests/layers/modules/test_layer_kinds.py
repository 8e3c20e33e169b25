"""The allow-list of classes: those on it compute the bits of the original when wrapped, all others stay."""

import copy
import pickle

import pytest
import torch
from torch import nn

import vbrt
from tests.models import config, wrap, wrap_streamed
from vbrt.layers import KINDS, Kind, VBLayer, VBLinear, kind_of
from vbrt.layers.modules import layer_kinds
from vbrt.training import trained_class

transformers = pytest.importorskip("transformers")
from transformers.models.esm.modeling_esmfold import EsmFoldLinear  # noqa: E402  # after the check that it is there
from transformers.models.falcon.modeling_falcon import FalconLinear  # noqa: E402
from transformers.models.llama4.modeling_llama4 import Llama4Router  # noqa: E402

SUBCLASSES = (FalconLinear, EsmFoldLinear)
HOLDINGS = [("dense", torch.float32), ("dense", torch.bfloat16), ("exact", torch.bfloat16), ("exact", torch.float16)]


def layers(cls, *, bias=True, dtype=torch.float32, count=5):
    torch.manual_seed(2)
    made = nn.Sequential(*(cls(64, 64, bias=bias) for _ in range(count))).to(dtype).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made


@pytest.mark.sample(8)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("format", "dtype"), HOLDINGS)
@pytest.mark.parametrize("cls", SUBCLASSES)
def test_a_plain_subclass_gives_the_very_outputs_and_gradients_of_the_original(
    cls, format, dtype, bias, streamed, tmp_path
):
    original = layers(cls, bias=bias, dtype=dtype)
    model = copy.deepcopy(original)
    inputs = [torch.randn(3, 64), torch.randn(2, 5, 64), torch.randn(2, 8, 64, 8).transpose(2, 3)]
    with wrap_streamed(model, format, tmp_path) if streamed else wrap(model, format) as vb:
        assert {swap.kind for swap in vb.plan.swaps} == {cls.__name__} and len(vb.plan.swaps) == 5
        for x in inputs:
            x, x_original = x.to(dtype).requires_grad_(), x.detach().to(dtype).requires_grad_()
            y, y_original = vb(x), original(x_original)
            y.float().square().sum().backward()
            y_original.float().square().sum().backward()
            assert torch.equal(y, y_original) and torch.equal(x.grad, x_original.grad)
            assert torch.equal(copy.deepcopy(vb)(x), y) and torch.equal(pickle.loads(pickle.dumps(vb))(x), y)
        assert isinstance(vb.module[0], cls) and isinstance(vb.module[0], VBLinear)
        assert type(vb.unwrap()[0]) is cls


@pytest.mark.parametrize("cls", SUBCLASSES)
def test_a_plain_subclass_runs_in_a_compiled_graph(cls):
    vb, x = wrap(layers(cls, count=2)).materialize(), torch.randn(3, 64)
    assert torch.equal(torch.compile(vb.module, backend="aot_eager", fullgraph=True)(x), vb(x))


def test_a_falcon_is_swapped_and_writes_what_it_wrote():
    torch.manual_seed(3)
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "bias": True}
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, bos_token_id=1, eos_token_id=2)).eval()
    ids = torch.arange(3, 15).reshape(1, 12)
    with torch.no_grad():
        logits, tokens = model(ids).logits, model.generate(ids, max_new_tokens=6, do_sample=False)
        vb = wrap(model)
        assert [swap.kind for swap in vb.plan.swaps] == ["FalconLinear"] * 8
        assert torch.equal(vb(ids).logits, logits)
        assert torch.equal(vb.generate(ids, max_new_tokens=6, do_sample=False), tokens)


class FalconLinearOfMine(FalconLinear):
    """A subclass of a plain subclass is a stranger again."""


def test_what_is_not_on_the_list_stays():
    router = Llama4Router(transformers.Llama4TextConfig(hidden_size=64, num_local_experts=64))
    for stranger in (router, FalconLinearOfMine(64, 64), nn.Conv2d(64, 64, 1)):
        assert kind_of(stranger) is None
        plan = vbrt.make_plan(nn.Sequential(stranger), vbrt.load_config(config("dense")))
        assert not plan.swaps and type(stranger).__name__ in plan.skipped["0"].reason


def test_every_kind_has_a_class_that_takes_its_place():
    for module in (nn.Linear(2, 2), FalconLinear(2, 2), EsmFoldLinear(2, 2), transformers.pytorch_utils.Conv1D(2, 2)):
        kind = kind_of(module)
        assert kind is KINDS[type(module).__name__] and kind.sites("", module)[0].kept_shape == module.weight.shape
        for cls in (kind.layer_class(), trained_class(kind)):
            assert cls.plain_class() is type(module)


class Turned(nn.Module):
    """[.., in] -> [.., out], its weight kept as [in, out]."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 8)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class VBTurned(VBLayer, Turned):
    def forward(self, x):
        return self._product(x, self._parameters["bias"])


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_new_kind_takes_a_record_and_a_class_with_a_forward(mode, monkeypatch, tmp_path):
    kind = Kind("Turned", __name__, __name__, transposed=True)
    monkeypatch.setitem(KINDS, "Turned", kind)
    monkeypatch.setitem(layer_kinds._BY_CLASS, (__name__, "Turned"), kind)
    model, x = nn.Sequential(Turned(64, 96), Turned(96, 64)).eval(), torch.randn(3, 64)
    expected = model(x)
    vb = vbrt.wrap(model, config("dense") | {"mode": mode})
    assert [(swap.kind, swap.shape) for swap in vb.plan.swaps] == [("Turned", (96, 64)), ("Turned", (64, 96))]
    assert torch.equal(vb(x), expected) and set(vb.stats().layers) == {"0", "1"}
    vb.save(tmp_path)
    with torch.device("meta"):
        empty = nn.Sequential(Turned(64, 96), Turned(96, 64)).eval()
    assert torch.equal(vbrt.load(tmp_path, empty)(x), expected)
    assert type(vb.unwrap()[0]) is Turned and torch.equal(model(x), expected)
