"""Codes that make up for each other's errors: less error of the output, never more, under the same scales."""

import pytest
import torch

from vbrt.config import chosen_formats
from vbrt.formats import get_format
from vbrt.formats.error_feedback import compensated, moments_of

FOUR_BITS = [name for name in chosen_formats() if name != "dense"]


def inputs(tokens: int, k: int) -> torch.Tensor:
    """Neighbours go together."""
    x_TK = torch.randn(tokens, k, generator=torch.Generator().manual_seed(k))
    return x_TK.cumsum(1) / 4


def loss(fmt, coarse, w_NK, x_TK):
    error = fmt.decode(coarse, tuple(w_NK.shape), torch.float32) - w_NK
    return (x_TK @ error.t()).square().sum(0)


@pytest.mark.parametrize("name", FOUR_BITS)
@pytest.mark.parametrize("k", [72, 600])
def test_outputs_are_nearer_under_the_same_scales_on_inputs_that_were_not_seen_too(name, k):
    fmt, x_TK = get_format(name), inputs(400, k)
    w_NK = torch.randn(9, k, generator=torch.Generator().manual_seed(1))
    coarse = fmt.encode(w_NK)
    found = compensated(fmt, w_NK, coarse, moments_of(x_TK[:300]))
    assert found.keys() == coarse.keys() and found["codes"].shape == coarse["codes"].shape
    assert all(found[field] is coarse[field] for field in coarse if field != "codes")
    assert loss(fmt, found, w_NK, x_TK[300:]).sum() < 0.8 * loss(fmt, coarse, w_NK, x_TK[300:]).sum()


@pytest.mark.parametrize("name", FOUR_BITS)
def test_what_inputs_do_not_tell_apart_keeps_its_nearest_codes(name):
    fmt, w_NK = get_format(name), torch.randn(5, 256, generator=torch.Generator().manual_seed(2))
    coarse = fmt.encode(w_NK)
    for moments in (torch.eye(256)[None], torch.zeros(1, 256, 256)):
        found = compensated(fmt, w_NK, coarse, moments)
        given, nearest = (fmt.decode(plane, (5, 256), torch.float32) for plane in (found, coarse))
        assert torch.equal((given - w_NK).abs(), (nearest - w_NK).abs())


def test_no_row_of_a_group_loses_more_than_it_did():
    """Weights that clip, zeros, and few tokens."""
    fmt, x_TK = get_format("nvfp4"), inputs(3, 256)
    w_NK = torch.randn(64, 256, generator=torch.Generator().manual_seed(3)).pow(5)
    w_NK[0], w_NK[1, :16] = 0, 0
    w_NK = w_NK.bfloat16()
    coarse = fmt.encode(w_NK)
    found = compensated(fmt, w_NK, coarse, moments_of(x_TK))
    before, after = (loss(fmt, plane, w_NK.float(), x_TK) for plane in (coarse, found))
    assert (after <= before * 1.01).all() and (after < before / 2).sum() > 32


def test_a_weight_that_is_encoded_under_autocast_has_the_codes_that_it_has_without():
    fmt, w_NK = get_format("nvfp4"), torch.randn(9, 512, generator=torch.Generator().manual_seed(4))
    coarse, moments = fmt.encode(w_NK), moments_of(inputs(400, 512))
    expected = compensated(fmt, w_NK, coarse, moments)["codes"]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(moments_of(inputs(400, 512)), moments)
        assert torch.equal(compensated(fmt, w_NK, coarse, moments)["codes"], expected)
