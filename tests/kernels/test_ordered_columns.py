"""Kernels for weights with columns in another order give the products of the weight in its own order."""

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.cuda.gpu_cases import error
from vbrt.errors import KernelError
from vbrt.formats import FORMATS, WeightPlanes, get_format
from vbrt.kernels import KERNELS, fused_on, reference, resolve

CPU = torch.device("cpu")
NAMES = ("symmetric128-float16", "levels32-bfloat16", "zeros64-float16", "bytes128-float16", "zerobytes32-float32")


def case(name, shape=(48, 200), dtype=torch.bfloat16, device="cpu"):
    """Planes with shuffled columns, and the weight."""
    fmt = get_format(f"{name}-ordered")
    coarse = fmt.encode(torch.randn(shape, device=device) * 0.03)
    coarse["order"] = torch.randperm(shape[1], dtype=torch.int32, device=device)
    stored = fmt.base.decode(coarse, shape, dtype)
    w = torch.empty_like(stored)
    w[:, coarse["order"].long()] = stored
    return WeightPlanes(f"{name}-ordered", shape, dtype, coarse), w


def test_every_such_format_has_the_kernels_of_its_base():
    ordered = [name for name, record in FORMATS.items() if record.base]
    assert len(ordered) == 60
    for name in ordered:
        assert fused_on(name) == fused_on(FORMATS[name].base) == {"cpu", "cuda"}
    assert not any(kernel.few or kernel.turned for kernel in KERNELS if (kernel.formats or ("",))[0] in ordered)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_products_are_those_of_the_weight_in_its_own_order(name, device):
    planes, w = case(name, device=device)
    linear, decode = (resolve(op, "auto", torch.device(device), planes.format) for op in ("linear", "decode_weight"))
    assert linear.rank > 0
    for run in (decode, reference.decode_weight, decode):
        assert torch.equal(run(planes), w)
    bias = torch.randn(48, device=device).bfloat16()
    for shape in ((1, 200), (3, 200), (70, 200), (2, 5, 200), (200,), (0, 200)):
        x = torch.randn(shape, device=device).bfloat16()
        y, want = linear(x, planes, bias, "relu"), F.linear(x.float(), w.float(), bias.float()).relu()
        assert y.shape == want.shape and y.dtype == x.dtype and (not y.numel() or error(y, want) < 0.01)
    with pytest.raises(KernelError, match="expected"):
        linear(torch.randn(2, 100, device=device), planes)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_inputs_and_biases_have_the_gradients_of_the_weight(device):
    planes, w = case("zeros64-float16", dtype=torch.float32, device=device)
    linear = resolve("linear", "auto", torch.device(device), planes.format)
    inputs = [torch.randn(4, 200, device=device), torch.randn(48, device=device)]
    found, want = ([each.clone().requires_grad_() for each in inputs] for _ in range(2))
    linear(found[0], planes, found[1]).square().sum().backward()
    F.linear(want[0], w, want[1]).square().sum().backward()
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)


def test_inputs_rounded_to_int8_are_close():
    planes, w = case("levels128-float16")
    linear = resolve("linear", "auto", CPU, planes.format, rounding="int8")
    x = torch.randn(2, 200).bfloat16()
    assert error(linear(x, planes), F.linear(x.float(), w.float())) < 0.02
