"""Encoding in C: the bits of the specification, for every shape, dtype and range, by squares of inputs too."""

import pytest
import torch

from tests.kernels.cuda.test_encode import DTYPES, SHAPES, as_bytes, weight
from tests.matrix import matrix
from vbrt.formats import get_format
from vbrt.kernels import resolve
from vbrt.kernels.cpu import encode
from vbrt.kernels.cpu.build import refusal

CPU = torch.device("cpu")
built = pytest.mark.skipif(refusal(CPU, "encode") is not None, reason="no C compiler")


@built
@matrix(name=encode.FORMATS, shape=[*SHAPES, (40, 1030)], dtype=DTYPES, octaves=(0.0, 2.0), at_most=16)
def test_c_gives_the_bits_of_the_specification(name, shape, dtype, octaves):
    torch.manual_seed(0)
    w, fmt = weight(shape, dtype, octaves), get_format(name)
    known = fmt._range(w)
    for squares in (None, torch.rand(1, shape[1]) + 0.05, torch.randn(shape).square() + 0.05):
        given, expected = encode.encoded(fmt, w, known, squares), fmt._encode(w, known, squares)
        torch.testing.assert_close(as_bytes(given), as_bytes(expected), rtol=0, atol=0)


def test_large_weights_are_encoded_in_c_and_others_by_the_reference_with_the_same_bits(monkeypatch):
    fmt, run = get_format("nvfp4"), resolve("encode_many", "auto", CPU, "nvfp4").run
    w_ENK, calls = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(0)), []
    monkeypatch.setattr(encode, "encoded", lambda *args: calls.append(args) or fmt._encode(*args[1:]))
    (small,) = run(fmt, w_ENK)
    monkeypatch.setattr(encode, "_WORTH_BUILDING", 1)
    (large,) = run(fmt, w_ENK)
    monkeypatch.setattr(encode, "refusal", lambda device, source: "no compiler")
    (refused,) = run(fmt, w_ENK)
    assert len(calls) == (0 if refusal(CPU, "encode") else 1)
    for group in (large, refused):
        torch.testing.assert_close(as_bytes(group.coarse), as_bytes(small.coarse), rtol=0, atol=0)
    assert resolve("encode_many", "reference", CPU, "nvfp4").run is not run
