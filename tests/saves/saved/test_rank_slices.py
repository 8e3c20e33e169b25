"""Planes of parts of a weight, joined and cut again without being decoded."""

import pytest
import torch

from vbrt.formats import get_format
from vbrt.saves.saved.rank_slices import Held, Matrix, cut_between_blocks, join_parts, planes_of_part


@pytest.mark.parametrize(
    ("format", "cut", "k"),
    [
        ("mxfp4", 64, 160),
        ("mxint8", 64, 160),
        ("affine32-float16", 64, 160),
        ("signed32-bfloat16", 64, 160),
        ("zeros64-bfloat16", 64, 160),
        ("superblock32", 256, 608),
        ("superbytes16", 256, 608),
        ("floatbytes128-float32", 128, 320),
    ],
)
def test_codes_of_any_size_are_joined_along_their_columns_and_cut_again(format, cut, k):
    fmt, w = get_format(format), torch.randn(6, k)
    matrix, halves = Matrix((6, k), torch.float32, format, fine=False), (Held(1, ((0, cut),)), Held(1, ((cut, k),)))
    assert all(cut_between_blocks(matrix, held) for held in halves)
    assert not cut_between_blocks(matrix, Held(1, ((0, cut // 8),)))
    parts = [(held, {"coarse": fmt.encode(w[:, begin:end])}) for held in halves for begin, end in held.spans]
    whole = join_parts(matrix, parts)
    decoded = fmt.decode(dict(whole["coarse"]), (6, k), torch.float32)
    alone = [fmt.decode(planes["coarse"], (6, held.size), torch.float32) for held, planes in parts]
    assert torch.equal(decoded, torch.cat(alone, 1))
    for held, planes in parts:
        again = planes_of_part(matrix, whole, held)["coarse"]
        assert all(torch.equal(again[name], tensor) for name, tensor in planes["coarse"].items())


def test_columns_that_are_stored_in_another_order_are_not_cut():
    matrix = Matrix((32, 512), torch.bfloat16, "levels64-float16-ordered", fine=False)
    assert cut_between_blocks(matrix, Held(0, ((0, 16),))) and not cut_between_blocks(matrix, Held(1, ((0, 256),)))
