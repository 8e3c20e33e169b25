"""Formats of any sixteen levels with 16- or 32-bit block scales."""

import pytest
import torch

from vbrt.config import FORMATS, load_config
from vbrt.errors import ConfigError, FormatError
from vbrt.formats import get_format, new_page, pack, unpack
from vbrt.formats.nf4 import NF4_LEVELS
from vbrt.formats.sixteen_levels import FP4_LEVELS, INT4_LEVELS, IQ4_NL_LEVELS

TABLES = {"int4": INT4_LEVELS, "nf4": NF4_LEVELS, "fp4": FP4_LEVELS, "iq4_nl": IQ4_NL_LEVELS}
NAMES = [name for name, record in FORMATS.items() if record.kernels == "levels" and name.startswith("levels")]
SYMMETRIC = [name.replace("levels", "symmetric") for name in NAMES]


def plane(name, levels, shape, scale=0.01):
    """Any codes and scales of a format."""
    fmt, generator = get_format(name), torch.Generator().manual_seed(0)
    fields = {field.name: field.shape for field in fmt.layout(shape, torch.float32).fields}
    codes = torch.randint(0, 256, fields["codes"], dtype=torch.uint8, generator=generator)
    scales = torch.randn(fields["scales"], generator=generator) * scale
    return {"codes": codes, "scales": scales.to(fmt.scale_dtype), "levels": torch.tensor(levels)}


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_is_its_level_times_its_blocks_scale(name):
    fmt, shape = get_format(name), (3, 150)
    coarse = plane(name, torch.linspace(-3, 5, 16).tolist(), shape)
    layout = fmt.layout(shape, torch.bfloat16)
    coarse = unpack(pack(coarse, layout, new_page(layout)), layout)
    low_high = torch.stack((coarse["codes"] & 15, coarse["codes"] >> 4), dim=-1).flatten(1).long()
    expected = coarse["levels"][low_high] * coarse["scales"].float().repeat_interleave(fmt.block, dim=1)
    assert torch.equal(fmt.decode(coarse, shape, torch.bfloat16), expected[:, :150].bfloat16())


@pytest.mark.parametrize(("table", "name"), list(zip(TABLES, NAMES[2::3], strict=True)))
def test_what_was_decoded_is_encoded_with_a_table_as_good(table, name):
    fmt, shape = get_format(name), (5, 300)
    decoded = fmt.decode(plane(name, TABLES[table], shape), shape, torch.float32)
    again = fmt.encode(decoded)
    assert tuple(again["levels"].tolist()) == tuple(torch.tensor(TABLES[table]).tolist())
    assert torch.allclose(fmt.decode(again, shape, torch.float32), decoded, rtol=3e-7, atol=0)


@pytest.mark.parametrize("name", SYMMETRIC)
def test_a_symmetric_weight_is_its_code_less_8_times_its_blocks_scale(name):
    fmt, levels, shape = get_format(name), get_format(name.replace("symmetric", "levels")), (3, 150)
    coarse = plane(levels.name, INT4_LEVELS, shape)
    decoded = levels.decode(coarse, shape, torch.bfloat16)
    fields = {field: coarse[field] for field in ("codes", "scales")}
    layout = fmt.layout(shape, torch.bfloat16)
    fields = unpack(pack(fields, layout, new_page(layout)), layout)
    assert torch.equal(fmt.decode(fields, shape, torch.bfloat16), decoded)
    again = fmt.encode(levels.decode(coarse, shape, torch.float32))
    assert set(again) == {"codes", "scales"}
    assert torch.allclose(fmt.decode(again, shape, torch.float32), decoded.float(), rtol=5e-3, atol=0)


@pytest.mark.parametrize("name", ["levels16-float16", "levels64-bfloat16", "levels128-float32"])
def test_encoding_rounds_a_gaussian_weight_well(name):
    fmt, w = get_format(name), torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)) * 0.02
    error = fmt.decode(fmt.encode(w), (64, 1000), torch.float32) - w
    assert 20 * torch.log10(w.norm() / error.norm()) > (19 if fmt.block > 16 else 21)


@pytest.mark.parametrize("weight", [torch.zeros(2, 40), torch.full((2, 40), 3e38), torch.full((1, 20), 1e-40)])
def test_extreme_weights_stay_finite(weight):
    fmt = get_format("levels32-float32")
    decoded = fmt.decode(fmt.encode(weight), tuple(weight.shape), torch.float32)
    assert torch.allclose(decoded, weight, rtol=1e-6, atol=1e-30)


def test_a_weight_beyond_the_scales_is_refused():
    with pytest.raises(FormatError, match=r"largest weight is 1e\+30; float16 scales reach"):
        get_format("levels32-float16").encode(torch.full((2, 32), 1e30))


def test_no_config_asks_for_them():
    with pytest.raises(
        ConfigError, match=r'weights.format = "levels64-float16"; expected "nvfp4", .*"dense" or "auto"'
    ):
        load_config("fp4", weights={"format": "levels64-float16"})
