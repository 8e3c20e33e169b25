"""GPU kernels as they are compiled, behind their own launches, run on the CPU: see `ptx`."""

import contextlib
import copy
import pickle

import pytest
import torch

from tests.emulator.ptx import Machine, launched
from tests.kernels.cuda.gpu_cases import error, tiled
from tests.matrix import matrix
from vbrt.errors import KernelError
from vbrt.formats import WeightPlanes, get_format
from vbrt.formats.nf4 import NF4_LEVELS
from vbrt.formats.sixteen_levels import INT4_LEVELS
from vbrt.kernels import reference
from vbrt.kernels.cuda import devices, launcher, tuned_configs
from vbrt.kernels.cuda.e2m1 import fused_linear, launches
from vbrt.kernels.cuda.e2m1 import linear as e2m1_linear
from vbrt.kernels.cuda.e2m1.fused_linear import Norm
from vbrt.kernels.cuda.e2m1.tiles import weight_of
from vbrt.kernels.cuda.launch_table import RULES, Gpu, Launch, MmaLaunch, PersistentLaunch, Rule, WideLaunch, launch_for
from vbrt.kernels.cuda.rounded import fp8 as fp8_linear
from vbrt.kernels.cuda.table import linear as table_linear
from vbrt.kernels.cuda.whole import linear as whole_linear

pytest.importorskip("triton.experimental.gluon")


@pytest.fixture
def gpu(monkeypatch, request):
    """The names of what is launched, on tensors of the CPU, as on a GPU of five multiprocessors; new memory is NaN."""
    from triton.runtime.jit import JITFunction

    def by_launcher(self, device, grid, tensors, numbers, *, warps, registers=None, specialized=(), **constants):
        self._check(constants)
        run(self._kernel, *tensors, *numbers, grid=grid, num_warps=warps, enable_fp_fusion=self._fused, **constants)

    def run(kernel, *given, grid, warmup=False, **named):
        ran.append(kernel.fn.__name__)
        launched(kernel, capability, grid, given, named)

    option = request.config.getoption("--capability") or "9.0"
    capability, ran = getattr(request, "param", int(option.replace(".", ""))), []
    monkeypatch.setattr(launcher.Launcher, "__call__", by_launcher)
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(devices, "capability", lambda index: divmod(capability, 10))
    monkeypatch.setattr(devices, "gpu", lambda index: Gpu(capability // 10, processors=5))
    monkeypatch.setattr(tuned_configs, "tuned", lambda index: {})
    torch.use_deterministic_algorithms(True)
    yield ran
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def copies(request, monkeypatch):
    """When copies into shared memory arrive: at once, or when they are waited for."""
    monkeypatch.setattr(Machine, "late", request.param)


on_hopper = pytest.mark.parametrize("gpu", [90], indirect=True)  # instructions that no other GPU has
CONFIGS = [Launch(1, 4, False), Launch(2, 16, True), Launch(1, 8, True), Launch(2, 4, True, True), Launch(4, 4, False)]


@matrix(name=["nvfp4", "mxfp4"], config=CONFIGS, tokens=[13, 1])
def test_few_tokens(name, config, tokens, gpu):
    planes, weight = tiled(name, (40, 512), device="cpu")
    x, bias = torch.randn(tokens, 512).bfloat16(), torch.randn(40).bfloat16()
    y = torch.empty(tokens, 40, dtype=x.dtype)
    launches.narrow(x, weight_of(planes), bias, y, "gelu", config)
    assert error(y, reference.ACTIVATIONS["gelu"](x.double() @ weight.T + bias.double())) < 3e-3


@pytest.mark.sample(1)
@matrix(gpu=[90, 80], k=[330, 165, 408], tokens=[1, 9], indirect=("gpu",))  # rows of words, of neither, of 16 bytes
def test_few_tokens_of_any_k(tokens, k, gpu):
    planes, weight = tiled("nvfp4", (40, k), device="cpu")
    x = torch.randn(tokens, 3 * k).bfloat16()[:, k : 2 * k]
    y = e2m1_linear.multiply(x, weight_of(planes), None, "silu")
    assert error(y, reference.ACTIVATIONS["silu"](x.double() @ weight.T)) < 3e-3
    padded = k % 2 or (tokens > 8 and k % 8)
    assert gpu == ["pad_kernel", "linear_kernel"][0 if padded else 1 :]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_sums_of_bf16(dtype, gpu):
    planes, weight = tiled("nvfp4", (24, 128), device="cpu")
    x, bias = torch.randn(3, 128).to(dtype), torch.randn(24).to(dtype)
    y = e2m1_linear.multiply(x, weight_of(planes), bias, "none")
    assert error(y, x.double() @ weight.T + bias.double()) < (1e-5 if dtype is torch.float32 else 3e-3)


@pytest.mark.sample(1)
@matrix(name=["nvfp4", "mxfp4"], count=[2, 3])
def test_several_weights_of_one_input(name, count, gpu):
    made = [tiled(name, (n, 264), device="cpu") for n in (40, 16, 24)[:count]]
    x = torch.randn(1, 5, 264).bfloat16()
    ys = fused_linear.siblings(x, [weight_of(planes) for planes, _ in made])
    assert all(error(y, x.double() @ weight.T) < 3e-3 for y, (_, weight) in zip(ys, made, strict=True))
    assert gpu == ["siblings_kernel"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param("nvfp4", (40, 512), marks=pytest.mark.exhaustive),
        pytest.param("mxfp4", (40, 512), marks=pytest.mark.exhaustive),
        pytest.param("nvfp4", (120, 330), marks=pytest.mark.exhaustive),
        pytest.param("nvfp4", (56, 138), marks=pytest.mark.exhaustive),
        ("nvfp4", (24, 138)),
    ],
    ids=str,
)
def test_layers_that_share_a_norm(name, shape, gpu):
    (n, k), rows = shape, [24, 24, 8]
    out, weight = tiled(name, shape, device="cpu")
    behind = [tiled(name, (size, n), device="cpu") for size in rows]
    weights = [weight_of(planes) for planes, _ in behind]
    x, other, gain = (torch.randn(1, 1, size).bfloat16() for size in (k, n, n))
    total, y, squares = fused_linear.residual(x, weight_of(out), other, gain.flatten())
    assert error(total, x.double() @ weight.T + other.double()) < 3e-3 and torch.equal(y, total * gain)
    torch.testing.assert_close(squares.sum(), total.float().square().sum())
    normed = y.double() * torch.rsqrt(total.double().square().mean() + 1e-5)
    for count in (1, 2, 3):
        zs = fused_linear.siblings(y, weights[:count], Norm(squares, 1e-5))
        assert all(error(z, normed @ w.T) < 3e-3 for z, (_, w) in zip(zs, behind, strict=False))
    gated = fused_linear.gated(y, *weights[:2], "silu", Norm(squares, 1e-5))
    gate, up = (normed @ w.T for _, w in behind[:2])
    assert error(gated, reference.ACTIVATIONS["silu"](gate) * up) < 3e-3


@pytest.mark.sample(1)
@matrix(name=["nvfp4", "mxfp4"], tokens=[1, 16, 8], at_most=2)
def test_a_gated_pair(name, tokens, gpu):
    (gate, w), (up, v) = (tiled(name, (40, 136), device="cpu") for _ in range(2))
    x = torch.randn(tokens, 136).bfloat16()
    y = fused_linear.gated(x, weight_of(gate), weight_of(up), "silu")
    assert error(y, reference.ACTIVATIONS["silu"](x.double() @ w.T) * (x.double() @ v.T)) < 3e-3


@pytest.mark.parametrize("k", [64, 2730])
def test_a_sum_and_its_norm(k, gpu):
    gain = torch.randn(k).bfloat16()
    x, other = torch.randn(2, 3, 2 * k).bfloat16()[..., :k]
    total, y = fused_linear.normed_sum(x, other, gain, 1e-5)
    assert torch.equal(total, x + other)
    assert error(y, torch.nn.functional.rms_norm(total.double(), (k,), gain.double(), 1e-5)) < 3e-3


@pytest.mark.sample(1)
@matrix(name=["nvfp4", "mxfp4"], dtype=[torch.bfloat16, torch.float16, torch.float32])
def test_a_decoded_weight_has_the_reference_s_bits(name, dtype, gpu):
    planes, _ = tiled(name, (40, 520), dtype, device="cpu")
    w = launches.decode(weight_of(planes), dtype)
    assert torch.equal(w, reference.decode_weight(e2m1_linear.plain(planes)))


WIDE = [
    ("mxfp4", WideLaunch(64, 8, 4, 4)),
    ("nvfp4", WideLaunch(32, 4, 2, 6)),
    ("nvfp4", WideLaunch(16, 16, 1, 6)),
    ("nvfp4", WideLaunch(128, 16, 1, 4)),
]


@on_hopper
@pytest.mark.parametrize("copies", [True, pytest.param(False, marks=pytest.mark.exhaustive)], indirect=True)
@pytest.mark.parametrize(
    "case", [WIDE[0], *(pytest.param(case, marks=pytest.mark.exhaustive) for case in WIDE[1:])], ids=str
)
def test_many_tokens(case, copies, gpu):
    name, config = case
    tokens = config.tokens + 3
    planes, weight = tiled(name, (72, 328), device="cpu")
    x, bias = torch.randn(tokens, 328).bfloat16(), torch.randn(72).bfloat16()
    y = launches.wide(x, weight_of(planes), bias, "silu", config)
    assert error(y, reference.ACTIVATIONS["silu"](x.double() @ weight.T + bias.double())) < 3e-3
    apart = config.splits > 1 and not config.reduces_itself
    assert gpu == ["order_kernel", "wgmma_kernel", "reduce_kernel"][: 3 if apart else 2]


@on_hopper
def test_partial_results_are_added_in_one_order_whichever_program_ends_last(gpu, monkeypatch):
    planes, weight = tiled("nvfp4", (24, 264), device="cpu")
    x, results = torch.randn(13, 264).bfloat16(), []
    for backward in (False, True):
        monkeypatch.setattr(Machine, "backward", backward)
        results.append(launches.wide(x, weight_of(planes), None, "none", WideLaunch(16, 4, 4, 4)))
    assert torch.equal(*results) and error(results[0], x.double() @ weight.T) < 3e-3
    assert gpu == ["order_kernel", "wgmma_kernel"] * 2


@on_hopper
@matrix(activation=list(reference.ACTIVATIONS), dtype=[torch.bfloat16, torch.float16, torch.float32])
def test_activations_are_as_exact_as_the_result_s_type(activation, dtype, gpu):
    v = torch.cat([torch.linspace(-12, 12, 997), torch.tensor([1e4, -1e4, float("inf"), float("nan")])])
    y = torch.empty(1, len(v), dtype=dtype)
    launches.reduce(torch.stack([v / 2, v / 2])[:, None], None, y, activation)
    want = reference.ACTIVATIONS[activation](v.double())
    near = 2e-7 * v.abs() + torch.finfo(dtype).eps * want.abs() + 3e-8  # half of the smallest fp16
    if dtype is torch.bfloat16:
        near += 2.5e-4 * v.abs() + 3e-4
    fits = torch.where(want.isinf(), y[0] == want, (y[0] - want).abs() <= near)
    assert fits[:-1].all() and y[0, -1].isnan()


CASES = [  # the launch, then (format, tokens, n, k, activation)
    (PersistentLaunch(2, 96), ("mxfp4", 170, 136, 392, "relu")),
    (PersistentLaunch(0, 256), ("nvfp4", 300, 200, 328, "silu")),
    (PersistentLaunch(2, 256), ("nvfp4", 300, 120, 520, "gelu")),
    (PersistentLaunch(4, 224, programs=4), ("nvfp4", 300, 200, 328, "gelu")),
    (PersistentLaunch(1, 160), ("nvfp4", 70, 120, 520, "none")),
    (PersistentLaunch(0, 128), ("mxfp4", 130, 200, 328, "silu")),
    (PersistentLaunch(3, 32), ("nvfp4", 70, 120, 520, "relu")),
    (PersistentLaunch(1, 96, ordered=True), ("nvfp4", 70, 120, 330, "none")),
    (PersistentLaunch(0, 128, ordered=True), ("mxfp4", 130, 200, 328, "silu")),
]


@on_hopper
@pytest.mark.parametrize("copies", [True, pytest.param(False, marks=pytest.mark.exhaustive)], indirect=True)
@pytest.mark.parametrize("case", [CASES[0], *(pytest.param(case, marks=pytest.mark.exhaustive) for case in CASES[1:])])
def test_hundreds_of_tokens(case, copies, gpu):
    """Also with tiles that several programs share, and in pieces."""
    launch, (name, tokens, n, k, activation) = case
    planes, weight = tiled(name, (n, k), device="cpu")
    x, bias = torch.randn(tokens, k + 8).bfloat16()[:, :k], torch.randn(n).bfloat16()
    y = launches.persistent(x, launches.codes_of(weight_of(planes)), bias, activation, launch)
    assert error(y, reference.ACTIVATIONS[activation](x.double() @ weight.T + bias.double())) < 3e-3
    assert gpu == ["order_kernel", "persistent_kernel"][not launch.ordered :]


GRADIENTS = [  # the launch, then (format, tokens, n, k)
    (PersistentLaunch(2, 96), ("mxfp4", 170, 328, 136)),
    (PersistentLaunch(0, 256), ("nvfp4", 300, 392, 200)),
    (PersistentLaunch(2, 256), ("nvfp4", 300, 520, 120)),
    (PersistentLaunch(4, 224, programs=4), ("nvfp4", 300, 330, 200)),
    (PersistentLaunch(1, 160), ("nvfp4", 70, 520, 138)),
    (PersistentLaunch(0, 128), ("mxfp4", 130, 328, 266)),
    (PersistentLaunch(3, 32), ("nvfp4", 70, 40, 520)),
]


@on_hopper
@pytest.mark.parametrize("copies", [True, pytest.param(False, marks=pytest.mark.exhaustive)], indirect=True)
@pytest.mark.parametrize(
    "case", [*GRADIENTS[:2], *(pytest.param(case, marks=pytest.mark.exhaustive) for case in GRADIENTS[2:])]
)
def test_gradients_to_inputs(case, copies, gpu):
    """Products with the weight turned, also with tiles that several programs share, and in pieces."""
    launch, (name, tokens, n, k) = case
    planes, weight = tiled(name, (n, k), device="cpu")
    dy = torch.randn(tokens, n + 8).bfloat16()[:, :n]
    dx = launches.TurnedProduct(weight_of(planes), tuple(dy.shape), launch)(dy, None)
    assert error(dx, dy.double() @ weight) < 3e-3
    assert gpu[-1] == "turned_kernel"


@on_hopper
def test_a_launch_that_is_prepared_with_the_planes_serves_any_activations_of_its_shape(gpu, monkeypatch):
    chosen, made = [PersistentLaunch(0, 64)], []
    product = launches.PersistentProduct
    monkeypatch.setattr(launches, "PersistentProduct", lambda *given: made.append(product(*given)) or made[-1])
    monkeypatch.setattr(e2m1_linear, "serves", lambda planes: True)
    monkeypatch.setattr(e2m1_linear, "choose", lambda *given: chosen[0])
    planes, weight = tiled("nvfp4", (40, 136), device="cpu")
    wide, bias = torch.randn(2, 20, 137).bfloat16(), torch.randn(40).bfloat16()
    for x in (torch.randn(2, 20, 136).bfloat16(), torch.randn(2, 20, 136).bfloat16(), wide[..., 1:]):
        want = x.double() @ weight.T
        assert error(e2m1_linear.linear(x, planes), want) < 3e-3
        assert error(e2m1_linear.linear(x, planes, bias), want + bias.double()) < 3e-3
    assert len(made) == 2  # without a bias, and with one
    assert error(e2m1_linear.linear(x[:1], planes), want[:1]) < 3e-3 and len(made) == 3
    assert set(gpu) == {"pad_kernel", "persistent_kernel"}
    assert copy.deepcopy(planes).prepared is None is pickle.loads(pickle.dumps(planes)).prepared
    dy, turned = torch.randn(2, 20, 40).bfloat16(), []
    product = launches.TurnedProduct
    monkeypatch.setattr(launches, "TurnedProduct", lambda *given: turned.append(product(*given)) or turned[-1])
    monkeypatch.setattr(e2m1_linear, "turned_for", lambda *given: PersistentLaunch(0, 64))
    for each in (dy, dy + 1):
        assert error(e2m1_linear.gradient(each, planes), each.double() @ weight) < 3e-3
    assert len(turned) == 1 and gpu[-2:] == ["turned_kernel"] * 2
    chosen[0] = Launch(1, 4, False)  # as after `vbrt.tune`
    gpu.clear()
    assert error(e2m1_linear.linear(x[:, :4], planes), want[:, :4]) < 3e-3
    assert error(e2m1_linear.linear(x[:1], planes), want[:1]) < 3e-3
    assert "persistent_kernel" not in gpu


@pytest.mark.exhaustive
@on_hopper
@matrix(name=table_linear.FORMATS, k=[520, 328], launch=[PersistentLaunch(2, 160), PersistentLaunch(0, 64)], at_most=1)
def test_hundreds_of_tokens_through_a_table(name, k, launch, gpu, monkeypatch):
    monkeypatch.setattr(table_linear, "nf4_levels", lambda index: torch.tensor(NF4_LEVELS))
    weight, format = torch.randn(200, k) * 0.03, get_format(name)
    planes = WeightPlanes(name, (200, k), torch.bfloat16, format.encode(weight))
    x, bias = torch.randn(100, k).bfloat16(), torch.randn(200).bfloat16()
    monkeypatch.setattr(table_linear, "codes_for", lambda *_: launch)
    y = table_linear._multiply(x, planes, bias, "silu")
    exact = format.decode(planes.coarse, (200, k), torch.float64)
    assert error(y, reference.ACTIVATIONS["silu"](x.double() @ exact.T + bias.double())) < 4e-3
    assert gpu == ["persistent_kernel"]


TABLES = [(name, dtype, 200) for name, dtype in zip(table_linear.FORMATS, (torch.bfloat16, torch.float32), strict=True)]
LEVELS = [
    ("levels16-float16", torch.bfloat16, 200),
    *(
        pytest.param(name, torch.float16, k, marks=pytest.mark.exhaustive)
        for name in ("levels16-bfloat16", "levels32-float16", "levels64-float32", "levels128-bfloat16")
        for k in (192, 200, 208, 1304)  # 192: the last group of 64 columns of blocks of 128 is padding
    ),
]


AFFINE = [
    *(
        (name, torch.bfloat16, 328)
        for name in ("superblock32", "affine32-float16", "signed32-bfloat16", "symmetric32-float16")
    ),
    *(
        pytest.param(name, torch.float32, k, marks=pytest.mark.exhaustive)
        for name in (
            "superblock32",
            "affine16-bfloat16",
            "affine64-float32",
            "signed16-float16",
            "signed64-float32",
            "zeros64-float32",
            "zeros128-float16",
            "symmetric128-float16",
        )
        for k in (192, 200, 208, 512, 1304)
    ),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "dtype", "k"), [*TABLES, *LEVELS, *AFFINE])
def test_tables(name, dtype, k, gpu, monkeypatch):
    """Also with rows that end within 64 columns, in the middle of the last blocks or behind them."""
    monkeypatch.setattr(table_linear, "nf4_levels", lambda index: torch.tensor(table_linear.NF4_LEVELS))
    coarse = get_format(name).encode(torch.randn(40, k) * 0.03)
    planes = WeightPlanes(name, (40, k), dtype, coarse)
    exact = get_format(name).decode(coarse, (40, k), torch.float64)
    x, bias = torch.randn(2, 5, k).bfloat16()[0], torch.randn(40).bfloat16()
    y = table_linear._multiply(x, planes, bias, "relu")
    assert error(y, (x.double() @ exact.T + bias.double()).relu()) < 3e-3
    assert torch.equal(table_linear._decode(planes, dtype), reference.decode_weight(planes))
    assert gpu == ["linear_kernel", "decode_kernel"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("scales", ["bfloat16", "float32"])
def test_the_middle_code_decodes_to_the_middle_itself_however_small_it_is(scales, gpu):
    format, shape = get_format(f"signed16-{scales}"), (8, 208)
    coarse = format.encode(torch.randn(shape) * 0.03)
    coarse["middles"] *= 2.0**-20
    coarse["codes"][:, ::2] = 0x88
    planes = WeightPlanes(format.name, shape, torch.float32, coarse)
    w = table_linear._decode(planes, torch.float32)
    assert torch.equal(w, reference.decode_weight(planes))
    assert torch.equal(w[:, ::16], coarse["middles"].float()) and gpu == ["decode_kernel"]


@pytest.mark.sample(2)
@matrix(
    name=[
        "superblock32",
        "affine32-float16",
        "signed64-bfloat16",
        "levels32-float32",
        "zeros64-bfloat16",
        "nf4",
        "symmetric32-float16",
    ],
    tokens=[1, 2],
    at_most=1,
)
def test_two_tokens_take_sixteen_bytes_of_a_row_at_a_time(name, tokens, gpu, monkeypatch):
    monkeypatch.setattr(table_linear, "nf4_levels", lambda index: torch.tensor(table_linear.NF4_LEVELS))
    format, shape = get_format(name), (24, 1280)
    coarse, x = format.encode(torch.randn(shape) * 0.03), torch.randn(tokens, 1280).bfloat16()
    y = table_linear._multiply(x, WeightPlanes(name, shape, x.dtype, coarse), None, "none")
    assert error(y, x.double() @ format.decode(coarse, shape, torch.float64).T) < 4e-3


@pytest.mark.sample(1)
@matrix(name=["superblock32", "zeros128-float16", "levels16-float16"], launch=[(2, 4), (4, 4)], at_most=1)
def test_programs_have_several_row_tiles(name, launch, gpu, monkeypatch):
    """The last program's are partly behind the weight's rows."""
    monkeypatch.setattr(table_linear.tuned_configs, "found", lambda *_: Launch(*launch, True))
    format, shape = get_format(name), (40, 1280)
    coarse, x = format.encode(torch.randn(shape) * 0.03), torch.randn(11, 1280).bfloat16()
    y = table_linear._multiply(x, WeightPlanes(name, shape, x.dtype, coarse), None, "none")
    assert error(y, x.double() @ format.decode(coarse, shape, torch.float64).T) < 4e-3


def test_a_token_does_not_meet_the_next_one_behind_its_last_block(gpu):
    """K ends with a block, not with the 64 columns that a warp takes at a time."""
    format, shape = get_format("levels16-float16"), (16, 208)
    coarse, x = format.encode(torch.randn(shape) * 0.03), torch.randn(2, 208).bfloat16()
    x[1] = torch.nan
    y = table_linear._multiply(x, WeightPlanes(format.name, shape, x.dtype, coarse), None, "none")
    assert error(y[0], x[0].double() @ format.decode(coarse, shape, torch.float64).T) < 4e-3 and y[1].isnan().all()


@pytest.mark.sample(1)
@matrix(tokens=[1, 11, 32], k=[200, 264, 1320], dtype=[torch.bfloat16, torch.float32], at_most=2)
def test_whole_numbers(tokens, k, dtype, gpu):
    """Also with rows that end within 64 columns, and within a block."""
    fmt = get_format("mxint8")
    coarse = fmt.encode(torch.randn(20, k) * 0.03)
    coarse["codes"][3, :5] = torch.tensor([-128, -127, 127, 0, -1])
    planes = WeightPlanes("mxint8", (20, k), dtype, coarse)
    exact = fmt.decode(coarse, (20, k), torch.float64)
    x, bias = torch.randn(2, tokens, k).bfloat16()[0], torch.randn(20).bfloat16()
    y = whole_linear._product(x, coarse["codes"], coarse["scales"], bias, "relu")
    assert error(y, (x.double() @ exact.T + bias.double()).relu()) < 3e-3
    odd = [*range(8), 255]  # of numbers below the normal ones, and NaN
    coarse["scales"][:9, 0] = torch.tensor(odd, dtype=torch.uint8)
    decoded = whole_linear._decode(planes, dtype)
    assert torch.equal(decoded.nan_to_num(7), reference.decode_weight(planes).nan_to_num(7)) and decoded.isnan().any()
    assert gpu == ["linear_kernel", "decode_kernel"]


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_a_weight_in_eight_bits_is_the_rounded_one(name, gpu):
    planes, weight = tiled(name, (40, 266), device="cpu")
    codes, scales = fp8_linear.decode8(weight_of(planes))
    want = (weight / scales.double()[:, None]).float().to(torch.float8_e4m3fn)
    assert torch.equal(codes[:, :266].float(), want.float()) and not codes[:, 266:].float().any()


def test_activations_in_eight_bits_are_the_rounded_ones(gpu):
    x = torch.randn(3, 600).bfloat16()[:, :300]
    x[1] = 0
    codes, scales = fp8_linear.quantize(x)
    assert not codes[:, 300:].float().any() and not codes[1].float().any()
    torch.testing.assert_close(codes[:, :300].double() * scales.double()[:, None], x.double(), rtol=1 / 16, atol=1e-4)


def test_a_new_kernel_takes_a_signature_a_rule_and_a_launcher(gpu, monkeypatch):
    from tests.emulator.toy_triton import scale_kernel

    monkeypatch.setitem(RULES, "toy", {(9, 0): (Rule(8, None, None, Launch(1, 4, True)),)})
    scale, x, y = launcher.Launcher(scale_kernel), torch.randn(200), torch.empty(200)
    warps = launch_for("toy", Gpu(9, 132), 1, 1, 1).k_warps
    for doubled in (False, True):
        scale(0, (2, 1), (x, y), (200,), warps=warps, BLOCK=128, DOUBLED=doubled)
        assert torch.equal(y, x * (1 + doubled))
    with pytest.raises(KernelError, match="expected BLOCK, DOUBLED"):
        scale(0, (2, 1), (x, y), (200,), warps=warps, BLOCK=128, DOUBLE=True)
    assert gpu == ["scale_kernel"] * 2


MMA = [
    MmaLaunch(16, 2, ring=2),
    MmaLaunch(32, 4, 1, splits=2),
    MmaLaunch(64, 2, 2, ring=2),
    MmaLaunch(128, 1, 2, ring=2),
]


@pytest.mark.sample(1)
@matrix(gpu=[80, 89], config=MMA, name=["nvfp4", "mxfp4"], k=[328, 136], indirect=("gpu",), at_most=2)
def test_many_tokens_without_wgmma(gpu, config, name, k):
    planes, weight = tiled(name, (72, k), device="cpu")
    x, bias = torch.randn(config.tokens + 3, k + 8).bfloat16()[:, :k], torch.randn(72).bfloat16()
    y = launches.mma(x, launches.codes_of(weight_of(planes)), bias, "silu", config)
    assert error(y, reference.ACTIVATIONS["silu"](x.double() @ weight.T + bias.double())) < 3e-3
    assert gpu == ["mma_kernel"] + ["reduce_kernel"] * (config.splits > 1)


MMA_FORMATS = ["nf4", "mxint8", "symmetric64-float32", "levels16-float16", "quantile", "levels128-bfloat16"]


@pytest.mark.sample(1)
@matrix(gpu=[80, 89], config=MMA, name=MMA_FORMATS, k=[328, 136], indirect=("gpu",), at_most=4)
def test_many_tokens_of_rows_of_codes_without_wgmma(gpu, config, name, k, monkeypatch):
    monkeypatch.setattr(table_linear, "nf4_levels", lambda index: torch.tensor(NF4_LEVELS))
    monkeypatch.setattr(table_linear, "int4_levels", lambda index: torch.tensor(INT4_LEVELS))
    k += 24 * (name == "levels16-float16")  # rows of whole 16 bytes
    format, shape = get_format(name), (72, k)
    coarse = format.encode(torch.randn(shape) * 0.03)
    module = whole_linear if name == "mxint8" else table_linear
    x, bias = torch.randn(config.tokens + 3, k + 8).bfloat16()[:, :k], torch.randn(72).bfloat16()
    y = launches.mma(x, module.codes_of(coarse), bias, "silu", config)
    exact = format.decode(coarse, shape, torch.float64)
    assert error(y, reference.ACTIVATIONS["silu"](x.double() @ exact.T + bias.double())) < 4e-3
    assert gpu == ["mma_kernel"] + ["reduce_kernel"] * (config.splits > 1)


@matrix(gpu=[80], dtype=[torch.float16, torch.float32], indirect=("gpu",), at_most=1)
def test_many_tokens_of_other_dtypes_without_wgmma(gpu, dtype):
    planes, weight = tiled("nvfp4", (40, 200), device="cpu")
    x = torch.randn(9, 200).to(dtype)
    y = launches.mma(x, launches.codes_of(weight_of(planes)), None, "none", MmaLaunch(16, 2))
    assert error(y, x.double() @ weight.T) < (1e-3 if dtype is torch.float16 else 1e-5)
