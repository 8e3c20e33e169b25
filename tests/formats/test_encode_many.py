"""Several matrices encoded together have the bits that each has alone."""

import pytest
import torch

from tests.matrix import matrix
from vbrt.config import chosen_formats
from vbrt.errors import FormatError
from vbrt.formats import get_format
from vbrt.formats.block_formats import power_of_two_scale

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weights(shape, dtype, *, octaves=8.0):
    """Matrices whose ranges lie some octaves apart, among them an empty one."""
    generator = torch.Generator().manual_seed(3)
    scale = torch.rand(shape[0], 1, 1, generator=generator).mul(octaves).exp2()
    w_ENK = torch.randn(shape, generator=generator) * scale
    w_ENK[-1] = 0
    return w_ENK.to(dtype)


@matrix(
    name=(*chosen_formats(), "levels32-float16"),
    shape=((1, 4, 64), (5, 7, 33), (9, 16, 128), (3, 20, 1030), (4, 1, 16)),
    dtype=DTYPES,
    octaves=(0.0, 8.0),
)
def test_each_matrix_has_the_bits_that_it_has_alone(name, shape, dtype, octaves):
    fmt, w_ENK = get_format(name), weights(shape, dtype, octaves=octaves)
    layout = fmt.layout(tuple(w_ENK.shape[1:]), dtype)
    found = {}
    for group in fmt.encode_many(w_ENK):
        found |= dict(zip(group.members, group.planes(layout), strict=True))
    assert sorted(found) == list(range(len(w_ENK)))
    for at, w_NK in enumerate(w_ENK):
        alone = fmt.encode(w_NK)
        assert set(found[at]) == set(alone)
        for field, tensor in alone.items():
            assert found[at][field].shape == tensor.shape and found[at][field].is_contiguous()
            assert torch.equal(found[at][field].view(torch.uint8), tensor.view(torch.uint8))


def test_matrices_of_one_range_are_one_group_and_share_their_scale():
    w_ENK = torch.randn(6, 8, 64, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    w_ENK[:, 0, 0], w_ENK[4] = 2.0, w_ENK[4] * 1024
    groups = list(get_format("nvfp4").encode_many(w_ENK))
    assert [list(group.members) for group in groups] == [[0, 1, 2, 3, 5], [4]]
    assert groups[0].coarse["codes"].shape == (40, 32) and groups[0].coarse["tensor_scale"].shape == (1,)


def test_a_view_of_transposed_matrices_is_encoded_too():
    w_EKN = torch.randn(4, 64, 12, generator=torch.Generator().manual_seed(1))
    fmt, w_ENK = get_format("mxfp4"), w_EKN.transpose(1, 2)
    for group in fmt.encode_many(w_ENK):
        for at, plane in zip(group.members, group.planes(fmt.layout((12, 64), torch.float32)), strict=True):
            assert torch.equal(plane["codes"], fmt.encode(w_ENK[at].contiguous())["codes"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_cannot_be_encoded_refuses_them_all(bad):
    w_ENK = torch.randn(3, 4, 32)
    w_ENK[1, 2, 3] = bad
    with pytest.raises(FormatError, match=r"shape \(4, 32\) holds"):
        list(get_format("nvfp4").encode_many(w_ENK))
    with pytest.raises(FormatError, match="float64"):
        list(get_format("nvfp4").encode_many(w_ENK.double()))


def test_the_scale_of_a_matrix_is_the_least_power_of_two_that_reaches_its_largest_weight():
    patterns = torch.randint(0, 0x7F800000, (2000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    sevens = [7 * 2.0**k for k in range(-140, 125)]
    beside = [x * (1 + step * 2.0**-23) for x in sevens for step in (-1, 1)]
    for largest in (0.0, *patterns.view(torch.float32).tolist(), *sevens, *beside):
        scale = power_of_two_scale(largest)
        assert scale in (2.0**k for k in range(-126, 128))
        assert largest <= 448 * scale or scale == 2.0**127
        assert largest > 448 * scale / 2 or scale == 2.0**-126


def test_equal_layouts_are_one_object():
    fmt = get_format("nvfp4")
    assert fmt.layout((16, 64), torch.float32) is fmt.layout((16, 64), torch.bfloat16)
    assert fmt.layout((16, 64), torch.float32) != fmt.layout((32, 64), torch.float32)


@pytest.mark.parametrize("name", [name for name in chosen_formats() if name not in ("dense", "t3")])  # which search
def test_scales_that_are_searched_by_squares_of_inputs_lose_less_of_the_output_and_each_expert_has_its_own(name):
    generator = torch.Generator().manual_seed(2)
    w_ENK = torch.randn(3, 16, 200, generator=generator) * torch.tensor([1.0, 1.0, 9.0]).view(3, 1, 1)
    squares_EK = torch.randn(3, 200, generator=generator).exp2().square()
    fmt, errors = get_format(name), []
    layout = fmt.layout((16, 200), torch.float32)
    for squares in (None, squares_EK):
        total = 0.0
        for group in fmt.encode_many(w_ENK, squares=squares):
            for at, plane in zip(group.members, group.planes(layout), strict=True):
                alone = fmt.encode(w_ENK[at], None if squares is None else squares[at])
                assert all(torch.equal(plane[k].view(torch.uint8), alone[k].view(torch.uint8)) for k in alone)
                error = fmt.decode(plane, (16, 200), torch.float32) - w_ENK[at]
                total += float((error.square() * squares_EK[at] / w_ENK[at].square().mean()).sum())
        errors.append(total)
    assert errors[1] < 0.995 * errors[0]
