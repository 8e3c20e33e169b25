"""FP4 matmuls, everything but the vendor's call: on GPUs without one, and on CPUs by Triton's interpreter."""

import contextlib
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.cuda.gpu_cases import compiled, error, poison, tiled
from tests.matrix import matrix
from vbrt.formats import get_format
from vbrt.formats.rounding import E2M1_LEVELS
from vbrt.kernels import fp4_refusal, resolve
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.e2m1 import linear as e2m1_linear
from vbrt.kernels.cuda.e2m1.tiles import TILES, TiledWeight, is_tiled, weight_of
from vbrt.kernels.cuda.rounded import fp4 as fp4_scaled
from vbrt.kernels.cuda.rounded.fp4 import FP4_TOKENS, Operand
from vbrt.kernels.cuda.table import linear as table_linear

CPU = torch.device("cpu")
NAMES = ("nvfp4", "mxfp4")
#: relative error of the whole product, all of it from the activations; measured 9.5 %
BOUND = 0.1
SHAPES = [(256, 512), (208, 416), (80, 2730), (45, 330), (1, 31), (144, 161)]


# --- what the vendor's matmul computes, from the very operands that it is handed --------------------------------------


def plain_scales(operand):
    """Block scales float64 [R, K / 16] out of the vendor's order; what pads them is dropped."""
    rows, columns = operand.codes.shape[0], operand.codes.shape[1] // 8
    blocks = -(-columns // 4)
    assert operand.scales.shape == (-(-rows // 128) * blocks * 512,) and operand.scales.is_contiguous()
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    at = (r // 128 * blocks + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    return operand.scales.double()[at.to(operand.scales.device)]


def levels(operand):
    """float64 [R, K], K a multiple of 32."""
    byte = operand.codes.view(torch.uint8)
    code = torch.stack((byte & 15, byte >> 4), dim=-1).flatten(1)
    return torch.tensor(E2M1_LEVELS, dtype=torch.float64, device=byte.device)[code.long()]


def dense(operand):
    scale = plain_scales(operand) * operand.unit.double()
    return levels(operand) * scale.repeat_interleave(16, dim=1)


def emulated(x, w, dtype):
    """`_scaled_matmul` in float64, with what torch asks of its arguments."""
    for operand in (x, w):
        assert [t.dtype for t in operand] == [torch.float4_e2m1fn_x2, torch.float8_e4m3fn, torch.float32]
        assert operand.codes.is_contiguous() and operand.codes.shape[1] % 16 == 0 and operand.unit.numel() == 1
    assert w.codes.shape[0] % 16 == 0
    return (dense(x) @ dense(w).T).to(dtype)


def blocked(scales):
    """E4M3 scales [R, C] padded and put in the vendor's order, flat: the inverse of `plain_scales`."""
    rows, columns = scales.shape
    out = torch.zeros(-(-rows // 128) * 128, -(-columns // 4) * 4, dtype=torch.uint8, device=scales.device)
    out[:rows, :columns] = scales.view(torch.uint8)
    return out.view(-1, 4, 32, out.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).flatten()


def quantized(x):
    """`quantize` in plain torch."""
    k = x.shape[1]
    x = F.pad(x.float(), (0, -k % 32))
    block = x.unflatten(1, (-1, 16))
    exponent = torch.frexp(x.abs().max().clamp(min=2**-100)).exponent - 1
    inverse = (137 - exponent << 23).view(torch.float32)  # 2^(10 - exponent)
    scale = block.abs().amax(2) * (inverse * 0.16666667)
    scale = scale.to(torch.float8_e4m3fn).float().clamp(min=2**-9)
    y = (block.abs() * (inverse / scale).unsqueeze(2)).double()
    code = torch.minimum(torch.minimum(2 * y, y + 2), y / 2 + 4).round().clamp(max=7).to(torch.uint8)
    code = (code | block.signbit().to(torch.uint8) << 3).flatten(1)
    codes = (code[:, 0::2] | code[:, 1::2] << 4).view(torch.float4_e2m1fn_x2)
    return Operand(codes, blocked(scale.to(torch.float8_e4m3fn)).view(torch.float8_e4m3fn), (1 / inverse).reshape(1))


def same(got, want):
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True))


# --- the kernels, wherever they run -----------------------------------------------------------------------------------


def check_weights(name, shape, device):
    """A weight's operand is the weight, bit for bit, with zeros around."""
    planes, weight = tiled(name, shape, device=device)
    if device == "cuda":
        poison()
    w = fp4_scaled.pack(weight_of(planes))
    wide = -(-shape[1] // 32) * 32
    scale = plain_scales(w).float() * w.unit  # both products rounded to fp32, as in the format's decode
    decoded = levels(w).float() * scale.repeat_interleave(16, dim=1)
    assert w.codes.shape == (shape[0], wide // 2)
    assert torch.equal(decoded.double(), F.pad(weight, (0, wide - shape[1])))
    assert torch.equal(w.scales.view(torch.uint8), blocked(plain_scales(w).to(torch.float8_e4m3fn)))


def check_fading(device):
    """mxfp4 scales down to 2^-17 of the largest are exact in E4M3, and what is smaller becomes zero."""
    top = torch.arange(32, device=device).exp2().reciprocal()
    coarse = get_format("mxfp4").encode(torch.full((32, 64), 6.0, device=device) * top.unsqueeze(1))
    packed = e2m1_linear.packing("mxfp4").pack(coarse, (32, 64))
    w = fp4_scaled.pack(TiledWeight(packed[TILES], packed["tensor_scale"], "mxfp4", 32, 64))
    want = get_format("mxfp4").decode(coarse, (32, 64), torch.float64)
    want[18:] = 0
    assert torch.equal(dense(w), want) and want[17].all()


def check_activations(tokens, k, device, dtype=torch.bfloat16):
    """Activations' operand is the reference's, bit for bit, for blocks of any magnitude and strided rows too."""
    x = torch.randn(tokens, 2 * k, device=device)[:, :k]
    x = x * torch.exp2(torch.randint(-24, 3, (tokens, k), device=device) // 3 * 3.0)
    x[tokens // 2] = 0
    x[tokens // 3, : min(k, 9)] = torch.tensor([6, 0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5, -0.0], device=device)[:k]
    x = torch.cat((x, x), dim=1).to(dtype)[:, :k]
    if device == "cuda":
        poison()
    for x_ in (x, x * 1e30, torch.zeros_like(x)):
        assert same(fp4_scaled.quantize(x_), quantized(x_))


def check_products(name, device):
    """The whole of `linear` but the vendor's call: bias, activation, leading dimensions, gradients."""
    planes, weight = tiled(name, (48, 330), device=device)
    x = torch.randn(2, fp4_scaled.FP4_TOKENS // 2 + 3, 330, device=device).bfloat16()
    bias = (torch.randn(48, device=device) * 0.1).bfloat16()
    exact = x.double() @ weight.T + bias.double()
    assert fp4_scaled.route(x, planes) == "fp4"
    y = fp4_scaled.linear(x, planes, bias)
    assert y.dtype is torch.bfloat16 and y.shape == exact.shape and 0.05 < error(y, exact) < BOUND
    assert error(fp4_scaled.linear(x, planes, bias, "silu"), F.silu(exact)) < BOUND
    dy = torch.randn_like(y)
    x.requires_grad_()
    bias.requires_grad_()
    again = fp4_scaled.linear(x, planes, bias)
    again.backward(dy)
    assert torch.equal(again, y)
    assert error(x.grad, dy.double() @ weight) < 4e-3 and error(bias.grad, dy.double().sum((0, 1))) < 4e-3


def interpreted():
    """The checks above on this CPU, in a process whose Triton interprets."""
    torch.manual_seed(0)
    for name in NAMES:
        for shape in ((45, 330), (144, 161)):
            check_weights(name, shape, "cpu")
    check_fading("cpu")
    check_activations(130, 330, "cpu")
    check_activations(5, 31, "cpu", torch.float32)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "device", contextlib.nullcontext))
        stack.enter_context(mock.patch.object(e2m1_linear, "serves", lambda planes: True))
        stack.enter_context(mock.patch.object(devices, "major", lambda index: 10))
        stack.enter_context(mock.patch.object(fp4_scaled, "_scaled_matmul", emulated))
        stack.enter_context(mock.patch.object(fp4_scaled, "FP4_TOKENS", 32))  # a hundred take seconds
        for name in NAMES:
            check_products(name, "cpu")
    print("all as the reference")


def test_operands_and_products_are_the_references_in_the_interpreter():
    """In a process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton")
    command = [sys.executable, "-c", "from tests.kernels.cuda.test_fp4_scaled import interpreted; interpreted()"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"TRITON_INTERPRET": "1"}
    )
    assert done.stdout.strip() == "all as the reference", done.stderr


@matrix(e8=dict(zip(NAMES, [False, True], strict=True)), capability=[90, 100, 120])
def test_the_packing_kernel_compiles_with_wide_stores(capability, e8):
    pytest.importorskip("triton")
    from vbrt.kernels.cuda.rounded import fp4_triton as fp4_scaled_triton

    types = {"tile_ptr": "*i32", "scale_ptr": "*fp32", "code_ptr": "*i32", "block_ptr": "*i32", "unit_ptr": "*fp32"}
    types |= dict.fromkeys(("N", "chunks", "columns"), "i32")
    constants = {"E8M0_SCALES": e8, "COLUMNS": 4}
    aligned = ("tile_ptr", "code_ptr", "block_ptr")
    ptx = compiled(fp4_scaled_triton.pack_kernel, types, constants, capability, aligned=aligned, gluon=False).asm["ptx"]
    assert ptx.count("st.global.v4") == 2


@pytest.mark.parametrize("capability", [90, 100, 120])
def test_the_fp4_quantizer_compiles_with_wide_accesses(capability):
    pytest.importorskip("triton")
    from vbrt.kernels.cuda.rounded import fp4_triton as fp4_scaled_triton

    types = {"x_ptr": "*bf16", "largest_ptr": "*fp32", "code_ptr": "*u8", "block_ptr": "*i32", "unit_ptr": "*fp32"}
    types |= dict.fromkeys(("M", "K", "x_stride", "chunks"), "i32")
    aligned = ("x_ptr", "code_ptr", "block_ptr", "K", "x_stride", "chunks")
    ptx = compiled(fp4_scaled_triton.quantize_kernel, types, {}, capability, warps=8, aligned=aligned, gluon=False).asm[
        "ptx"
    ]
    assert ptx.count("ld.global.v4") == 4


def test_torch_takes_the_operands_as_far_as_it_checks_them_without_a_gpu():
    def operand(rows, scales):
        codes = torch.empty(rows, 176, dtype=torch.uint8, device="cuda").view(torch.float4_e2m1fn_x2)
        scales = torch.empty(scales, dtype=torch.float8_e4m3fn, device="cuda")
        return Operand(codes, scales, torch.empty(1, device="cuda"))

    with FakeTensorMode():
        w = operand(48, 128 * 24)
        y = fp4_scaled._scaled_matmul(operand(700, 768 * 24), w, torch.bfloat16)
        assert y.shape == (700, 48) and y.dtype is torch.bfloat16
        with pytest.raises(RuntimeError, match="scale_a must have"):
            fp4_scaled._scaled_matmul(operand(700, 768 * 20), w, torch.bfloat16)


@pytest.mark.parametrize("name", NAMES)
def test_the_error_is_the_activations_and_no_more(name):
    _, weight = tiled(name, (256, 512), device="cpu")
    x = torch.randn(512, 512).bfloat16()
    assert 0.09 < error(dense(quantized(x)) @ weight.T, x.double() @ weight.T) < BOUND


def test_outliers_cost_their_neighbours_as_much_as_promised():
    x = torch.randn(256, 2048)
    x[:, ::64] *= 30
    x = x.bfloat16()
    others = torch.arange(2048) % 64 != 0
    assert 0.27 < error(dense(quantized(x))[:, others], x.double()[:, others]) < 0.33


def test_a_token_does_not_depend_on_its_neighbours_magnitudes():
    x = torch.randn(4, 64).bfloat16()
    loud = torch.cat((x, 1000 * x))
    assert torch.equal(dense(quantized(loud))[:4], dense(quantized(x)))


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_the_cpu_computes_the_fp4_op_as_without_it():
    assert fp4_refusal(CPU) == "cpu has no FP4 matmul"
    for name in (*NAMES, *table_linear.FORMATS):
        assert resolve("linear", "auto", CPU, name, rounding="fp4") is resolve("linear", "auto", CPU, name)
    planes, _ = tiled("nvfp4", (32, 128), torch.bfloat16, "cpu")
    x = torch.randn(1024, 128).bfloat16()
    assert fp4_scaled.route(x, planes) == "reference"
    assert torch.equal(fp4_scaled.linear(x, planes, None, "relu"), e2m1_linear.linear(x, planes, None, "relu"))


@pytest.mark.parametrize(
    ("capability", "cuda", "reason"),
    [((8, 0), "12.8", "sm_80 has no FP4"), ((8, 9), "12.8", "sm_89 has no FP4"), ((9, 0), "13.0", "takes sm_100"),
     ((10, 0), "12.6", "built for CUDA 12.6"), ((10, 0), "12.8", None), ((10, 3), "13.0", None),
     ((12, 0), "13.0", None)],
)  # fmt: skip
def test_gpus_before_sm_100_and_old_libraries_are_refused(monkeypatch, capability, cuda, reason):
    monkeypatch.setattr(devices, "available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    said = fp4_refusal.__wrapped__(torch.device("cuda", 0))
    assert said is None if reason is None else reason in said
    assert fp4_refusal.__wrapped__(torch.device("cuda", 7)) == "cuda:7 is not there"


def test_what_is_not_served_goes_the_ordinary_way(monkeypatch):
    monkeypatch.setattr(e2m1_linear, "serves", lambda planes: is_tiled(planes.coarse))
    monkeypatch.setattr(e2m1_linear, "route", lambda x, planes: "another")
    monkeypatch.setattr(devices, "major", lambda index: 10)
    planes, _ = tiled("nvfp4", (32, 128), device="cpu")
    odd, _ = tiled("nvfp4", (40, 128), device="cpu")
    plain = e2m1_linear.plain(planes)
    x = torch.randn(FP4_TOKENS, 128).bfloat16()
    assert fp4_scaled.route(x, planes) == "fp4"
    for x_, p in ((x[1:], planes), (x.half(), planes), (x, odd), (x, plain)):
        assert fp4_scaled.route(x_, p) == "another"
    monkeypatch.setattr(devices, "major", lambda index: 9)
    assert fp4_scaled.route(x, planes) == "another"


def test_a_compiled_graph_holds_the_op(monkeypatch):
    monkeypatch.setattr(e2m1_linear, "serves", lambda planes: True)
    monkeypatch.setattr(devices, "major", lambda index: 10)
    planes, _ = tiled("nvfp4", (32, 128), device="cpu")
    bias, graphs = torch.randn(32).bfloat16(), []

    def keep(graph, inputs):
        graphs.append(graph)
        return lambda *args: (torch.zeros(2, 300, 32, dtype=torch.bfloat16),)

    with torch.no_grad():
        run = torch.compile(lambda x: fp4_scaled.linear(x, planes, bias), backend=keep, fullgraph=True)
        run(torch.randn(2, 300, 128).bfloat16())
    assert [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function"] == [
        "vbrt.fp4_scaled_linear.default"
    ]


# --- on a GPU, which need not have an FP4 matmul ----------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch):
    """This GPU, with the vendor's call emulated."""
    monkeypatch.setattr(fp4_scaled, "_MIN_MAJOR", 8)
    monkeypatch.setattr(fp4_scaled, "_scaled_matmul", emulated)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (1040, 14336)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_packed_weights_are_the_weights(name, shape):
    check_weights(name, shape, "cuda")


@pytest.mark.gpu
def test_small_mxfp4_scales_are_exact_and_smaller_ones_fade():
    check_fading("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 128, 300, 2000])
@pytest.mark.parametrize("k", [31, 330, 512, 2730, 14336])
def test_activations_are_rounded_as_the_reference_rounds_them(tokens, k):
    check_activations(tokens, k, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_products_but_for_the_vendors_call(name, served):
    check_products(name, "cuda")


@pytest.mark.gpu
def test_one_nan_among_the_activations_shows_in_all_results(served):
    planes, _ = tiled("nvfp4", (48, 512))
    x = torch.randn(FP4_TOKENS, 512, device="cuda", dtype=torch.bfloat16)
    for value in (float("nan"), float("inf"), -float("inf")):
        x[7, 5] = value
        assert not fp4_scaled.linear(x, planes).isfinite().any()


@pytest.mark.gpu
def test_fp4_runs_are_identical_in_graphs_and_compiled(served):
    planes, _ = tiled("nvfp4", (256, 512))
    x = torch.randn(2, 300, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        want = fp4_scaled.linear(x, planes)
        args = (x, planes.coarse["mma_tiles_v1"], planes.coarse["tensor_scale"], None, "nvfp4", 256, 512)
        torch.library.opcheck(torch.ops.vbrt.fp4_scaled_linear, args)
        assert torch.equal(torch.compile(lambda v: fp4_scaled.linear(v, planes), fullgraph=True)(x), want)
        quantized_x = fp4_scaled.quantize(x[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = fp4_scaled.quantize(x[0]), fp4_scaled.pack(weight_of(planes))
        for operand in got:
            operand.scales.view(torch.uint8).fill_(0x7F)
        graph.replay()
        assert same(got[0], quantized_x) and same(got[1], fp4_scaled.pack(weight_of(planes)))


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
def test_shapes_without_an_fp4_matmul_are_computed_all_the_same(bias, served, monkeypatch):
    def refuse(*args):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic")

    monkeypatch.setattr(fp4_scaled, "_scaled_matmul", refuse)
    planes, _ = tiled("nvfp4", (64, 330))
    x = torch.randn(FP4_TOKENS, 330, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(64, device="cuda", dtype=torch.bfloat16) if bias else None
    with pytest.warns(UserWarning, match="compute.fp4: no FP4 matmul for 330 -> 64"):
        y = fp4_scaled.linear(x, planes, b)
    torch.testing.assert_close(y, e2m1_linear.linear(x, planes, b), atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_the_gpu_resolves_the_fp4_op():
    kernel = resolve("linear", "auto", torch.device("cuda"), "nvfp4", rounding="fp4")
    assert kernel.run is fp4_scaled.linear and kernel.page_order("nvfp4") == e2m1_linear.packing("nvfp4")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_the_vendors_matmul_gives_the_emulations_product(name):
    if why := fp4_refusal(torch.device("cuda", 0)):
        pytest.skip(why)
    for tokens, (n, k) in ((512, (256, 512)), (700, (80, 2730)), (2048, (4096, 4096))):
        planes, _ = tiled(name, (n, k))
        w = fp4_scaled.pack(weight_of(planes))
        x = fp4_scaled.quantize(torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16))
        got = fp4_scaled._scaled_matmul(x, w, torch.bfloat16)
        assert error(got, emulated(x, w, torch.float64)) < 4e-3
