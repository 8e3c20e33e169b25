import pytest
import torch

from vbrt.errors import FormatError
from vbrt.formats import get_format, repack_mxfp4, repack_nvfp4

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def value(code):
    return -E2M1[code & 7] if code & 8 else E2M1[code]


def random_bytes(*shape, high=256):
    return torch.randint(0, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("divide", [False, True])
def test_nvfp4_checkpoints_decode_as_published(divide):
    packed, scales = random_bytes(3, 24), random_bytes(3, 3, high=0x7F)
    multiplier = torch.tensor(0.00123)
    published = 1 / multiplier if divide else multiplier
    coarse = repack_nvfp4(packed, scales.view(torch.float8_e4m3fn), published, divide=divide)
    decoded = get_format("nvfp4").decode(coarse, (3, 48), torch.float32)
    for row in range(3):
        for column in range(48):
            byte = int(packed[row, column // 2])
            s = int(scales[row, column // 16])
            scale = (s & 7) * 2.0**-9 if s < 8 else (8 + (s & 7)) * 2.0 ** ((s >> 3) - 10)
            expected = value(byte >> 4 if column % 2 else byte & 15) * scale * multiplier.item()
            assert decoded[row, column].item() == pytest.approx(expected, rel=3e-7)
    assert torch.equal(coarse["codes"], packed) and torch.equal(coarse["scales"].view(torch.uint8), scales)


def test_mxfp4_checkpoints_decode_as_published():
    blocks, scales = random_bytes(2, 3, 2, 16), random_bytes(2, 3, 2, high=255)
    scales[0, 0, 0], scales[0, 0, 1] = 0, 252
    decoded = get_format("mxfp4").decode(repack_mxfp4(blocks, scales), (6, 64), torch.float32).view(2, 3, 2, 32)
    for index in torch.cartesian_prod(*map(torch.arange, (2, 3, 2, 32))).tolist():
        e, n, g, i = index
        byte = int(blocks[e, n, g, i // 2])
        expected = value(byte >> 4 if i % 2 else byte & 15) * 2.0 ** (int(scales[e, n, g]) - 127)
        assert decoded[e, n, g, i].item() == torch.tensor(expected).item()


def test_what_vbrt_encodes_is_a_published_layout():
    w = torch.randn(4, 96, generator=torch.Generator().manual_seed(0))
    nv = get_format("nvfp4").encode(w)
    again = repack_nvfp4(nv["codes"], nv["scales"], nv["tensor_scale"], divide=False)
    assert all(torch.equal(again[k].view(torch.uint8), nv[k].view(torch.uint8)) for k in nv)
    mx = get_format("mxfp4").encode(w)
    again = repack_mxfp4(mx["codes"].view(4, 3, 16), mx["scales"])
    assert all(torch.equal(again[k], mx[k]) for k in mx)


@pytest.mark.parametrize(
    ("packed", "scales", "scale", "message"),
    [
        (random_bytes(2, 12), random_bytes(2, 2, high=9), 1.0, "expected"),
        (random_bytes(2, 16), random_bytes(2, 4, high=9), 1.0, "expected"),
        (random_bytes(32), random_bytes(4, high=9), 1.0, "expected"),
        (random_bytes(2, 16).float(), random_bytes(2, 2, high=9), 1.0, "float32"),
        (random_bytes(2, 16), random_bytes(2, 2, high=9).half(), 1.0, "float16"),
        (random_bytes(2, 16), torch.full((2, 2), 0xFF, dtype=torch.uint8), 1.0, "NaN"),
        (random_bytes(2, 16), random_bytes(2, 2, high=9), 0.0, "positive"),
        (random_bytes(2, 16), random_bytes(2, 2, high=9), torch.ones(2), "one positive"),
    ],
)
def test_nvfp4_tensors_that_do_not_fit_are_refused(packed, scales, scale, message):
    with pytest.raises(FormatError, match=message):
        repack_nvfp4(packed, scales, scale, divide=False)


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (random_bytes(2, 2, 8), random_bytes(2, 2, high=9), "expected"),
        (random_bytes(2, 2, 16), random_bytes(2, 3, high=9), "expected"),
        (random_bytes(2, 2, 16).float(), random_bytes(2, 2, high=9), "float32"),
        (random_bytes(2, 2, 16), torch.full((2, 2), 255, dtype=torch.uint8), "NaN"),
    ],
)
def test_mxfp4_tensors_that_do_not_fit_are_refused(blocks, scales, message):
    with pytest.raises(FormatError, match=message):
        repack_mxfp4(blocks, scales)
