"""What cannot be had on a device is said once, and stays visible."""

import types
import warnings

import pytest
import torch

from vbrt.kernels import register, resolve
from vbrt.nn import handle as handles
from vbrt.nn.handle import HandleSpec, WeightHandle

GPU = types.SimpleNamespace(device=torch.device("cuda", 0))  # a stack that is asked for nothing else


def handle(**options):
    return WeightHandle(HandleSpec("layer", (64, 64), torch.bfloat16, "nvfp4", **options), GPU)


@pytest.fixture
def refusals(monkeypatch):
    """No kernel but the reference, and no FP8."""
    monkeypatch.setattr(handles, "kernel_refusal", lambda device: "Triton with Gluon is not installed")
    monkeypatch.setattr(handles, "fp8_refusal", lambda device: "sm_80 has no FP8 matmul, it takes sm_89")
    monkeypatch.setattr(handles, "resolve", lambda op, backend, *_: resolve(op, "reference", torch.device("cpu")))


def test_a_gpu_without_kernels_is_announced_once_for_all_layers(refusals):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        layers = [handle() for _ in range(3)]
    assert len({str(w.message) for w in caught}) == 1 and "Triton with Gluon is not installed" in str(caught[0].message)
    assert all("plain torch" in layer.fallbacks[0] for layer in layers)
    assert len({reason for layer in layers for reason in layer.fallbacks}) == 1


def test_fp8_that_cannot_be_had_is_announced(refusals):
    with pytest.warns(UserWarning, match="compute.fp8: sm_80 has no FP8 matmul"):
        layer = handle(fp8=True)
    assert any("compute.fp8" in reason for reason in layer.fallbacks)


@pytest.mark.parametrize("options", [{"fine": True, "fp8": True}, {"backend": "reference", "fp8": True}], ids=str)
def test_what_was_not_asked_for_is_not_announced(refusals, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert handle(**options).fallbacks == []


def test_a_format_can_have_its_own_implementation(monkeypatch):
    monkeypatch.setattr("vbrt.kernels._REGISTRY", {})

    def any_format():
        pass

    def tables():
        pass

    def refused():
        pass

    register("op", "reference", any_format)
    register("op", "triton", tables, formats=("nf4",), rank=1)
    register("other", "reference", any_format)
    register("other", "triton", refused, rank=1, refusal=lambda device: "too old")
    cpu = torch.device("cpu")
    assert resolve("op", "auto", cpu, "nf4") is tables
    assert resolve("op", "auto", cpu, "nvfp4") is resolve("op", "auto", cpu) is any_format
    assert resolve("op", "reference", cpu, "nf4") is any_format
    assert resolve("other", "auto", cpu) is any_format
