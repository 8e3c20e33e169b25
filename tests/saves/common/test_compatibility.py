"""Models that do not fit their files, and other wrong uses of save and load."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import vbrt
from tests.models import mlp, wrap
from tests.saves.cases import logits, on_meta
from vbrt.errors import CheckpointError, ConfigError, FormatError, TierError, WrapError


def test_another_architecture_is_refused_with_names(saved):
    with pytest.raises(CheckpointError, match=r"not of this model.*4 missing: 12\.bias, 12\.we"):
        vbrt.load(saved, mlp(depth=8))
    with pytest.raises(CheckpointError, match=r"4 unexpected: 10\.bias, 10\.weight, 8\.bias, \.\.\."):
        vbrt.load(saved, mlp(depth=4))
    with pytest.raises(CheckpointError, match=r"6 layers do not fit: 0\.weight is \(72, 72\), saved as \(64, 64\), 2"):
        vbrt.load(saved, mlp(width=72))
    model = mlp()
    model[2].bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(CheckpointError, match=r"1 shapes do not fit: 2\.bias is \(3,\), saved as \(64,\)"):
        vbrt.load(saved, model)
    model[2] = type("Routed", (nn.Linear,), {})(64, 64)
    with pytest.raises(CheckpointError, match=r"1 layers do not fit: 2 is a Routed, saved as a Linear"):
        vbrt.load(saved, model)
    assert type(model[0]) is nn.Linear and model[0].weight.numel()


def test_another_checkpoint_is_refused_with_names(tmp_path):
    save_file(mlp().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"4 missing: 12\.bias"):
        vbrt.load(tmp_path, mlp(depth=8))
    with pytest.raises(CheckpointError, match=r"12 shapes do not fit: 0\.weight is \(72, 72\)"):
        vbrt.load(tmp_path, mlp(width=72))


def test_another_format_is_refused_and_other_tiers_are_not(saved):
    with pytest.raises(ConfigError, match=r"weights\.format = 'nf4', and .* was saved with 'nvfp4'"):
        vbrt.load(saved, mlp(), weights={"format": "nf4"})
    with pytest.raises(ConfigError, match=r'preset "exact": weights\.fine = .exact., and'):
        vbrt.load(saved, mlp(), "exact")
    assert vbrt.load(saved, mlp(), "lru").settings.policy.kind == "lru"
    with pytest.raises(ConfigError, match=r"the tiers hold cpu 4\.0 KiB"):
        vbrt.load(saved, mlp(), tiers={"cpu": {"budget": 4096}})


def test_weights_of_another_kind_of_number_are_refused_by_name(tmp_path):
    state = mlp().state_dict()
    state["2.weight"] = state["2.weight"].view(torch.int32)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 dtypes do not fit: 2\.weight is float32, saved as int32"):
        vbrt.load(tmp_path, mlp())


def test_what_is_no_save_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither vbrt.json, .* nor model.safetensors"):
        vbrt.load(tmp_path, mlp())
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        vbrt.load(tmp_path / "nowhere", mlp())
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: no such file"):
        vbrt.load(tmp_path, mlp())


def test_what_cannot_be_loaded_into_or_saved_is_named(saved):
    vb = wrap(mlp(), "nvfp4")
    for model in (vb, vb.module, [vb]):
        with pytest.raises(WrapError, match=r"wrapped"):
            vbrt.load(saved, model)
    vb.unwrap()
    with pytest.raises(WrapError, match="closed or unwrapped"):
        vb.save(saved)
    with pytest.raises(FormatError, match="meta device"):
        wrap(on_meta(mlp), "nvfp4").save(saved)


def test_a_page_that_finds_no_room_gives_the_model_back(saved, tmp_path, monkeypatch):
    model = mlp()
    monkeypatch.setattr(
        "vbrt.tiers.storage.memory_tiers.MemoryTier.reserve",
        lambda *_, **__: (_ for _ in ()).throw(TierError("no room")),
        raising=True,
    )
    with pytest.raises(TierError, match="no room"):
        vbrt.load(saved, model)
    monkeypatch.undo()
    x = torch.randn(2, 64)
    assert torch.equal(logits(model, x), logits(mlp(), x)) and not model._forward_pre_hooks


def test_meta_buffers_that_nobody_knows_are_named(tmp_path):
    class Odd(nn.Module):
        def __init__(self, kind=None):
            super().__init__()
            self.up = nn.Linear(64, 64)
            if kind == "buffer":
                self.register_buffer("frequencies", torch.arange(4.0), persistent=False)
            if kind == "attribute":
                self.table = torch.arange(4.0)

    wrap(Odd().eval(), "nvfp4").save(tmp_path)
    for kind, name in (("buffer", "frequencies"), ("attribute", "table")):
        model = on_meta(Odd, kind=kind)
        with pytest.raises(CheckpointError, match=f"does not hold {name}, which is on the meta device"):
            vbrt.load(tmp_path, model)
        assert model.up.weight.is_meta and type(model.up) is nn.Linear
    vbrt.load(tmp_path, Odd("buffer").eval())


def test_loading_in_training_mode_warns_once(saved):
    with pytest.warns(UserWarning, match="training mode"):
        vbrt.load(saved, mlp().train())


def test_a_parameter_with_the_name_of_a_planes_tensor_is_refused(tmp_path):
    class Weight(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.zeros(3))

    model = mlp()
    vb = wrap(model, "nvfp4").materialize()
    layer = model[0]
    layer._modules["weight"] = Weight()
    with pytest.raises(CheckpointError, match=r"0\.weight\.codes: a parameter or buffer has the name"):
        vb.save(tmp_path)
