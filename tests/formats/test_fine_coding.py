import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats.test_format_fine import BLOCK_FORMATS, finite_patterns, identical
from vbrt.errors import FormatError
from vbrt.formats import (
    code_fine,
    estimate_fine_bytes,
    fine_coding,
    fine_layout,
    fine_plane,
    get_format,
    merge_fine,
    new_page,
    pack,
    split_fine,
    unpack,
)
from vbrt.formats.fine_coding import CODED, SPAN, stream_bytes
from vbrt.formats.fine_plane import check_fine

BF16 = torch.bfloat16


def through_a_page(w, name, coarse=None):
    fmt = get_format(name)
    coarse = coarse or fmt.encode(w)
    plane = code_fine(w, coarse, fmt)
    layout = fine_layout(plane)
    plane = unpack(pack(plane, layout, new_page(layout)), layout)
    check_fine(coarse, plane, fmt, tuple(w.shape), w.dtype)
    return merge_fine(coarse, plane, fmt, tuple(w.shape), w.dtype), layout


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("order", ["by value", "shuffled"])
def test_every_finite_bit_pattern_comes_back_from_a_coded_plane(name, order):
    w = finite_patterns(BF16)
    if order == "shuffled":
        w = w[torch.randperm(len(w), generator=torch.Generator().manual_seed(0))]
    w = w.view(-1, 102)
    assert identical(through_a_page(w, name)[0], w)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 140), st.floats(-20, 10), st.floats(0, 6),
    st.sampled_from(BLOCK_FORMATS),
)  # fmt: skip
def test_any_shape_and_spread_comes_back_from_a_coded_plane(seed, n, k, exponent, spread, name):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=g) * 2 ** (exponent + spread * torch.randn(n, k, generator=g))
    w = w.to(BF16).nan_to_num()
    w[torch.rand(n, k, generator=g) < 0.1] = -0.0
    assert identical(through_a_page(w, name)[0], w)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.0, 1e-40, 3.3895e38])
def test_weights_that_are_all_equal_come_back_from_a_coded_plane(name, value):
    w = torch.full((3, 70), value, dtype=BF16)
    assert identical(through_a_page(w, name)[0], w)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_codes_of_another_weight_cost_escapes_and_no_bits(name):
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).pow(3).to(BF16)
    coarse = get_format(name).encode(w.flip(0))
    assert len(code_fine(w, coarse, get_format(name))["escapes"]) > 100
    assert identical(through_a_page(w, name, coarse)[0], w)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_tiles_leave_no_trace_in_the_stream(name, monkeypatch):
    w = torch.randn(95, 301, generator=torch.Generator().manual_seed(0)).to(BF16)
    fmt = get_format(name)
    coarse = fmt.encode(w)
    whole = code_fine(w, coarse, fmt)
    monkeypatch.setattr(fine_coding, "decode_tile", lambda device: 2000)
    tiled = code_fine(w, coarse, fmt)
    assert all(torch.equal(tiled[field], whole[field]) for field in whole)
    assert identical(merge_fine(coarse, whole, fmt, (95, 301), BF16), w)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "limit"), [("nvfp4", 6.7), ("nf4", 6.85), ("mxfp4", 6.72), ("quantile", 6.87)])
def test_gaussian_weights_take_the_advertised_bits_when_coded(name, limit):
    w = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(BF16)
    merged, layout = through_a_page(w, name)
    assert identical(merged, w) and layout.plane == "fine" and layout.nbytes * 8 / w.numel() <= limit
    assert layout.nbytes <= estimate_fine_bytes((1024, 1024), coded=True)


def test_heavy_tails_cost_less_coded_than_plain():
    torch.manual_seed(0)
    w = torch.distributions.StudentT(4.0).sample((512, 1024)).to(BF16)
    assert through_a_page(w, "nvfp4")[1].nbytes * 8 / w.numel() <= 6.95


def test_starts_count_extra_bits_and_escapes_before_each_span():
    w = torch.randn(96, 128, generator=torch.Generator().manual_seed(0)).pow(3).to(BF16)
    fmt = get_format("nvfp4")
    coarse = fmt.encode(w)
    fine = code_fine(w, coarse, fmt)
    part = fine_coding.opened(coarse, fine, fmt, 128)
    of_spans = torch.stack((part.length.view(-1, SPAN).sum(1), (part.symbol == 0).view(-1, SPAN).sum(1)), 1)
    assert torch.equal(fine["starts"].long(), of_spans.cumsum(0) - of_spans)
    assert of_spans.sum(0).tolist()[1] == len(fine["escapes"]) > 0
    assert len(fine["extra"]) == stream_bytes(int(of_spans[:, 0].sum()))


def test_one_layout_serves_a_coded_plane_and_says_so():
    w = torch.randn(4, 70).to(BF16)
    fmt = get_format("nf4")
    fine = code_fine(w, fmt.encode(w), fmt)
    fields = fine_plane.fine_fields((4, 70), BF16, fmt)
    assert list(fields) == list(fine) and CODED in fields
    for name, (dtype, shape) in fields.items():
        assert str(fine[name].dtype) == f"torch.{dtype}"
        assert all(want in (None, have) for want, have in zip(shape, fine[name].shape, strict=True))


@pytest.mark.parametrize("name", ["nvfp4", "nf4"])
def test_a_damaged_coded_plane_is_refused(name):
    w = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)).pow(3).to(BF16)
    fmt = get_format(name)
    coarse = fmt.encode(w)
    plane = code_fine(w, coarse, fmt)
    others = [{"starts": plane["starts"] + 1}, {"extra": plane["extra"][16:]}, {"fours": plane["fours"] ^ 3}]
    others += [{"escapes": plane["escapes"][1:]}, {CODED: plane[CODED].new_full(plane[CODED].shape, -1)}]
    for other in others:
        with pytest.raises(FormatError, match="fine plane: a stream of"):
            check_fine(coarse, plane | other, fmt, (40, 256), BF16)


def test_pruned_weights_are_smaller_plain():
    g = torch.Generator().manual_seed(0)
    w = (torch.randn(64, 256, generator=g) * (torch.rand(64, 256, generator=g) > 0.5)).to(BF16)
    fmt = get_format("nvfp4")
    coarse = fmt.encode(w)
    assert fine_layout(code_fine(w, coarse, fmt)).nbytes > fine_layout(split_fine(w, coarse, fmt)).nbytes
