"""The kernels of published codes of 8 bits, and HQQ's, compiled, and on a GPU; tests/emulator runs them on CPUs."""

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.cuda.gpu_cases import compiled, error, poison
from tests.matrix import matrix
from vbrt.config.format_records import FORMATS
from vbrt.formats import WeightPlanes, get_format
from vbrt.kernels import KERNELS, reference
from vbrt.kernels.cuda.plain import linear as plain_linear

#: one of each kind of codes, scales and offsets
NAMES = (
    "bytes32-float16",
    "bytes128-float32",
    "offsetbytes32-float16",
    "zerobytes64-bfloat16",
    "floatbytes128-float32",
    "floatbytes16-bfloat16",
    "floatzeros64-float16",
    "floatzerobytes64-bfloat16",
    "unitbytes128",
    "superbytes16",
    "superbytes32",
)


def case(name, shape, dtype=torch.bfloat16, device="cuda"):
    fmt = get_format(name)
    coarse = fmt.encode(torch.randn(shape, device=device) * 0.03)
    return WeightPlanes(name, shape, dtype, coarse)


def test_every_such_format_has_a_kernel():
    assert set(NAMES) < set(plain_linear.FORMATS)
    eight = {name for name, of in FORMATS.items() if of.published and of.bits == 8 and not of.base}
    assert eight < set(plain_linear.FORMATS)
    of_gpus = [kernel for kernel in KERNELS if kernel.backend == "triton"]
    runs = {kernel.op for kernel in of_gpus if set(plain_linear.FORMATS) <= set(kernel.formats or ())}
    assert runs == {"linear", "decode_weight", "experts_up", "experts_down"}


@pytest.mark.parametrize("name", NAMES)
def test_without_a_gpu_they_go_through_the_reference(name):
    planes, x = case(name, (24, 200), torch.float32, "cpu"), torch.randn(3, 200)
    assert plain_linear.route(x, planes) == "reference"
    assert torch.equal(plain_linear.linear(x, planes, None, "silu"), reference.linear(x, planes, None, "silu"))


@matrix(name=NAMES, kernel=["sums", "dots", "decode"], capability=[75, 80, 90, 120], at_most=6)
def test_the_kernels_compile(name, kernel, capability):
    pytest.importorskip("triton")
    from vbrt.kernels.cuda.plain import linear_triton

    record = FORMATS[name]
    constants = dict(plain_linear._constants(name, capability >= 90))
    float_ = "fp16" if capability == 75 else "bf16"
    scales = {"superblock": "*u8", "float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}[record.scales]
    zeros = {None: scales, "superblock": "*u8", "zeros": "*u8"}.get(record.offsets, scales)
    codes = "*i8" if constants["CODES"] == "int8" else "*u8"
    large = "*fp32" if constants["UNIT"] else "*fp16"
    types = {"code_ptr": codes, "block_ptr": scales, "offset_ptr": zeros, "large_ptr": large, "least_ptr": "*fp16"}
    blocks = 1024 // record.block
    if kernel == "decode":
        types |= {"w_ptr": f"*{float_}"} | dict.fromkeys(("N", "K", "blocks"), "i32")
        constants |= {"BLOCKS": blocks}
    else:
        types |= {"x_ptr": f"*{float_}"} | dict.fromkeys(("M", "N", "K", "blocks", "x_stride"), "i32")
        constants |= {"TOKENS": 4, "ROWS": 2, "BLOCKS": blocks, "HAS_BIAS": True}
        types |= {"bias_ptr": f"*{float_}", "y_ptr": f"*{float_}"}
        if kernel == "dots":
            types |= {"part_ptr": "*fp32", "share": "i32"}
            constants |= {"TOKENS": 16, "ROWS": 64, "BLOCKS": max(1, 128 // record.block)}
            del types["bias_ptr"], types["y_ptr"], constants["HAS_BIAS"]
    ptx = compiled(getattr(linear_triton, f"{kernel}_kernel"), types, constants, capability, gluon=False).asm["ptx"]
    assert "st.global" in ptx and ("mma" in ptx) == (kernel == "dots" and capability > 75)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(200, 416), (77, 2730), (1024, 4096)], ids=str)
def test_products_match_float64(name, shape):
    planes, fmt = case(name, shape), get_format(name)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        decoded = plain_linear.decode_weight(WeightPlanes(name, shape, dtype, planes.coarse))
        assert torch.equal(decoded, fmt.decode(planes.coarse, shape, dtype)), dtype
        weight = decoded.double()
        for tokens in (1, 2, 3, 4, 5, 16, 17, 32, 33, 300):
            x = torch.randn(tokens, 2 * shape[1], device="cuda", dtype=dtype)
            x = x[:, ::2] if tokens % 2 else x[:, : shape[1]]
            bias = torch.randn(shape[0], device="cuda", dtype=dtype)
            poison()
            y = plain_linear.linear(x, planes, bias)
            want = x.double() @ weight.T + bias.double()
            assert error(y, want) < 4e-3, (dtype, tokens, plain_linear.route(x, planes))
            assert error(plain_linear.linear(x, planes, None, "silu"), F.silu(want - bias.double())) < 5e-3


@pytest.mark.gpu
def test_gradients_graphs_and_compilation():
    planes = case("bytes32-float16", (256, 512))
    weight = plain_linear.decode_weight(planes).double()
    x = torch.randn(4, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
    plain_linear.linear(x, planes).backward(dy)
    assert error(x.grad, dy.double() @ weight) < 4e-3
    for tokens in (4, 20, 64):
        x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            want = plain_linear.linear(x, planes, None, "gelu")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = plain_linear.linear(x, planes, None, "gelu")
            graph.replay()
            assert torch.equal(got, want)
            again = torch.compile(plain_linear.linear, fullgraph=True)(x, planes, None, "gelu")
            assert torch.equal(again, want)
