"""Formats of 8-bit codes under scales alone."""

from itertools import product

import pytest
import torch

from vbrt.config import FORMATS, load_config
from vbrt.errors import ConfigError, FormatError
from vbrt.formats import get_format, new_page, pack, unpack

PLAIN = {name: record for name, record in FORMATS.items() if not record.base}
NAMES = [name for name, record in PLAIN.items() if record.published and record.bits == 8 and not record.offsets]


def any_plane(name, shape):
    """Any fields of a format, in a page."""
    fmt, generator = get_format(name), torch.Generator().manual_seed(0)
    layout, fields = fmt.layout(shape, torch.bfloat16), {}
    for field in layout.fields:
        made = torch.randn(field.shape, generator=generator)
        dtype = getattr(torch, field.dtype)
        fields[field.name] = made.mul(50).clamp(-128, 127).to(dtype) if dtype is torch.int8 else made.to(dtype)
    return fmt, unpack(pack(fields, layout, new_page(layout)), layout)


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_is_code_times_scale(name):
    shape = (3, 300)
    fmt, plane = any_plane(name, shape)
    scales = plane["scales"].float().repeat_interleave(fmt.block, dim=1)[:, :300]
    if "d" in plane:
        scales *= plane["d"].float().repeat_interleave(256, dim=1)[:, :300]
    expected = plane["codes"].float()[:, :300] * scales * plane.get("unit", 1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(fmt.decode(plane, shape, dtype), expected.to(dtype))


@pytest.mark.parametrize("name", NAMES)
def test_encoding_rounds_a_gaussian_weight_well(name):
    fmt, w = get_format(name), torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)) * 0.02
    plane, layout = fmt.encode(w), fmt.layout((64, 1000), w.dtype)
    decoded = fmt.decode(unpack(pack(plane, layout, new_page(layout)), layout), (64, 1000), torch.float32)
    assert 20 * torch.log10(w.norm() / (decoded - w).norm()) > (31 if "float8" in fmt.code_dtype else 43)


@pytest.mark.parametrize(("name", "dtype"), list(product(NAMES, (torch.float32, torch.bfloat16, torch.float16))))
def test_extreme_weights_stay_finite(name, dtype):
    fmt = get_format(name)
    largest = 0.99 * min(torch.finfo(dtype).max, fmt._reach())
    for w in (torch.zeros(2, 40), torch.full((2, 40), largest), torch.linspace(-1, 1, 80).view(2, 40) * largest):
        decoded = fmt.decode(fmt.encode(w.to(dtype)), (2, 40), dtype)
        assert decoded.isfinite().all()
        assert ((decoded.double() - w.double()).abs() <= 0.1 * largest * bool(w.any())).all()


@pytest.mark.parametrize("name", ["bytes32-float16", "floatbytes128-float16", "superbytes16"])
def test_a_weight_beyond_the_scales_is_refused(name):
    with pytest.raises(FormatError, match=r"largest weight is 1e\+30; its scales reach"):
        get_format(name).encode(torch.full((2, 32), 1e30))


def test_no_config_asks_for_them():
    with pytest.raises(ConfigError, match=r'weights.format = "superbytes16"; expected "nvfp4"'):
        load_config("fp4", weights={"format": "superbytes16"})


def test_there_are_as_many_as_records_say():
    assert len(NAMES) == 26
