"""HQQ's weights become planes, or dense weights, with the bits of its own dequantization."""

from itertools import product

import pytest
import torch
from safetensors.torch import save_file

from vbrt.errors import FormatError
from vbrt.formats import get_format, repack_hqq
from vbrt.formats.published import unpack_hqq
from vbrt.saves.files.safetensors_file import TensorFile
from vbrt.saves.published.packed_files import PackedFiles

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def parts(shape, group, bits, dtype):
    """Codes [N K / group, group], their packed form, scales, and zero points of about half of the range."""
    generator, groups = torch.Generator().manual_seed(0), shape[0] * shape[1] // group
    codes = torch.randint(0, 1 << bits, (groups, group), dtype=torch.uint8, generator=generator)
    packed = codes if bits == 8 else codes[: groups // 2] << 4 | codes[groups // 2 :]
    scale = (torch.rand(groups, 1, generator=generator) * 0.01 + 1e-3).to(dtype)
    zero = ((torch.rand(groups, 1, generator=generator) + 0.5) * 2 ** (bits - 1)).to(dtype)
    return codes, packed, scale, zero


@pytest.mark.parametrize(
    ("k", "group", "bits", "format"),
    [
        (256, 64, 4, "floatzeros64"),
        (256, 128, 4, "floatzeros128"),
        (256, 256, 4, "floatzeros128"),
        (96, 64, 4, "floatzeros32"),
        (256, 64, 8, "floatzerobytes64"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_difference_is_rounded_before_the_product(k, group, bits, format, dtype):
    codes, packed, scale, zero = parts((16, k), group, bits, dtype)
    made = repack_hqq(packed, scale, zero, (16, k), group=group, packing=f"{bits}bit_u8")
    assert made.format == f"{format}-{str(dtype).removeprefix('torch.')}"
    expected = ((codes.to(dtype) - zero) * scale).view(16, k)
    decoded = get_format(made.format).decode(made.coarse, made.shape, dtype)
    assert torch.equal(decoded, expected)
    once = ((codes.float() - zero.float()) * scale.float()).view(16, k).to(dtype)
    assert torch.equal(once, expected) == (dtype is torch.float32), "one rounding is another weight"


def test_words_have_codes_of_distant_rows_from_the_highest_bits():
    rows = torch.arange(40, dtype=torch.uint8).view(20, 2)
    words = sum(rows[2 * part : 2 * part + 2].int() % 8 << 27 - 3 * part for part in range(10))
    assert torch.equal(unpack_hqq(words, "3bit_32"), rows % 8)
    assert torch.equal(unpack_hqq(rows[:2] % 16 << 4 | rows[2:4] % 16, "4bit_u8"), rows[:4] % 16)
    under_floats = (rows % 16 << 4).view(torch.float16)
    assert torch.equal(unpack_hqq(under_floats, "4bit_u8")[:20], rows % 16)


BYTES = torch.zeros(4, 64, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("repack", "message"),
    [
        (lambda: repack_hqq(BYTES.int(), torch.ones(8), torch.ones(8), (8, 64), group=64), "W_q torch.int32"),
        (lambda: repack_hqq(BYTES, torch.ones(7), torch.ones(8), (8, 64), group=64), r"scale torch.float32 \(7,\)"),
        (lambda: repack_hqq(BYTES, torch.ones(8), torch.ones(8).half(), (8, 64), group=64), "zero torch.float16"),
        (lambda: repack_hqq(BYTES, torch.ones(8), torch.ones(8), (8, 32), group=64), r"those of \(8, 32\) weights"),
        (lambda: repack_hqq(BYTES, torch.ones(8), torch.ones(8), (64, 8), group=64), "groups made of blocks of 16"),
        (lambda: repack_hqq(BYTES, torch.ones(8) / 0, torch.ones(8), (8, 64), group=64), "scales hold NaN or Inf"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(repack, message):
    with pytest.raises(FormatError, match=message):
        repack()


@pytest.mark.parametrize(("bits", "axis", "dtype"), list(product((8, 6, 4, 3, 2, 1), (0, 1), DTYPES)))
def test_files_of_the_library_decode_to_its_bits(tmp_path, bits, axis, dtype):
    quantize = pytest.importorskip("hqq.core.quantize")
    for group, viewed in ((64, False), (16, False), (None, False), (64, bits != 3)):
        linear = torch.nn.Linear(192, 64, bias=True, dtype=dtype)
        config = quantize.BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis, view_as_float=viewed)
        layer = quantize.HQQLinear(linear, config, compute_dtype=dtype, device="cpu", del_orig=False)
        state = {f"0.{name}": tensor for name, tensor in layer.state_dict().items() if tensor is not None}
        save_file(state, tmp_path / "model.safetensors")
        files = PackedFiles(tmp_path, [TensorFile(tmp_path / "model.safetensors")], {}, dtype)
        assert set(files.tensors) == {"0.weight", "0.bias"}
        assert bool(files.weights["0.weight"].outline.format) == (axis == 1 and bits > 3)
        assert torch.equal(files.read("0.weight"), layer.dequantize())
