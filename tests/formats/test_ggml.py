"""Blocks of GGUF become planes that decode to the bits of `gguf.dequantize`, whatever the codes and scales."""

import pytest
import torch

from vbrt.errors import FormatError
from vbrt.formats import get_format, repack_gguf
from vbrt.formats.ggml import GGML_PLANES

# where a block has its fp16 numbers, if not one at first
SCALES = {"Q3_K": (108, 110), "Q6_K": (208, 210), "Q2_K": (80, 84), "TQ1_0": (52, 54), "TQ2_0": (64, 66)}
SCALES |= dict.fromkeys(("MXFP4", "NVFP4", "IQ1_M"), (0, 0))
SCALES |= dict.fromkeys(("Q4_1", "Q4_K", "Q5_1", "Q5_K"), (0, 4))


def any_blocks(type, n, k):
    numpy = pytest.importorskip("numpy")
    plane, generator = GGML_PLANES[type], numpy.random.default_rng(0)
    made = generator.integers(0, 255, (n * k // plane.weights, plane.nbytes), dtype=numpy.uint8)
    first, last = SCALES.get(type, (0, 2))
    scales = generator.standard_normal((len(made), (last - first) // 2)).astype(numpy.float16)
    made[:, first:last] = scales.view(numpy.uint8).reshape(len(made), -1)
    if type == "IQ1_M":
        made[:, -1] &= 0x3F  # high bits of an fp16 number that is in four places
    return made.reshape(n, -1)


@pytest.mark.parametrize("type", GGML_PLANES)
def test_a_plane_decodes_to_the_librarys_bits(type):
    gguf, (n, k) = pytest.importorskip("gguf"), (6, 512)
    blocks = any_blocks(type, n, k)
    with pytest.importorskip("numpy").errstate(over="ignore"):
        expected = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[type]))
    made = repack_gguf(torch.from_numpy(blocks), (n, k), type)
    assert (made.format, made.shape) == (GGML_PLANES[type].format, (n, k))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(get_format(made.format).decode(made.coarse, (n, k), dtype), expected.to(dtype))


def test_scales_that_are_no_numbers_are_refused():
    for type in GGML_PLANES.keys() - {"NVFP4"}:  # there the byte of NaN is 0
        blocks = torch.full((GGML_PLANES[type].nbytes,), 255, dtype=torch.uint8)
        with pytest.raises(FormatError, match="NaN"):
            repack_gguf(blocks, (1, GGML_PLANES[type].weights), type)
