"""The kernels of `mxint8` on a GPU; what they compute is checked on CPUs too, by tests/emulator."""

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.cuda.gpu_cases import compiled, error, poison, replayed
from tests.matrix import matrix
from vbrt.errors import KernelError
from vbrt.formats import WeightPlanes, get_format
from vbrt.kernels import KERNELS, reference, resolve
from vbrt.kernels.cuda.whole import linear as whole_linear


def case(shape, dtype=torch.bfloat16, device="cuda"):
    fmt = get_format("mxint8")
    coarse = fmt.encode(torch.randn(shape, device=device) * 0.03)
    return WeightPlanes("mxint8", shape, dtype, coarse), fmt.decode(coarse, shape, torch.float64)


def test_without_a_gpu_whole_numbers_go_through_the_reference():
    planes, _ = case((24, 200), torch.float32, "cpu")
    x = torch.randn(3, 200)
    assert whole_linear.route(x, planes) == "reference"
    assert torch.equal(whole_linear.linear(x, planes, None, "silu"), reference.linear(x, planes, None, "silu"))
    (kernel,) = (kernel for kernel in KERNELS if kernel.run is whole_linear.linear)
    assert kernel.formats == ("mxint8",) and kernel.runs_unpacked and kernel.page_order("mxint8") is None


@matrix(capability=[80, 90, 100, 120], groups=[4, 1], at_most=1)
def test_the_fused_kernel_compiles_with_wide_loads(capability, groups):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.whole import linear_gluon

    types = {"x_ptr": "*bf16", "code_ptr": "*i32", "block_ptr": "*u8", "bias_ptr": "*bf16", "y_ptr": "*bf16"}
    types |= dict.fromkeys(("M", "N", "K", "blocks", "x_stride", "y_stride"), "i32")
    constants = {"TOKEN_GROUPS": groups, "K_WARPS": 8, "UNROLL": 2, "ACTIVATION": "silu", "HAS_BIAS": True}
    aligned = ("x_ptr", "code_ptr")
    ptx = compiled(linear_gluon.linear_kernel, types, constants, capability, warps=8, aligned=aligned).asm["ptx"]
    assert ptx.count("ld.global.cg.v4.b32") == 8 and ptx.count("mma.sync") == 8 * groups
    assert ptx.count("ld.global.v4.b32") == 4 * groups  # of activations


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(200, 416), (77, 2730), (1024, 4096), (4160, 1024)], ids=str)
@pytest.mark.parametrize("capability", [None, (8, 0)], indirect=True)
def test_products_match_float64(shape, capability):
    planes, weight = case(shape)
    for tokens in (1, 3, 8, 9, 21, 32, 33, 64, 65, 300):
        x = torch.randn(tokens, 2 * shape[1], device="cuda", dtype=torch.bfloat16)
        x = x[:, ::2] if tokens % 2 else x[:, : shape[1]]
        bias = torch.randn(shape[0], device="cuda", dtype=torch.bfloat16)
        poison()
        y = whole_linear.linear(x, planes, bias)
        # where the library adds the bias afterwards the result is rounded twice
        bound = 3e-3 if whole_linear.route(x, planes) == "fused" else 4e-3
        assert error(y, x.double() @ weight.T + bias.double()) < bound, (tokens, whole_linear.route(x, planes))
        poison()
        y = whole_linear.linear(x, planes, bias, "silu")
        assert error(y, F.silu(x.double() @ weight.T + bias.double())) < 4e-3
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        decoded = whole_linear.decode_weight(WeightPlanes("mxint8", shape, dtype, planes.coarse))
        assert torch.equal(decoded, get_format("mxint8").decode(planes.coarse, shape, dtype))
    on_cpu = get_format("mxint8").encode(weight.float().cpu())
    again = get_format("mxint8").encode(weight.float())
    assert all(torch.equal(on_cpu[name], again[name].cpu()) for name in on_cpu)


@pytest.mark.gpu
def test_gradients_graphs_compilation_and_refusals():
    planes, weight = case((256, 512))
    x = torch.randn(4, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
    whole_linear.linear(x, planes).backward(dy)
    assert error(x.grad, dy.double() @ weight) < 4e-3
    with torch.no_grad():
        want = whole_linear.linear(x, planes, None, "gelu")
        assert torch.equal(replayed(lambda: whole_linear.linear(x, planes, None, "gelu")), want)
        args = (planes.coarse["codes"], planes.coarse["scales"])
        torch.library.opcheck(torch.ops.vbrt.whole_linear, (x.detach(), *args, None, "gelu"))
        torch.library.opcheck(torch.ops.vbrt.whole_decode, (*args, 512, torch.bfloat16))
        run = torch.compile(lambda v: whole_linear.linear(v, planes, None, "gelu"), fullgraph=True)
        torch.testing.assert_close(run(x), want, atol=2e-2, rtol=2e-2)
        with pytest.raises(KernelError, match="expected"):
            whole_linear.linear(x[:, :400], planes)
        with pytest.raises(KernelError, match="swish"):
            whole_linear.linear(x, planes, None, "swish")
    for op, run in (("linear", whole_linear.linear), ("decode_weight", whole_linear.decode_weight)):
        assert resolve(op, "auto", torch.device("cuda"), "mxint8").run is run
