import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vbrt.errors import FormatError
from vbrt.formats import (
    block_formats,
    estimate_fine_bytes,
    fine_layout,
    fine_plane,
    get_format,
    merge_fine,
    new_page,
    pack,
    split_fine,
    unpack,
)

BLOCK_FORMATS = ("nvfp4", "mxfp4", "nf4", "quantile")
SIXTEEN = (torch.bfloat16, torch.float16)


def through_a_page(w, name):
    fmt = get_format(name)
    coarse = fmt.encode(w)
    plane = split_fine(w, coarse, fmt)
    layout = fine_layout(plane)
    plane = unpack(pack(plane, layout, new_page(layout)), layout)
    return merge_fine(coarse, plane, fmt, tuple(w.shape), w.dtype), layout


def identical(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.int16), b.view(torch.int16))


def finite_patterns(dtype):
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    return every[every.isfinite()]


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("order", ["by value", "shuffled"])
def test_every_finite_bit_pattern_comes_back(name, dtype, order):
    w = finite_patterns(dtype)
    if order == "shuffled":
        w = w[torch.randperm(len(w), generator=torch.Generator().manual_seed(0))]
    w = w.view(-1, 62) if dtype == torch.float16 else w.view(-1, 102)
    merged, _ = through_a_page(w, name)
    assert identical(merged, w)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 140), st.floats(-20, 10), st.floats(0, 6),
    st.sampled_from(BLOCK_FORMATS), st.sampled_from(SIXTEEN),
)  # fmt: skip
def test_any_shape_and_spread_comes_back(seed, n, k, exponent, spread, name, dtype):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=g) * 2 ** (exponent + spread * torch.randn(n, k, generator=g))
    w = w.to(dtype).nan_to_num()
    w[torch.rand(n, k, generator=g) < 0.1] = -0.0
    assert identical(through_a_page(w, name)[0], w)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_tiles_leave_no_trace_in_the_lists(name, dtype, monkeypatch):
    w = torch.randn(23, 301, generator=torch.Generator().manual_seed(0)).pow(3).to(dtype)
    fmt = get_format(name)
    coarse = fmt.encode(w.flip(0))  # of another weight, so that the lists are long
    whole = split_fine(w, coarse, fmt)
    assert len(whole["escapes"]) > 100
    monkeypatch.setattr(fine_plane, "decode_tile", lambda device: 44)
    monkeypatch.setattr(block_formats, "decode_tile", lambda device: 200)
    tiled = split_fine(w, coarse, fmt)
    assert all(torch.equal(tiled[k], whole[k]) for k in whole)
    assert identical(merge_fine(coarse, whole, fmt, (23, 301), dtype), w)


def test_ordinals_follow_the_values_and_undo_themselves():
    for dtype in SIXTEEN:
        w = finite_patterns(dtype)
        bits = w.view(torch.int16)
        assert torch.equal(fine_plane.ordinal(fine_plane.ordinal(bits)), bits)
        ascending = w[fine_plane.ordinal(bits).argsort()]
        assert (ascending.float().diff() >= 0).all()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "limit"), [("nvfp4", 8.7), ("nf4", 8.8), ("mxfp4", 8.85), ("quantile", 8.85)])
def test_gaussian_weights_take_the_advertised_bits(name, limit):
    w = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    _, layout = through_a_page(w.bfloat16(), name)
    assert layout.plane == "fine" and layout.nbytes * 8 / w.numel() <= limit
    assert layout.nbytes <= estimate_fine_bytes((1024, 1024))
    _, layout = through_a_page(w.half(), name)
    assert layout.nbytes * 8 / w.numel() <= limit + 4
    assert layout.nbytes <= estimate_fine_bytes((1024, 1024), torch.float16)


def test_heavy_tails_cost_a_little_more():
    torch.manual_seed(0)
    w = torch.distributions.StudentT(4.0).sample((512, 1024)).bfloat16()
    merged, layout = through_a_page(w, "nvfp4")
    assert identical(merged, w) and layout.nbytes * 8 / w.numel() <= 9.0


def test_a_transposed_weight_comes_back():
    w = torch.randn(100, 30).bfloat16().T
    assert identical(through_a_page(w, "nvfp4")[0], w.contiguous())


def test_fp32_is_refused_with_what_is_offered():
    w = torch.randn(4, 16)
    fmt = get_format("nvfp4")
    coarse = fmt.encode(w)
    with pytest.raises(FormatError, match=r"float32; expected bfloat16 or float16.*dense.*bfloat16"):
        split_fine(w, coarse, fmt)
    with pytest.raises(FormatError, match="float32"):
        merge_fine(coarse, {}, fmt, (4, 16), torch.float32)


def test_nan_and_inf_are_refused_and_counted():
    fmt = get_format("nvfp4")
    w = torch.ones(2, 16, dtype=torch.bfloat16)
    coarse = fmt.encode(w)
    w[0, 0], w[1, 1] = float("nan"), float("inf")
    with pytest.raises(FormatError, match="1 NaN and 1 Inf"):
        split_fine(w, coarse, fmt)


def test_dense_needs_no_fine_plane():
    w = torch.ones(2, 16, dtype=torch.bfloat16)
    dense = get_format("dense")
    with pytest.raises(FormatError, match="already exact"):
        split_fine(w, dense.encode(w), dense)


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("shape", [(3, 5), (64, 64), (3, 70_001)])
def test_lists_that_do_not_go_with_the_codes_are_refused(name, dtype, shape):
    w, fmt = (torch.randn(shape) * torch.randn(shape).exp()).to(dtype), get_format(name)
    coarse = fmt.encode(w)
    plane = split_fine(w, coarse, fmt)
    fine_plane.check_fine(coarse, plane, fmt, shape, dtype)
    others = [{"starts": plane["starts"] + 1}]
    others += [{key: plane[key][1:]} for key in ("side", "escapes") if len(plane[key])]
    others += [{key: torch.cat((plane[key], plane[key].new_zeros(1)))} for key in ("side", "escapes")]
    for other in others:
        with pytest.raises(FormatError, match=r"lists of \d+ and \d+ entries, or `starts`, that do not go with"):
            fine_plane.check_fine(coarse, plane | other, fmt, shape, dtype)
