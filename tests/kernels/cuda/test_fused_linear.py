import pytest
import torch
import torch.nn.functional as F

from tests.kernels.cuda.gpu_cases import compiled, error, poison, tiled
from tests.kernels.cuda.sass import products_before_a_wait
from tests.matrix import matrix
from vbrt.errors import KernelError
from vbrt.formats import WeightPlanes
from vbrt.kernels import resolve
from vbrt.kernels.cuda.e2m1 import fused as fused_linear
from vbrt.kernels.cuda.e2m1 import linear as fp4_linear
from vbrt.kernels.cuda.e2m1.fused import Norm

NAMES = ("nvfp4", "mxfp4")


def norm64(x, norm):
    x = x.double()
    if norm is None:
        return x
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    x = x if norm.gain is None else x * norm.gain.double()
    return x if norm.shift is None else x + norm.shift.double()


def norms(k, device="cuda", dtype=torch.bfloat16):
    gain = (1 + 0.1 * torch.randn(k, device=device)).to(dtype)
    shift = torch.randn(k, device=device).to(dtype)
    return [Norm("rms"), Norm("rms", gain, eps=1e-6), Norm("layer"), Norm("layer", gain), Norm("layer", gain, shift)]


def plain(planes):
    coarse = fp4_linear.packing(planes.format).unpack(planes.coarse, planes.shape)
    return WeightPlanes(planes.format, planes.shape, planes.dtype, coarse)


def test_without_a_gpu_they_are_the_norm_the_layers_and_the_product():
    torch.manual_seed(0)
    planes, weight = tiled("nvfp4", (24, 200), torch.float32, "cpu")
    other, other_weight = tiled("nvfp4", (24, 200), torch.float32, "cpu")
    x, bias = torch.randn(2, 3, 200), torch.randn(24)
    for norm in norms(200, "cpu", torch.float32):
        y = resolve("norm_linear", "auto", x.device)(x, plain(planes), norm, bias, "gelu")
        assert error(y, F.gelu(norm64(x, norm) @ weight.T + bias.double())) < 1e-5
        assert torch.equal(fused_linear.norm_linear(x, planes, norm, bias, "gelu"), y)
    y = resolve("gated_linear", "auto", x.device)(x, plain(planes), plain(other))
    assert error(y, F.silu(x.double() @ weight.T) * (x.double() @ other_weight.T)) < 1e-5
    assert torch.equal(fused_linear.gated_linear(x, planes, other), y)


def test_what_makes_no_sense_is_refused():
    planes, _ = tiled("nvfp4", (24, 200), torch.float32, "cpu")
    other, _ = tiled("nvfp4", (40, 200), torch.float32, "cpu")
    x = torch.randn(3, 200)
    with pytest.raises(KernelError, match="expected one of rms, layer"):
        Norm("batch")
    with pytest.raises(KernelError, match="no shift"):
        Norm("rms", None, torch.ones(3))
    with pytest.raises(KernelError, match="swish"):
        fused_linear.norm_linear(x, planes, Norm("rms"), None, "swish")
    with pytest.raises(KernelError, match=r"expected \(\.\.\., 200\)"):
        fused_linear.gated_linear(x[:, :100], planes, planes)
    with pytest.raises(KernelError, match="expected one shape"):
        fused_linear.gated_linear(x, planes, other)


@pytest.mark.parametrize("tokens", [1, 8, 9, 16])
def test_every_size_of_the_gated_pair_has_a_launch(tokens):
    for row_tiles in (1, 512, 513, 4096):
        launch = fused_linear.launch_for(tokens, row_tiles)
        assert launch.WK in (4, 8, 16) and launch.R in (1, 2, 4)


def compiled_gated(capability, groups, squares, warps, format="nvfp4"):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.e2m1 import fused_gluon

    types = {
        "x_ptr": "*bf16",
        "tile_ptr": "*i32",
        "scale_ptr": "*fp32",
        "other_ptr": "*i32",
        "other_scale_ptr": "*fp32",
        "square_ptr": "*fp32",
        "y_ptr": "*bf16",
    }
    types |= {**dict.fromkeys(("M", "N", "K", "columns", "x_stride", "y_stride"), "i32"), "eps": "fp32"}
    constants = {
        "R": 1,
        "NT": groups,
        "WK": warps,
        "PREFETCH": True,
        "E8": format == "mxfp4",
        "FULL": False,
        "TAIL": False,
        "ACTIVATION": "silu",
        "SQUARES": squares,
        "EARLY": capability >= 90,
    }
    aligned = ("x_ptr", "tile_ptr", "other_ptr", "y_ptr", "K", "x_stride", "y_stride")
    return compiled(fused_gluon.gated_kernel, types, constants, capability, warps=warps, aligned=aligned)


@matrix(case=[(1, 0), (1, 256), (2, 0)], capability=[80, 90, 100, 120])
def test_the_gated_kernel_compiles_to_matrix_instructions(case, capability):
    groups, squares = case
    ptx = compiled_gated(capability, groups, squares, 8).asm["ptx"]
    assert ptx.count("mma.sync") == 8 * groups * 2 and ("rsqrt" in ptx) is (squares > 0)


@matrix(format=["nvfp4", "mxfp4"], squares=[0, 256])
def test_the_gated_kernel_multiplies_while_the_next_tiles_are_on_their_way(format, squares, tmp_path):
    """Where the third product waited for them already, a pair of 14336 rows took 8 to 15 % longer on an H200."""
    path = tmp_path / "gated.cubin"
    path.write_bytes(compiled_gated(90, 1, squares, 4, format).asm["cubin"])
    products, waited = products_before_a_wait(path, "LDG.E.128.STRONG")
    assert products == 16 and waited >= 8


@matrix(layer=[False, True], add={"sum": True, "alone": False}, capability=[80, 90, 100, 120])
def test_the_norm_kernel_compiles_with_wide_loads(capability, layer, add):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.e2m1 import fused_gluon

    pointers = ("x_ptr", "other_ptr", "gain_ptr", "shift_ptr", "sum_ptr", "y_ptr")
    types = {**dict.fromkeys(pointers, "*bf16"), "eps": "fp32", "K": "i32", "x_stride": "i32", "other_stride": "i32"}
    constants = {
        "BLOCK": 4096,
        "WARPS": 8,
        "LAYER": layer,
        "GAIN": True,
        "SHIFT": layer,
        "ADD": add,
        "EARLY": capability >= 90,
    }
    aligned = (*pointers, "K", "x_stride", "other_stride")
    ptx = compiled(fused_gluon.norm_kernel, types, constants, capability, warps=8, aligned=aligned).asm["ptx"]
    assert ptx.count("ld.global.v4") == 2 * (2 + layer + add) and ptx.count("st.global.v4") == 2 * (1 + add)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("k", [64, 200, 2730, 4096, 32768])
def test_a_sum_and_its_norm_match_float64(k):
    gain = torch.randn(k, device="cuda", dtype=torch.bfloat16)
    for tokens in (1, 3, 16):
        x, other = (torch.randn(2 * tokens, k, device="cuda").bfloat16()[::2] for _ in range(2))
        poison()
        total, y = fused_linear.normed_sum(x, other, gain, 1e-5)
        assert torch.equal(total, x + other)
        assert error(y, norm64(total, Norm("rms", gain))) < 3e-3
    torch.library.opcheck(torch.ops.vbrt.normed_sum, (x, other, gain, 1e-5))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(256, 512), (200, 416), (72, 2736), (1024, 4096), (8256, 1024)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_norm_linear_matches_float64(name, shape):
    planes, weight = tiled(name, shape)
    bias = torch.randn(shape[0], device="cuda", dtype=torch.bfloat16)
    for norm in norms(shape[1]):
        for tokens in (1, 3, 9, 16, 40):
            x = (3 * torch.randn(tokens, shape[1], device="cuda") + 0.5).bfloat16()
            poison()
            y = fused_linear.norm_linear(x, planes, norm, bias)
            want = norm64(x, norm) @ weight.T + bias.double()
            assert error(y, want) < 3e-3, (norm.kind, tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 256), (416, 200), (2736, 72), (72, 2736), (4096, 1024), (8256, 1024)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gated_linear_matches_float64(name, shape):  # one launch where rows are no longer than the matrix is tall
    gate, gate_weight = tiled(name, shape)
    up, up_weight = tiled(name, shape)
    for norm in (None, *norms(shape[1])):
        for tokens in (1, 3, 9, 16, 40):
            x = (3 * torch.randn(tokens, shape[1], device="cuda") + 0.5).bfloat16()
            poison()
            y = fused_linear.gated_linear(x, gate, up, norm)
            x64 = norm64(x, norm)
            # a product of two rounded results, of inputs that a gain has rounded
            want = F.silu(x64 @ gate_weight.T) * (x64 @ up_weight.T)
            assert error(y, want) < 5e-3, (norm, tokens)


@pytest.mark.gpu
def test_a_far_mean_does_not_drown_the_layer_norm():
    planes, weight = tiled("nvfp4", (256, 512))
    x = (torch.randn(4, 512, device="cuda") + 20).bfloat16()
    y = fused_linear.norm_linear(x, planes, Norm("layer"))
    assert error(y, norm64(x, Norm("layer")) @ weight.T) < 3e-3


@pytest.mark.gpu
def test_fused_results_do_not_change_and_survive_graphs_and_compile():
    gate, _ = tiled("nvfp4", (1024, 1024))
    up, _ = tiled("nvfp4", (1024, 1024))
    norm = norms(1024)[1]
    x = torch.randn(1, 4, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        want = fused_linear.gated_linear(x, gate, up, norm)
        assert all(torch.equal(fused_linear.gated_linear(x, gate, up, norm), want) for _ in range(20))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = fused_linear.gated_linear(x, gate, up, norm)
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, want)
        tiles = [t for p in (gate, up) for t in (p.coarse["mma_tiles_v1"], p.coarse["tensor_scale"])]
        torch.library.opcheck(torch.ops.vbrt.fp4_gated, (x, *tiles, "nvfp4", 1024, 1024, "silu"))
        run = torch.compile(lambda v: fused_linear.gated_linear(v, gate, up), fullgraph=True)
        assert torch.equal(run(x), fused_linear.gated_linear(x, gate, up))
        run = torch.compile(lambda v: fused_linear.gated_linear(v, gate, up, norm), fullgraph=True)
        assert error(run(x), want.double()) < 5e-3  # the compiler's norm rounds elsewhere


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 16, 300])
def test_the_norms_kernel_is_the_norm(tokens):
    planes, _ = tiled("nvfp4", (64, 2730))
    for norm in norms(2730):
        for x in (torch.randn(tokens, 2730, device="cuda").bfloat16(),
                  torch.randn(tokens, 2 * 2730, device="cuda").bfloat16()[:, ::2]):  # fmt: skip
            poison()
            assert fused_linear._norms(x, planes, norm)
            assert error(fused_linear._normed(x, planes, norm), norm64(x, norm)) < 3e-3


@pytest.mark.gpu
def test_gradients_and_other_dtypes_take_the_separate_way():
    planes, weight = tiled("nvfp4", (256, 512))
    norm = Norm("rms", torch.ones(512, device="cuda", dtype=torch.bfloat16, requires_grad=True))
    x = torch.randn(4, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    fused_linear.norm_linear(x, planes, norm).sum().backward()
    assert x.grad.isfinite().all() and norm.gain.grad.isfinite().all()
    half = x.detach().half()
    y = fused_linear.norm_linear(half, planes, Norm("rms"))
    assert y.dtype is torch.float16 and error(y, norm64(half, Norm("rms")) @ weight.T) < 2e-3
    assert torch.equal(y, fp4_linear.linear(Norm("rms")(half), planes))
