"""Automatic precision and calibration where a GPU computes: within its budget, with a CPU's choices."""

import json

import pytest
import torch

import vbrt
from vbrt.estimation.precision.input_statistics import with_inputs

pytestmark = pytest.mark.gpu
IDS = torch.randint(128, (4, 48), generator=torch.Generator().manual_seed(0))
WEIGHTS = {"format": "nvfp4", "min_parameters": 0}


def network(**sizes: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    shape = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, **sizes}
    return LlamaForCausalLM(LlamaConfig(**shape)).eval()


def gpu(budget: int) -> dict:
    return {"weights": WEIGHTS, "tiers": {"gpu": {"budget": budget}}}


def test_a_model_in_host_memory_is_measured_on_the_gpu_within_its_budget_as_on_a_cpu():
    pytest.importorskip("transformers")
    model = network(hidden_size=512, intermediate_size=2048, num_hidden_layers=10)
    on_cpu = vbrt.choose_precision(model, IDS, "15 bits", {"weights": WEIGHTS, "tiers": {"gpu": {"enabled": False}}})
    largest = max(p.nbytes for p in model.parameters())
    swapped = sum(layer.swap.dense_bytes for layer in on_cpu.layers)
    kept = sum(p.nbytes for p in model.parameters()) - swapped
    before = [(p.data_ptr(), p.device) for p in model.parameters()]
    peaks = []
    for budget in (4 * largest, 2 * swapped):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        choice = vbrt.choose_precision(model, IDS, "15 bits", gpu(budget))
        peaks.append(torch.cuda.max_memory_allocated() - start)
        losses = [(a.loss, b.loss) for a, b in zip(choice.layers, on_cpu.layers, strict=True)]
        assert all(a == pytest.approx(b, rel=0.1, abs=1e-7) for a, b in losses)
    assert [(p.data_ptr(), p.device) for p in model.parameters()] == before
    assert peaks[0] < kept + 4 * largest + 20 * largest < swapped < peaks[1], (peaks, kept, largest, swapped)


def test_a_gpu_calibrates_a_model_in_host_memory_to_nearly_the_scales_of_a_cpu(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "ids.json").write_text(json.dumps(IDS.tolist()))
    asked = vbrt.load_config(gpu(64 << 20) | {"weights": {**WEIGHTS, "calibrate": str(tmp_path / "ids.json")}})
    model = network()
    plan = vbrt.make_plan(model, asked)
    found = [with_inputs(model, plan, asked, device=torch.device(name)) for name in ("cuda", "cpu")]
    for one, other in zip(found[0].swaps, found[1].swaps, strict=True):
        torch.testing.assert_close(one.inputs[0].squares, other.inputs[0].squares, rtol=1e-2, atol=1e-3)
    vb = vbrt.wrap(model, asked)
    with torch.no_grad():
        logits = vb(IDS.cuda()).logits.float().cpu()
        whole = network()(IDS).logits
    assert {layer.format for layer in vb.stats().layers.values()} == {"nvfp4, calibrated"}
    assert (logits - whole).norm() < 0.2 * whole.norm()
