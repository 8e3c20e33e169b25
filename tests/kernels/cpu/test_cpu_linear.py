"""The C kernels for CPUs against the decoded weight in float64; where no C compiler is, what is said instead."""

import copy
import dataclasses
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

import vbrt
from tests.kernels.cuda.gpu_cases import error
from tests.matrix import matrix
from vbrt.errors import FormatError, KernelError
from vbrt.formats import WeightPlanes, get_format, split_fine
from vbrt.kernels import KERNELS, reference, resolve
from vbrt.kernels.cpu import build
from vbrt.kernels.cpu import linear as cpu_linear

CPU = torch.device("cpu")
FORMATS = (*cpu_linear.FORMATS, *cpu_linear.BYTES)
BOUND = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 3e-3}
WHY = build.refusal(CPU)
built = pytest.mark.skipif(WHY is not None, reason=str(WHY))


def case(name, shape, dtype=torch.float32):
    """(planes, the weight they stand for in float64)."""
    fmt = get_format(name)
    coarse = fmt.encode(torch.randn(shape) * 0.03)
    if "scales" in coarse and coarse["scales"].dtype is torch.float16:
        coarse["scales"].view(-1)[:2] = torch.tensor([-6e-8, 6.1e-5][: coarse["scales"].numel()])  # denormal
    if "tensor_scale" in coarse:
        coarse["tensor_scale"] *= 1.2345  # published checkpoints: not a power of two
    if "unit" in coarse:
        coarse["unit"] /= 127
    if fmt.record.offsets == "floatzeros":
        coarse["zeros"] += torch.rand(coarse["zeros"].shape).to(coarse["zeros"].dtype)  # between codes
    return WeightPlanes(name, shape, dtype, coarse), fmt.decode(coarse, shape, torch.float64)


@built
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@matrix(tokens=[1, 3, 9, 70], shape=[(1, 1), (7, 50), (24, 200), (130, 4112), (64, 2048)], name=FORMATS)
def test_any_shape_is_as_close_as_the_dtype_allows(name, shape, tokens, dtype):
    planes, w = case(name, shape, dtype)
    x, bias = torch.randn(tokens, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
    y = cpu_linear.linear(x, planes, bias)
    assert y.dtype is dtype and y.is_contiguous()
    assert error(y, F.linear(x.double(), w, bias.double())) <= BOUND[dtype]


@built
@pytest.mark.parametrize("tokens", [1, 3, 29])
def test_each_code_of_fp8_is_its_number_and_nan_makes_its_row_nan(tokens):
    coarse = get_format("floatbytes16-float32").encode(torch.randn(20, 272))
    coarse["codes"].view(torch.uint8)[:16, :256] = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(1, 16)
    planes = WeightPlanes("floatbytes16-float32", (20, 272), torch.float32, coarse)
    want = reference.decode_weight(planes)
    got, x = cpu_linear.decode_weight(planes), torch.rand(tokens, 272)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())
    y, finite = cpu_linear.linear(x, planes), ~want.isnan().any(1)
    assert torch.equal(finite, torch.arange(20)[:, None].ne(torch.tensor([7, 15])).all(1))
    assert y[:, ~finite].isnan().all()
    assert error(y[:, finite], F.linear(x.double(), want[finite].double())) <= BOUND[torch.float32]


@built
def test_tables_live_as_long_as_a_call_may_read_them_though_another_thread_prepares_the_planes_anew():
    planes, _ = case("quantile", (24, 200))
    read = cpu_linear._weight(planes)
    tables = [weakref.ref(tensor) for tensor in read.tensors]
    object.__setattr__(planes, "prepared", None)
    assert cpu_linear._weight(planes) is not read
    gc.collect()
    assert all(table() is not None for table in tables)


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_among_many_has_the_bits_that_it_has_among_others(dtype):
    planes, _ = case("nvfp4", (40, 1072), dtype)
    x = torch.randn(1050, 1072).to(dtype)
    if cpu_linear.route(x, planes) != "panels":
        pytest.skip("torch multiplies many tokens on this CPU")
    y = cpu_linear.linear(x, planes)
    assert error(y, F.linear(x.double(), cpu_linear.decode_to(planes, dtype).double())) <= BOUND[dtype]
    for first, last in ((0, 9), (7, 30), (1000, 1050)):
        assert torch.equal(y[first:last], cpu_linear.linear(x[first:last], planes))


@built
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_every_activation_is_applied(activation, tokens):
    planes, w = case("nvfp4", (24, 200))
    x = torch.randn(tokens, 200)
    want = reference.ACTIVATIONS[activation](F.linear(x.double(), w))
    assert error(cpu_linear.linear(x, planes, None, activation), want) <= 1e-5


@built
@pytest.mark.parametrize(
    "x",
    [torch.randn(2, 3, 200), torch.randn(200), torch.randn(0, 200), torch.randn(200, 3).t(), torch.randn(200, 40).t(),
     torch.randn(3, 400)[:, ::2], torch.randn(1, 200).expand(5, 200), torch.randn(3, 201)[:, 1:]],
    ids=lambda x: f"{tuple(x.shape)}-{x.stride()}",
)  # fmt: skip
def test_any_strides_and_leading_dimensions_will_do(x):
    planes, w = case("mxfp4", (24, 200))
    want = F.linear(x.double(), w)
    y = cpu_linear.linear(x, planes)
    assert y.shape == want.shape and torch.allclose(y.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(24)
@built
@pytest.mark.parametrize("dtype", [*BOUND, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 50), (130, 4112), (3000, 512)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_the_decoded_weight_has_the_bits_of_the_reference(name, shape, dtype):
    planes, _ = case(name, shape, dtype)
    w, rows = reference.decode_weight(planes), [shape[0] - 1, 0, shape[0] // 2]
    assert torch.equal(cpu_linear.decode_weight(planes), w)
    if dtype in BOUND:
        assert torch.equal(cpu_linear.decode_rows(planes, rows), w[rows])
    else:
        with pytest.raises(KernelError, match="float64: C decodes no rows"):
            cpu_linear.decode_rows(planes, rows)


@built
@pytest.mark.parametrize(
    "name",
    [
        "affine16-float32",
        "affine128-float32",
        "signed64-float32",
        "zeros32-float32",
        "offsetbytes16-float32",
        "zerobytes32-float32",
    ],
)
def test_products_with_scales_of_32_bits_are_rounded_before_offsets_are_added(name):
    """In tiles, too: their sums of one weight each are that weight."""
    planes, _ = case(name, (40, 528))
    w = reference.decode_weight(planes)
    assert torch.equal(cpu_linear.decode_weight(planes), w)
    if cpu_linear.library().vbrt_has_panels():
        y = cpu_linear._multiply(torch.eye(528), planes, None, torch.float32, cpu_linear.library().vbrt_panels)
        assert torch.equal(y, w.T)


@built
@matrix(kind=["floatzeros", "floatzerobytes"], block=[16, 32, 64, 128], scales=["float16", "bfloat16", "float32"])
def test_the_difference_of_code_and_zero_point_is_rounded_before_the_product(kind, block, scales):
    """Sums of one weight each are that weight; a weight without that rounding is another."""
    name = f"{kind}{block}-{scales}"
    planes, _ = case(name, (40, 528))
    planes.coarse["zeros"][:2] = -planes.coarse["zeros"][:2]
    w = reference.decode_weight(planes)
    assert torch.equal(cpu_linear.decode_weight(planes), w)
    ways = [None, cpu_linear.library().vbrt_panels] if cpu_linear.library().vbrt_has_panels() else [None]
    for multiply in ways:
        assert torch.equal(cpu_linear._multiply(torch.eye(528), planes, None, torch.float32, multiply), w.T)
    wide = {field: tensor.float() if tensor.is_floating_point() else tensor for field, tensor in planes.coarse.items()}
    exact = get_format(f"{kind}{block}-float32").decode(wide, planes.shape, torch.float32)
    assert torch.equal(w, exact) is (scales == "float32")


@built
@pytest.mark.parametrize("scales", ["float16", "bfloat16", "float32"])
def test_the_middle_code_is_the_middle_itself_however_small_it_is(scales):
    """Counted from 0, codes would have an offset of -8 scales, which fp32 rounds by more than these middles."""
    planes, _ = case(f"signed32-{scales}", (40, 528))
    planes.coarse["middles"][::2] *= 2.0**-20
    planes.coarse["codes"][:, ::3] = 0x88
    w = reference.decode_weight(planes)
    assert torch.equal(w[:, ::96], planes.coarse["middles"][:, ::3].float())
    assert torch.equal(cpu_linear.decode_weight(planes), w)
    assert torch.equal(cpu_linear.decode_rows(planes, [3, 0]), w[[3, 0]])
    if cpu_linear.library().vbrt_has_panels():
        y = cpu_linear._multiply(torch.eye(528), planes, None, torch.float32, cpu_linear.library().vbrt_panels)
        assert torch.equal(y, w.T)
    y = cpu_linear.linear(torch.eye(528)[96:97], planes)
    assert torch.equal(y[0], w[:, 96])


@pytest.mark.sample(8)
@built
@pytest.mark.parametrize("name", [*cpu_linear.LEVELS, *cpu_linear.AFFINE, *cpu_linear.EIGHT])
def test_published_levels_and_offsets_in_any_encoding_will_do(name):
    for shape, tokens in (((7, 50), 1), ((33, 412), 3), ((5, 2200), 40), ((6, 4416), 2)):
        planes, w = case(name, shape, torch.bfloat16)
        decoded, rows = reference.decode_weight(planes), [4, 1, 4]
        assert torch.equal(cpu_linear.decode_weight(planes), decoded)
        assert torch.equal(cpu_linear.decode_rows(planes, rows), decoded[rows])
        x = torch.randn(tokens, shape[1])
        assert (cpu_linear.route(x, planes) == "fused") is (tokens <= 4)
        assert error(cpu_linear.linear(x, planes), F.linear(x.double(), w)) <= 1e-5
    assert resolve("linear", "auto", CPU, name).run is cpu_linear.linear


@built
@pytest.mark.parametrize(
    "name",
    ["affine16-float32", "affine128-float16", "signed32-bfloat16", "signed16-float32", "zeros32-float32",
     "superblock32", "superbytes16", "superbytes32", "floatzeros64-float16", "floatzerobytes16-bfloat16"],
)  # fmt: skip
def test_scales_and_offsets_of_other_rows_do_not_matter(name):
    """Planes end where their memory does; a row of 4112 columns ends within vectors of scales, and in a superblock."""
    shape = (9, 4112)
    planes, _ = case(name, shape)
    x = torch.randn(3, 4112)
    y = cpu_linear.linear(x, planes)
    for row in range(9):
        fields = {
            field: torch.full_like(tensor, torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
            for field, tensor in planes.coarse.items()
        }
        for field, tensor in planes.coarse.items():
            fields[field][row] = tensor[row]
        among_others = cpu_linear.linear(x, WeightPlanes(name, shape, torch.float32, fields))
        assert torch.equal(among_others[:, row], y[:, row])


@built
@pytest.mark.parametrize("tokens", [1, 40])
def test_gradients_reach_the_input_and_the_bias(tokens):
    planes, w = case("nf4", (24, 200))
    x, bias = torch.randn(tokens, 200, requires_grad=True), torch.randn(24, requires_grad=True)
    cpu_linear.linear(x, planes, bias).sum().backward()
    torch.testing.assert_close(x.grad, w.sum(0).float().expand(tokens, -1))
    assert torch.equal(bias.grad, torch.full((24,), float(tokens)))


@built
def test_a_tensor_elsewhere_goes_through_the_reference():
    planes, _ = case("nvfp4", (24, 200))
    assert cpu_linear.route(torch.empty(3, 200, device="meta"), planes) == "reference"


def exact_case(name, shape, dtype):
    """(planes with a fine one, the weight): rows of all magnitudes, zeros of both signs, denormals."""
    w = (torch.randn(shape) * torch.exp(3 * torch.randn(shape[0], 1))).clamp_(-6e4, 6e4).to(dtype)
    odd = torch.tensor([0.0, -0.0, 1e-30, -6e-8, 3e-6, 65504.0]).to(dtype)
    w.view(-1)[: len(odd)] = odd[: w.numel()]
    coarse = get_format(name).encode(w)
    return WeightPlanes(name, shape, dtype, coarse, split_fine(w, coarse, get_format(name))), w


def bits(tensor):
    return tensor.contiguous().view(torch.int16)


@pytest.mark.sample(16)
@built
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 50), (33, 100), (3, 9999), (1000, 33), (4100, 3), (130, 4112)], ids=str)
@pytest.mark.parametrize("name", cpu_linear.FORMATS)
def test_both_planes_give_every_bit_of_the_weight_back(name, shape, dtype, monkeypatch):
    planes, w = exact_case(name, shape, dtype)
    assert torch.equal(bits(cpu_linear.decode_weight(planes)), bits(w))
    for threads in (1, 3, 8):  # each begins somewhere in the lists
        monkeypatch.setattr(cpu_linear, "_threads", lambda work, threads=threads: threads)
        assert torch.equal(bits(cpu_linear.decode_weight(planes)), bits(w))


@built
@pytest.mark.parametrize("shape", [(1, 1), (33, 100), (100, 33), (64, 640), (130, 412), (1057, 1056)], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_weight_comes_turned_for_modules_that_keep_it_so(shape, threads, monkeypatch):
    monkeypatch.setattr(cpu_linear, "_threads", lambda work: threads)
    planes, w = exact_case("nf4", shape, torch.bfloat16)
    for kernel in KERNELS:
        if kernel.op != "decode_weight" or not kernel.is_for(CPU) or (kernel.formats or ("",))[0].endswith("-ordered"):
            continue
        turned = kernel.decode_turned(planes)
        assert turned.is_contiguous() and torch.equal(bits(turned), bits(w.t()))


@built
def test_what_has_no_last_dimension_is_refused_in_torchs_words():
    planes, _ = case("nvfp4", (24, 200))
    with pytest.raises(RuntimeError, match="at least 1D"):
        cpu_linear.linear(torch.tensor(1.0), planes)


@built
@matrix(tokens=[1, 2, 16, 70], trained=[True, False], bias=[True, False], dtype=[torch.bfloat16, torch.float16])
def test_exact_layers_give_the_very_outputs_of_the_original_through_the_compiled_merge(tokens, trained, bias, dtype):
    plain = torch.nn.Linear(150, 70, bias=bias).to(dtype).requires_grad_(trained).eval()
    x = torch.randn(2, tokens, 150).to(dtype)
    with torch.no_grad(), vbrt.wrap(torch.nn.Sequential(copy.deepcopy(plain)), "exact",
                                    weights={"keep_head": False, "min_parameters": 1}) as vb:  # fmt: skip
        for input in (x, x[0], x[0, 0], x[:, :0], x.transpose(0, 1), x.expand(2, *x.shape)):
            assert torch.equal(vb(input), plain(input))
        assert torch.equal(vb.module[0].weight, plain.weight)
        assert {layer.kernel for layer in vb.stats().layers.values()} == {"compiled"}


@built
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_fine_plane_that_does_not_fit_its_codes_is_refused(dtype):
    """A save by somebody else may hold anything under its right digest."""
    planes, _ = exact_case("nf4", (40, 700), dtype)
    fine = planes.fine
    wrong = {
        "side": (fine["side"][:-1], fine["side"][:0], torch.cat((fine["side"], fine["side"][:1]))),
        "escapes": (fine["escapes"][:-1], fine["escapes"][:0], torch.cat((fine["escapes"], fine["escapes"][:1]))),
        "starts": (fine["starts"][:-1], fine["starts"] + 1, fine["starts"] - 1, fine["starts"] + (1 << 30)),
        "low": (fine["low"][:-1], fine["low"][:, 1:].contiguous()),
    }
    for field, tensors in wrong.items():
        for tensor in tensors:
            damaged = dataclasses.replace(planes, fine=fine | {field: tensor})
            with pytest.raises(FormatError, match=r"fine plane: .* the pages are damaged"):
                cpu_linear.decode_weight(damaged)


@built
@pytest.mark.parametrize("message", ["'swish'; expected one of none", r"x has shape \(1, 100\)"])
def test_what_cannot_be_computed_is_refused(message):
    planes, _ = case("nvfp4", (24, 200))
    x, activation = (torch.randn(1, 200), "swish") if "swish" in message else (torch.randn(1, 100), "none")
    with pytest.raises(KernelError, match=message):
        cpu_linear.linear(x, planes, None, activation)


@built
@pytest.mark.parametrize("multiply", [cpu_linear.linear, cpu_linear._multiply_tiles])
def test_autocast_around_a_call_changes_no_bit_of_it(multiply):
    planes, _ = case("nvfp4", (130, 412))
    x = torch.randn(9, 412).bfloat16()
    expected = multiply(x, planes)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(multiply(x, planes), expected)


@built
@pytest.mark.parametrize("name", cpu_linear.FORMATS)
def test_auto_takes_the_compiled_kernels_on_pages_as_they_are(name):
    for op in ("linear", "decode_weight"):
        for backend, expected in (("auto", "compiled"), ("compiled", "compiled"), ("reference", "reference")):
            assert resolve(op, backend, CPU, name).backend == expected
        assert resolve(op, "auto", CPU, "dense").backend == "reference"
    kernel = resolve("linear", "auto", CPU, name, rounding="fp8")
    assert kernel.run is cpu_linear.linear and kernel.runs_unpacked and kernel.page_order(name) is None


@built
def test_stats_name_the_kernel_that_runs():
    with vbrt.wrap(torch.nn.Sequential(torch.nn.Linear(64, 64)).eval(), "fp4") as vb:
        vb(torch.randn(1, 64))
        assert {layer.kernel for layer in vb.stats().layers.values()} == {"compiled"}
        assert not vb.stats().fallbacks
