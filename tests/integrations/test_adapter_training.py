"""Adapters of PEFT on a model that came wrapped out of `from_pretrained`, trained by transformers' Trainer."""

import pytest
import torch

import vbrt

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

IDS = torch.arange(3, 15)[None]
SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "num_hidden_layers": 1,
}
TARGETS = ["q_proj", "down_proj"]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def load(tmp_path):
    """A function that loads the same small Llama into planes of a preset."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, intermediate_size=96)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "plain")

    def load(preset):
        settings = vbrt.QuantizationConfig(preset, weights={"min_parameters": 0})
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=settings)

    return load


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def weights(model):
    """The weights of all VB layers, by the end of their names."""
    return {
        name.rpartition("layers.")[2].replace(".base_layer", ""): layer.weight.clone()
        for name, layer in vbrt.of(model).registry.items()
    }


def train(model, path):
    """Train for a few steps; return the first loss and the last."""
    rows = [{"input_ids": torch.arange(at, at + 8) % 64, "labels": torch.arange(at, at + 8) % 64} for at in range(8)]
    settings = transformers.TrainingArguments(
        output_dir=str(path), max_steps=4, per_device_train_batch_size=8, learning_rate=0.05, logging_steps=1,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses[0], losses[-1]


def add_by_transformers(model):
    try:
        model.add_adapter(peft.LoraConfig(r=4, target_modules=TARGETS))
    except ValueError as error:  # 5.24 wants a PEFT that is not out
        assert "PEFT" in str(error)
        pytest.skip(str(error))
    return model


def add_by_peft(model):
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=TARGETS))


def load_by_transformers(model, path):
    model.load_adapter(path)
    return model


WAYS = {
    "peft": (add_by_peft, peft.PeftModel.from_pretrained),
    "transformers": (add_by_transformers, load_by_transformers),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapper", [False, True])
def test_only_adapters_train_and_another_process_loads_them(load, tmp_path, wrapper, way):
    (add, load_onto), model = WAYS[way], load("fp4")
    vb = vbrt.of(model)
    before, plain = weights(model), {id(p): p.detach().clone() for p in model.parameters()}
    adapted = add(vb if wrapper and way == "peft" else model)
    first, last = train(vb if wrapper and way == "transformers" else adapted, tmp_path)
    assert last < first
    assert all(torch.equal(weight, before[name]) for name, weight in weights(model).items())
    assert all(torch.equal(p, plain[id(p)]) for p in model.parameters() if id(p) in plain)
    adapted.save_pretrained(tmp_path / "adapters")
    assert not list((tmp_path / "adapters").glob("model*.safetensors"))  # the planes are where they were
    fresh = load_onto(load("fp4"), str(tmp_path / "adapters"))
    assert torch.equal(logits(fresh), logits(adapted))


@pytest.mark.sample(1)
@pytest.mark.parametrize("preset", ["exact", "fp4"])
def test_merged_adapters_are_in_the_planes_as_far_as_their_format_goes(load, tmp_path, preset):
    settings = peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(load(preset), settings)
    before, wanted = weights(model), logits(model)
    merged = model.merge_and_unload()
    assert isinstance(merged.model.layers[0].mlp.down_proj, vbrt.VBLinear)
    error = (logits(merged) - wanted).abs().max() / wanted.abs().max()
    assert error < (0.02 if preset == "exact" else 0.3)  # bf16's rounding, as without vbrt; that of 4 bits
    after = weights(merged)
    if preset == "exact":
        torch.manual_seed(1)
        dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
        dense = peft.get_peft_model(dense, settings).merge_and_unload()
        assert torch.equal(logits(merged), logits(dense))
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert changed == {"0.self_attn.q_proj", "0.mlp.down_proj"}
    merged.save_pretrained(tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(again), logits(merged))
