"""Models whose checkpoints other libraries quantized, saved in those libraries' layouts."""

import copy
import json
import os
import warnings

import pytest
import torch
from safetensors.torch import save_file

import vbrt
from tests.saves.published.published_files import LAYOUTS, compressed_mxfp4, publish
from vbrt.errors import ArgumentError, CheckpointError
from vbrt.saves.files.safetensors_file import TensorFile, digest

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"vocab_size": 64, "num_hidden_layers": 1}
QUIET = {"weights": {"min_parameters": 0}, "tiers": {"gpu": {"enabled": False}}}


def published(directory, layout):
    """Write a checkpoint in a layout, with a norm that is not the usual one; return its directory."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    model.model.norm.weight.data.uniform_(0.5, 1.5)
    directory.mkdir()
    publish(directory, model, layout)
    return directory


def loaded(directory, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return vbrt.from_pretrained(directory, *args, **QUIET, progress=False)


def tensors_of(directory):
    file = TensorFile(directory / "model.safetensors")
    return {name: file.read(name) for name in file.tensors}, file.metadata


@torch.no_grad()
def logits(model):
    return model(torch.arange(8).view(1, 8)).logits


@pytest.mark.sample(12)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_published_is_saved_in_its_layout(tmp_path, layout):
    path = published(tmp_path / "a", layout)
    vb = loaded(path)
    vb.save_pretrained(tmp_path / "b")
    (before, metadata), (after, kept) = tensors_of(path), tensors_of(tmp_path / "b")
    assert before.keys() == after.keys() and metadata == kept
    for name, tensor in before.items():
        assert tensor.dtype is after[name].dtype and tensor.shape == after[name].shape, name
        assert digest(tensor) == digest(after[name]), name
    schemes = [json.loads((at / "config.json").read_text())["quantization_config"] for at in (path, tmp_path / "b")]
    assert schemes[0] == schemes[1] and not hasattr(vb.module.config, "quantization_config")
    again = loaded(tmp_path / "b")
    assert torch.equal(logits(again), logits(vb)) and again.plan.notes == vb.plan.notes
    again.close()
    vb.close()


def test_tensors_that_are_not_quantized_are_the_models(tmp_path):
    config = published(tmp_path / "a", "awq") / "config.json"  # the files hold the head, which is the table, too
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    vb = loaded(tmp_path / "a")
    with torch.no_grad():
        vb.module.model.norm.weight.mul_(2)
    vb.save_pretrained(tmp_path / "b", max_shard_size="8KB")
    assert (tmp_path / "b/model.safetensors.index.json").is_file()
    again = loaded(tmp_path / "b")
    assert torch.equal(again.module.model.norm.weight, vb.module.model.norm.weight)
    assert torch.equal(logits(again), logits(vb))
    again.close()
    vb.close()


def test_experts_and_their_router_are_saved_under_the_files_names(tmp_path):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    model = transformers.MixtralForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    (tmp_path / "a").mkdir()
    model.save_pretrained(tmp_path / "a")
    tensors, packed = tensors_of(tmp_path / "a")[0], {}
    for name, value in tensors.items():
        if ".experts." in name:
            made = compressed_mxfp4(value)
            packed |= {name.removesuffix(".weight") + suffix: tensor for suffix, tensor in made.tensors.items()}
        else:
            packed[name] = value
    save_file(packed, tmp_path / "a/model.safetensors", {"format": "pt"})
    vb = loaded(tmp_path / "a")
    gate = next(
        value for name, value in vb.module.named_parameters() if name.endswith(("gate.weight", "router.weight"))
    )
    with torch.no_grad():
        gate.add_(1)
    vb.save_pretrained(tmp_path / "b")
    saved = tensors_of(tmp_path / "b")[0]
    other = [name for name, tensor in packed.items() if digest(tensor.contiguous()) != digest(saved[name])]
    assert saved.keys() == packed.keys() and len(other) == 1 and "gate" in other[0]
    vb.close()


def test_weights_that_are_rounded_again_or_unwrapped_are_saved_dense(tmp_path):
    path = published(tmp_path / "a", "awq")
    vb = loaded(path, "fp4")
    vb.save_pretrained(tmp_path / "b")
    assert "model.layers.0.mlp.up_proj.weight" in tensors_of(tmp_path / "b")[0]
    vb.close()
    model = loaded(path).unwrap()
    model.save_pretrained(tmp_path / "c")
    copied = copy.deepcopy(model)
    copied.save_pretrained(tmp_path / "d")
    for at in ("b", "c", "d"):
        assert "quantization_config" not in json.loads((tmp_path / at / "config.json").read_text())
    tensors, again = tensors_of(tmp_path / "c")[0], tensors_of(tmp_path / "d")[0]
    assert torch.equal(tensors["model.layers.0.mlp.up_proj.weight"], model.model.layers[0].mlp.up_proj.weight)
    assert tensors.keys() == again.keys()


def test_files_that_are_gone_changed_or_written_over_are_refused_by_name(tmp_path):
    path = published(tmp_path / "a", "awq")
    vb, file = loaded(path), path / "model.safetensors"
    with pytest.raises(ArgumentError, match=r"save_pretrained: .*a: quantized weights are copied from the files in"):
        vb.save_pretrained(path)
    before = file.stat().st_atime_ns, file.stat().st_mtime_ns
    os.utime(file, ns=(0, 0))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: gone or changed since the model was loaded"):
        vb.save_pretrained(tmp_path / "b")
    os.utime(file, ns=before)
    config = (path / "config.json").read_text()
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: gone or changed"):
        vb.save_pretrained(tmp_path / "b")
    (path / "config.json").write_text(config)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: gone or changed"):
        vb.save_pretrained(tmp_path / "b")
    assert logits(vb).isfinite().all() and not hasattr(vb.module.config, "quantization_config")
    vb.close()
