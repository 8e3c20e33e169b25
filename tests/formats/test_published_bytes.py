"""Published 8-bit weights become planes with their bits; what does not fit together is refused by name."""

import pytest
import torch

from vbrt.errors import FormatError
from vbrt.formats import (
    cut_blocks,
    get_format,
    join_rows,
    new_page,
    pack,
    repack_compressed_int8,
    repack_fp8,
    repack_gptq,
    repack_int8,
    repack_llm_int8,
    repack_mlx,
)
from vbrt.saves.published.decode_layouts import scaled_blocks
from vbrt.saves.published.layouts import Outline


def decoded(made, dtype=torch.float32):
    layout = get_format(made.format).layout(made.shape, dtype)
    pack(made.coarse, layout, new_page(layout))
    return get_format(made.format).decode(made.coarse, made.shape, dtype)


def fp8(n, k):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0)).mul(40).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("k", "grid", "block", "format"),
    [
        (256, (2, 2), (128, 128), "floatbytes128-float32"),
        (320, (2, 3), (128, 128), "floatbytes128-float32"),
        (192, (3, 4), (64, 48), "floatbytes16-float32"),
        (320, (160, 1), (128, 128), "floatbytes128-float32"),
        (320, (160,), (128, 128), "floatbytes128-float32"),
        (100, (), (128, 128), "floatbytes128-float32"),
    ],
)
def test_fp8_has_scales_of_blocks_of_rows_or_of_the_tensor(k, grid, block, format):
    weight, scale = fp8(160, k), torch.rand(grid, generator=torch.Generator().manual_seed(1)) - 0.5
    made = repack_fp8(weight, scale, block=block)
    assert (made.format, made.shape) == (format, (160, k))
    expected = scaled_blocks(
        {"weight": weight, "scale": scale}, Outline((160, k), torch.float32, more={"block": block})
    )
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(decoded(made, dtype), expected.to(dtype))


def test_llm_int8_rounds_twice_as_its_library_does():
    codes = torch.randint(-127, 128, (64, 300), dtype=torch.int8)
    stats = torch.rand(64) + 0.1
    expected = codes * stats.view(-1, 1) * 7.874015718698502e-3
    made = repack_llm_int8(codes, stats)
    assert torch.equal(decoded(made), expected)
    assert not torch.equal(codes * (stats.view(-1, 1) * 7.874015718698502e-3), expected), (
        "one product is another weight"
    )


@pytest.mark.parametrize("scale", [(6, 4), (6, 1), (6,), ()])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_int8_has_scales_of_groups_of_rows_or_of_the_tensor(scale, asymmetric):
    codes = torch.randint(-128, 128, (6, 256), dtype=torch.int8)
    numbers, group = torch.rand(scale) - 0.5, 64 if scale == (6, 4) else -1
    zeros = torch.randint(-128, 128, scale, dtype=torch.int8) if asymmetric else None

    def spread(term):
        return term.reshape(len(term) if term.ndim else 1, -1).repeat_interleave(64 if group == 64 else 256, 1)

    expected = (codes.float() - (spread(zeros) if asymmetric else 0)) * spread(numbers)
    made = repack_int8(codes, numbers, zeros, group=group)
    assert made.format.startswith("zerobytes" if asymmetric else "bytes")
    assert torch.equal(decoded(made), expected)


def test_parts_of_other_blocks_are_joined_with_their_bits():
    one = repack_fp8(fp8(4, 200), torch.rand(4, 1))
    other = cut_blocks(one, 32)
    joined = join_rows([one, other])
    assert joined.format == "floatbytes32-float32"
    assert torch.equal(decoded(joined), decoded(one).repeat(2, 1))


BYTES = torch.zeros(4, 64, dtype=torch.int8)
NAN = torch.full((4, 64), float("nan")).to(torch.float8_e4m3fn)
WORDS = torch.zeros(16, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("repack", "message"),
    [
        (lambda: repack_fp8(NAN, torch.ones(4, 1)), "block codes hold NaN"),
        (lambda: repack_fp8(fp8(4, 64), torch.tensor([float("inf")] * 4)), "block scales hold NaN or Inf"),
        (lambda: repack_fp8(fp8(4, 64), torch.ones(3)), "FP8: scales of .3,. for a weight .4, 64."),
        (lambda: repack_fp8(fp8(4, 64), torch.ones(1, 4, 1)), "FP8: scales of .1, 4, 1."),
        (lambda: repack_fp8(fp8(4, 64), torch.ones(1, 8), block=(4, 8)), "groups of 8 weights"),
        (lambda: repack_fp8(fp8(4, 64).to(torch.float8_e5m2), torch.ones(1)), "expected float8_e4m3fn"),
        (lambda: repack_fp8(fp8(4, 64), torch.ones(1, dtype=torch.int32)), "block scales are torch.int32"),
        (lambda: repack_int8(BYTES.float(), torch.ones(4, 1)), "expected int8 .N, K."),
        (lambda: repack_int8(BYTES, torch.ones(4, 3), group=32), "scales of .4, 3. rows and groups"),
        (lambda: repack_int8(BYTES, torch.ones(4, 1), torch.zeros(3, dtype=torch.int8)), "zero points torch.int8 .3,."),
        (lambda: repack_int8(BYTES, torch.ones(4, 1), torch.zeros(4)), "zero points torch.float32"),
        (lambda: repack_llm_int8(BYTES, torch.ones(5)), r"with SCB \(5,\)"),
        (lambda: repack_llm_int8(BYTES, torch.ones(4) * float("nan")), "block scales hold NaN or Inf"),
        (lambda: repack_compressed_int8(WORDS, torch.ones(16, 1), (16, 64), group=-1), "in 8 bits"),
        (
            lambda: repack_compressed_int8(WORDS, torch.ones(16, 1), (16, 16), group=-1, weight_zero_point=WORDS),
            "weight_zero_point .16, 4.",
        ),
        (lambda: repack_gptq(WORDS, torch.ones(2, 4), group=32, bits=3), "3 bits; expected 4 or 8"),
        (lambda: repack_gptq(WORDS, torch.ones(2, 4), WORDS[:2, :2], group=32, bits=8), "expected int32 .2, 1."),
        (lambda: repack_gptq(WORDS, torch.ones(2, 4), WORDS[:2, :1], group=32, bits=8), "not all 128"),
        (lambda: repack_mlx(WORDS.view(torch.uint32), torch.ones(16, 1), torch.ones(16, 1), bits=6), "6 bits"),
        (lambda: repack_mlx(WORDS, torch.ones(16, 1), torch.ones(16, 1), bits=8), "expected uint32 .N, K/4."),
    ],
)
def test_tensors_that_do_not_fit_are_refused(repack, message):
    with pytest.raises(FormatError, match=message):
        repack()
