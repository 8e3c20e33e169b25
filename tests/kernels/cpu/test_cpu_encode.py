"""Encoding and splitting in C: the bits of the specification, for every shape, dtype and range."""

import pytest
import torch

from tests.kernels.cuda.test_encode import DTYPES, SHAPES, as_bytes, weight
from tests.matrix import matrix
from vbrt.config import load_config
from vbrt.formats import code_fine, get_format, split_fine
from vbrt.formats.fine_plane import WIDTH
from vbrt.formats.quantile import magnitude_quantiles
from vbrt.kernels import resolve
from vbrt.kernels.cpu import build, compiler, encode, split
from vbrt.saves.load import save_units

CPU = torch.device("cpu")
BLOCKS, LEVELS = encode.formats_of("e2m1", "table"), encode.formats_of("levels")
built = pytest.mark.skipif(build.refusal(CPU, "encode") is not None, reason="no C compiler")
ODD = [*SHAPES, (40, 1030), (6, 1)]


def in_c(name, monkeypatch):
    """The format that encodes every weight in C, small ones too."""
    monkeypatch.setattr(encode, "_WORTH_BUILDING", 1)
    return encode.codec(get_format(name))


def hard(shape, dtype, octaves=0.0, *, huge=True):
    """A weight of many magnitudes: zeros of both signs, empty blocks, denormals, ties, the largest finite numbers."""
    w = weight((max(shape[0], 6), max(shape[1], 33)), dtype, octaves)
    if not huge:
        w[5] = 1.0
    w[4] = torch.finfo(dtype).smallest_normal / 2
    w[3] = w[3].sign()
    return w[-shape[0] :, : shape[1]].clone()


def check_bits(name, w):
    """What C makes of a weight of any size has the bits of the specification; in 16 bits the fine plane has, too."""
    fmt = get_format(name)
    expected = fmt.encode(w)
    fitted = {"levels": expected["levels"]} if "levels" in expected else {}
    if name in LEVELS:
        codes, scales = encode.encoded_levels(fmt, w, fmt.tables(expected)[0], squares=None)
        return same({"codes": codes, "scales": scales, **fitted}, expected)
    same(encode.encoded(fmt, w, fmt._range(w), **fitted), expected)
    if w.dtype in WIDTH and name in BLOCKS:
        same(split.split_in_c(w, expected, fmt), split_fine(w, expected, fmt))
    return None


def same(given, expected):
    torch.testing.assert_close(as_bytes(given), as_bytes(expected), rtol=0, atol=0)


@built
@matrix(name=(*BLOCKS, "mxint8"), shape=ODD, dtype=DTYPES, octaves=(0.0, 2.0), at_most=16)
def test_c_gives_the_bits_of_the_specification(name, shape, dtype, octaves, monkeypatch):
    torch.manual_seed(0)
    w, fmt, fast = hard(shape, dtype, octaves), get_format(name), in_c(name, monkeypatch)
    for squares in (None, torch.rand(shape[1]) + 0.05):
        same(fast.encode(w, squares), fmt.encode(w, squares))
    w_ENK = torch.stack((w, w / 4, w.flip(0)))
    squares = torch.randn(3, shape[1]).square() + 0.05
    for given, expected in zip(
        fast.encode_many(w_ENK, None, squares), fmt.encode_many(w_ENK, None, squares), strict=True
    ):
        assert list(given.members) == list(expected.members)
        same(given.coarse, expected.coarse)
    same(fast.frame(w).tensors, fmt.frame(w).tensors)


@built
@matrix(name=LEVELS, shape=ODD, dtype=DTYPES, huge=(False, True))
def test_scales_under_which_the_largest_weight_is_a_level_are_searched_in_c(name, shape, dtype, huge, monkeypatch):
    torch.manual_seed(0)
    fast, fmt = in_c(name, monkeypatch), get_format(name)
    w = hard(shape, dtype, huge=huge and (dtype is torch.float16 or not name.endswith("float16")))
    for squares in (None, torch.rand(shape[1]) + 0.05):
        same(fast.encode(w, squares), fmt.encode(w, squares))


@built
@matrix(name=BLOCKS, shape=[*ODD, (3, 4097), (2, 9000)], dtype=(torch.bfloat16, torch.float16), threads=(1, 3))
def test_fine_planes_are_split_in_c(name, shape, dtype, threads, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(split, "_STEP", 1000)
    w, fmt = hard(shape, dtype, 2.0), get_format(name)
    for coarse in (fmt.encode(w), fmt.encode(w.flip(0))):  # one of another weight, so that the lists are long
        same(split.split_in_c(w, coarse, fmt), split_fine(w, coarse, fmt))


@pytest.fixture(params=[None, "x86-64"])
def instructions(request, use_library, library_for):
    """The encoder built for an instruction set; None: this CPU's own."""
    if request.param is not None:
        sets = {each.name: each for each in compiler.served(compiler.machine(), compiler.cpu_features())}
        if request.param not in sets:
            pytest.skip(f"this CPU has no {request.param}")
        use_library("encode", library_for("encode", sets[request.param]))


@built
@matrix(name=BLOCKS, shape=[*ODD, (3, 4097), (2, 9000)], threads=(1, 3))
def test_fine_planes_are_coded_in_c(name, shape, threads, instructions, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(split, "_STEP", 1000)
    w, fmt = hard(shape, torch.bfloat16, 2.0), get_format(name)
    for coarse in (fmt.encode(w), fmt.encode(w.flip(0))):  # one of another weight, so that there are escapes
        same(split.code_in_c(w, coarse, fmt), code_fine(w, coarse, fmt))


@built
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fit_counts_in_c(dtype, monkeypatch):
    torch.manual_seed(0)
    fast, fmt, w = in_c("quantile", monkeypatch), get_format("quantile"), torch.randn(70, 1030).to(dtype)
    at = [0.0, 0.3, 1.0]
    assert torch.equal(fast._quantiles(w, at), magnitude_quantiles(w, at))
    coarse = fmt.encode(w.t().contiguous().view(70, 1030))
    share = fmt.clipped_share(w, coarse)
    assert fast.clipped_share(w, coarse) == share > 0


def test_c_encodes_once_the_weights_are_worth_its_library_and_before_the_reference_to_the_same_bits(monkeypatch):
    run = resolve("encode_many", "auto", CPU, "nvfp4").run
    calls, encoded = [], encode.encoded
    w_ENK = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(encode, "encoded", lambda *args, **known: calls.append(args) or encoded(*args, **known))
    monkeypatch.setattr(encode, "libraries", dict)
    monkeypatch.setattr(encode, "_seen", 0)
    monkeypatch.setattr(encode, "_WORTH_BUILDING", 2 * w_ENK.numel())
    (first,), (second,) = run(get_format("nvfp4"), w_ENK), run(get_format("nvfp4"), w_ENK)
    assert len(calls) == (0 if build.refusal(CPU, "encode") else 1)
    monkeypatch.setattr(encode, "refusal", lambda device, source: "no compiler")
    (refused,) = run(get_format("nvfp4"), w_ENK)
    assert len(calls) < 2
    for group in (second, refused):
        same(group.coarse, first.coarse)
    assert resolve("encode_many", "reference", CPU, "nvfp4").run is not run


@built
@pytest.mark.parametrize("backend", ["auto", "triton", "reference"])
def test_conversions_encode_in_c_unless_the_reference_is_asked_for(backend):
    config = load_config({"compute": {"backend": backend}})
    fast = encode.codec(get_format("nvfp4"))
    found = resolve("codec", save_units._to_encode(config, CPU).compute.backend, CPU, "nvfp4").run(get_format("nvfp4"))
    assert (found is fast) is (backend != "reference")
