"""Kernels of CPUs without AVX-512: fixed-point activations, panels, and the choice of an instruction set."""

import functools

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.cpu.test_cpu_linear import BOUND
from tests.kernels.cpu.test_int8 import case
from tests.kernels.cuda.gpu_cases import error
from vbrt.formats import WeightPlanes, get_format
from vbrt.formats.format import padded
from vbrt.formats.sixteen_levels import INT4_LEVELS
from vbrt.kernels.cpu import build, compiler
from vbrt.kernels.cpu import linear as cpu_linear

SETS = {each.name: each for each in compiler.served(compiler.machine(), compiler.cpu_features())}
STEPS = 32639  # FIXED_STEPS of dots_avx2.h
planes_of = functools.partial(case, dtype=torch.bfloat16)
SHAPES = ((7, 48), (35, 144), (9, 4112))


@pytest.fixture(params=["avx2", "avx2-vnni"])
def avx2(request, use_library, library_for):
    """The linear kernels built for AVX2, in the place of this CPU's own."""
    if request.param not in SETS:
        pytest.skip(f"this CPU has no {request.param}")
    library = library_for("linear", SETS[request.param])
    use_library("linear", library)
    return library


def in_steps(x):
    """x in steps of 1/32639 of the largest of eight columns, as bytes of fixed point hold it."""
    k = x.shape[1]
    words = F.pad(x.float(), (0, padded(k, 8) - k)).view(len(x), -1, 8)
    largest = words.abs().amax(-1, keepdim=True)
    steps = torch.where(largest > 0, words * (STEPS / largest), words).round().double()
    return (steps * (largest.double() / STEPS)).flatten(1)[:, :k]


def product(x, planes, library=None):
    """y in fp32, of few tokens; by panels, of a library."""
    return cpu_linear._multiply(x, planes, None, torch.float32, library and library.vbrt_panels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("nvfp4", None),
        ("mxfp4", None),
        ("levels64-float16", INT4_LEVELS),
        ("affine32-float16", None),
        ("signed32-bfloat16", None),
    ],
)
def test_inputs_of_16_bits_are_multiplied_in_fixed_point(avx2, name, levels, dtype):
    for shape in SHAPES:
        planes, w = planes_of(name, shape, levels)
        for tokens in (1, 2, 7):
            x = torch.randn(tokens, shape[1]).mul(torch.randn(shape[1]).exp()).to(dtype)
            y = product(x, planes)
            assert error(y, F.linear(in_steps(x), w)) <= 3e-6  # halves of a step may round either way
            assert 4e-6 <= error(y, F.linear(x.double(), w)) <= 1e-4  # of bf16 results: 2e-3


def test_inputs_in_fp32_and_levels_that_are_no_halves_are_multiplied_in_fp32(avx2):
    for name, dtype in (("nvfp4", torch.float32), ("nf4", torch.bfloat16)):
        planes, w = planes_of(name, (35, 144))
        x = torch.randn(3, 144).to(dtype)
        assert error(product(x, planes), F.linear(x.double(), w)) <= 1e-6


def test_the_largest_numbers_do_not_overflow(avx2):
    for name, levels, value in (("nvfp4", None, 6.0), ("nvfp4", None, -6.0), ("levels64-float16", INT4_LEVELS, -8.0)):
        fmt = get_format(name)
        given = {} if levels is None else {"levels": torch.tensor(levels)}
        coarse = fmt.encode(torch.full((5, 4160), value), **given)
        planes = WeightPlanes(name, (5, 4160), torch.bfloat16, coarse)
        w = fmt.decode(coarse, (5, 4160), torch.float64)
        for x in (torch.ones(2, 4160), -torch.ones(2, 4160)):
            for rounded in (False, True):
                y = cpu_linear._multiply(x.bfloat16(), planes, None, torch.float32, rounded=rounded)
                assert torch.allclose(y.double(), F.linear(x.double(), w), rtol=1e-6)


def test_what_is_no_number_shows_in_its_token_alone_and_tiny_numbers_are_none(avx2):
    planes, w = planes_of("nvfp4", (24, 208))
    for odd in (float("nan"), float("inf"), -float("inf")):
        x = torch.randn(4, 208).bfloat16()
        x[1, 77] = odd
        y = product(x, planes)
        assert y[1].isnan().all() and y[[0, 2, 3]].isfinite().all()
    for tiny in (0.0, 1e-38, 1e-35):
        assert not product(torch.full((2, 208), tiny).bfloat16(), planes).any()
    assert error(product(torch.full((1, 208), -1e-33).bfloat16(), planes), w.sum(1) * -1e-33) < 3e-3
    planes.coarse["scales"].view(torch.uint8)[3, 12] = 0x7F  # NaN as E4M3
    for y in (product(torch.ones(1, 208).bfloat16(), planes), product(torch.ones(9, 208), planes, avx2)):
        assert y[:, 3].isnan().all() and y[:, [0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", ["nvfp4", "nf4", "mxint8"])
def test_panels_multiply_many_tokens(avx2, name, dtype):
    for shape, tokens in zip(SHAPES, (1, 17, 29), strict=True):
        planes, w = planes_of(name, shape)
        x, bias = torch.randn(tokens, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
        want = F.linear(x.double(), w, bias.double())
        assert error(product(x, planes, avx2), F.linear(x.double(), w)) <= 1e-6
        assert error(cpu_linear._multiply(x, planes, bias, dtype, avx2.vbrt_panels), want) <= BOUND[dtype]


def test_a_token_has_the_bits_that_it_has_among_others(avx2, monkeypatch):
    for dtype in (torch.float32, torch.bfloat16):
        planes, _ = planes_of("nvfp4", (45, 1072))
        x = torch.randn(530, 1072).to(dtype)  # more than one PASS of panels
        panels, few = product(x, planes, avx2), product(x[:7], planes)
        for first, last in ((0, 1), (3, 7), (500, 530)):
            assert torch.equal(panels[first:last], product(x[first:last], planes, avx2))
        assert all(torch.equal(few[m], product(x[m : m + 1], planes)[0]) for m in range(7))
        for threads in (1, 5):
            monkeypatch.setattr(cpu_linear, "_threads", lambda work, threads=threads: threads)
            assert torch.equal(panels[:40], product(x[:40], planes, avx2))


def test_an_instruction_set_can_be_named(monkeypatch):
    lowest = list(SETS)[-1]
    monkeypatch.setenv("VBRT_INSTRUCTION_SET", lowest)
    assert compiler.suitable() == (SETS[lowest],)
    monkeypatch.setenv("VBRT_INSTRUCTION_SET", "avx9")
    with pytest.raises(compiler.CompileError, match=rf"VBRT_INSTRUCTION_SET is 'avx9'.*{lowest}"):
        compiler.suitable()
    build._build.cache_clear()
    assert "avx9" in build.refusal(torch.device("cpu"), "tiles")
    monkeypatch.delenv("VBRT_INSTRUCTION_SET")
    build._build.cache_clear()
    assert len(compiler.suitable()) > 1
