"""The kernels of `t3` on a GPU; what they compute is checked on CPUs too, by tests/emulator."""

import pytest
import torch
import torch.nn.functional as F

from tests.formats.test_t3 import random_plane
from tests.kernels.cuda.gpu_cases import compiled, error, poison, replayed
from tests.matrix import matrix
from vbrt.errors import KernelError
from vbrt.formats import WeightPlanes, get_format, t3
from vbrt.kernels import KERNELS, reference, resolve
from vbrt.kernels.cuda.trellis import linear as trellis_linear

FORMAT = get_format("t3")


def case(shape, dtype=torch.bfloat16, device="cuda"):
    coarse = {name: tensor.to(device) for name, tensor in random_plane(*shape).items()}
    return WeightPlanes("t3", shape, dtype, coarse), FORMAT.decode(coarse, shape, torch.float64)


def test_without_a_gpu_trellis_codes_go_through_the_reference():
    planes, _ = case((24, 200), torch.float32, "cpu")
    x = torch.randn(3, 200)
    assert trellis_linear.route(x, planes) == "reference"
    assert torch.equal(trellis_linear.linear(x, planes, None, "silu"), reference.linear(x, planes, None, "silu"))
    (kernel,) = (kernel for kernel in KERNELS if kernel.run is trellis_linear.linear)
    assert kernel.formats == ("t3",) and kernel.runs_unpacked and kernel.page_order("t3") is None


@matrix(capability=[80, 90, 100, 120], groups=[4, 1], at_most=1)
def test_the_fused_kernel_compiles_with_wide_loads_of_inputs(capability, groups):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.trellis import linear_gluon

    types = {"x_ptr": "*bf16", "code_ptr": "*i32", "scale_ptr": "*u8", "unit_ptr": "*fp32"}
    types |= {"bias_ptr": "*bf16", "y_ptr": "*bf16", **dict.fromkeys(("M", "N", "groups", "y_stride"), "i32")}
    constants = {"TOKEN_GROUPS": groups, "K_WARPS": 8, "UNROLL": 2, "BLOCK": 128, "ACTIVATION": "silu"}
    constants |= {"HAS_BIAS": True, "WHOLE": True}
    aligned = ("x_ptr", "code_ptr")
    ptx = compiled(linear_gluon.linear_kernel, types, constants, capability, warps=8, aligned=aligned).asm["ptx"]
    assert ptx.count("mma.sync") == 8 * groups and ptx.count("ld.global.v4.b32") == 4 * groups
    assert ptx.count("lop3.b32") >= 64 and ptx.count("ld.global.cg.b32") == 16


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(200, 448), (77, 2730), (1024, 4096), (4160, 1024)], ids=str)
def test_products_match_float64(shape):
    planes, weight = case(shape)
    for tokens in (1, 3, 8, 9, 21, 32, 33, 300):
        x = torch.randn(tokens, 2 * shape[1], device="cuda", dtype=torch.bfloat16)
        x = x[:, ::2] if tokens % 2 else x[:, : shape[1]]
        bias = torch.randn(shape[0], device="cuda", dtype=torch.bfloat16)
        poison()
        y = trellis_linear.linear(x, planes, bias)
        assert error(y, x.double() @ weight.T + bias.double()) < 4e-3, (tokens, trellis_linear.route(x, planes))
        poison()
        y = trellis_linear.linear(x, planes, bias, "silu")
        assert error(y, F.silu(x.double() @ weight.T + bias.double())) < 5e-3
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        decoded = trellis_linear.decode_weight(WeightPlanes("t3", shape, dtype, planes.coarse))
        on_cpu = {name: tensor.cpu() for name, tensor in planes.coarse.items()}
        assert torch.equal(decoded.cpu(), FORMAT.decode(on_cpu, shape, dtype))
        assert torch.equal(decoded, FORMAT.decode(planes.coarse, shape, dtype))


@pytest.mark.gpu
def test_a_weight_that_is_encoded_on_the_gpu_is_as_near():
    w = torch.randn(256, 640, device="cuda")
    fmt = resolve("codec", "auto", w.device, "t3").run(FORMAT)
    x = torch.randn(40, t3.PAIRS, 2, device="cuda")
    losses = [(t3.codebook(x.device)[path(x).long()] - x).square().sum() for path in (fmt.path, FORMAT.path)]
    assert losses[0] < 1.001 * losses[1]
    decoded = FORMAT.decode(fmt.encode(w), (256, 640), torch.float32)
    assert 10 * torch.log10(w.square().sum() / (w - decoded).square().sum()) > 16.95


@pytest.mark.gpu
def test_gradients_graphs_compilation_and_refusals():
    planes, weight = case((256, 512))
    x = torch.randn(4, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
    trellis_linear.linear(x, planes).backward(dy)
    assert error(x.grad, dy.double() @ weight) < 4e-3
    with torch.no_grad():
        want = trellis_linear.linear(x, planes, None, "gelu")
        assert torch.equal(replayed(lambda: trellis_linear.linear(x, planes, None, "gelu")), want)
        args = trellis_linear._fields(planes)
        torch.library.opcheck(torch.ops.vbrt.trellis_linear, (x.detach(), *args, None, "gelu"))
        torch.library.opcheck(torch.ops.vbrt.trellis_decode, (*args, 512, torch.bfloat16))
        run = torch.compile(lambda v: trellis_linear.linear(v, planes, None, "gelu"), fullgraph=True)
        torch.testing.assert_close(run(x), want, atol=2e-2, rtol=2e-2)
        with pytest.raises(KernelError, match="expected"):
            trellis_linear.linear(x[:, :400], planes)
        with pytest.raises(KernelError, match="swish"):
            trellis_linear.linear(x, planes, None, "swish")
    for op, run in (("linear", trellis_linear.linear), ("decode_weight", trellis_linear.decode_weight)):
        assert resolve(op, "auto", torch.device("cuda"), "t3").run is run
