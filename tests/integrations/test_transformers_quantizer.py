"""`from_pretrained` of transformers with a `vbrt.QuantizationConfig`."""

import copy
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import vbrt
from tests.matrix import matrix
from vbrt.errors import CheckpointError, ConfigError, FormatError, WrapError
from vbrt.integrations.register_hooks import when_imported
from vbrt.layers.experts import expert_encoding

transformers = pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402
from transformers.core_model_loading import MergeModulelist  # noqa: E402
from transformers.trainer_utils import validate_quantization_for_training  # noqa: E402

from vbrt.integrations.transformers_quantizer import VBQuantizer  # noqa: E402

IDS = torch.arange(3, 15)[None]
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}


def llama(**sizes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=96, num_hidden_layers=2, **sizes)).to(torch.bfloat16)


def qwen3_moe():
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes, head_dim=16, intermediate_size=96)).to(torch.bfloat16)


MODELS = {"llama": llama, "qwen3_moe": qwen3_moe}


@pytest.fixture
def saved(tmp_path):
    """A directory with a small Llama, and the logits of the plain model."""
    llama().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain", AutoModelForCausalLM.from_pretrained(tmp_path / "plain")(IDS).logits


def load(path, *args, **kwargs):
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=vbrt.QuantizationConfig(*args, **kwargs))


@matrix(name=list(MODELS), stored=["planes", "dense"])
def test_a_model_is_wrapped_as_it_is_read_and_read_again_as_it_was_saved(name, stored, tmp_path):
    MODELS[name]().save_pretrained(tmp_path / "plain")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")(IDS).logits
    model = load(tmp_path / "plain", "exact", stored=stored)
    assert torch.equal(model(IDS).logits, expected)
    model.save_pretrained(tmp_path / "wrapped")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "wrapped")
    named = load(tmp_path / "wrapped", tiers={"cpu": {"budget": "64MiB"}})
    for other in (again, named):
        assert torch.equal(other(IDS).logits, expected)
        assert vbrt.of(other).registry.keys() == vbrt.of(model).registry.keys()
        assert vbrt.of(other).settings.weights.fine == "exact"
    assert vbrt.of(named).plan.budgets["cpu"] == 64 << 20


@pytest.mark.parametrize("name", MODELS)
def test_no_weight_that_is_swapped_waits_for_the_others(name, tmp_path, monkeypatch):
    MODELS[name]().save_pretrained(tmp_path)
    for kind in (vbrt.layers.VBLayer, vbrt.layers.experts.VBExperts):
        monkeypatch.setattr(kind, "materialize_", None)  # which encodes what is left when everything is read
    assert all(layer.materialized for layer in vbrt.of(load(tmp_path, "exact")).registry.values())


def test_planes_that_were_saved_are_not_encoded_again(saved, tmp_path, monkeypatch):
    load(saved[0], "fp4").save_pretrained(tmp_path)
    expected = load(saved[0], "fp4")(IDS).logits
    monkeypatch.setattr("vbrt.layers.weights.weight_encoding.Encoder.split", None)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, expected)


@pytest.mark.parametrize("stored", ["planes", "dense"])
def test_a_config_that_was_saved_with_a_retired_key_still_loads(stored, saved, tmp_path):
    load(saved[0], "exact", stored=stored).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    content["quantization_config"]["config"]["compute"]["fp4"] = False
    path.write_text(json.dumps(content))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, saved[1])
    with vbrt.from_pretrained(tmp_path) as vb:
        assert torch.equal(vb(IDS).logits, saved[1])
    with vbrt.load(tmp_path, llama()) as vb:
        assert vb.settings.weights.fine == "exact"


@pytest.mark.parametrize("stored", ["planes", "dense"])
def test_a_model_that_is_larger_than_memory_is_saved_through_the_ssd_tier(stored, saved, tmp_path, monkeypatch):
    pages = tmp_path / "pages"
    tiers = {"cpu": {"budget": "16KiB"}, "ssd": {"enabled": True, "path": str(pages)}}
    model = load(saved[0], "exact", tiers=tiers, stored=stored)
    before = sorted(pages.iterdir())
    monkeypatch.setattr("vbrt.saves.saved.embedded_planes._Collector", None)  # which copies into memory
    monkeypatch.setattr(model, "state_dict", None)
    model.save_pretrained(tmp_path / "wrapped")
    assert sorted(pages.iterdir()) == before
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "wrapped")(IDS).logits, saved[1])


@pytest.mark.parametrize("stored", ["planes", "dense"])
def test_a_model_of_which_no_page_has_gone_to_the_drive_is_saved_through_a_directory_that_goes_again(
    stored, saved, tmp_path
):
    pages = tmp_path / "none" / "yet"
    tiers = {"ssd": {"path": str(pages)}, "cpu": {"budget": "64MiB"}}
    model = load(saved[0], "cpu-ssd", tiers=tiers, stored=stored)
    assert not pages.parent.exists()
    model.save_pretrained(tmp_path / "wrapped")
    assert not pages.parent.exists()
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "wrapped")(IDS).logits, saved[1])


def test_planes_do_not_train(saved, tmp_path):
    load(saved[0], "fp4").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="holds planes, which do not train"):
        load(tmp_path, mode="train")


def test_experts_are_read_one_by_one_and_never_stacked(tmp_path, monkeypatch):
    qwen3_moe().save_pretrained(tmp_path)
    merged, read = [], []
    take, merge = expert_encoding.MatricesOnDemand.__getitem__, MergeModulelist.convert
    monkeypatch.setattr(expert_encoding, "_STEP_BYTES", {"cpu": 1})
    monkeypatch.setattr(
        expert_encoding.MatricesOnDemand, "__getitem__", lambda m, some: read.append(some) or take(m, some)
    )
    monkeypatch.setattr(
        MergeModulelist,
        "convert",
        lambda op, given, **kwargs: merged.extend(map(len, given.values())) or merge(op, given, **kwargs),
    )
    load(tmp_path, "exact")
    assert read == [slice(e, e + 1) for e in range(4) for part in ("gate_up_proj", "down_proj")]
    assert set(merged) == {1}


def test_a_reader_without_vbrt_gets_the_dense_weights_or_an_error(saved, tmp_path, monkeypatch):
    model = load(saved[0], "exact", stored="dense")
    model.save_pretrained(tmp_path / "dense")
    model.config.quantization_config.stored = "planes"
    model.save_pretrained(tmp_path / "planes")
    auto = transformers.quantizers.auto
    monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, "vbrt")
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "vbrt")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "dense")(IDS).logits, saved[1])
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "planes")


def test_a_map_of_devices_is_refused_because_tiers_do_that(saved):
    with pytest.raises(ConfigError, match="tiers do that"):
        AutoModelForCausalLM.from_pretrained(
            saved[0], device_map={"model": "cpu", "lm_head": "disk"}, quantization_config=vbrt.QuantizationConfig()
        )


@pytest.mark.parametrize("size", ["fsdp_size", "pp_size"])
def test_a_model_that_is_split_otherwise_than_by_a_tensor_parallel_plan_is_refused(size):
    model = llama()
    model.config.distributed_config = SimpleNamespace(tp_size=2, **{size: 2})
    quantizer = VBQuantizer(vbrt.QuantizationConfig(), pre_quantized=False)
    with pytest.raises(ConfigError, match=f"distributed_config has {size} = 2"):
        quantizer.preprocess_model(model, checkpoint_files=[])


def test_a_weight_that_cannot_be_encoded_is_named(tmp_path):
    model = llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(FormatError, match=r"model.layers.1.mlp.up_proj: .*NaN"):
        load(tmp_path, "exact")


def test_damaged_planes_are_refused_by_name(saved, tmp_path):
    load(saved[0], "exact").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model.safetensors: .*bytes of model\..* do not match their digest"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_tied_tables_in_the_tiers_are_one_weight(tmp_path):
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "plain")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")(IDS).logits
    wrapped = load(tmp_path / "plain", "exact", weights={"embeddings": True, "min_parameters": 0})
    assert torch.equal(wrapped(IDS).logits, expected)
    assert wrapped.lm_head.handle is wrapped.model.embed_tokens.handle
    wrapped.save_pretrained(tmp_path / "wrapped")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "wrapped")(IDS).logits, expected)


def test_an_unwrapped_model_is_saved_as_a_plain_one(saved, tmp_path):
    model = load(saved[0], "exact")
    assert vbrt.of(model).unwrap() is model
    with pytest.raises(WrapError, match="expected a model that is wrapped"):
        vbrt.of(model)
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()


def test_importing_vbrt_imports_neither_torch_nor_transformers():
    code = "import sys, vbrt; assert not {'torch', 'transformers', 'inspect'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_library_is_told_of_vbrt_when_it_is_imported_later(tmp_path, monkeypatch):
    (tmp_path / "some_library.py").write_text("known = []")
    monkeypatch.syspath_prepend(tmp_path)
    when_imported("some_library", lambda module: module.known.append("vbrt"))
    import some_library

    when_imported("some_library", lambda module: module.known.append("again"))
    assert some_library.known == ["vbrt", "again"]
    assert {"vbrt"} <= transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING.keys()
    known = transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING["vbrt"]
    assert isinstance(vbrt.QuantizationConfig(), known) and not isinstance(monkeypatch, known)


def test_trainer_takes_models_whose_weights_train_and_adapters_on_others(saved, tmp_path):
    model, frozen = load(saved[0], "train"), load(saved[0], "exact")
    for trainable in (model, vbrt.of(model)):
        validate_quantization_for_training(trainable)
    with pytest.raises(ValueError, match="attach trainable adapters"):
        validate_quantization_for_training(frozen)
    assert frozen.hf_quantizer.is_trainable and frozen.hf_quantizer.is_compileable
    frozen._hf_peft_config_loaded = True  # as add_adapter() leaves it
    validate_quantization_for_training(frozen)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert vbrt.of(again).settings.mode == "train"
    assert torch.equal(again.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)


def test_a_copy_of_a_wrapped_model_has_a_wrapper_of_its_own(saved):
    model = load(saved[0], "exact")
    copied = copy.deepcopy(model)
    vbrt.of(model).close()
    assert vbrt.of(copied).module is copied
    assert torch.equal(copied(IDS).logits, saved[1])


def test_models_that_are_loaded_with_one_config_share_a_runtime_if_it_says_so(saved, tmp_path):
    path, expected = saved
    tiers = {"cpu": {"budget": "64MiB"}, "ssd": {"enabled": True, "path": str(tmp_path / "pages")}}
    config = vbrt.QuantizationConfig("exact", tiers=tiers, runtime="shared")
    first, second = (AutoModelForCausalLM.from_pretrained(path, quantization_config=config) for _ in range(2))
    one, two = vbrt.of(first), vbrt.of(second)
    assert two.runtime is one.runtime and len(one.runtime.attachments) == 2
    one.set_budget("cpu", max(one.plan.largest_layer_bytes, two.plan.largest_layer_bytes))
    assert torch.equal(first(IDS).logits, expected) and torch.equal(second(IDS).logits, expected)
    one.close()
    assert torch.equal(second(IDS).logits, expected)
    joined = vbrt.QuantizationConfig("exact", runtime=two.runtime)
    third = AutoModelForCausalLM.from_pretrained(path, quantization_config=joined)
    assert vbrt.of(third).runtime is two.runtime and torch.equal(third(IDS).logits, expected)
    third.save_pretrained(tmp_path / "planes")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "planes", quantization_config=joined)
    assert vbrt.of(again).runtime is two.runtime and torch.equal(again(IDS).logits, expected)
    with pytest.raises(vbrt.ConfigError, match="models on one runtime share its tiers"):
        load(path, "exact", runtime=two.runtime, tiers={"cpu": {"budget": "1GiB"}})
    with pytest.raises(vbrt.ConfigError, match="runtime = 3"):
        vbrt.QuantizationConfig("exact", runtime=3)


def test_a_model_that_cannot_join_leaves_the_others_and_their_tiers_as_they_were(saved, tmp_path):
    path, expected = saved
    first = load(path, "exact")
    vb, broken = vbrt.of(first), llama()
    broken.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    broken.save_pretrained(tmp_path / "broken")
    pages = set(vb.stack.pages)
    with pytest.raises(vbrt.FormatError, match=r"layers\.1\.mlp\.up_proj"):
        load(tmp_path / "broken", "exact", runtime=vb.runtime)
    assert set(vb.stack.pages) == pages and len(vb.runtime.attachments) == 1
    assert torch.equal(first(IDS).logits, expected)
