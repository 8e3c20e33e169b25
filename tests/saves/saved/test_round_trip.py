"""vb.save and vbrt.load: the same bits back, in any tier, without encoding and without the dense model."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

import vbrt
from tests.models import config, gpt2, llama, mlp, wrap
from tests.saves.cases import logits, on_meta, settings
from tests.zoo import zoo
from vbrt.errors import ConfigError
from vbrt.kernels import registry
from vbrt.kernels.cuda.e2m1 import linear as fp4_linear

SETTINGS = [
    (format, fine, dtype)
    for dtype in ("float32", "bfloat16", "float16")
    for format, fine in (
        ("nvfp4", "none"),
        ("mxfp4", "none"),
        ("nf4", "none"),
        ("quantile", "none"),
        ("mxint8", "none"),
        ("dense", "none"),
        ("nvfp4", "exact"),
        ("quantile", "exact"),
    )
    if (fine, dtype) != ("exact", "float32")
]


@pytest.mark.sample(9)
@pytest.mark.parametrize(("format", "fine", "dtype"), SETTINGS)
def test_a_loaded_model_gives_the_bits_of_the_saved_one_and_encodes_nothing(tmp_path, no_encoding, format, fine, dtype):
    dtype = getattr(torch, dtype)
    x = torch.linspace(-1, 1, 3 * 72, dtype=dtype).reshape(3, 72)
    vb = vbrt.wrap(mlp(width=72, depth=3, dtype=dtype), settings(format, fine))
    expected, room = logits(vb, x), 2 * max(swap.page_bytes for swap in vb.plan.swaps)
    vb.save(tmp_path / "saved")
    vb.close()
    no_encoding()
    drive = {"cpu": {"budget": room}, "ssd": {"enabled": True, "path": str(tmp_path / "pages")}}
    for tiers in ({}, drive):
        with vbrt.load(tmp_path / "saved", on_meta(mlp, width=72, depth=3), tiers=tiers) as again:
            assert (again.plan.home_bytes("ssd") > 0) is bool(tiers)
            assert all(torch.equal(logits(again, x), expected) for _ in range(2))
            assert all(layer.materialized for layer in again.registry.values())
            assert {p.dtype for p in again.module.parameters()} == {dtype}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("make", "fine"), [(llama, "exact"), (gpt2, "none"), (gpt2, "exact")])
@pytest.mark.parametrize("real", [False, True])
def test_transformers_models_load_into_real_ones_and_into_meta_ones(tmp_path, no_encoding, make, fine, real):
    vb = vbrt.wrap(make(dtype=torch.bfloat16), settings("nvfp4", fine))
    expected, counted = logits(vb), vb.plan
    vb.save(tmp_path)
    vb.close()
    no_encoding()
    model = make() if real else on_meta(make)
    embedding = model.get_input_embeddings()
    with vbrt.load(tmp_path, model) as again:
        assert again.module is model and model.get_input_embeddings() is embedding
        assert torch.equal(logits(again), expected)
        assert again.plan.swaps == counted.swaps and dict(again.plan.skipped) == dict(counted.skipped)
        assert again.settings == counted_settings(again)
        assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def counted_settings(vb):
    return vbrt.load_config(settings("nvfp4", vb.settings.weights.fine))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_save_of_a_machine_with_a_gpu_loads_on_one_without(tmp_path):
    vb = wrap(mlp(), "dense")
    vb.runtime.settings = vbrt.load_config(vb.settings, tiers={"gpu": {"enabled": True}})
    vb.save(tmp_path)
    assert vbrt.load(tmp_path, on_meta(mlp)).settings.tiers.gpu.enabled == "auto"
    with pytest.raises(ConfigError, match=r"tiers\.gpu\.enabled = true; this machine has no GPU"):
        vbrt.load(tmp_path, on_meta(mlp), tiers={"gpu": {"enabled": True}})


def test_tied_weights_stay_tied(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.again = nn.Linear(64, 64), nn.Linear(64, 64)
            self.again.weight = self.up.weight
            self.norm, self.other = nn.LayerNorm(64), nn.LayerNorm(64)
            self.other.weight = self.norm.weight

        def forward(self, x):
            return self.other(self.again(self.norm(self.up(x))))

    x = torch.randn(3, 64)
    vb = wrap(Tied().eval(), "nvfp4")
    expected = logits(vb, x)
    vb.save(tmp_path)
    untied = on_meta(Tied)
    untied.again.weight = nn.Parameter(torch.empty(64, 64, device="meta"))
    untied.other.weight = nn.Parameter(torch.empty(64, device="meta"))
    for model in (on_meta(Tied), Tied(), untied):
        again = vbrt.load(tmp_path, model.eval())
        assert torch.equal(logits(again, x), expected)
        assert again.registry["up"].handle is again.registry["again"].handle and len(again.plan.swaps) == 1
        assert model.norm.weight is model.other.weight
        dense = again.unwrap()
        assert dense.up.weight is dense.again.weight


def test_a_tied_head_of_transformers_stays_tied(tmp_path):
    vb = wrap(llama(tied=True), "nvfp4")
    expected = logits(vb)
    vb.save(tmp_path)
    again = vbrt.load(tmp_path, on_meta(llama, tied=True))
    assert again.module.lm_head.weight is again.module.model.embed_tokens.weight
    assert torch.equal(logits(again), expected)


def test_a_bare_linear_casts_and_frozen_layers_survive(tmp_path):
    bare = nn.Linear(64, 64).requires_grad_(False)
    x = torch.randn(2, 64)
    vb = wrap(bare, "nvfp4").half()
    expected = logits(vb, x.half())
    vb.save(tmp_path)
    again = vbrt.load(tmp_path, on_meta(nn.Linear, in_features=64, out_features=64))
    assert torch.equal(logits(again, x.half()), expected) and again.module.weight.dtype is torch.float16
    assert not again.module.bias.requires_grad and not again.unwrap().weight.requires_grad


@pytest.mark.parametrize("format", ["dense", "nvfp4", "exact"])
def test_a_layer_that_was_cast_after_encoding_computes_in_what_it_was_cast_to(tmp_path, format):
    vb = wrap(mlp(dtype=torch.bfloat16), format).materialize().float()
    x = torch.randn(2, 64)
    vb.save(tmp_path)
    again = vbrt.load(tmp_path, on_meta(mlp))
    assert torch.equal(logits(again, x), logits(vb, x)) and again.module[0].weight.dtype is torch.float32
    assert again.registry["0"].handle.spec == vb.registry["0"].handle.spec


def test_buffers_come_back_persistent_or_not(tmp_path):
    class Buffered(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(64, 64), nn.BatchNorm1d(64))
            self.register_buffer("scale", torch.full((1,), 2.0), persistent=False)
            self.register_buffer("empty", torch.zeros(0, 3, dtype=torch.int16))
            self.register_buffer("none", None)

        def forward(self, x):
            return super().forward(x) * self.scale

    model, x = Buffered().eval(), torch.randn(3, 64)
    model[1].running_mean.normal_()
    model.scale.fill_(3.0)
    vb = wrap(model, "nvfp4")
    expected = logits(vb, x)
    vb.save(tmp_path)
    again = vbrt.load(tmp_path, on_meta(Buffered).eval())
    assert torch.equal(logits(again, x), expected) and again.module.empty.shape == (0, 3)
    assert again.module[1].num_batches_tracked.shape == ()
    assert list(again.state_dict()) == list(Buffered().state_dict())


def test_a_loaded_model_is_a_wrapped_one(tmp_path):
    model = mlp()
    wrap(model, "exact").save(tmp_path / "one")
    vb = vbrt.load(tmp_path / "one", on_meta(mlp), policy={"kind": "lru"})
    assert vb.settings.policy.kind == "lru"
    vb.save(tmp_path / "two")
    x = torch.randn(2, 64, requires_grad=True)
    expected = vbrt.load(tmp_path / "two", mlp())(x)
    assert torch.equal(vb(x), expected)
    expected.sum().backward()
    assert x.grad is not None and vb.stats().passes == 1
    assert torch.equal(copy.deepcopy(vb)(x), expected)
    vb.load_state_dict(mlp(width=64, depth=6).state_dict())
    assert torch.equal(vb.unwrap()(x), mlp()(x))


def test_what_is_not_encoded_yet_is_encoded_by_saving(tmp_path):
    vb = wrap(mlp(), "nvfp4")
    vb.module[2].weight = nn.Parameter(torch.randn(64, 64))
    vb.save(tmp_path)
    x = torch.randn(2, 64)
    assert torch.equal(logits(vbrt.load(tmp_path, mlp()), x), logits(vb, x))


def test_a_kernels_own_order_of_a_page_stays_out_of_the_files(tmp_path, monkeypatch):
    x = torch.randn(2, 64)
    plain = wrap(mlp(), "nvfp4")
    expected = logits(plain, x)
    plain.save(tmp_path / "plain")

    def packed_as_on_a_gpu(patch):
        for key, kernel in list(registry._REGISTRY["linear"].items()):
            ordered = replace(kernel, page_order=fp4_linear.packing, builds=False)
            patch.setitem(registry._REGISTRY["linear"], key, ordered)

    with monkeypatch.context() as patch:
        packed_as_on_a_gpu(patch)
        again = vbrt.load(tmp_path / "plain", mlp())
        with again.registry["0"].handle.lease() as (page,):
            assert "codes" not in page
        again.save(tmp_path / "packed")
    assert torch.equal(logits(vbrt.load(tmp_path / "packed", mlp()), x), expected)
    manifests = [json.loads((tmp_path / name / "vbrt.json").read_text()) for name in ("plain", "packed")]
    assert manifests[0]["layers"] == manifests[1]["layers"]
    digests = [{name: rest for name, (_, *rest) in manifest["tensors"].items()} for manifest in manifests]
    assert digests[0] == digests[1]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(
            *pair, marks=() if pair[1] in ("gemma", "mixtral", "xlnet", "t5", "whisper") else pytest.mark.exhaustive
        )
        for pair in zoo.SAMPLE
        if pair[0] in ("causal", "base")
    ],
)
def test_models_of_many_architectures_come_back_from_meta(tmp_path, kind, name):
    try:
        model, inputs = zoo.build(kind, name, dtype=torch.bfloat16)
    except zoo.Unbuildable as reason:
        pytest.skip(str(reason))
    save_model(model, str(tmp_path / "dense.safetensors"))
    vb = wrap(model, "nvfp4").materialize()
    want = zoo.forward(vb, inputs)
    vb.save(tmp_path / "saved")

    def architecture():
        with torch.device("meta"):
            return type(model)(model.config).eval()

    got = zoo.forward(vbrt.load(tmp_path / "saved", architecture()), inputs)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key].nan_to_num(), want[key].nan_to_num()) for key in want)
    encoded = vbrt.load(tmp_path / "dense.safetensors", architecture(), config("nvfp4"))
    built = dict(type(model)(model.config).named_buffers())
    for key, buffer in encoded.module.named_buffers():
        assert torch.equal(buffer, built[key].to(buffer.dtype)), key
