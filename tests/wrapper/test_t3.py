"""Models in `t3`: products, tiers, saves and calibration are those of any format; rows of tables are not for it."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vbrt
from vbrt.errors import ConfigError
from vbrt.formats import get_format
from vbrt.layers.weights.hosted_weights import is_hostable
from vbrt.layers.weights.weight_spec import HandleSpec
from vbrt.residency.weight_site import WeightSite

T3 = {"format": "t3", "min_parameters": 0, "keep_head": False}
ON_CPU = {"gpu": {"enabled": False}}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(30, 70), nn.Linear(70, 64), nn.ReLU(), nn.Linear(64, 40)).eval()


IDS = torch.tensor([[1, 5, 29]])


@pytest.fixture
def wrapped():
    with vbrt.wrap(model(), weights=T3 | {"embeddings": True}, tiers=ON_CPU) as vb:
        vb.materialize()
        yield vb


def test_a_model_computes_with_the_decoded_weights(wrapped):
    h = F.linear(wrapped.module[0](IDS), wrapped.module[1].weight, wrapped.module[1].bias).relu()
    assert torch.equal(wrapped(IDS), F.linear(h, wrapped.module[3].weight, wrapped.module[3].bias))
    error = (wrapped.module[1].weight - model()[1].weight).square().mean() / model()[1].weight.square().mean()
    assert 0 < error < 0.025
    layers = wrapped.stats().layers.values()
    assert {(layer.kernel, layer.format) for layer in layers if layer.forwards} == {("reference", "t3")}
    pages = {page.key: page.nbytes for swap in wrapped.plan.swaps for page in swap.pages}
    assert pages["1#coarse"] == get_format("t3").layout((64, 70), torch.float32).nbytes


def test_routed_experts_compute_with_their_decoded_weights():
    pytest.importorskip("transformers")
    from tests.models import qwen3_moe

    ids = torch.arange(12)[None]
    with vbrt.wrap(qwen3_moe(), weights=T3 | {"include": ["*.experts"]}, tiers=ON_CPU) as vb, torch.no_grad():
        got = vb.materialize()(ids).logits
        (plain, *_), held = (swap for swap in vb.plan.swaps if swap.experts), qwen3_moe()
        assert plain.format == "t3" and {layer.format for layer in vb.stats().layers.values()} == {"t3"}
        for name, module in vb.module.named_modules():
            if name.endswith(".experts"):
                plain = held.get_submodule(name)
                for parameter in ("gate_up_proj", "down_proj"):
                    decoded = getattr(module, parameter).to(torch.bfloat16)
                    assert not torch.equal(decoded, getattr(plain, parameter))
                    getattr(plain, parameter).data.copy_(decoded)
    with torch.no_grad():
        torch.testing.assert_close(got, held(ids).logits, rtol=0.05, atol=0.02)


def test_a_table_stays_dense_by_name(wrapped):
    reason = wrapped.plan.skipped["0"].reason
    assert "looked up one by one" in reason and "t3 codes 16 rows together" in reason
    held = vbrt.make_plan(model(), vbrt.load_config("fp4", weights=T3 | {"embeddings": True, "formats": {"0": "nf4"}}))
    assert {swap.name: swap.format for swap in held.swaps} == {"0": "nf4", "1": "t3", "3": "t3"}


def test_planes_survive_a_save_and_a_tier_of_files(wrapped, tmp_path):
    want = wrapped(IDS)
    wrapped.save(tmp_path / "saved")
    with vbrt.load(tmp_path / "saved", model()) as loaded:
        assert torch.equal(loaded(IDS), want)
    tiers = ON_CPU | {"cpu": {"budget": "64KiB"}, "ssd": {"enabled": True, "path": str(tmp_path / "pages")}}
    with vbrt.wrap(model(), weights=T3, tiers=tiers) as streamed:
        assert torch.equal(streamed(IDS), want)


def test_calibrated_codes_lose_less_of_the_outputs_on_the_text(tmp_path):
    ids = torch.randint(30, (40, 16), generator=torch.Generator().manual_seed(1))
    text = tmp_path / "ids.json"
    text.write_text(json.dumps(ids.tolist()))
    plain, errors = model()[:2](ids), []
    for calibrate in (None, str(text)):
        chosen = T3 if calibrate is None else T3 | {"calibrate": calibrate}
        with vbrt.wrap(model(), weights=chosen, tiers=ON_CPU) as vb:
            vb.materialize()
            errors.append((vb.module[:2](ids) - plain).square().sum())
    assert errors[1] < 0.9 * errors[0]


def test_a_fine_plane_for_three_bits_is_refused_by_name():
    with pytest.raises(ConfigError, match=r'the codes of "t3" have 3 bits, and a fine plane refines 4'):
        vbrt.load_config("fp4", weights={"format": "t3", "fine": "exact"})


def test_the_cpu_is_given_no_share_of_products_that_it_has_no_kernel_for():
    site = WeightSite("layer", (64, 128))
    hosted = {format: is_hostable(HandleSpec(site, torch.bfloat16, format)) for format in ("nvfp4", "mxint8", "t3")}
    assert hosted == {"nvfp4": True, "mxint8": True, "t3": False}
