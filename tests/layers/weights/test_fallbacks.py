"""What cannot be had on a device is said once, and stays visible."""

import copy
import importlib.util
import types
import warnings

import pytest
import torch

import vbrt
from vbrt.host import accelerator
from vbrt.kernels import entries, kernel_refusal, resolve
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.e2m1 import linear as e2m1_linear
from vbrt.kernels.cuda.rounded import fp8 as fp8_linear
from vbrt.layers import HandleSpec, Weight
from vbrt.layers.weights import kernel_selection
from vbrt.residency.weight_site import WeightSite

CPU = torch.device("cpu")
GPU = types.SimpleNamespace(device=torch.device("cuda", 0))  # a stack that is asked for nothing else


def handle(**options):
    return Weight(HandleSpec(WeightSite("layer", (64, 64)), torch.bfloat16, "nvfp4", **options), GPU)


@pytest.fixture
def refusals(monkeypatch):
    """No kernel but the reference, and no FP8."""
    monkeypatch.setattr(kernel_selection, "kernel_refusal", lambda device: "Triton with Gluon is not installed")
    monkeypatch.setattr(kernel_selection, "fp8_refusal", lambda device: "sm_80 has no FP8 matmul, it takes sm_89")
    monkeypatch.setattr(kernel_selection, "resolve", lambda op, *_, **options: resolve(op, "reference", CPU))


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


@pytest.mark.parametrize(
    ("options", "rounding"), [({"fp8": True}, "fp8"), ({"fp8": True, "fine": True}, None), ({}, None)]
)
def test_operands_are_rounded_where_it_was_asked_for_and_the_weight_loses_bits(
    refusals, monkeypatch, options, rounding
):
    asked = []
    monkeypatch.setattr(kernel_selection, "fp8_refusal", lambda device: None)

    def ask(op, *_, rounding=None):
        asked.append(rounding)
        return resolve(op, "reference", CPU)

    monkeypatch.setattr(kernel_selection, "resolve", ask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle(**options)
    assert asked[0] == rounding


def test_a_cpu_computes_as_without_fp8_and_says_so_once():
    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).eval()

    x = torch.randn(600, 64)
    with vbrt.wrap(model(), weights={"keep_head": False}) as vb:
        want = vb(x)
        assert not any("compute." in reason for reason in vb.stats().fallbacks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        with vbrt.wrap(model(), weights={"keep_head": False}, compute={"fp8": True}) as vb:
            assert torch.equal(vb(x), want)
            said = [reason for reason in vb.stats().fallbacks if "compute.fp8" in reason]
    reason = "compute.fp8: cpu has no FP8 matmul; long inputs are multiplied in torch.float32"
    assert said == [f"{reason} instead"] and [str(w.message) for w in caught].count(said[0]) == 1


def test_int8_that_cannot_be_had_is_announced(refusals):
    with pytest.warns(
        UserWarning, match="compute.int8: cuda has no int8 products of 4-bit weights; .* in torch.bfloat16"
    ):
        layer = handle(int8=True)
    assert sum("compute.int8" in reason for reason in layer.fallbacks) == 1


@pytest.mark.skipif(kernel_refusal(CPU) is not None, reason="no kernels for CPUs")
def test_int8_rounds_few_tokens_on_a_cpu_and_announces_nothing():
    layer, x, got = torch.nn.Linear(64, 64).eval(), torch.randn(2, 64), {}
    for int8 in (False, True):
        with vbrt.wrap(copy.deepcopy(layer), weights={"keep_head": False}, compute={"int8": int8}) as vb:
            got[int8] = vb(x)
            assert not any("compute." in reason for reason in vb.stats().fallbacks)
    assert 1e-4 < (got[True] - got[False]).norm() / got[False].norm() < 1e-2


@pytest.mark.parametrize("option", ["fp8", "int8"])
def test_what_was_not_asked_for_is_not_announced(refusals, option):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert handle(backend="reference", **{option: True}).fallbacks == []


@pytest.mark.parametrize("option", ["fp8", "int8"])
def test_exact_layers_announce_that_no_kernel_merges_their_planes_and_nothing_of_rounded_products(refusals, option):
    with pytest.warns(UserWarning, match="kernels: Triton with Gluon is not installed"):
        layer = handle(fine=True, **{option: True})
    assert [reason.split(":")[0] for reason in layer.fallbacks] == ["kernels"]


@pytest.mark.filterwarnings("ignore:kernels", "ignore:compute")
def test_a_shape_that_the_vendors_matmul_refuses_is_listed(monkeypatch):
    monkeypatch.setattr(fp8_linear, "_REFUSED", {})
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64))
    vb = vbrt.wrap(model, "fp8", weights={"keep_head": False, "min_parameters": 1}).materialize()
    before = vb.stats().fallbacks
    with pytest.warns(UserWarning, match="compute.fp8: no FP8 matmul for 64 -> 96; multiplied in torch.bfloat16"):
        fp8_linear.note_refusal(96, 64, torch.bfloat16)
    added = set(vb.stats().fallbacks) - set(before)
    assert added == {"compute.fp8: no FP8 matmul for 64 -> 96; multiplied in torch.bfloat16"}
    vb.close()


@pytest.mark.parametrize("capability", [(8, 6), (9, 0), (12, 0)])
def test_a_gpu_on_which_nothing_was_measured_says_so_in_statistics_and_names_tune(capability, monkeypatch):
    monkeypatch.setattr(devices, "why_unavailable", lambda: None)
    monkeypatch.setattr(devices, "capability", lambda index: capability)
    monkeypatch.setattr(accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(e2m1_linear, "tuned", lambda index: {})
    entries._no_triton.cache_clear()
    try:
        said = [note for note in handle().all_fallbacks() if "vbrt tune" in note]
        assert len(said) == (capability != (9, 0)), said
        assert not said or said[0].startswith(f"sm_{capability[0]}{capability[1]}: launches of 4-bit kernels")
        monkeypatch.setattr(e2m1_linear, "tuned", lambda index: {(1, 4, 1): object()})
        assert not [note for note in handle().all_fallbacks() if "vbrt tune" in note]
    finally:
        entries._no_triton.cache_clear()


@pytest.mark.parametrize(
    ("hip", "cuda", "missing", "why"),
    [
        ("6.4", None, (), "built for ROCm"),
        (None, None, (), "built without CUDA"),
        (None, "13.0", ("triton",), "Triton is not installed"),
        (None, "13.0", ("triton.experimental.gluon",), "has no Gluon"),
        (None, "13.0", (), None),
    ],
)
def test_the_reason_why_no_kernel_runs_is_the_true_one(hip, cuda, missing, why, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else name)
    assert (why is None) == (devices.why_unavailable() is None) and (why or "") in (devices.why_unavailable() or "")
