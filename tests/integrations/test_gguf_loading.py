"""`from_pretrained(gguf_file=..., quantization_config=vbrt.QuantizationConfig(...))` of transformers."""

import pytest
import torch

import vbrt
from vbrt.errors import CheckpointError
from vbrt.saves.files.gguf_file import GGUFFile
from vbrt.saves.published import published_checkpoint
from vbrt.saves.published.published_checkpoint import PublishedCheckpoint

pytest.importorskip("gguf")
pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
from tests.saves.published.gguf_files import Type, model_of, write  # noqa: E402 - needs them

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {"weights": {"min_parameters": 0}, "tiers": {"gpu": {"enabled": False}}, "compute": {"backend": "reference"}}


def types(name):
    return Type.Q8_0 if "attn_v." in name else Type.F16 if "embd" in name else Type.Q4_0


def pretrained(path, **given):
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **given)


@torch.no_grad()
def logits(model):
    return model(torch.arange(8).view(1, 8)).logits


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_file_goes_into_planes_as_transformers_reads_it(tmp_path, architecture, monkeypatch):
    path, read = tmp_path / "model.gguf", []
    write(path, model_of(architecture), architecture, types)
    plain = PublishedCheckpoint.read
    monkeypatch.setattr(PublishedCheckpoint, "read", lambda self, name: read.append(name) or plain(self, name))
    fused_on = published_checkpoint.fused_on  # and as where no kernel computes with 8-bit codes
    monkeypatch.setattr(published_checkpoint, "fused_on", lambda own: () if own.startswith("bytes") else fused_on(own))
    model = pretrained(path, dtype=torch.bfloat16, quantization_config=vbrt.QuantizationConfig("exact", **SMALL))
    vb = vbrt.of(model)
    assert torch.equal(logits(model), logits(pretrained(path, dtype=torch.bfloat16)))
    formats = {name.split(".")[-1]: layer.format for name, layer in vb.stats().layers.items()}
    assert (formats["v_proj"], formats["q_proj"]) == ("nvfp4+exact", "symmetric32-float16")
    assert vb.stats().fallbacks[0].startswith("2 layers: decoded and held as nvfp4+exact: GGUF Q8_0")
    swapped = {name for name in read if name.endswith("_proj.weight")}
    assert swapped == {f"model.layers.{layer}.self_attn.v_proj.weight" for layer in (0, 1)}, "the others' planes alone"
    assert len(read) == len(set(read))


def test_its_planes_are_saved_and_read_again(tmp_path):
    path = tmp_path / "model.gguf"
    write(path, model_of("llama"), "llama", types)
    model = pretrained(path, dtype="auto", quantization_config=vbrt.QuantizationConfig("exact", **SMALL))
    assert model.dtype is torch.float32
    model.save_pretrained(tmp_path / "planes")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "planes")
    assert torch.equal(logits(again), logits(model))
    assert vbrt.of(again).plan.swaps[0].format == "symmetric32-float16"


def test_a_model_of_a_file_trains_through_4_bits(tmp_path):
    path = tmp_path / "model.gguf"
    write(path, model_of("llama"), "llama", types)
    plain = pretrained(path, dtype=torch.float32)
    model = pretrained(path, quantization_config=vbrt.QuantizationConfig(mode="train", weights={"min_parameters": 0}))
    state = {name: value for name, value in model.state_dict().items() if not name.endswith("separation")}
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("name", ["blk.1.ffn_up.weight", "output_norm.weight"])
def test_damage_is_named_whatever_transformers_is_at(tmp_path, name):
    path = tmp_path / "model.gguf"
    write(path, model_of("llama"), "llama", types)
    given = {"quantization_config": vbrt.QuantizationConfig("exact", **SMALL)}
    plain = GGUFFile.rows

    def rows(self, wanted, first, count):
        if wanted == name:
            raise CheckpointError(f"{self.path}: {wanted} cannot be read: truncated")
        return plain(self, wanted, first, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFFile, "rows", rows)
        with pytest.raises(CheckpointError, match=rf"{name} cannot be read"):
            pretrained(path, **given)
