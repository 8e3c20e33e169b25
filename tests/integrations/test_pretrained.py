"""vbrt.from_pretrained: a directory of transformers into a wrapped model."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import vbrt
from tests.cli.conftest import save_tokenizer
from tests.saves.published.published_files import publish
from tests.saves.published.test_published import QUIET, llama, logits
from vbrt.host import file_prefetch
from vbrt.integrations.causal_models import load_dense

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_dense_checkpoint_comes_back_wrapped_and_bit_equal(tmp_path):
    model = llama()
    model.generation_config.max_new_tokens = 3
    model.save_pretrained(tmp_path)
    with vbrt.from_pretrained(tmp_path, "exact", **QUIET) as vb:
        assert torch.equal(logits(vb), logits(model))
        assert vb.module.generation_config.max_new_tokens == 3
        assert not vb.training


@pytest.mark.parametrize("layout", ["modelopt", "gptq"])
def test_a_published_checkpoint_is_wrapped_without_naming_its_layout(tmp_path, layout):
    model = llama()
    model.load_state_dict(publish(tmp_path, model, layout))
    with vbrt.from_pretrained(tmp_path, **QUIET) as vb:
        assert torch.equal(logits(vb), logits(model))
        assert not hasattr(vb.module.config, "quantization_config")


def test_planes_come_back_however_they_were_saved(tmp_path):
    model = llama()
    model.load_state_dict(publish(tmp_path, model, "modelopt"))
    with vbrt.from_pretrained(tmp_path, **QUIET) as vb:
        expected = logits(vb)
        vb.save(tmp_path / "saved")
    with vbrt.from_pretrained(tmp_path / "saved") as vb:
        assert torch.equal(logits(vb), expected)
        assert {swap.format for swap in vb.plan.swaps} == {"nvfp4"}


def test_a_save_has_the_configs_and_the_tokenizer_that_a_model_was_loaded_with(tmp_path):
    model = llama()
    model.generation_config.max_new_tokens = 3
    model.save_pretrained(tmp_path / "dense")
    (tmp_path / "dense" / "tokenizer_config.json").write_text("{}")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "chat_template.jinja").write_text("mine")
    (tmp_path / "dense" / "chat_template.jinja").write_text("theirs")
    with vbrt.from_pretrained(tmp_path / "dense", "fp4", **QUIET) as vb:
        vb.save(tmp_path / "saved")
        expected = logits(vb)
    assert (tmp_path / "saved" / "tokenizer_config.json").read_text() == "{}"
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == "mine"
    found = AutoConfig.from_pretrained(tmp_path / "saved")
    assert found.architectures == ["LlamaForCausalLM"] and not hasattr(found, "quantization_config")
    assert not list((tmp_path / "saved").glob("model*"))
    with vbrt.from_pretrained(tmp_path / "saved", **QUIET) as vb:
        assert torch.equal(logits(vb), expected) and vb.module.generation_config.max_new_tokens == 3


def test_a_dense_checkpoint_is_calibrated_on_a_text_by_its_own_tokenizer(tmp_path):
    model = llama(vocab_size=280)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / "sea.txt").write_text("the sea is calm and the sky is blue" * 9)
    asked = {**QUIET, "weights": {"min_parameters": 0, "calibrate": str(tmp_path / "sea.txt")}}
    with vbrt.from_pretrained(tmp_path, "fp4", **asked) as vb:
        assert any("tokens of" in note and "sea.txt" in note for note in vb.plan.notes)
        expected = logits(vb)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    with vbrt.wrap(dense, "fp4", **asked) as vb:
        assert torch.equal(logits(vb), expected)
    with pytest.raises(vbrt.ConfigError, match=r"weights.calibrate = .*the model has to run before"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=vbrt.QuantizationConfig("fp4", **asked))


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(vbrt.VBError, match=r"config\.json"):
        vbrt.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(vbrt.CheckpointError, match=r"model\.safetensors"):
        vbrt.from_pretrained(tmp_path)


def test_a_config_of_another_model_is_refused_with_what_does_not_fit(tmp_path):
    """By vbrt's own words: transformers refers to a log, and fills what is missing at random."""
    llama().save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key, says in (
        (
            "vocab_size",
            r"2 shapes do not fit: lm_head\.weight is \(\d+, \d+\) in the files, and \(\d+, \d+\) in the model",
        ),
        ("num_hidden_layers", r"9 weights are missing: model\.layers\.1\.input_layernorm\.weight, "),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: config[key] + 1, "layer_types": None}))
        for load in (vbrt.from_pretrained, load_dense):
            with pytest.raises(vbrt.CheckpointError, match=f"not of this model: {says}"):
                load(tmp_path)


def test_a_truncated_file_is_named_through_transformers_too(tmp_path):
    llama().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(vbrt.CheckpointError, match=r"model\.safetensors: damaged, truncated"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=vbrt.QuantizationConfig("fp4", **QUIET))


@pytest.mark.parametrize("way", ["vbrt", "transformers"])
def test_files_are_read_ahead_layer_by_layer(tmp_path, monkeypatch, way):
    llama().save_pretrained(tmp_path)
    read = []
    monkeypatch.setattr(file_prefetch, "_joined", iter)  # or neighbours would be one read
    monkeypatch.setattr(file_prefetch.Crew, "give", lambda crew, work, piece: read.append(getattr(piece, "name", None)))
    if way == "vbrt":
        vbrt.load(tmp_path, llama(meta=True), "exact", **QUIET).close()
    else:
        made = AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=vbrt.QuantizationConfig("exact", **QUIET)
        )
        vbrt.of(made).close()
    names = [name for name in read if isinstance(name, str)]
    first, last = ("lm_head.weight", "model.layers.0") if way == "vbrt" else ("model.layers.0", "model.norm.weight")
    assert names[0].startswith(first) and names[-1].startswith(last)  # each reads them in an order of its own
    assert set(names) == set(llama().state_dict())


@pytest.mark.parametrize("tied", [False, True])
def test_planes_that_save_pretrained_wrote_are_a_source_like_any_other(tmp_path, tied):
    """Into the tiers of another model, and by `vbrt.load`; tied tables, in the tiers too, are one weight."""
    config = {**QUIET, "weights": {"min_parameters": 0, "embeddings": tied, "keep_head": not tied}}
    dense, saved = tmp_path / "dense", tmp_path / "saved"
    model = llama(tie_word_embeddings=tied)
    model.save_pretrained(dense)
    made = AutoModelForCausalLM.from_pretrained(dense, quantization_config=vbrt.QuantizationConfig("exact", **config))
    made.save_pretrained(saved)
    with vbrt.of(made) as first, vbrt.from_pretrained(saved, runtime=first.runtime) as second:
        assert torch.equal(logits(second), logits(model)) and second.runtime is first.runtime
        assert len(second.plan.swaps) == len(first.plan.swaps)
        assert {swap.format for swap in second.plan.swaps} == {"nvfp4"}
    with torch.device("meta"):
        empty = type(model)(model.config).eval()
    with pytest.raises(vbrt.ConfigError, match="a save keeps its format"):
        vbrt.load(saved, empty, "nf4")
    with vbrt.load(saved, empty) as vb:
        assert torch.equal(logits(vb), logits(model))


def test_pickled_weights_are_read_by_transformers(tmp_path):
    model = llama()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with vbrt.from_pretrained(tmp_path, "exact", **QUIET) as vb:
        assert torch.equal(logits(vb), logits(model))
