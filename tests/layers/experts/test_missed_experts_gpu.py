"""Missed experts that the CPU computes beside a GPU while the host decides: its numbers, tiles, who decides."""

import pytest
import torch

import vbrt
from tests.models import fallbacks, qwen3_moe
from vbrt.layers.experts import hosted_experts
from vbrt.residency.miss_policy import MissRates

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
NAME = "model.layers.0.mlp.experts"


def _wrapped(miss: str, format: str = "nvfp4") -> vbrt.VBModelWrapper:
    """Half of the experts find room on the GPU; all of them live in host memory."""
    settings = {"weights": {"format": format, "min_parameters": 0}, "experts": {"miss": miss}}
    model = qwen3_moe(count=16, layers=3)
    plan = vbrt.make_plan(model, vbrt.config.load_config(settings))
    experts = sum(swap.page_bytes for swap in plan.swaps if swap.experts)
    settings["tiers"] = {"gpu": {"budget": plan.page_bytes - experts + 2 * plan.largest_layer_bytes + experts // 2}}
    return vbrt.wrap(model, settings)


def _logits(vb: vbrt.VBModelWrapper) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tokens = [torch.randint(0, 128, (1, 24)), *(torch.randint(0, 128, (1, 1)) for _ in range(40))]
    return [vb(each.cuda()).logits for each in tokens]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4"])
@torch.no_grad()
def test_what_the_cpu_computes_is_what_the_gpu_would(format, monkeypatch):
    monkeypatch.setattr(hosted_experts, "refusal", lambda stack: "no mailbox")
    vb, again = _wrapped("compute", format), _wrapped("compute", format)
    found = _logits(vb)
    for got, want in zip(found, _logits(_wrapped("fetch", format)), strict=True):
        torch.testing.assert_close(got, want, rtol=5e-2, atol=2e-2)
    assert all(torch.equal(*both) for both in zip(found, _logits(again), strict=True))
    experts = vb.stats().layers[NAME].experts
    assert experts.decides == "host" and experts.computed > 0 and not fallbacks(vb)


@torch.no_grad()
def test_auto_leaves_small_experts_to_the_gpu_and_divides_large_ones(monkeypatch):
    monkeypatch.setattr(hosted_experts, "refusal", lambda stack: "no mailbox")
    vb = _wrapped("auto")
    _logits(vb)
    assert vb.stats().layers[NAME].experts.decides == "gpu" and "the GPU decides" in str(vb.stats().fallbacks)
    vb = _wrapped("auto")
    vb._attachment.missed.rates = MissRates(1e6, 4e6)  # large pages, and a CPU that pays
    _logits(vb)
    experts = vb.stats().layers[NAME].experts
    assert experts.decides == "host" and 0 < experts.computed < vb.stats().layers[NAME].misses
