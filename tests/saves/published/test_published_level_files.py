"""Published weights of 16 levels, with or without offsets, live in the tiers, are saved and come back with their bits,
and can be assigned."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import vbrt
from tests.models import config, mlp, qwen3_moe
from tests.saves.cases import logits, on_meta
from vbrt.config import FORMATS, load_config
from vbrt.formats import get_format
from vbrt.layers.experts.experts_handle import ExpertsHandle
from vbrt.model.attach import attach, plan_for
from vbrt.saves.saved.save import save_attached


def attached(model, format, **tiers):
    """A model whose swapped layers hold a format that only readers of checkpoints choose."""
    settings = config("nf4")
    settings["tiers"] |= tiers
    settings = load_config(settings)
    chosen = plan_for(model, settings)
    saved = [replace(swap, format=format, pages=()) for swap in chosen.swaps]
    return attach(model, settings, plan_for(model, settings, saved=saved))


def streamed(tmp_path, room):
    return {"cpu": {"budget": room}, "ssd": {"enabled": True, "path": str(tmp_path / "pages")}}


def random_plane(format, shape, generator):
    """Any fields of a format, whose weights are about .1: in fp16 their sums are to lose little."""
    fields, codes = {}, 256 if FORMATS[format].bits == 4 else 16
    for field in get_format(format).layout(shape, torch.float16).fields:
        small = 4 if field.dtype == "uint8" else 64
        below = {"codes": codes, "zeros": 16}.get(field.name, small)
        made, dtype = torch.randint(0, below, field.shape, generator=generator), getattr(torch, field.dtype)
        whole = field.name == "codes" or not dtype.is_floating_point
        fields[field.name] = made.to(dtype) if whole else ((made - 20) * 5e-4).to(dtype)
    return fields


@pytest.mark.parametrize(
    "format",
    [
        *(
            "levels32-float16",
            "symmetric32-float16",
            "affine32-float16",
            "signed32-float16",
            "zeros64-float16",
            "floatzeros64-float16",
            "superblock32",
        ),
        *("bytes32-float16", "superbytes16", "floatbytes128-float32", "unitbytes128"),
    ],
)
def test_a_published_weight_is_stored_streamed_saved_and_loaded_without_encoding(tmp_path, no_encoding, format):
    model, generator = mlp(width=64, depth=3, dtype=torch.float16), torch.Generator().manual_seed(0)
    biases = [layer.bias.clone() for layer in model if hasattr(layer, "bias")]
    no_encoding()
    attachment = attached(model, format)
    decoded = []
    for layer in attachment.layers.values():
        shape = layer.handle.spec.shape
        plane = random_plane(format, shape, generator)
        layer.handle.store(layer.handle.encoder.from_encoded({"coarse": plane}))
        layer.forget_dense_()
        decoded.append(get_format(format).decode(plane, shape, torch.float16))
    attachment.materialize()
    assert all(torch.equal(layer.weight, w) for layer, w in zip(attachment.layers.values(), decoded, strict=True))
    x = torch.randn(40, 64, generator=generator).half()
    y, expected = logits(model, x), x
    for w, bias in zip(decoded, biases, strict=True):
        expected = F.linear(expected, w, bias).tanh()
    torch.testing.assert_close(y, expected, rtol=2e-3, atol=2e-3)
    assert {layer.format for layer in attachment.stats().layers.values()} == {format}
    save_attached(attachment, tmp_path / "saved")
    page = max(swap.page_bytes for swap in attachment.plan.swaps)
    attachment.close()
    for tiers in ({}, streamed(tmp_path, 2 * page)):
        with vbrt.load(tmp_path / "saved", on_meta(mlp, width=64, depth=3), tiers=tiers) as vb:
            assert (vb.plan.home_bytes("ssd") > 0) is bool(tiers)
            assert all(torch.equal(logits(vb, x), y) for _ in range(2))


def test_a_weight_that_is_assigned_to_such_a_layer_is_encoded():
    model = mlp(width=64, depth=3)
    attachment = attached(model, "levels64-float32")
    layer = attachment.layers["0"]
    attachment.materialize()
    with torch.no_grad():
        layer.weight = torch.nn.Parameter(torch.arange(64 * 64).view(64, 64).remainder(16).sub(8).float())
        logits(model, torch.randn(2, 64))
    assert layer.materialized and torch.equal(layer.weight, torch.arange(64 * 64).view(64, 64).remainder(16).sub(8))
    attachment.close()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "format", ["levels32-bfloat16", "affine32-float16", "signed32-bfloat16", "superblock32", "superbytes16"]
)
def test_routed_experts_compute_with_it(tmp_path, dtype, format):
    model, ids = qwen3_moe(dtype=dtype), torch.arange(12).view(1, 12)
    attachment = attached(model, format)
    attachment.materialize()
    y = logits(model, ids)
    assert any(isinstance(layer.handle, ExpertsHandle) for layer in attachment.layers.values())
    save_attached(attachment, tmp_path / "saved")
    plain = attachment.detach()
    torch.testing.assert_close(y, logits(plain, ids), rtol=1e-4, atol=1e-4 if dtype is torch.float32 else 3e-2)
    with vbrt.load(tmp_path / "saved", on_meta(qwen3_moe)) as vb:
        assert torch.equal(logits(vb, ids), y)
