"""What is registered, what `resolve` chooses, and what its records say."""

import pytest
import torch

import vbrt
from vbrt import config
from vbrt.errors import KernelError
from vbrt.kernels import (
    BACKENDS,
    KERNELS,
    Kernel,
    kernel_refusal,
    reference,
    register_kernel,
    registry,
    resolve,
    resolves_late,
)
from vbrt.kernels.registry import register

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def empty(monkeypatch):
    """A registry without entries."""
    monkeypatch.setattr("vbrt.kernels.registry._REGISTRY", {})


def slow():
    return "slow"


def fast():
    return "fast"


def test_users_can_ask_for_every_backend_that_kernels_have_and_no_other():
    assert config.BACKENDS is BACKENDS
    assert {kernel.backend for kernel in KERNELS} == set(BACKENDS[1:])


@pytest.mark.parametrize("op", ["linear", "decode_weight"])
def test_an_op_of_a_layer_is_registered_once_for_each_backend_and_format(op):
    for backend in BACKENDS[1:]:
        formats = [
            f for kernel in KERNELS if (kernel.op, kernel.backend) == (op, backend) for f in kernel.formats or [None]
        ]
        assert len(formats) == len(set(formats)) > 0


@pytest.mark.parametrize(
    ("op", "backend", "message"),
    [
        ("linear", "tritonn", "'tritonn' implementation for device 'cpu'.*; expected one of auto, .*reference"),
        (
            "convolution",
            "auto",
            "'convolution'; expected one of code_fine, codec, decode_weight, encode_many, experts_down, experts_sum",
        ),
        ("nothing_registered", "triton", "nothing_registered"),
        ("linear", "triton", "op 'linear': no 'triton' implementation for device 'cpu'"),
    ],
)
def test_an_op_or_backend_that_is_not_there_is_refused(op, backend, message):
    with pytest.raises(KernelError, match=message):
        resolve(op, backend, CPU)


def test_a_backend_that_config_does_not_know_cannot_be_registered():
    with pytest.raises(KernelError, match="'cutlass' for op 'op'"):
        register(Kernel("op", "cutlass", fast))


def test_auto_takes_the_highest_rank_that_serves_the_device(empty):
    register(Kernel("op", "reference", slow))
    register(Kernel("op", "triton", fast, devices=("cuda",), rank=1))
    assert resolve("op", "auto", CPU).run is slow and resolve("op", "auto", GPU).run is fast
    assert resolve("op", "auto", GPU)() == "fast"
    assert resolve("op", "reference", GPU).run is slow
    with pytest.raises(KernelError, match="op 'op': no 'triton' implementation for device 'cpu'"):
        resolve("op", "triton", CPU)


def test_a_format_can_have_its_own_implementation(empty):
    register(Kernel("op", "reference", slow))
    register(Kernel("op", "triton", fast, formats=("nf4",), rank=1))
    assert resolve("op", "auto", CPU, "nf4").run is fast
    assert resolve("op", "auto", CPU, "nvfp4").run is resolve("op", "auto", CPU).run is slow
    assert resolve("op", "reference", CPU, "nf4").run is slow
    with pytest.raises(KernelError, match="no 'triton' implementation for device 'cpu' and format 'nvfp4'"):
        resolve("op", "triton", CPU, "nvfp4")


def test_one_that_refuses_the_device_is_passed_over_and_says_why(empty):
    register(Kernel("linear", "reference", slow))
    assert kernel_refusal(CPU) is None
    register(Kernel("linear", "compiled", fast, devices=("cpu",), rank=1, refusal=lambda device: "no compiler"))
    assert resolve("linear", "auto", CPU).run is slow
    assert kernel_refusal(CPU) == "no compiler" and kernel_refusal(GPU) is None
    with pytest.raises(KernelError, match=r"device 'cpu' \(no compiler\); expected one of auto, reference"):
        resolve("linear", "compiled", CPU)
    register(Kernel("linear", "compiled", fast, devices=("cpu",), rank=1, formats=("nf4",)))
    assert kernel_refusal(CPU) is None


def test_one_of_a_format_that_refuses_the_device_is_not_replaced_by_its_backend_s_generic_one(empty):
    register(Kernel("linear", "reference", slow))
    register(Kernel("linear", "triton", fast, devices=("cuda",), rank=1))
    register(
        Kernel("linear", "triton", fast, devices=("cuda",), formats=("nf4",), rank=1, refusal=lambda device: "too old")
    )
    assert resolve("linear", "auto", GPU, "nvfp4").run is fast and resolve("linear", "auto", GPU, "nf4").run is slow
    assert kernel_refusal(GPU, format="nf4") == "too old"
    assert kernel_refusal(GPU, format="nvfp4") is kernel_refusal(GPU) is None
    with pytest.raises(KernelError, match=r"format 'nf4' \(too old\); expected one of auto, reference"):
        resolve("linear", "triton", GPU, "nf4")


def test_operands_are_rounded_only_where_the_caller_allows_it_and_the_kernel_can(empty):
    register(Kernel("linear", "triton", slow, rounded={"fp8": fast}))
    assert resolve("linear", "auto", CPU).run is slow
    assert resolve("linear", "auto", CPU, rounding="fp8").run is fast
    assert resolve("linear", "auto", CPU, rounding="fp4").run is slow


def test_what_has_to_be_built_is_resolved_late_and_only_if_nobody_asked_for_it(empty):
    assert not resolves_late("auto", CPU)
    register(Kernel("linear", "compiled", fast, devices=("cpu",), builds=True))
    assert resolves_late("auto", CPU)
    assert not resolves_late("compiled", CPU) and not resolves_late("auto", GPU)


def test_a_kernel_that_replaces_one_of_vbrt_runs_in_wrapped_models(registers):
    calls = []

    def linear(x, planes, bias=None, activation="none"):
        calls.append(planes.format)
        return reference.linear(x, planes, bias, activation)

    kernel = Kernel("linear", "compiled", linear, devices=("cpu",), formats=("nf4",), rank=2, runs_unpacked=True)
    with pytest.raises(KernelError, match=r"op 'linear', backend 'compiled', format nf4: there is one; .*replace=True"):
        register_kernel(kernel)
    register_kernel(kernel, replace=True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).eval()
    options = {"weights": {"keep_head": False}, "tiers": {"gpu": {"enabled": False}}}
    with vbrt.wrap(model, "nf4", **options) as vb:
        x = torch.randn(2, 64)
        assert torch.equal(vb(x), torch.nn.functional.linear(x, vb.module[0].weight, vb.module[0].bias))
        assert calls == ["nf4"] and [layer.kernel for layer in vb.stats().layers.values()] == ["compiled"]


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("linear", "kernel 'linear'; expected a vbrt.kernels.Kernel"),
        (Kernel("linear", "compiled", None), "expected a vbrt.kernels.Kernel whose run is a function"),
        (Kernel("convolve", "compiled", fast), "op 'convolve'; expected one of code_fine, codec, .*linear"),
        (Kernel("linear", "cutlass", fast), "backend 'cutlass' for op 'linear'; expected one of reference, compiled"),
        (Kernel("linear", "compiled", fast, formats=("int5",)), "format 'int5'; expected one of nvfp4, .*exact"),
        (Kernel("linear", "compiled", fast, formats="nf4"), "formats = 'nf4'; expected a tuple of names, or None"),
        (Kernel("linear", "compiled", fast, devices=()), r"devices = \(\); expected a tuple of names, or None"),
        (Kernel("linear", "reference", fast), "backend 'reference', format any: there is one"),
    ],
)
def test_a_kernel_that_is_wrong_is_refused_by_name(registers, kernel, message):
    before = {op: dict(offered) for op, offered in registry._REGISTRY.items()}
    with pytest.raises(KernelError, match=message):
        register_kernel(kernel)
    assert before == registry._REGISTRY


@pytest.mark.parametrize(("preset", "kernel"), [("fp4", "compiled"), ("exact", "compiled"), ("dense", "reference")])
def test_a_user_can_insist_on_the_compiled_kernels(preset, kernel):
    if why := kernel_refusal(CPU):
        pytest.skip(why)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16().eval()
    options = {"weights": {"keep_head": False}, "tiers": {"gpu": {"enabled": False}}}
    with vbrt.wrap(model, preset, compute={"backend": "compiled"}, **options) as vb:
        vb(torch.randn(1, 64, dtype=torch.bfloat16))
        assert [layer.kernel for layer in vb.stats().layers.values()] == [kernel]


def test_a_user_who_insists_on_kernels_that_cannot_run_hears_it_at_wrap():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).eval()
    options = {"weights": {"keep_head": False}, "tiers": {"gpu": {"enabled": False}}}
    with pytest.raises(KernelError, match="no 'triton' implementation for device 'cpu'"):
        vbrt.wrap(model, compute={"backend": "triton"}, **options)


@pytest.mark.parametrize("op", ["experts_up", "experts_down", "experts_sum"])
def test_routed_experts_of_every_format_run_everywhere(op):
    known = {(kernel.backend, f) for kernel in KERNELS if kernel.op == op for f in kernel.formats or [None]}
    assert ("reference", None) in known
    assert op == "experts_sum" or ("triton", None) in known
