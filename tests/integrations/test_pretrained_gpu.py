"""Loading into the planes of a GPU: whichever way a checkpoint is read, the same weights."""

import pytest
import torch

import vbrt
from tests.integrations.test_pretrained import AutoModelForCausalLM, llama

SETTINGS = {"weights": {"min_parameters": 0}}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("preset", ["exact", "fp4", "dense"])
def test_every_way_into_a_gpu_gives_the_same_weights_and_logits(tmp_path, preset):
    model = llama(hidden_size=256, intermediate_size=512)
    model.save_pretrained(tmp_path / "plain")
    config = vbrt.QuantizationConfig(preset, **SETTINGS)
    by_transformers = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    by_transformers.save_pretrained(tmp_path / "planes")
    ways = [
        vbrt.of(by_transformers),
        vbrt.from_pretrained(tmp_path / "plain", preset, **SETTINGS),
        vbrt.from_pretrained(tmp_path / "planes"),
        vbrt.wrap(model.cuda(), preset, **SETTINGS),
    ]
    ids = torch.arange(8, device="cuda").view(1, 8)
    with torch.no_grad():
        expected = ways[-1](ids).logits
    for vb in ways:
        assert vb.stack.device.type == "cuda"
        with torch.no_grad():
            assert torch.equal(vb(ids).logits, expected)
        for name, layer in ways[-1].registry.items():
            assert torch.equal(vb.registry[name].weight, layer.weight), name
