"""Experts are encoded several at a time, with the bits and the words that each has alone."""

import pytest
import torch

import vbrt
from tests.matrix import matrix
from tests.models import config, qwen3_moe, wrap
from vbrt.errors import FormatError
from vbrt.kernels.cuda.e2m1.linear import Packing
from vbrt.layers.experts import expert_encoding

NAME = "model.layers.0.mlp.experts"


def encoder_of(format: str, part: str, dtype: torch.dtype = torch.bfloat16):
    vb = wrap(qwen3_moe(dtype=dtype), format)
    return vb.module.get_submodule(NAME).handle.coder.encoders[part]


def weights_of(encoder, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(count, 1, 1, generator=generator).mul(3).exp2()
    return (torch.randn(count, *encoder.spec.site.matrix_shape, generator=generator) * scale).to(encoder.spec.dtype)


def assert_same(made, alone):
    assert [layout for layout, _ in made] == [layout for layout, _ in alone]
    for (_, one), (_, other) in zip(made, alone, strict=True):
        assert set(one) == set(other)
        for name, tensor in one.items():
            assert tensor.shape == other[name].shape
            assert torch.equal(tensor.contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8))


@matrix(format=("nvfp4", "mxfp4", "nf4", "exact", "dense", "quantile"), part=("up", "down"), packed=(False, True))
def test_each_expert_has_the_planes_that_it_has_alone(format, part, packed):
    encoder = encoder_of(format, part)
    if packed and format in ("nvfp4", "mxfp4", "exact"):
        encoder.packing = Packing(encoder.spec.format)
    weights = weights_of(encoder, 6)
    alone = [encoder.split(weight) for weight in weights]
    if encoder.separation:  # its codebook is kept from one weight to the next
        encoder = encoder_of(format, part)
    for made, expected in zip(encoder.split_many(weights), alone, strict=True):
        assert_same(made, expected)


def test_several_experts_are_put_in_the_kernels_order_together():
    encoder, calls = encoder_of("nvfp4", "up"), []

    class Counting(Packing):
        def pack(self, coarse, shape):
            calls.append(shape)
            return super().pack(coarse, shape)

    encoder.packing = Counting("nvfp4")
    weights = weights_of(encoder, 1).expand(6, -1, -1).contiguous()
    encoder.split_many(weights)
    n, k = encoder.spec.shape
    assert calls == [(6 * n, k)]


@pytest.mark.parametrize("step", [1, 3, 8])
@torch.no_grad()
def test_the_number_that_is_encoded_at_a_time_changes_no_page(monkeypatch, step):
    model = qwen3_moe()
    each = sum(model.get_submodule(NAME).get_parameter(name)[0].nbytes for name in ("gate_up_proj", "down_proj"))
    whole = wrap(qwen3_moe(), "exact").materialize()
    monkeypatch.setitem(expert_encoding._STEP_BYTES, "cpu", step * each)
    vb = wrap(model, "exact").materialize()
    assert set(vb.stack.pages) == set(whole.stack.pages)
    for key, page in vb.stack.pages.items():
        with vb.stack.lease((key,)) as (one,), whole.stack.lease((key,)) as (other,):
            assert page.layout == whole.stack.pages[key].layout
            assert all(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one)


@torch.no_grad()
def test_an_expert_that_cannot_be_encoded_is_named_by_its_number():
    model = qwen3_moe()
    model.get_submodule(NAME).down_proj[5, 3, 2] = float("nan")
    with pytest.raises(FormatError, match=rf"{NAME}.*\[5\]: .*1 NaN"):
        wrap(model, "nvfp4").materialize()


@pytest.mark.gpu
@torch.no_grad()
def test_experts_that_are_copied_to_the_gpu_meanwhile_have_the_same_planes(monkeypatch):
    model = qwen3_moe(count=32)
    monkeypatch.setitem(
        expert_encoding._STEP_BYTES, "cuda", 5 * sum(p[0].nbytes for p in model.get_submodule(NAME).parameters())
    )
    vb = vbrt.wrap(model, config("nvfp4"))
    handle = vb.module.get_submodule(NAME).handle
    weights = {"up": model.get_submodule(NAME).gate_up_proj, "down": model.get_submodule(NAME).down_proj}
    for expert, planes in enumerate(handle.split(weights)):
        alone = {part: handle.coder.encoders[part].split(weight[expert]) for part, weight in weights.items()}
        assert_same(planes, expert_encoding.join_planes(alone))
