"""Linear layers on weights in tile order: which kernel runs, and on a GPU what it computes."""

import dataclasses
import itertools

import pytest
import torch

import vbrt
from tests.kernels.cuda.gpu_cases import error, poison, replayed
from vbrt.formats import WeightPlanes, get_format
from vbrt.kernels import EXACT, reference, resolve
from vbrt.kernels.cuda import devices, launch_table
from vbrt.kernels.cuda.e2m1 import linear as e2m1_linear
from vbrt.kernels.cuda.e2m1.tiles import TILES
from vbrt.kernels.cuda.launch_table import MmaLaunch, PersistentLaunch

NAMES = ("nvfp4", "mxfp4")
#: tokens, and tokens per tile of the persistent kernel
BLOCKS = ((3, 32), (130, 96), (700, 256), (700, 224), (2049, 160))


@pytest.mark.parametrize(
    "shape",
    [(16, 64), (4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192), (50257, 2730), (40000, 1024)],
    ids=str,
)
def test_slices_are_few_and_end_on_whole_blocks(shape):
    tiles = -(-shape[0] // 16)
    step = e2m1_linear.slice_tiles(tiles, 2 * shape[1], 2048)
    slices = -(-tiles // step)
    assert step * 16 % 256 == 0 and slices <= 4
    assert (slices == 1) == (shape[0] * shape[1] * 2 <= 64 << 20)
    assert slices == 4 or step * 16 * shape[1] * 2 <= (64 << 20) + 256 * shape[1] * 2
    assert e2m1_linear.slice_tiles(tiles, 2 * shape[1], 2047) == tiles


def test_a_compiled_graph_holds_one_op_for_any_number_of_tokens(monkeypatch):
    coarse = get_format("nvfp4").encode(torch.randn(32, 128))
    planes = WeightPlanes("nvfp4", (32, 128), torch.bfloat16, e2m1_linear.packing("nvfp4").pack(coarse, (32, 128)))
    monkeypatch.setattr(e2m1_linear, "serves", lambda planes: True)
    graphs = []

    def keep(graph, inputs):
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return lambda *args: (torch.zeros(1),)

    torch.compiler.reset()
    run = torch.compile(lambda x: e2m1_linear.linear(x, planes), backend=keep, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (3, 40, 300, 3000, 9000):
            run(torch.empty(tokens, 128, dtype=torch.bfloat16))
    assert graphs == [["vbrt.fp4_linear.default"]]


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def case(name, shape, dtype=torch.bfloat16):
    fmt = get_format(name)
    coarse = fmt.encode(torch.randn(shape, device="cuda") * 0.03)
    if name == "nvfp4":
        coarse["tensor_scale"] *= 1.2345  # published checkpoints: not a power of two
    tiled = WeightPlanes(name, shape, dtype, e2m1_linear.packing(name).pack(coarse, shape))
    return tiled, WeightPlanes(name, shape, dtype, coarse), fmt.decode(coarse, shape, torch.float64)


TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 1e-3, torch.float32: 1e-5}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(256, 512), (200, 416), (77, 2730), (1024, 4096), (4160, 1024)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_linear_matches_float64(name, shape, dtype):
    planes, _, weight = case(name, shape, dtype)
    for tokens in (1, 2, 7, 8, 9, 16, 21, 30, 48, 64, 65, 200, 300):
        x = torch.randn(tokens, shape[1], device="cuda", dtype=dtype)
        bias = torch.randn(shape[0], device="cuda", dtype=dtype) if tokens % 2 else None
        fused = e2m1_linear.route(x, planes) == "fused"  # else the decoded weight is rounded to x's dtype first
        want = x.double() @ (weight if fused else weight.to(dtype).double()).T + (0 if bias is None else bias.double())
        poison()
        y = e2m1_linear.linear(x, planes, bias)
        assert y.dtype is dtype and y.shape == (tokens, shape[0])
        assert error(y, want) < TOLERANCE[dtype], (tokens, e2m1_linear.route(x, planes))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8320, 512), (8230, 1030), (20480, 1536), (9000, 2730)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_carried_pointers_match_float64(name, shape):
    planes, _, weight = case(name, shape)
    for tokens in (9, 12, 16):
        x = torch.randn(tokens, shape[1], device="cuda", dtype=torch.bfloat16)
        poison()
        assert error(e2m1_linear.linear(x, planes), x.double() @ weight.T) < 3e-3


MMA = [MmaLaunch(32, 4, 1, 2, 4), MmaLaunch(32, 4, 2, 1, 4), MmaLaunch(64, 4, 1, 1, 3), MmaLaunch(64, 4, 2, 4, 3)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(520, 1032), (4096, 4096), (1000, 264), (72, 2730)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_with_mma_sync_matches_float64(name, shape, monkeypatch):
    planes, _, weight = case(name, shape)
    n, k = shape
    for launch, tokens in itertools.product(MMA, (17, 64, 333)):
        monkeypatch.setattr(e2m1_linear, "choose", lambda *_, launch=launch: launch)
        for dtype, activation in ((torch.bfloat16, "gelu"), (torch.float16, "none"), (torch.float32, "silu")):
            if dtype is not torch.bfloat16 and launch is not MMA[0]:
                continue
            x = torch.randn(tokens, k + 24, device="cuda", dtype=dtype)[:, 8 : k + 8]
            bias = torch.randn(n, device="cuda", dtype=dtype)
            poison()
            y = e2m1_linear.linear(x, planes, bias, activation)
            want = reference.ACTIVATIONS[activation](x.double() @ weight.T + bias.double())
            assert y.shape == (tokens, n) and error(y, want) < TOLERANCE[dtype], (launch, tokens, dtype)
            assert torch.equal(y, e2m1_linear.linear(x, planes, bias, activation))


@pytest.mark.gpu
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)], indirect=True)
def test_products_on_gpus_without_wgmma_match_float64_whatever_kernel_is_chosen(capability):
    planes, _, weight = case("nvfp4", (2048, 1024))
    routes = set()
    for tokens in (1, 16, 17, 63, 200, 1000, 5000):
        x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
        routes.add(e2m1_linear.route(x, planes))
        assert error(e2m1_linear.linear(x, planes), x.double() @ weight.T) < TOLERANCE[torch.bfloat16], tokens
    assert "fused" in routes and "persistent" not in routes


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16896, 2048), (16890, 1032), (33000, 392), (33792, 2730)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_persistent_kernel_matches_float64(name, shape, monkeypatch):
    launch = PersistentLaunch(0, 192, ordered=True) if name == "mxfp4" else PersistentLaunch(0, 256)
    monkeypatch.setattr(e2m1_linear, "choose", lambda *_: launch)
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for sm_90")
    planes, _, weight = case(name, shape)
    n, k = shape
    for tokens, activation in ((500, "none"), (505, "gelu"), (1003, "none"), (4096, "relu")):
        wide = torch.randn(tokens, k + 24, device="cuda", dtype=torch.bfloat16)
        x, bias = wide[:, 8 : k + 8], torch.randn(n, device="cuda", dtype=torch.bfloat16)
        assert e2m1_linear.route(x, planes) == "persistent"
        poison()
        y = e2m1_linear.linear(x, planes, bias, activation)
        want = reference.ACTIVATIONS[activation](x.double() @ weight.T + bias.double())
        assert y.shape == (tokens, n) and error(y, want) < 3e-3, (tokens, activation)
        assert torch.equal(y, e2m1_linear.linear(x, planes, bias, activation))
    bare = torch.randn(2, 255, k, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
    for x in (bare, bare[:1, :1].expand(255, 2, k)):
        assert error(e2m1_linear.linear(x, planes), x.double() @ weight.T) < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(700, 2000), (256, 16384), (1030, 1032), (4096, 130), (5000, 4096)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_tiles_of_the_persistent_kernel_that_are_cut(name, shape, monkeypatch):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for sm_90")
    planes, _, weight = case(name, shape)
    for (tokens, block), cut in itertools.product(BLOCKS, (1, 2)):
        tiles = -(-tokens // block) * -(-shape[0] // 128)
        launch = PersistentLaunch(tiles // cut, block, ordered=block < 256)
        monkeypatch.setattr(e2m1_linear, "choose", lambda *_, launch=launch: launch)
        x = torch.randn(tokens, shape[1], device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(shape[0], device="cuda", dtype=torch.bfloat16)
        poison()
        y = e2m1_linear.linear(x, planes, bias, "silu")
        assert error(y, torch.nn.functional.silu(x.double() @ weight.T + bias.double())) < 3e-3, (tokens, cut)
        assert all(torch.equal(y, e2m1_linear.linear(x, planes, bias, "silu")) for _ in range(10))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2000, 700), (130, 4096), (4100, 5000)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_to_inputs_match_float64(name, shape, monkeypatch):
    """Of whole tiles and cut ones, and where the weight is decoded."""
    planes, _, weight = case(name, shape)
    for (tokens, block), share in itertools.product(BLOCKS, (0, 1, 2)) if devices.major(0) == 9 else ():
        tiles = -(-tokens // block) * -(-shape[1] // 128)
        launch = PersistentLaunch(tiles // share if share else 0, block)
        monkeypatch.setattr(e2m1_linear, "turned_for", lambda *_, launch=launch: launch)
        dy = torch.randn(tokens, shape[0] + 8, device="cuda", dtype=torch.bfloat16)[:, : shape[0]]
        planes = dataclasses.replace(planes)  # launches of the one before stay with it
        poison()
        dx = e2m1_linear.gradient(dy, planes)
        assert dx.shape == (tokens, shape[1]) and error(dx, dy.double() @ weight) < 3e-3, (tokens, share)
        assert all(torch.equal(dx, e2m1_linear.gradient(dy, planes)) for _ in range(10))
    monkeypatch.setattr(e2m1_linear, "turned_for", lambda *_: None)
    for dtype, most in TOLERANCE.items():
        dy = torch.randn(2, 35, shape[0], device="cuda", dtype=dtype)
        assert error(e2m1_linear.gradient(dy, planes), dy.double() @ weight) < most
        assert e2m1_linear.gradient(dy[:, :0], planes).shape == (2, 0, shape[1])


@pytest.mark.gpu
def test_a_layer_s_gradient_is_the_kernel_s_and_a_graph_s_has_its_bits():
    if devices.major(0) != 9:
        pytest.skip("for sm_90")
    layer = torch.nn.Linear(2048, 4096, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    wrapped = vbrt.wrap(torch.nn.Sequential(layer), "fp4", weights={"min_parameters": 1}).materialize().module[0]
    x = torch.randn(2, 512, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(2, 512, 4096, device="cuda", dtype=torch.bfloat16)
    (dx,) = torch.autograd.grad(wrapped(x), x, dy)
    planes = wrapped.handle.held.planes
    assert torch.equal(dx, e2m1_linear.gradient(dy, planes))
    assert error(dx, dy.double() @ e2m1_linear.decode_weight(planes).double()) < 3e-3
    assert torch.equal(replayed(lambda: e2m1_linear.gradient(dy, planes)), dx)


def cut_into_100(*args) -> launch_table.Choice:
    choice = launch_table.choose(*args)
    return launch_table.PersistentLaunch(100) if isinstance(choice, launch_table.PersistentLaunch) else choice


@pytest.mark.gpu
@pytest.mark.parametrize("cut", [False, True])
def test_the_persistent_kernel_in_graphs_and_compiled(cut, monkeypatch):
    if devices.major(0) != 9:
        pytest.skip("for sm_90")
    planes, _, weight = case("nvfp4", (16896, 2048))
    if cut:
        monkeypatch.setattr(e2m1_linear, "choose", cut_into_100)
    x = torch.randn(500, 2048, device="cuda", dtype=torch.bfloat16)
    assert e2m1_linear.route(x, planes) == "persistent"
    want = e2m1_linear.linear(x, planes)
    assert torch.equal(replayed(lambda: e2m1_linear.linear(x, planes)), want)
    torch.compiler.reset()
    run = torch.compile(lambda x: e2m1_linear.linear(x, planes), fullgraph=True, dynamic=True)
    assert torch.equal(run(x), want)
    for tokens in (5, 60, 700, 5000):
        other = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(run(other), e2m1_linear.linear(other, planes))
    x = x.requires_grad_()
    e2m1_linear.linear(x, planes).float().pow(2).sum().backward()
    assert error(x.grad, 2 * (x.detach().double() @ weight.T) @ weight) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2048, 3000])
@pytest.mark.parametrize("shape", [(14336, 4096), (9000, 14336), (50257, 2730)], ids=str)
def test_large_weights_are_decoded_in_slices(shape, tokens):
    planes, _, weight = case("nvfp4", shape)
    assert e2m1_linear.slice_tiles(-(-shape[0] // 16), 2 * shape[1], tokens) * 16 < shape[0]
    x = torch.randn(2, tokens // 2, shape[1], device="cuda", dtype=torch.float16)
    bias = torch.randn(shape[0], device="cuda", dtype=torch.float16)
    assert e2m1_linear.route(x, planes) == "decode+matmul"
    for added in (None, bias):
        want = torch.nn.functional.linear(x.double(), weight, None if added is None else added.double())
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = e2m1_linear.linear(x, planes, added)
        scratch = torch.cuda.max_memory_allocated() - before - y.numel() * 2
        assert error(y, want) < 3e-3
        assert (scratch < 0.6 * weight.numel() * 2) == (added is None or shape[1] % 8 > 0)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_activations_match_float64(activation):
    planes, _, weight = case("nvfp4", (512, 1024))
    for tokens in (3, 40, 100, 600):
        x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(512, device="cuda", dtype=torch.bfloat16)
        want = reference.ACTIVATIONS[activation](x.double() @ weight.T + bias.double())
        poison()
        assert error(e2m1_linear.linear(x, planes, bias, activation), want) < 4e-3


@pytest.mark.gpu
def test_strided_and_batched_inputs():
    planes, _, weight = case("nvfp4", (384, 512))
    wide = torch.randn(4, 6, 1024, device="cuda", dtype=torch.bfloat16)
    for x in (wide[..., :512], wide[..., 3:515], wide[..., ::2], wide.transpose(0, 1)[..., 512:], wide[:0, :, :512]):
        y = e2m1_linear.linear(x, planes)
        assert y.shape == (*x.shape[:-1], 384)
        assert not x.numel() or error(y, x.double() @ weight.T) < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_decoded_weights_are_the_references_bits(name, dtype):
    for shape in ((256, 512), (77, 2730), (300, 1000)):
        tiled, plain, _ = case(name, shape, dtype)
        poison()
        assert torch.equal(e2m1_linear.decode_weight(tiled), reference.decode_weight(plain))


@pytest.mark.gpu
def test_runs_are_identical():
    planes, _, _ = case("nvfp4", (4096, 4096))
    for tokens in (1, 16, 64, 200, 1024, 1536):
        x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
        first = e2m1_linear.linear(x, planes)
        assert all(torch.equal(first, e2m1_linear.linear(x, planes)) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4, 128])
def test_gradients_match_float64(tokens):
    planes, _, weight = case("nvfp4", (256, 512))
    x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
    e2m1_linear.linear(x, planes, bias, "silu").backward(dy)
    x64, bias64 = x.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
    torch.nn.functional.silu(x64 @ weight.T + bias64).backward(dy.double())
    assert error(x.grad, x64.grad) < 1e-2 and error(bias.grad, bias64.grad) < 1e-2


@pytest.mark.gpu
def test_graphs_and_compile_give_the_eager_result():
    planes, _, _ = case("nvfp4", (512, 1024))
    x = torch.randn(4, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        want = e2m1_linear.linear(x, planes, None, "gelu")
        assert torch.equal(replayed(lambda: e2m1_linear.linear(x, planes, None, "gelu")), want)
        tiles, scale = planes.coarse[TILES], planes.coarse["tensor_scale"]
        args = (x, tiles, scale, None, "nvfp4", 512, "gelu")
        torch.library.opcheck(torch.ops.vbrt.fp4_linear, args)
        torch.library.opcheck(torch.ops.vbrt.fp4_decode, (tiles, scale, "nvfp4", 512, 1024, torch.bfloat16))
        compiled_fn = torch.compile(lambda v: e2m1_linear.linear(v, planes, None, "gelu"), fullgraph=True)
        assert torch.equal(compiled_fn(x), want)


@pytest.mark.gpu
def test_a_gpu_resolves_to_the_kernels():
    for format in NAMES:
        kernel = resolve("linear", "auto", torch.device("cuda"), format)
        assert kernel.run is e2m1_linear.linear
        assert kernel.page_order(format) == e2m1_linear.packing(format) is not None
    assert resolve("linear", "auto", torch.device("cuda"), EXACT).page_order("nvfp4") is None  # merges both planes
