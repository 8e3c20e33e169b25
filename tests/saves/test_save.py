"""vb.save and vbrt.load: the same bits back, in any tier, without encoding and without the dense model."""

import copy
import json
import os
import random
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model
from torch import nn

import vbrt
from tests.models import TOKENS, config, gpt2, llama, mlp, wrap
from tests.zoo import zoo
from vbrt.errors import CheckpointError, ConfigError, FormatError, TierError, WrapError
from vbrt.host.mapped import page_out
from vbrt.kernels import registry
from vbrt.kernels.cuda.e2m1 import linear as fp4_linear
from vbrt.layers import WeightHandle
from vbrt.saves.manifest import content_digest, read_manifest
from vbrt.saves.tensorfile import TensorFile
from vbrt.saves.tensorfile import digest as tensor_digest

SETTINGS = [
    (format, fine, dtype)
    for dtype in ("float32", "bfloat16", "float16")
    for format, fine in (
        ("nvfp4", "none"),
        ("mxfp4", "none"),
        ("nf4", "none"),
        ("quantile", "none"),
        ("dense", "none"),
        ("nvfp4", "exact"),
        ("quantile", "exact"),
    )
    if (fine, dtype) != ("exact", "float32")
]


def settings(format, fine="none", **weights):
    given = config(format, **weights)
    given["weights"]["fine"] = fine
    return given


def on_meta(make, **given):
    with torch.device("meta"):
        return make(**given)


def tied_llama(**given):
    return llama(tied=True, **given)


def logits(model, x=TOKENS):
    with torch.no_grad():
        y = model(x)
    return getattr(y, "logits", y)


@pytest.fixture
def no_encoding(monkeypatch):
    """Encoding anything raises from now on, once the fixture is called."""

    def refuse(*args, **kwargs):
        raise AssertionError("a weight was encoded again")

    def start():
        monkeypatch.setattr(WeightHandle, "split", refuse)
        for name in vbrt.formats.FORMATS:
            monkeypatch.setattr(type(vbrt.formats.get_format(name)), "encode", refuse)
        monkeypatch.setattr("vbrt.layers.encoding.split_fine", refuse)

    return start


# -- the same bits ----------------------------------------------------------------------------------------------------


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
            assert {p.dtype for p in again.model.parameters()} == {dtype}


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
        assert again.model is model and model.get_input_embeddings() is embedding
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
    assert again.model.lm_head.weight is again.model.model.embed_tokens.weight
    assert torch.equal(logits(again), expected)


def test_a_bare_linear_casts_and_frozen_layers_survive(tmp_path):
    bare = nn.Linear(64, 64).requires_grad_(False)
    x = torch.randn(2, 64)
    vb = wrap(bare, "nvfp4").half()
    expected = logits(vb, x.half())
    vb.save(tmp_path)
    again = vbrt.load(tmp_path, on_meta(nn.Linear, in_features=64, out_features=64))
    assert torch.equal(logits(again, x.half()), expected) and again.model.weight.dtype is torch.float16
    assert not again.model.bias.requires_grad and not again.unwrap().weight.requires_grad


@pytest.mark.parametrize("format", ["dense", "nvfp4", "exact"])
def test_a_layer_that_was_cast_after_encoding_computes_in_what_it_was_cast_to(tmp_path, format):
    vb = wrap(mlp(dtype=torch.bfloat16), format).materialize().float()
    x = torch.randn(2, 64)
    vb.save(tmp_path)
    again = vbrt.load(tmp_path, on_meta(mlp))
    assert torch.equal(logits(again, x), logits(vb, x)) and again.model[0].weight.dtype is torch.float32
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
    assert torch.equal(logits(again, x), expected) and again.model.empty.shape == (0, 3)
    assert again.model[1].num_batches_tracked.shape == ()
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
    vb.model[2].weight = nn.Parameter(torch.randn(64, 64))
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


# -- the files --------------------------------------------------------------------------------------------------------


def files(directory):
    return sorted(path.name for path in directory.iterdir())


def test_the_files_are_plain_safetensors_with_the_dense_models_names(tmp_path):
    vb = wrap(llama(dtype=torch.bfloat16), "nvfp4")
    assert vb.save(tmp_path) == tmp_path
    manifest = json.loads((tmp_path / "vbrt.json").read_text())
    assert manifest["version"] == 3 and manifest["vbrt"] == vbrt.__version__
    (shard,) = tmp_path.glob("*.safetensors")
    tensors = load_file(shard)
    codes = tensors["model.layers.0.mlp.up_proj.weight.codes"]
    with vb.registry["model.layers.0.mlp.up_proj"].handle.lease() as (coarse,):
        assert torch.equal(codes, coarse["codes"])
        assert tensors["model.layers.0.mlp.up_proj.weight.scales"].dtype is torch.float8_e4m3fn
    assert torch.equal(tensors["model.norm.weight"], vb.model.model.norm.weight)
    with safe_open(shard, "pt") as file:
        assert set(file.keys()) == set(manifest["tensors"])


def test_the_library_reads_every_tensor_whatever_the_lengths_of_lists(tmp_path):
    vb = wrap(llama(dtype=torch.float16), "exact", exclude=["*.mlp.*"])
    vb.save(tmp_path)
    (shard,) = tmp_path.glob("*.safetensors")
    tensors = load_file(shard)
    assert any(tensor.numel() % 2 for name, tensor in tensors.items() if name.endswith(".side"))
    assert all(info.begin % info.dtype.itemsize == 0 for info in TensorFile(shard).tensors.values())
    for name, layer in vb.registry.items():
        with layer.handle.lease() as (_, fine):
            assert all(torch.equal(tensors[f"{name}.weight.fine.{field}"], fine[field]) for field in fine)


def test_a_dense_save_is_a_checkpoint_of_the_dense_model(tmp_path):
    model = mlp()
    wrap(mlp(), "dense").save(tmp_path)
    (shard,) = tmp_path.glob("*.safetensors")
    saved = load_file(shard)
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())


def test_large_models_are_written_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("vbrt.saves.save._SHARD_BYTES", 20_000)
    vb = wrap(llama(), "nvfp4")
    vb.save(tmp_path)
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) > 3 and all(path.stat().st_size < 50_000 for path in shards)
    assert torch.equal(logits(vbrt.load(tmp_path, on_meta(llama))), logits(vb))


def test_a_second_save_takes_the_place_of_the_first(tmp_path):
    wrap(mlp(), "nvfp4").save(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    first = files(tmp_path)
    vb = wrap(mlp(), "nf4")
    vb.save(tmp_path)
    assert len(files(tmp_path)) == 3 and len(set(files(tmp_path)) & set(first)) == 2
    assert vbrt.load(tmp_path, mlp()).settings.weights.format == "nf4"


@pytest.mark.parametrize("at", ["pwrite", "fsync", "replace"])
@pytest.mark.parametrize("when", [0, 1, 2])
def test_an_interrupted_save_leaves_the_one_before(tmp_path, monkeypatch, at, when):
    old = wrap(mlp(), "nvfp4")
    old.save(tmp_path)
    before, calls, real = files(tmp_path), [], getattr(os, at)

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) > when:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    vb = wrap(mlp(depth=4), "dense").materialize()
    with monkeypatch.context() as patch:
        patch.setattr(f"vbrt.host.files.os.{at}", failing)
        if (at, when) == ("replace", 2):
            vb.save(tmp_path)
            assert files(tmp_path) != before
            return
        with pytest.raises(CheckpointError, match=f"(?s){tmp_path}.*the disk is full"):
            vb.save(tmp_path)
    assert files(tmp_path) == before
    x = torch.randn(2, 64)
    assert torch.equal(logits(vbrt.load(tmp_path, mlp()), x), logits(old, x))
    vb.save(tmp_path)
    assert torch.equal(logits(vbrt.load(tmp_path, mlp(depth=4)), x), logits(vb, x))


KILLED = """
import os, sys, vbrt
from tests.zoo import zoo
from tests.models import mlp, wrap
left = int(sys.argv[2])
real = os.pwrite
def pwrite(*args):
    global left
    left -= 1
    if left < 0:
        os._exit(9)
    return real(*args)
os.pwrite = pwrite
wrap(mlp(), "dense").save(sys.argv[1])
"""


def test_a_killed_save_leaves_the_one_before_and_no_litter_after_the_next(tmp_path):
    vb = wrap(mlp(), "nvfp4")
    vb.save(tmp_path)
    before = files(tmp_path)
    assert (
        subprocess.run(
            [sys.executable, "-c", KILLED, tmp_path, "3"], cwd=Path(__file__).parents[2], check=False
        ).returncode
        == 9
    )
    assert len(files(tmp_path)) == len(before) + 1
    x = torch.randn(2, 64)
    assert torch.equal(logits(vbrt.load(tmp_path, mlp()), x), logits(vb, x))
    vb.save(tmp_path)
    assert len(files(tmp_path)) == len(before)


def test_a_save_writes_through_no_link_that_somebody_planted(tmp_path, monkeypatch):
    victim, saved = tmp_path / "victim", tmp_path / "saved"
    victim.write_text("mine")
    saved.mkdir()
    monkeypatch.setattr("secrets.token_hex", lambda nbytes: "0" * 2 * nbytes)  # even if the name could be known
    for name in ("vbrt.json", "vbrt.json.tmp"):
        (saved / name).symlink_to(victim)
    vb = wrap(mlp(), "nvfp4")
    vb.save(saved)
    assert victim.read_text() == "mine" and not (saved / "vbrt.json").is_symlink()
    planted = saved / "vbrt.json.00000000.tmp"
    planted.symlink_to(victim)
    with pytest.raises(CheckpointError, match=r"cannot be saved.*File exists; a save that was there is as it was"):
        vb.save(saved)
    assert victim.read_text() == "mine" and not planted.is_symlink()
    assert vbrt.load(saved, mlp()).registry


def test_a_save_whose_directory_cannot_be_synced_says_that_it_is_in_place(tmp_path, monkeypatch):
    wrap(mlp(), "nvfp4").save(tmp_path)
    before = files(tmp_path)
    vb, real = wrap(mlp(), "nf4"), os.fsync

    def failing(fd):
        if "vbrt.json" in files(tmp_path) and "nf4" in (tmp_path / "vbrt.json").read_text():
            raise OSError(5, "Input/output error")
        return real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(CheckpointError, match=r"the save is in place, but .* \(Input/output error\).*save again"):
            vb.save(tmp_path)
    assert set(before) < set(files(tmp_path))  # a power cut may bring the old manifest back
    assert vbrt.load(tmp_path, mlp()).settings.weights.format == "nf4"
    vb.save(tmp_path)
    assert len(files(tmp_path)) == len(before)


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=str(tmp_path / "file")):
        wrap(mlp(), "nvfp4").save(tmp_path / "file")
    with pytest.raises(CheckpointError, match="file/below"):
        wrap(mlp(), "nvfp4").save(tmp_path / "file" / "below")


# -- from a dense checkpoint ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, gpt2, tied_llama])
@pytest.mark.parametrize("shards", ["10GB", "30KB"])
def test_a_dense_checkpoint_is_encoded_as_wrap_would(tmp_path, make, shards):
    dense = make(dtype=torch.bfloat16)
    dense.save_pretrained(tmp_path, max_shard_size=shards)
    assert ("model.safetensors.index.json" in files(tmp_path)) is (shards == "30KB")
    vb = vbrt.load(tmp_path, on_meta(make, dtype=torch.bfloat16), settings("nvfp4", "exact"))
    assert all(layer.materialized and layer.handle.spec.fine for layer in vb.registry.values()) and vb.registry
    want = copy.deepcopy(dense)
    for name, buffer in vb.model.named_buffers():
        assert not buffer.is_meta
        want.get_buffer(name).data = buffer  # llama(dtype=bf16) has cast inv_freq, from_config has not
    assert torch.equal(logits(vb), logits(want))
    vb.save(tmp_path / "saved")
    assert torch.equal(logits(vbrt.load(tmp_path / "saved", on_meta(make))), logits(want))


def test_a_meta_model_of_a_config_gets_its_rotary_frequencies(tmp_path):
    from transformers import AutoModelForCausalLM

    dense = llama(dtype=torch.bfloat16)
    dense.save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(reference.config).eval()
    vb = vbrt.load(tmp_path, model, settings("dense"))
    assert torch.equal(vb.model.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)
    assert torch.equal(logits(vb), logits(reference))
    assert torch.equal(vb.generate(TOKENS, max_new_tokens=4), reference.generate(TOKENS, max_new_tokens=4))


def mixtral(**given):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 12,
        **given,
    }
    return MixtralForCausalLM(MixtralConfig(**sizes)).eval()


@pytest.mark.parametrize("shards", ["10GB", "60KB"])
def test_a_checkpoint_that_transformers_renames_and_merges_loads_as_from_pretrained_does(tmp_path, shards):
    from transformers import AutoModelForCausalLM

    mixtral().save_pretrained(tmp_path, max_shard_size=shards)
    names = [name for path in tmp_path.glob("*.safetensors") for name in load_file(path)]
    assert any("block_sparse_moe.experts" in name for name in names)  # not the model's names
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    vb = vbrt.load(tmp_path, on_meta(mixtral), settings("dense"))
    assert vb.registry and torch.equal(logits(vb), logits(reference))
    for name, parameter in reference.named_parameters():
        if name.removesuffix(".weight") not in vb.registry:
            assert torch.equal(vb.model.get_parameter(name), parameter), name


def test_a_checkpoint_of_the_base_model_and_one_with_legacy_names_load(tmp_path):
    from transformers import BertConfig, BertForMaskedLM

    def bert():
        torch.manual_seed(0)
        return BertForMaskedLM(
            BertConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=64, num_attention_heads=4)
        ).eval()

    state = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor.clone()
        for name, tensor in bert().state_dict().items()
        if name != "cls.predictions.decoder.weight"
    }
    assert any(name.endswith("gamma") for name in state)
    save_file(state, tmp_path / "model.safetensors")
    vb = vbrt.load(tmp_path, on_meta(bert), settings("dense"))
    assert torch.equal(logits(vb), logits(bert()))


def test_a_conversion_that_cannot_be_done_is_refused_by_the_names_of_tensor_and_operations(tmp_path):
    mixtral().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    good = load_file(path)
    name = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    save_file({**good, name: torch.zeros(3, 5)}, path)
    with pytest.raises(
        CheckpointError,
        match=r"1\.mlp\.experts\.gate_up_proj is made by transformers of 24 tensors "
        r"\(.*\.0\.w1\.weight, .*\) by MergeModulelist, Concatenate, which",
    ):
        vbrt.load(tmp_path, on_meta(mixtral))
    save_file({key: tensor for key, tensor in good.items() if key != name}, path)
    with pytest.raises(CheckpointError, match="gate_up_proj"):
        vbrt.load(tmp_path, on_meta(mixtral))
    save_file(good | {"model.layers.1.mlp.gate.weight": torch.zeros(12, 64)}, path)
    with pytest.raises(CheckpointError, match=r"are both model\.layers\.1\.mlp\.gate\.weight"):
        vbrt.load(tmp_path, on_meta(mixtral))


def test_a_tensor_that_two_shards_have_is_refused(tmp_path):
    state = mlp().state_dict()
    for name in ("a", "b"):
        save_file(state, tmp_path / f"{name}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"0.weight": "a.safetensors", "2.weight": "b.safetensors"}}'
    )
    with pytest.raises(CheckpointError, match=r"0\.(bias|weight) is in a\.safetensors and in b\.safetensors"):
        vbrt.load(tmp_path, mlp())


def test_a_single_file_will_do_and_its_dtype_counts(tmp_path):
    save_file(mlp(dtype=torch.bfloat16).state_dict(), tmp_path / "step-100.safetensors")
    vb = vbrt.load(tmp_path / "step-100.safetensors", on_meta(mlp), config("exact"))
    x = torch.randn(2, 64).bfloat16()
    assert torch.equal(logits(vb, x), logits(mlp(dtype=torch.bfloat16), x))


class Lookup(nn.Module):
    """An embedding of 2 MiB, which is kept, and a layer that is swapped."""

    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(8192, 64), nn.Linear(64, 64)

    def forward(self, ids):
        return self.up(self.embed(ids))


def test_large_weights_of_a_checkpoint_that_are_kept_stay_mapped_from_its_file(tmp_path):
    file = tmp_path / "model.safetensors"
    model, ids = Lookup(), torch.arange(0, 8192, 17)
    save_file(model.state_dict(), file)
    expected = model(ids)
    vb = vbrt.load(tmp_path, on_meta(Lookup).eval(), settings("dense"))
    storages = {name: p.untyped_storage() for name, p in vb.model.named_parameters()}
    assert {name: storage.resizable() for name, storage in storages.items()} == {"embed.weight": False, "up.bias": True}
    assert storages["embed.weight"].nbytes() == 8192 * 64 * 4 and page_out(vb.embed.weight) > 0
    assert torch.equal(vb(ids), expected)
    again = copy.deepcopy(vb)
    assert again.embed.weight.untyped_storage().nbytes() == 8192 * 64 * 4
    save_file({"another": torch.zeros(9)}, tmp_path / "new.safetensors")
    os.replace(tmp_path / "new.safetensors", file)
    assert torch.equal(vb(ids), expected)


def test_writing_into_a_mapped_weight_leaves_the_file_as_it_is(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(Lookup().state_dict(), file)
    content = file.read_bytes()
    vb = vbrt.load(tmp_path, on_meta(Lookup).eval(), settings("dense"))
    with torch.no_grad():
        vb.embed.weight.zero_()
    assert not vb.embed.weight.any() and file.read_bytes() == content


def test_an_embedding_at_an_odd_offset_or_in_a_file_that_was_cut_short_is_not_mapped(tmp_path):
    file, state = tmp_path / "model.safetensors", Lookup().state_dict()
    save_file(state, file)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    head, rest = content[8 : 8 + length], content[8 + length :]
    file.write_bytes((length + 1).to_bytes(8, "little") + head + b" " + rest)
    odd = vbrt.load(tmp_path, on_meta(Lookup).eval(), settings("dense"))
    assert torch.equal(odd.embed.weight, state["embed.weight"]) and odd.embed.weight.untyped_storage().resizable()
    save_file(state, file)
    source = TensorFile(file)
    os.truncate(file, 4096)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: embed\.weight cannot be mapped: truncated"):
        source.map("embed.weight")


ANONYMOUS = """
import re, sys, torch, vbrt
from torch import nn
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
with torch.device("meta"):
    model = nn.ModuleDict({"embed": nn.Embedding(1 << 19, 64), "up": nn.Linear(64, 64)})
vbrt.wrap(nn.Sequential(nn.Linear(64, 64))).materialize()  # imports and thread pools
before = anonymous()
vb = vbrt.load(sys.argv[1], model)
print(anonymous() - before)
"""


def test_a_loaded_checkpoint_takes_no_memory_for_what_stays_mapped(tmp_path):
    state = {"embed.weight": torch.zeros(1 << 19, 64), "up.weight": torch.ones(64, 64), "up.bias": torch.ones(64)}
    save_file(state, tmp_path / "model.safetensors")  # 128 MiB
    command = [sys.executable, "-W", "ignore", "-c", ANONYMOUS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 32 << 20


def test_a_nan_in_a_checkpoint_is_named_and_the_model_is_as_it_was(tmp_path):
    bad = mlp()
    bad[4].weight.data[0, 0] = float("nan")
    save_file(bad.state_dict(), tmp_path / "model.safetensors")
    model = mlp()
    before = [(type(m), dict(m._parameters)) for m in model.modules()]
    with pytest.raises(FormatError, match=r"4: .*1 NaN"):
        vbrt.load(tmp_path, model, config("nvfp4"))
    assert [(type(m), dict(m._parameters)) for m in model.modules()] == before
    x = torch.randn(2, 64)
    assert torch.equal(logits(model, x), logits(mlp(), x)) and not model._forward_pre_hooks


PEAK = """
import sys, torch, vbrt
from torch import nn
from tests.zoo import zoo
from tests.models import config, wrap
def build(width, depth):
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(depth))).eval()
def mib(what):
    return int(next(line for line in open("/proc/self/status") if line.startswith(what)).split()[1]) / 1024
def peak(work):
    open("/proc/self/clear_refs", "w").write("5")
    before = mib("VmRSS:")
    out = work()
    return mib("VmHWM:") - before, out
small, large, saved = sys.argv[1:]
vbrt.load(small, build(1024, 2), config("nvfp4")).save(saved)
vbrt.load(saved, build(1024, 2)).close()
grown, vb = peak(lambda: vbrt.load(large, build(1024, 48), config("nvfp4")))
saving, _ = peak(lambda: vb.save(saved))
pages = vb.plan.page_bytes / 2**20
vb.close()
del vb
again, vb = peak(lambda: vbrt.load(saved, build(1024, 48)))
print(grown, saving, again, pages)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_dense_model_is_never_in_memory(tmp_path):
    layer = 1024 * 1024 * 2 / 2**20
    for name, depth in (("small", 2), ("large", 48)):  # 96 MiB in bf16
        (tmp_path / name).mkdir()
        weights = {f"{i}.weight": torch.randn(1024, 1024).bfloat16() for i in range(depth)}
        save_file(weights, tmp_path / name / "model.safetensors")
    command = [sys.executable, "-c", PEAK, *(str(tmp_path / name) for name in ("small", "large", "saved"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    encoding, saving, loading, pages = map(float, done.stdout.split())
    print(f"MiB: encode {encoding:.1f}, save {saving:.1f}, load {loading:.1f}; pages {pages:.1f}, dense {48 * layer}")
    assert encoding < pages + 10 * layer and loading < pages + 5 * layer and saving < 3 * layer


# -- wrong use --------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    wrap(mlp(), "nvfp4").save(tmp_path)
    return tmp_path


def test_another_architecture_is_refused_with_names(saved):
    with pytest.raises(CheckpointError, match=r"not of this model.*4 that the model has are missing: 12\.bias, 12\.we"):
        vbrt.load(saved, mlp(depth=8))
    with pytest.raises(CheckpointError, match=r"4 that it has not are there: 10\.bias, 10\.weight, 8\.bias, \.\.\."):
        vbrt.load(saved, mlp(depth=4))
    with pytest.raises(CheckpointError, match=r"6 layers do not fit: 0\.weight is \(72, 72\), saved was \(64, 64\), 2"):
        vbrt.load(saved, mlp(width=72))
    model = mlp()
    model[2].bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(CheckpointError, match=r"1 shapes do not fit: 2\.bias is \(3,\), saved was \(64,\)"):
        vbrt.load(saved, model)
    model[2] = type("Routed", (nn.Linear,), {})(64, 64)
    with pytest.raises(CheckpointError, match=r"1 layers do not fit: 2 is a Routed, saved was a Linear"):
        vbrt.load(saved, model)
    assert type(model[0]) is nn.Linear and model[0].weight.numel()


def test_another_checkpoint_is_refused_with_names(tmp_path):
    save_file(mlp().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"4 that the model has are missing: 12\.bias"):
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


@pytest.mark.parametrize("damage", ["flip", "truncate", "cut header", "remove", "empty"])
def test_a_damaged_file_is_named_and_the_model_is_as_it_was(saved, damage):
    (shard,) = saved.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes({"flip": data, "truncate": data[:-5000], "cut header": data[:40], "empty": b""}.get(damage, b""))
    if damage == "remove":
        shard.unlink()
    model = mlp()
    words = {"flip": "damaged: the bytes of", "remove": "no such file"}.get(damage, "damaged")
    with pytest.raises(CheckpointError, match=f"{shard.name}: {words}"):
        vbrt.load(saved, model)
    x = torch.randn(2, 64)
    assert torch.equal(logits(model, x), logits(mlp(), x))


def as_version(directory, version):
    """Make a save one that an earlier vbrt wrote: before layers had sites (2), before manifests had digests (1)."""
    content = json.loads((directory / "vbrt.json").read_text())
    content["version"] = version
    for layer in content["layers"] if version < 3 else ():
        (name, *aliases), kind = [module for module, _, _ in layer["sites"]], layer["sites"][0][2]
        layer |= {"name": name, "aliases": aliases, "kind": kind}
        del layer["sites"], layer["matrices"]
    if version == 1:
        del content["digest"]
        content["tensors"] = {name: [file, digest] for name, (file, _, _, digest) in content["tensors"].items()}
    else:
        content["digest"] = content_digest(content)
    (directory / "vbrt.json").write_text(json.dumps(content, indent=1))
    return content


@pytest.mark.parametrize("version", [1, 2])
def test_a_save_of_an_earlier_version_still_loads(saved, version):
    expected = logits(vbrt.load(saved, mlp()), torch.ones(2, 64))
    as_version(saved, version)
    assert torch.equal(logits(vbrt.load(saved, on_meta(mlp)), torch.ones(2, 64)), expected)


OLD_CHANGES = [
    (("layers",), [{}], r"damaged: layers\[0\] has no \"aliases\""),
    (("layers", 0, "name"), None, r"damaged: layers\[0\]\.name = null; expected a name"),
    (("layers", 0, "name"), "2", r"damaged: layers\[1\] has the name \"2\", which layers\[0\] has already"),
    (("layers", 0, "name"), "7", r"damaged: \"tensors\" has no \"7\.weight\.codes\""),
    (("layers", 0, "aliases"), "02", r"damaged: layers\[0\]\.aliases = \"02\"; expected a list of names"),
    (("layers", 0, "kind"), "Linfar", r"damaged: layers\[0\]\.kind = \"Linfar\"; expected one of Linear"),
]
NEW_CHANGES = [
    (("layers",), [{}], r"damaged: layers\[0\] has no \"dtype\""),
    (("layers", 0, "sites"), None, r"damaged: layers\[0\]\.sites = null; expected lists of module, parameter and kind"),
    (("layers", 0, "sites"), [], r"damaged: layers\[0\]\.sites = \[\]; expected lists"),
    (
        ("layers", 0, "sites", 0),
        ["2", "weight", "Linear"],
        r"damaged: layers\[1\] has the name \"2\", which layers\[0\]",
    ),
    (("layers", 0, "sites", 0), ["7", "weight", "Linear"], r"damaged: \"tensors\" has no \"7\.weight\.codes\""),
    (("layers", 0, "sites", 0), ["0", "weight", "Linfar"], r"damaged: layers\[0\]\.sites = .*Linfar.*; expected lists"),
    (("layers", 0, "sites", 0), ["0", "waist", "Linear"], r"damaged: layers\[0\]: a Linear has no .* name \"waist\""),
    (("layers", 0, "matrices"), 2, r"damaged: layers\[0\]\.matrices = 2; a Linear has 1"),
    (("layers", 0, "matrices"), 0, r"damaged: layers\[0\]\.matrices = 0; expected a whole number"),
]
CHANGES = [
    (("version",), 4, "a save of version 4, by vbrt .*; this vbrt reads versions 1 to 3"),
    (("version",), True, "a save of version true"),
    (("kind",), "something", "not written by vb.save"),
    (("layers",), {}, "damaged: layers = {}; expected a list"),
    (("layers", 0), [], r"damaged: layers\[0\] = \[\]; expected a table"),
    (("layers", 0, "extra"), 1, r"damaged: layers\[0\] has an unknown \"extra\""),
    (("layers", 0, "shape"), [64, 64.0], r"damaged: layers\[0\]\.shape = \[64, 64\.0\]; expected two whole"),
    (("layers", 0, "shape"), [64, True], r"damaged: layers\[0\]\.shape"),
    (("layers", 0, "shape"), [64, 1 << 40], r"damaged: layers\[0\]\.shape"),
    (("layers", 0, "shape"), [64, 80], r"damaged: layers\[0\] asks for uint8 \[64, 40\], and 0\.weight\.codes is "),
    (("layers", 0, "stored_dtype"), "load", r"damaged: layers\[0\]\.stored_dtype = \"load\"; expected one of"),
    (("layers", 0, "stored_dtype"), "float64", r"damaged: layers\[0\]\.stored_dtype .* nvfp4 does not hold"),
    (("layers", 0, "dtype"), "int32", r"damaged: layers\[0\]\.dtype = \"int32\"; expected one of"),
    (("layers", 0, "format"), "nvfq4", r"damaged: layers\[0\]\.format = \"nvfq4\"; expected one of nvfp4"),
    (("layers", 0, "format"), "nf4", r"damaged: layers\[0\] asks for"),
    (("layers", 0, "format"), "dense", r"damaged: layers\[0\]\.planes = .*; expected dense: weight"),
    (("layers", 0, "transposed"), True, r"damaged: layers\[0\]\.transposed = true, which a Linear is not"),
    (("layers", 0, "fine"), 1, r"damaged: layers\[0\]\.fine = 1; expected true or false"),
    (("layers", 0, "fine"), True, r"damaged: layers\[0\]\.fine = true, which float32 in nvfp4 cannot have"),
    (("layers", 0, "planes"), {}, r"damaged: layers\[0\]\.planes = {}; expected coarse: "),
    (("layers", 0, "planes", "coarse"), ["codes"], r"damaged: layers\[0\]\.planes = "),
    (("kept", 0, "kind"), "p`rameter", r"damaged: kept\[0\]\.kind = \"p`rameter\"; expected one of parameter"),
    (("kept", 0, "trainable"), None, r"damaged: kept\[0\]\.trainable = null"),
    (("kept", 0, "name"), "0.weight", r"damaged: kept\[0\] has the name \"0\.weight\", which layers\[0\] has already"),
    (("kept",), [], r"damaged: \"tensors\" has \"0\.bias\", which no layer, parameter or buffer has"),
    (("tensors",), {}, r"damaged: \"tensors\" has no \"0\.weight\.codes\""),
    (("tensors", "0.bias"), None, r"damaged: tensors\.0\.bias = null; expected a list"),
    (("tensors", "0.bias", 0), "../x.safetensors", r"damaged: tensors\.0\.bias\[0\] = .*; expected a file of the name"),
    (("tensors", "0.bias", -1), "0", r"damaged: tensors\.0\.bias\[\d\] = \"0\"; expected 16 hexadecimal digits"),
    (("config",), [], r"damaged: config = \[\]; expected a table"),
    (("vbrt",), 7, "damaged: vbrt = 7; expected a version"),
]


def changed(content, keys, value):
    *path, last = keys
    for key in path:
        content = content[key]
    content[last] = value


@pytest.mark.parametrize(
    ("version", "keys", "value", "words"),
    [(version, *change) for version in (1, 3) for change in (CHANGES + (NEW_CHANGES if version > 2 else OLD_CHANGES))],
)
def test_a_manifest_with_another_entry_is_refused_by_the_name_of_the_entry(saved, version, keys, value, words):
    as_version(saved, version)
    content = json.loads((saved / "vbrt.json").read_text())
    changed(content, keys, value)
    if "digest" in content:
        content["digest"] = content_digest(content)
    (saved / "vbrt.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"vbrt.json: {words}"):
        vbrt.load(saved, mlp())


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("kept", 0, "trainable"), False),
        (("layers", 0, "trainable"), False),
        (("layers", 0, "dtype"), "bfloat16"),
        (("config", "weights", "keep_head"), False),
        (("vbrt",), "0.9"),
        (("tensors", "0.bias", -1), "0" * 16),
    ],
)
def test_a_manifest_whose_digest_is_not_that_of_its_content_is_refused(saved, keys, value):
    content = json.loads((saved / "vbrt.json").read_text())
    (saved / "vbrt.json").write_text(json.dumps(dict(reversed(content.items())), indent=3))
    assert vbrt.load(saved, mlp()).registry  # order and space are no content
    changed(content, keys, value)
    (saved / "vbrt.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r'vbrt.json: damaged: "digest" = '):
        vbrt.load(saved, mlp())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": 1, "a": 2}', '"a" stands twice in one object'),
        ('{"kind": NaN}', "NaN is no number"),
        ("\xff", "not valid JSON"),
        ("1" * 5000, "not valid JSON"),
        ("null", "not written"),
    ],
)
def test_what_is_no_manifest_is_refused(saved, text, words):
    (saved / "vbrt.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=f"vbrt.json: .*{words}"):
        vbrt.load(saved, mlp())


def test_any_flipped_bit_of_a_manifest_is_refused_or_changes_nothing(saved):
    path, dice = saved / "vbrt.json", random.Random(0)
    good, want = path.read_bytes(), read_manifest(saved)
    for _ in range(300):
        bad = bytearray(good)
        bad[dice.randrange(len(bad))] ^= 1 << dice.randrange(8)
        path.write_bytes(bad)
        try:
            assert read_manifest(saved) == want
        except CheckpointError as error:
            assert str(path) in str(error)


@pytest.mark.parametrize("what", ["vbrt.json", "shard", "index", "model.safetensors"])
def test_a_fifo_in_the_place_of_a_file_is_refused_and_nothing_waits_for_it(saved, what):
    (shard,) = saved.glob("*.safetensors")
    if what in ("index", "model.safetensors"):
        (saved / "vbrt.json").unlink()
        shard = shard.rename(saved / "model.safetensors")
    if what == "index":
        (saved / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    path = saved / "vbrt.json" if what == "vbrt.json" else shard
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=f"{path}: .*FIFO|neither {path.name}|nor {path.name}"):
        vbrt.load(saved, mlp())


@pytest.mark.parametrize("what", ["vbrt.json", "model.safetensors.index.json", "shard", "header"])
def test_a_file_that_pretends_to_be_large_is_refused_before_memory_is_taken(saved, what):
    (shard,) = saved.glob("*.safetensors")
    if what == "model.safetensors.index.json":
        (saved / "vbrt.json").unlink()
    path = shard if what in ("shard", "header") else saved / what
    with open(path, "r+b" if path.exists() else "wb") as file:
        if what == "header":
            file.write((1 << 34).to_bytes(8, "little"))
        file.truncate(1 << 36)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=f"{path}: "):
        vbrt.load(saved, mlp())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20


def test_a_fine_plane_whose_lists_do_not_go_with_its_codes_is_refused(tmp_path):
    vb = wrap(mlp(dtype=torch.bfloat16), "exact").materialize()
    vb.save(tmp_path)
    (shard,) = tmp_path.glob("*.safetensors")
    tensors = load_file(shard)
    name = "0.weight.fine.starts"
    tensors[name] = tensors[name] + 1000
    save_file(tensors, shard)
    content = json.loads((tmp_path / "vbrt.json").read_text())
    content["tensors"][name][-1] = tensor_digest(tensors[name])
    content["digest"] = content_digest(content)
    (tmp_path / "vbrt.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"0: fine plane: lists of \d+ and \d+ entries, or `starts`, that do not"):
        vbrt.load(tmp_path, mlp())


# -- headers ----------------------------------------------------------------------------------------------------------


def file_of(path, header, nbytes):
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(nbytes))
    return path


def entry(begin, end, dtype="F32", shape=None):
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "nbytes"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12),
        ({"a": entry(0, 8), "b": entry(12, 16)}, 16),
        ({"a": entry(4, 12)}, 12),
        ({"a": entry(0, 8)}, 9),
        ({"a": entry(0, 8)}, 7),
        ({"a": entry(0, 8, shape=["2"])}, 8),
        ({"a": entry(0, 8, shape=[2.0])}, 8),
        ({"a": entry(0, 8, shape=[True, 2])}, 8),
        ({"a": entry(0, 8, shape=[-2])}, 8),
        ({"a": entry(0, 8, shape=[float("inf")])}, 8),
        ({"a": entry(0, 8, shape=[1 << 64])}, 8),
        ({"a": [1]}, 8),
        ({"a": entry(0, 8) | {"data_offsets": ["0", "8"]}}, 8),
        ({"a": entry(0, 8, dtype="F33")}, 8),
        ({"a": None}, 8),
        ({"__metadata__": {"a": 1}}, 0),
        (f'{{"a": {json.dumps(entry(0, 4))}, "a": {json.dumps(entry(4, 8))}}}', 8),
        ("[]", 0),
        ("", 0),
        ("{}x", 0),
        ("[" * 10_000, 0),
        ('{"a":' * 10_000, 0),
        ({"a": entry(0, 8, shape=[2] + [1] * 70)}, 8),
        ({"a": entry(0, 0, shape=[1 << 62, 1 << 62, 0])}, 0),
        ({"a": entry(0, 8, dtype="F4", shape=[16])}, 8),
    ],
)
def test_a_header_that_the_library_refuses_is_refused(tmp_path, header, nbytes):
    path = file_of(tmp_path / "x.safetensors", header, nbytes)
    with pytest.raises(CheckpointError, match=f"{path}: damaged, truncated, or not a safetensors file"):
        TensorFile(path)


def test_every_dtype_that_torch_has_is_read(tmp_path):
    for name in ("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e4m3fn", "bool", "uint64", "complex64", "float64"):
        tensor = torch.ones(3, 2).to(getattr(torch, name))
        save_file({"a": tensor}, tmp_path / "x.safetensors")
        back = TensorFile(tmp_path / "x.safetensors").read("a")
        assert back.dtype is tensor.dtype and torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_weights_of_another_kind_of_number_are_refused_by_name(tmp_path):
    state = mlp().state_dict()
    state["2.weight"] = state["2.weight"].view(torch.int32)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 dtypes do not fit: 2\.weight is float32, saved was int32"):
        vbrt.load(tmp_path, mlp())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"weight_map": {"a": null}}', r"weight_map\.a = None"),
        ('{"weight_map": {"a": 1}}', r"weight_map\.a = 1"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "outside of its directory"),
        ('{"weight_map": []}', "weight_map"),
        ('{"weight_map": {"a": "."}}', r"weight_map\.a"),
        ('{"weight_map": {"a": ""}}', r"weight_map\.a"),
        ("[]", "weight_map"),
        ("[" * 100_000, "not valid JSON"),
        ('{"weight_map": {"a": "x\\u0000"}}', "x"),
        ("{}", "weight_map"),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path, text, words):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=words):
        vbrt.load(tmp_path, mlp())


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "\ud800", "~nobody-of-this-name/x", "x/" * 3000])
def test_a_name_that_no_file_can_have_is_refused(tmp_path, name):
    for path in (name, str(tmp_path / name))[: 1 if name.startswith("~") else 2]:
        with pytest.raises(CheckpointError):
            vbrt.load(path, mlp())
        with pytest.raises(CheckpointError):
            wrap(mlp(), "nvfp4").save(path)


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
    for model in (vb, vb.model, [vb]):
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
        "vbrt.tiers.memory.MemoryTier.allocate",
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


@pytest.mark.parametrize(("kind", "name"), [pair for pair in zoo.SAMPLE if pair[0] in ("causal", "base")])
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
    for key, buffer in encoded.model.named_buffers():
        assert torch.equal(buffer, built[key].to(buffer.dtype)), key
