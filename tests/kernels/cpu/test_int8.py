"""Products in int8: what they round, how much that changes, and that nothing else does."""

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.cpu.test_cpu_experts import bank, routed, rows
from tests.kernels.cuda.gpu_cases import error
from tests.matrix import matrix
from vbrt.formats import WeightPlanes, get_format
from vbrt.formats.format import padded
from vbrt.formats.sixteen_levels import FP4_LEVELS, INT4_LEVELS, IQ4_NL_LEVELS
from vbrt.kernels import resolve
from vbrt.kernels.cpu import build, int8
from vbrt.kernels.cpu import experts as cpu_experts
from vbrt.kernels.cpu import linear as cpu_linear
from vbrt.kernels.cpu.small_batch_linear import few

CPU = torch.device("cpu")
WHY = build.refusal(CPU)
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))


def case(name, shape, levels=None, dtype=torch.float32):
    """(planes, the weight they stand for in float64)."""
    fmt = get_format(name)
    given = {} if levels is None else {"levels": torch.tensor(levels)}
    coarse = fmt.encode(torch.randn(shape) * 0.03, **given)
    return WeightPlanes(name, shape, dtype, coarse), fmt.decode(coarse, shape, torch.float64)


def as_rounded(x):
    """What x is for the kernel: steps of 1/127 of the largest of eight columns."""
    k = x.shape[1]
    words = F.pad(x.float(), (0, padded(k, 8) - k)).view(len(x), -1, 8)
    largest = words.abs().amax(-1, keepdim=True)
    steps = torch.where(largest > 0, words * (127 / largest), words).round().double()
    return (steps * (largest / 127)).flatten(1)[:, :k]


@matrix(
    tokens=[1, 2, 4],
    shape=[(1, 1), (7, 50), (24, 200), (130, 4112), (64, 2048)],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    name=["nvfp4", "mxfp4"],
)
def test_any_shape_is_the_product_of_rounded_inputs(name, shape, tokens, dtype):
    planes, w = case(name, shape)
    x, bias = torch.randn(tokens, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
    want = F.linear(as_rounded(x), w, bias.double())
    assert error(int8.linear(x, planes, bias), want) <= (1e-5 if dtype is torch.float32 else 3e-3)


def check_layers():
    """A layer differs by no more than its stated error, and what is no number shows; also called for other CPUs."""
    for name in cpu_linear.FORMATS:
        planes, w = case(name, (256, 1104))
        x, sizes = torch.randn(4, 1104), torch.randn(1104).mul(2).exp()
        plain, rounded = cpu_linear.linear(x, planes), int8.linear(x, planes)
        assert 1e-3 < error(rounded, F.linear(x.double(), w)) <= int8.ERRORS[name] and not torch.equal(plain, rounded)
        # outliers have words of their own
        assert error(int8.linear(x * sizes, planes), F.linear((x * sizes).double(), w)) <= 2 * int8.ERRORS[name]
    for odd in (float("nan"), float("inf"), -float("inf")):
        x[1, 77] = odd
        y = int8.linear(x, planes)
        assert y[1].isnan().all() and y[[0, 2, 3]].isfinite().all()


def test_inputs_that_meet_weights_of_8_bits_stay_as_they_are():
    planes, _ = case("mxint8", (24, 200))
    x = torch.randn(3, 200)
    rounding = resolve("linear", "auto", CPU, "mxint8", rounding="int8").run
    assert torch.equal(rounding(x, planes), cpu_linear.linear(x, planes))


def check_experts():
    """The same of experts: two products, one after the other."""
    for name in cpu_linear.FORMATS:
        pages = bank(name, hidden=140, inner=72)
        for tokens in (1, 7):
            ids, weights = routed(pages, tokens, 3)
            x, h = torch.randn(tokens, 140), torch.randn(3 * tokens, 72)
            present = (ids.view(-1, 1) >= 0) & (ids.view(-1, 1) < pages.experts)
            got, want = int8.experts_up(x, ids, pages), rows(x, ids, pages, "up") * present
            assert 1e-3 < error(got, want) <= 1.5 * int8.ERRORS[name]  # few rows
            each = rows(h, ids.view(-1, 1), pages, "down").view(tokens, 3, -1)
            want = (each * weights.double().unsqueeze(-1)).sum(1)
            assert 1e-3 < error(int8.experts_down(h, ids, weights, pages), want) <= 1.5 * int8.ERRORS[name]


def test_a_layer_differs_by_no_more_than_its_stated_error():
    check_layers()


def test_experts_differ_by_no_more_than_their_stated_error():
    check_experts()


@pytest.mark.parametrize("levels", [INT4_LEVELS, IQ4_NL_LEVELS, FP4_LEVELS], ids=["int4", "iq4", "fp4"])
def test_published_levels_are_whole_steps_or_nearly_so(levels):
    planes, w = case("levels64-float16", (64, 640), levels)
    x = torch.randn(4, 640)
    exact = 1e-5 if levels is not FP4_LEVELS else 4e-3
    assert error(int8.linear(x, planes), F.linear(as_rounded(x), w)) <= exact


@pytest.mark.parametrize("name", ["affine32-float16", "signed32-bfloat16", "zeros128-bfloat16", "superblock32"])
def test_offsets_are_multiplied_by_what_inputs_were_rounded_to(name):
    """Codes are not centered: were sums of x exact, errors of its rounding would be twice as large."""
    planes, w = case(name, (64, 640))
    x = torch.randn(4, 640)
    assert error(int8.linear(x, planes), F.linear(as_rounded(x), w)) <= 1e-5
    assert error(int8.linear(x, planes), F.linear(x.double(), w)) <= 4.5e-3


def test_zeros_and_the_smallest_numbers_are_zeros():
    planes, _ = case("nf4", (24, 200))
    for x in (torch.zeros(2, 200), torch.full((2, 200), 1e-42), torch.full((2, 200), -1e-38)):
        assert int8.linear(x, planes).abs().max() < 1e-30


def test_any_number_of_threads_gives_the_same_bits(monkeypatch):
    planes, _ = case("quantile", (300, 520))
    x, got = torch.randn(3, 520), []
    for threads in (1, 2, 5):
        monkeypatch.setattr(cpu_linear, "_threads", lambda work, threads=threads: threads)
        got.append(int8.linear(x, planes))
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])


def test_prepared_products_have_the_same_bits():
    first, second = (case("nvfp4", shape)[0] for shape in ((130, 200), (7, 200)))
    x = torch.randn(3, 200)
    ys = few(first, rounded="int8").together([few(second, rounded="int8")], x)
    for y, planes in zip(ys, (first, second), strict=True):
        assert torch.equal(y, int8.linear(x, planes)) and not torch.equal(y, few(planes)(x))
    assert not few(first).suits(few(second, rounded="int8"))


def test_many_tokens_and_inputs_with_gradients_are_not_rounded():
    planes, _ = case("nvfp4", (24, 200))
    for x in (torch.randn(40, 200), torch.randn(2, 200, requires_grad=True)):
        assert torch.equal(int8.linear(x, planes), cpu_linear.linear(x, planes))


def test_the_option_is_what_takes_these_kernels():
    for op, plain, rounded in (
        ("linear", cpu_linear.linear, int8.linear),
        ("experts_up", cpu_experts.experts_up, int8.experts_up),
        ("experts_down", cpu_experts.experts_down, int8.experts_down),
    ):
        assert resolve(op, "auto", CPU, "nvfp4").run is plain
        assert resolve(op, "auto", CPU, "nvfp4", rounding="int8").run is rounded
    assert resolve("linear", "auto", CPU, "nvfp4", rounding="int8").few(case("nvfp4", (24, 64))[0]).rounded
    assert int8.int8_refusal(torch.device("cuda")) == "cuda has no int8 products of 4-bit weights"
