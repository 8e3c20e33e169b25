import pytest
import torch
import torch.nn.functional as F

from tests.kernels.cuda.gpu_cases import compiled, error, poison, replayed, tiled
from tests.matrix import matrix
from vbrt.formats import WeightPlanes, get_format
from vbrt.kernels import fp8_refusal, reference, resolve
from vbrt.kernels.cuda.e2m1 import linear as e2m1_linear
from vbrt.kernels.cuda.e2m1.tiles import weight_of
from vbrt.kernels.cuda.rounded import fp8 as fp8_linear

CPU = torch.device("cpu")
NAMES = ("nvfp4", "mxfp4")
#: relative error of the whole product, from activations and weights (see fp8_linear); measured 3.3 % and 2.7 %
BOUND = {"nvfp4": 0.036, "mxfp4": 0.029}


@pytest.mark.usefixtures("plain_torch")
def test_the_cpu_computes_the_fp8_op_as_the_reference_does():
    assert resolve("linear", "auto", CPU, "nvfp4", rounding="fp8").run is reference.linear
    assert "cpu has no FP8 matmul" in fp8_refusal(CPU)


def test_without_a_gpu_planes_go_through_the_reference():
    planes, _ = tiled("nvfp4", (32, 128), torch.bfloat16, "cpu")
    x = torch.randn(1024, 128).bfloat16()
    assert fp8_linear.route(x, planes) == "reference"
    assert torch.equal(fp8_linear.linear(x, planes, None, "relu"), e2m1_linear.linear(x, planes, None, "relu"))


@pytest.mark.parametrize("name", NAMES)
def test_an_eighth_of_a_weight_fits_e4m3_and_rounds_as_promised(name):
    torch.manual_seed(0)
    fmt = get_format(name)
    w = torch.randn(256, 512) * 0.03
    coarse = fmt.encode(w)
    decoded = fmt.decode(coarse, (256, 512), torch.float64)
    if name == "nvfp4":
        scale = 8 * coarse["tensor_scale"].double()
    else:
        scale = torch.tensor(2.0 ** (int(coarse["scales"].max()) - 127 - 6), dtype=torch.float64)
    assert (decoded / scale).abs().max() <= 448
    rounded = (decoded / scale).to(torch.float8_e4m3fn).double() * scale
    assert error(rounded, decoded) < (0.022 if name == "nvfp4" else 1e-12)


@matrix(e8=dict(zip(NAMES, [False, True], strict=True)), capability=[90, 100, 120], at_most=1)
def test_the_e4m3_decoder_compiles_with_wide_stores(capability, e8):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.rounded import fp8_gluon

    types = {"tile_ptr": "*i32", "scale_ptr": "*fp32", "w_ptr": "*i32", "row_scale_ptr": "*fp32"}
    types |= dict.fromkeys(("N", "quads", "columns"), "i32")
    constants = {"E8M0_SCALES": e8, "WARPS": 4}
    binary = compiled(fp8_gluon.decode8_kernel, types, constants, capability, aligned=("tile_ptr", "w_ptr"))
    assert binary.asm["ptx"].count("st.global.v4") == 4


@matrix(once=[True, False], capability=[90, 100, 120], at_most=2)
def test_the_quantizer_compiles_with_wide_accesses(capability, once):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.rounded import fp8_gluon

    types = {"x_ptr": "*bf16", "q_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    types |= dict.fromkeys(("K", "x_stride", "q_stride"), "i32")
    aligned = ("x_ptr", "q_ptr", "K", "x_stride", "q_stride")
    constants = {"BLOCK": 4096, "WHOLE_ROW": once}
    ptx = compiled(fp8_gluon.quantize_kernel, types, constants, capability, aligned=aligned, gluon=False).asm["ptx"]
    assert ptx.count("ld.global.v4") == (4 if once else 8) and ptx.count("st.global.v4") == 2


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def fp8():
    if torch.cuda.is_available() and (why := fp8_refusal(torch.device("cuda", 0))):
        pytest.skip(why)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(256, 512), (208, 416), (80, 2730), (1024, 4096), (1024, 28672)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_fp8_products_stay_within_their_bound(name, shape, fp8):
    planes, weight = tiled(name, shape)
    bias = torch.randn(shape[0], device="cuda", dtype=torch.bfloat16)
    for tokens in (512, 700):
        x = torch.randn(tokens, shape[1], device="cuda", dtype=torch.bfloat16)
        assert fp8_linear.route(x, planes) == "fp8"
        poison()
        y = fp8_linear.linear(x, planes, bias)
        assert y.dtype is torch.bfloat16 and error(y, x.double() @ weight.T + bias.double()) < BOUND[name]
        poison()
        y = fp8_linear.linear(x, planes, bias, "silu")
        assert error(y, F.silu(x.double() @ weight.T + bias.double())) < BOUND[name]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:compute.fp8")
def test_shapes_without_an_fp8_matmul_are_computed_all_the_same(fp8):
    planes, weight = tiled("nvfp4", (64, 33000))
    x = torch.randn(512, 33000, device="cuda", dtype=torch.bfloat16)
    assert error(fp8_linear.linear(x, planes), x.double() @ weight.T) < BOUND["nvfp4"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_codes_and_scales_are_the_rounded_weights(name, fp8):
    planes, weight = tiled(name, (208, 2730))
    poison()
    q, scale = fp8_linear.decode8(weight_of(planes))
    assert q.shape == (208, 2736) and not q[:, 2730:].float().any()
    want = (weight / scale.double()[:, None]).float().to(torch.float8_e4m3fn)
    assert torch.equal(q[:, :2730].float(), want.float())


@pytest.mark.gpu
@pytest.mark.parametrize("k", [512, 2730, 40000])
def test_activations_keep_their_largest_magnitude(k, fp8):
    x = torch.randn(300, 2 * k, device="cuda", dtype=torch.bfloat16)[:, :k]  # strided rows
    x[7] = 0
    poison()
    q, scale = fp8_linear.quantize(x)
    back = q[:, :k].double() * scale.double()[:, None]
    assert not q[:, k:].float().any() and not back[7].any()
    assert error(back, x.double()) < 0.028
    torch.testing.assert_close(back.abs().amax(1), x.double().abs().amax(1), rtol=1e-6, atol=0)


@pytest.mark.gpu
def test_few_tokens_other_dtypes_and_odd_widths_are_not_rounded_to_fp8(fp8):
    planes, _ = tiled("nvfp4", (256, 512))
    odd, _ = tiled("nvfp4", (250, 512))
    x = torch.randn(2048, 512, device="cuda", dtype=torch.bfloat16)
    for x_, p in ((x[:100], planes), (x.half(), planes), (x, odd)):
        assert fp8_linear.route(x_, p) == e2m1_linear.route(x_, p)
        assert torch.equal(fp8_linear.linear(x_, p), e2m1_linear.linear(x_, p))


@pytest.mark.gpu
def test_fp8_gradients_are_those_of_the_unrounded_weight(fp8):
    planes, weight = tiled("nvfp4", (256, 512))
    x = torch.randn(600, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(600, 256, device="cuda", dtype=torch.bfloat16)
    fp8_linear.linear(x, planes).backward(dy)
    assert error(x.grad, dy.double() @ weight) < 4e-3


@pytest.mark.gpu
def test_fp8_runs_are_identical_in_graphs_and_compiled(fp8):
    planes, _ = tiled("nvfp4", (256, 512))
    x = torch.randn(2, 300, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        want = fp8_linear.linear(x, planes)
        assert torch.equal(replayed(lambda: fp8_linear.linear(x, planes)), want)
        args = (x, planes.coarse["mma_tiles_v1"], planes.coarse["tensor_scale"], None, "nvfp4", 256, 512)
        torch.library.opcheck(torch.ops.vbrt.fp8_linear, args)
        assert torch.equal(torch.compile(lambda v: fp8_linear.linear(v, planes), fullgraph=True)(x), want)


@pytest.mark.gpu
def test_the_gpu_resolves_the_fp8_op(fp8):
    kernel = resolve("linear", "auto", torch.device("cuda"), "nvfp4", rounding="fp8")
    assert kernel.run is fp8_linear.linear and kernel.page_order("nvfp4") == e2m1_linear.packing("nvfp4")


@pytest.mark.gpu
def test_planes_that_are_not_in_tile_order_are_served(fp8):
    coarse = get_format("nvfp4").encode(torch.randn(64, 128, device="cuda"))
    planes = WeightPlanes("nvfp4", (64, 128), torch.bfloat16, coarse)
    x = torch.randn(1024, 128, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(fp8_linear.linear(x, planes), reference.linear(x, planes))
