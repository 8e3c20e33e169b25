"""Checkpoints in the layouts that others publish: logits are those of the decoded weights, bit for bit."""

import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

import vbrt
from tests.saves.published_files import LAYOUTS, publish
from vbrt.errors import CheckpointError

transformers = pytest.importorskip("transformers")
QUIET = {"weights": {"min_parameters": 0}, "tiers": {"gpu": {"enabled": False}}, "compute": {"backend": "reference"}}
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"vocab_size": 64, "num_hidden_layers": 1}


def llama(meta=False):
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).bfloat16().eval()


@torch.no_grad()
def logits(model):
    return model(torch.arange(8).view(1, 8)).logits


def loaded(directory, model, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return vbrt.load(directory, model, *args, **QUIET)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_checkpoint_gives_the_logits_of_its_decoded_weights(tmp_path, layout):
    model = llama()
    model.load_state_dict(publish(tmp_path, model, layout))
    vb = loaded(tmp_path, llama(meta=True))
    assert torch.equal(logits(vb), logits(model))
    formats = {swap.format for swap in vb.plan.swaps}
    assert formats == ({LAYOUTS[layout][2]} if LAYOUTS[layout][2] else {"nvfp4"}), "of what is decoded: exact"
    assert any(("bit for bit" if LAYOUTS[layout][2] else "decoded") in note for note in vb.plan.notes)
    vb.close()


def test_what_a_checkpoint_left_dense_stays_dense(tmp_path):
    model = llama()
    model.load_state_dict(publish(tmp_path, model, "modelopt", names=lambda name: "mlp" in name))
    vb = loaded(tmp_path, llama(meta=True), "fp4")
    formats = {swap.name.split(".")[3]: swap.format for swap in vb.plan.swaps}
    assert formats == {"self_attn": "dense", "mlp": "nvfp4"}
    assert torch.equal(logits(vb), logits(model))
    vb.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, name: t.pop(f"{name}.weight_scale_2"), "weight_scale"),
        (lambda t, name: t.update({f"{name}.weight_scale": t[f"{name}.weight_scale"][:-1].clone()}), "scales"),
        (lambda t, name: t.update({f"{name}.weight_scale_2": torch.tensor(float("nan"))}), "global scale"),
        (lambda t, name: t.update({f"{name}.weight": t[f"{name}.weight"][:-1].clone()}), "fit"),
    ],
)
def test_damaged_parts_of_a_weight_are_refused_by_name(tmp_path, change, message):
    publish(tmp_path, llama(), "modelopt")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors, "model.layers.0.mlp.gate_proj")
    save_file(tensors, file, {"format": "pt"})
    model = llama(meta=True)
    before = dict(model.named_parameters())
    with pytest.raises(CheckpointError, match=f"gate_proj.*{message}|{message}.*gate_proj"):
        loaded(tmp_path, model)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
