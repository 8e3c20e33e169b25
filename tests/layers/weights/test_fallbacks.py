"""What cannot be had on a device is said once, and stays visible."""

import copy
import importlib.util
import types
import warnings

import pytest
import torch

import vbrt
from vbrt.kernels import kernel_refusal, resolve
from vbrt.kernels.cuda import devices, kv_pages, step_ops, tuned_configs
from vbrt.kernels.cuda.experts import residency
from vbrt.kernels.cuda.rounded import fp8 as fp8_linear
from vbrt.kernels.cuda.table import linear as table_linear
from vbrt.layers import HandleSpec, Weight
from vbrt.layers.weights import kernel_selection
from vbrt.residency.weight_site import WeightSite

CPU = torch.device("cpu")
GPU = types.SimpleNamespace(device=torch.device("cuda", 0))  # a stack that is asked for nothing else


def handle(**options):
    return Weight(HandleSpec(WeightSite("layer", (64, 64)), torch.bfloat16, "nvfp4", **options), GPU)


@pytest.fixture
def as_gpu(monkeypatch):
    """Take this machine for one with a GPU, of a compute capability or, None, AMD's."""

    def taken(capability):
        monkeypatch.setattr(torch.version, "cuda", None if capability is None else "13.0")
        monkeypatch.setattr(torch.version, "hip", "6.4" if capability is None else None)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability or (9, 4))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        devices._CAPABILITIES.clear()
        devices.refusal.cache_clear()

    yield taken
    devices._CAPABILITIES.clear()
    devices.refusal.cache_clear()


@pytest.fixture
def refusals(monkeypatch):
    """No kernel but the reference, and no FP8."""
    monkeypatch.setattr(kernel_selection, "kernel_refusal", lambda device, **_: "Triton is not installed")
    monkeypatch.setattr(kernel_selection, "fp8_refusal", lambda device: "sm_80 has no FP8 matmul, it takes sm_89")
    monkeypatch.setattr(kernel_selection, "resolve", lambda op, *_, **options: resolve(op, "reference", CPU))


def test_a_gpu_without_kernels_is_announced_once_for_all_layers(refusals):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        layers = [handle() for _ in range(3)]
    assert len({str(w.message) for w in caught}) == 1 and "Triton is not installed" in str(caught[0].message)
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
    with pytest.warns(UserWarning, match="kernels: Triton is not installed"):
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
def test_a_gpu_on_which_nothing_was_measured_says_so_in_statistics_and_names_tune(capability, as_gpu, monkeypatch):
    as_gpu(capability)
    monkeypatch.setattr(tuned_configs, "tuned", lambda index: {})
    said = [note for note in handle().all_fallbacks() if "vbrt tune" in note]
    assert len(said) == (capability != (9, 0)), said
    assert not said or said[0].startswith(f"sm_{capability[0]}{capability[1]}: launches of 4-bit kernels")
    notes = {  # of every family
        "4-bit kernels": resolve("linear", "auto", GPU.device, "nvfp4").unmeasured(GPU.device),
        "kernels of levels": resolve("linear", "auto", GPU.device, "nf4").unmeasured(GPU.device),
        "8-bit kernels": resolve("linear", "auto", GPU.device, "mxint8").unmeasured(GPU.device),
        "expert kernels": resolve("experts_up", "auto", GPU.device, "nvfp4").unmeasured(GPU.device),
    }
    assert all((note is None) == (capability == (9, 0)) and (not note or of in note) for of, note in notes.items())
    monkeypatch.setattr(tuned_configs, "tuned", lambda index: {("linear", 8, 4, 1): object()})
    assert not [note for note in handle().all_fallbacks() if "vbrt tune" in note]
    note = resolve("experts_up", "auto", GPU.device, "nvfp4").unmeasured(GPU.device)
    assert (note is None) == (capability == (9, 0))  # another family
    monkeypatch.setattr(tuned_configs, "tuned", lambda index: {("expert sums", 8, 4, 1): object()})
    assert resolve("experts_up", "auto", GPU.device, "nvfp4").unmeasured(GPU.device) is None


PARTLY = "fused kernels of {}: {}; {}-bit layers are decoded by a kernel, and multiplied in torch"
WHOLLY = "kernels: {}; 4-bit layers are decoded and multiplied in plain torch"
LACKS = {(7, 5): "sm_75 has no bf16 arithmetic, it takes sm_80", None: "they are for NVIDIA GPUs, and this torch is b"}


@pytest.mark.filterwarnings("ignore:kernels", "ignore:fused kernels")
@pytest.mark.parametrize("capability", [(7, 5), None], ids=["sm_75", "ROCm"])
def test_a_gpu_runs_what_compiles_for_it_and_hears_of_the_rest_by_kernel(capability, as_gpu, monkeypatch):
    as_gpu(capability)
    for table in ("nf4_levels", "int4_levels"):
        monkeypatch.setattr(table_linear, table, lambda index: None)
    why = LACKS[capability] + ("" if capability else "uilt for ROCm")
    for format, said in {"nvfp4": WHOLLY.format(why), "nf4": PARTLY.format("nf4", why, 4),
                         "mxint8": PARTLY.format("mxint8", why, 8)}.items():  # fmt: skip
        layer = Weight(HandleSpec(WeightSite("layer", (64, 64)), torch.bfloat16, format), GPU)
        assert layer.fallbacks == [said]
        assert layer.take_kernels().kernel.backend == ("reference" if format == "nvfp4" else "triton")
        assert layer.take_kernels().packing is None
    exact = handle(fine=True)
    kernels = exact.take_kernels()
    assert exact.fallbacks == [] and kernels.kernel.backend == "triton"
    assert kernels.packing is None  # drafts could not read tiles
    assert resolve("encode_many", "auto", GPU.device, "nvfp4").backend == "triton"
    assert devices.refusal(GPU.device, kv_pages.NEEDS) is devices.refusal(GPU.device, residency.NEEDS) is None
    assert (devices.refusal(GPU.device, step_ops.NEEDS) is None) == (capability is not None)


@pytest.mark.filterwarnings("ignore:kernels")
@pytest.mark.parametrize(("capability", "format"), [((7, 0), "nf4"), ((7, 0), "exact"), ((8, 6), "nvfp4")])
def test_kernels_refuse_what_is_older_than_they_need_and_nothing_newer(capability, format, as_gpu):
    as_gpu(capability)
    why = kernel_refusal(GPU.device, format=format)
    assert why == ("sm_70 has no support in Triton, it takes sm_75" if capability == (7, 0) else None)
    assert (handle(fine=True).take_kernels().packing is not None) == (capability == (8, 6))  # read by drafts
    assert fp8_linear.fp8_refusal.__wrapped__(GPU.device).endswith("has no FP8 matmul, it takes sm_89")


@pytest.mark.parametrize(
    ("hip", "cuda", "missing", "why"),
    [
        ("6.4", None, (), "built for ROCm"),
        (None, None, (), "built without CUDA"),
        (None, "13.0", ("triton",), "Triton is not installed; pip install triton, or triton-windows"),
        (None, "13.0", ("triton.experimental.gluon",), "has no Gluon"),
        (None, "13.0", (), None),
    ],
)
def test_the_reason_why_no_kernel_runs_is_the_true_one(hip, cuda, missing, why, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else name)
    said = devices._why_unavailable(devices.BF16)
    assert (why is None) == (said is None) and (why or "") in (said or "")
