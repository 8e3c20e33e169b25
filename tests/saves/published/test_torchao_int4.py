"""torchao's int4: codes in its two packings, and the weights that its kernels multiply by."""

import pytest
import torch

from tests.saves.published.published_files import tinygemm_tiles, torchao_int4
from vbrt.errors import FormatError
from vbrt.formats import get_format, repack_tinygemm, repack_torchao_int4
from vbrt.formats.published import unpack_tinygemm
from vbrt.saves.published.decode_layouts import decode_torchao_int4
from vbrt.saves.published.layouts import Outline


def some_codes(n, k, device="cpu"):
    return torch.randint(0, 16, (n, k), generator=torch.Generator().manual_seed(n + k), dtype=torch.int32).to(device)


def some_numbers(groups, n, device="cpu"):
    """Scales and zero points bf16 [G, N, 2]: some zero points are tiny, some scales negative."""
    numbers = torch.randn(groups, n, 2, generator=torch.Generator().manual_seed(groups)) * 0.02
    numbers[::2, ::3, 1] *= 2.0**-12
    return numbers.bfloat16().to(device)


def tinygemm_weight(codes, numbers, k):
    """(code - 8) * scale + zero in fp32, of the first k columns."""
    spread = numbers.float().repeat_interleave(codes.shape[1] // len(numbers), 0)[:k]
    return (codes[:, :k] - 8) * spread[..., 0].t() + spread[..., 1].t()


def rounded_once(x):
    """Doubles to bf16, to nearest, ties to even, without fp32 in between; of numbers that are normal in bf16."""
    bits, dropped = x.view(torch.int64), 52 - 7
    up = bits + (1 << dropped - 1) - 1 + (bits >> dropped & 1)
    return (up >> dropped << dropped).view(torch.float64).to(torch.bfloat16)


def decoded(made, dtype):
    return get_format(made.format).decode(made.coarse, made.shape, dtype)


@pytest.mark.parametrize("inner_tiles", [2, 4, 8])
def test_tiles_give_the_codes_that_a_warp_has_packed(inner_tiles):
    codes = some_codes(24, 768)
    tiles = tinygemm_tiles(codes, inner_tiles)
    assert tiles.shape == (3, 48 // inner_tiles, 32, inner_tiles // 2) and tiles.dtype == torch.int32
    assert torch.equal(unpack_tinygemm(tiles), codes.to(torch.uint8))


def test_one_lane_has_these_columns_of_one_row():
    """The first word of lane 9, of row 2: columns 2, 10, 18, 26 in the lower half, the next ones in the upper."""
    tiles = torch.zeros(1, 1, 32, 4, dtype=torch.int32)
    tiles[0, 0, 9, 0] = 0x76543210
    codes = unpack_tinygemm(tiles)
    assert codes.shape == (8, 128) and codes.sum() == codes[2].sum() == sum(range(8))
    assert codes[2, [2, 10, 18, 26, 3, 11, 19, 27]].tolist() == list(range(8))


@pytest.mark.parametrize(
    ("shape", "group", "format"),
    [
        ((24, 1024), 32, "signed32-bfloat16"),
        ((20, 1024), 64, "signed64-bfloat16"),
        ((20, 1000), 128, "signed128-bfloat16"),
        ((7, 1100), 256, "signed128-bfloat16"),
    ],
)
def test_tiles_decode_to_the_product_without_their_padding(shape, group, format):
    (n, k), rows, columns = shape, 24, -(-shape[1] // 1024) * 1024
    codes, numbers = some_codes(rows, columns), some_numbers(columns // group, rows)
    made = repack_tinygemm(tinygemm_tiles(codes), numbers, shape, group=group)
    assert (made.format, made.shape) == (format, shape)
    expected = tinygemm_weight(codes[:n], numbers[:, :n], k)
    assert all(torch.equal(decoded(made, dtype), expected.to(dtype)) for dtype in (torch.float32, torch.bfloat16))


def test_decoded_weights_are_the_bf16_numbers_nearest_to_the_exact_ones():
    """As one FMA gives them: rounding to fp32 between does not matter here."""
    codes, numbers = some_codes(24, 1024), some_numbers(32, 24)
    w = decoded(repack_tinygemm(tinygemm_tiles(codes), numbers, (24, 1024), group=32), torch.bfloat16)
    spread = numbers.double().repeat_interleave(32, 0)
    exact = (codes - 8) * spread[..., 0].t() + spread[..., 1].t()
    for step in (-1, 1):
        other = (w.view(torch.int16) + step).view(torch.bfloat16)
        nearer = (other.double() - exact).abs() < (w.double() - exact).abs()
        assert not nearer.any()  # nor is NaN, next to 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("k", "group", "block"), [(256, 32, 32), (192, 192, 128), (96, 48, 16), (512, 256, 128)])
def test_plain_int4_decodes_as_torchao_dequantizes_it(k, group, block, dtype):
    numbers = some_numbers(k // group, 12).to(dtype)
    scale, zero = numbers.unbind(-1)
    files = {"weight": some_codes(12, k // 2).to(torch.int8) * 17, "scale": scale, "zero_point": zero}
    made = repack_torchao_int4(files["weight"], scale, zero)
    assert made.format == f"signed{block}-{str(dtype).removeprefix('torch.')}"
    expected = decode_torchao_int4(files, Outline((12, k), dtype))
    assert torch.equal(decoded(made, torch.float32), expected)
    assert torch.equal(decoded(made, dtype), expected.to(dtype))


def test_numbers_of_two_dtypes_become_the_one_that_has_all():
    tensors = torchao_int4(torch.randn(16, 64).bfloat16()).tensors
    weight, scale, zero = (tensors[f"._weight_{name}"] for name in ("qdata", "scale", "zero_point"))
    made = repack_torchao_int4(weight, scale, zero.half())
    assert made.format == "signed32-float32"
    files = {"weight": weight, "scale": scale, "zero_point": zero.half()}
    assert torch.equal(decoded(made, torch.float32), decode_torchao_int4(files, Outline((16, 64), torch.float32)))


NIBBLES, TILES = torch.zeros(8, 32, dtype=torch.int8), torch.zeros(1, 8, 32, 4, dtype=torch.int32)
ONES, PAIRS = torch.ones(2, 8), torch.ones(16, 8, 2, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("repack", "message"),
    [
        (lambda: repack_torchao_int4(NIBBLES.int(), ONES, ONES), "qdata torch.int32"),
        (lambda: repack_torchao_int4(NIBBLES[0], ONES, ONES), r"qdata torch.int8 \(32,\)"),
        (lambda: repack_torchao_int4(NIBBLES, ONES[0], ONES[0]), r"scale torch.float32 \(8,\)"),
        (lambda: repack_torchao_int4(NIBBLES, torch.ones(3, 8), torch.ones(3, 8)), "of whole groups"),
        (lambda: repack_torchao_int4(NIBBLES, ONES, ONES[:, :7]), r"zero point torch.float32 \(2, 7\)"),
        (lambda: repack_torchao_int4(NIBBLES, ONES, ONES.int()), "zero point torch.int32"),
        (lambda: repack_torchao_int4(NIBBLES, ONES / 0, ONES), "block scales hold NaN or Inf"),
        (lambda: repack_torchao_int4(NIBBLES, torch.ones(8, 8), torch.ones(8, 8)), "groups of 8 weights"),
        (lambda: repack_tinygemm(TILES.long(), PAIRS, (8, 1024), group=64), "qdata torch.int64"),
        (lambda: repack_tinygemm(TILES[0], PAIRS, (8, 1024), group=64), "expected int32 .N/8"),
        (lambda: repack_tinygemm(TILES[..., :3], PAIRS, (8, 1024), group=64), "expected int32 .N/8"),
        (lambda: repack_tinygemm(TILES, PAIRS, (9, 1024), group=64), r"a weight \(9, 1024\)"),
        (lambda: repack_tinygemm(TILES, PAIRS, (8, 1025), group=64), r"a weight \(8, 1025\)"),
        (lambda: repack_tinygemm(TILES, PAIRS, (8, 0), group=64), "at least one weight"),
        (lambda: repack_tinygemm(TILES, PAIRS, (8, 1024), group=-1), "in groups of -1"),
        (lambda: repack_tinygemm(TILES, PAIRS[:15], (8, 1024), group=64), r"scale_and_zero \(15, 8, 2\)"),
        (lambda: repack_tinygemm(TILES, PAIRS.int(), (8, 1024), group=64), "scale torch.int32"),
        (lambda: repack_tinygemm(TILES, PAIRS * float("nan"), (8, 1024), group=64), "block scales hold NaN or Inf"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(repack, message):
    with pytest.raises(FormatError, match=message):
        repack()


@pytest.mark.gpu
@pytest.mark.parametrize("inner_tiles", [2, 4, 8])
@pytest.mark.parametrize("shape", [(8, 128), (64, 1024), (136, 3072)], ids=str)
def test_tiles_of_pytorch_are_those_of_its_formula(shape, inner_tiles):
    codes = some_codes(*shape, "cuda")
    packed = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8).contiguous()
    tiles = torch.ops.aten._convert_weight_to_int4pack(packed, inner_tiles)
    assert torch.equal(tiles.cpu(), tinygemm_tiles(codes.cpu(), inner_tiles))
    assert torch.equal(unpack_tinygemm(tiles), codes.to(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_tinygemm_multiplies_by_the_decoded_weight(group):
    """Products with an identity have one term each: the weights, rounded once. Ours are rounded to fp32 before, which
    differs where that is halfway between two numbers of bf16."""
    n, k = 64, 2048
    codes, numbers = some_codes(n, k, "cuda"), some_numbers(k // group, n, "cuda")
    packed = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8).contiguous()
    tiles = torch.ops.aten._convert_weight_to_int4pack(packed, 8)
    one = torch.eye(k, dtype=torch.bfloat16, device="cuda")
    y = torch.ops.aten._weight_int4pack_mm(one, tiles, group, numbers)
    spread = numbers.double().repeat_interleave(group, 0)
    exact = (codes - 8) * spread[..., 0].t() + spread[..., 1].t()
    assert torch.equal(y.t(), rounded_once(exact))
    ours = decoded(repack_tinygemm(tiles, numbers, (n, k), group=group), torch.bfloat16)
    halfway = exact.float().view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(torch.where(halfway, y.t(), ours), y.t()) and (ours != y.t()).sum() < 10
