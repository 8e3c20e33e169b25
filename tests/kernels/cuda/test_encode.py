"""Encoding on a GPU: the bits of the format's own encoder, and of `pack_tiles` as plain torch computes it."""

import pytest
import torch

from tests import forked
from tests.kernels.cuda.gpu_cases import compiled
from tests.matrix import matrix
from vbrt.formats import get_format
from vbrt.kernels import reference, resolve
from vbrt.kernels.cuda.e2m1 import tiles
from vbrt.kernels.cuda.e2m1.encode import launch_encode, launch_pack

FORMATS = ("nvfp4", "mxfp4")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((33, 200), (16, 128), (7, 40))  # with rows and columns beyond the last whole tile


def weight(shape, dtype, octaves=2.0):
    """Rows of many magnitudes, with zeros of both signs, tiny blocks and the largest finite numbers among them."""
    w = (torch.randn(shape) * torch.exp2(octaves * torch.randn(shape[0], 1))).to(dtype)
    w[0, :16], w[1, 3], w[2, :32] = 0, -0.0, 1e-7
    w[5] = w[5].sign() * torch.finfo(dtype).max
    return w


def as_bytes(tensors):
    return {name: tensor.cpu().view(torch.uint8) for name, tensor in tensors.items()}


def check_encoder(name, dtype, shape, turn):
    w, fmt = weight(shape, dtype), get_format(name)
    known = fmt._range(w)
    cases = (None, torch.rand(1, shape[1]) + 0.05, torch.randn(shape[0], shape[1]).square() + 0.05)
    squares = cases[turn % 3]
    given, expected = launch_encode(fmt, w, known, squares), fmt._encode(w, known, squares)
    torch.testing.assert_close(as_bytes(given), as_bytes(expected), rtol=0, atol=0)


def check_tiles(name, shape):
    coarse = get_format(name).encode(torch.randn(shape).bfloat16())
    expected = tiles.pack_tiles(name, coarse, shape)[tiles.TILES]
    given, bytes_of = torch.full_like(expected, -1), coarse["scales"].view(torch.uint8)
    launch_pack(coarse["codes"], bytes_of, given, bytes_of.amax().view(1) if name == "mxfp4" else None, tiles.TOP_FIELD)
    assert torch.equal(given, expected)


def check_a_sample():
    torch.manual_seed(0)
    for number, shape in enumerate(SHAPES):
        for turn, name in enumerate(FORMATS):
            check_encoder(name, DTYPES[number], shape, number + turn)
            check_tiles(name, shape)
    print("same bits")


def test_the_kernels_give_the_bits_of_the_specification_in_the_interpreter():
    """In a process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton")
    done = forked.run(f"from {__name__} import check_a_sample; check_a_sample()", interpreted=True)
    assert done.stdout.strip() == "same bits", done.stderr


@matrix(capability=[80, 90, 120], block=[16, 32], at_most=1)
def test_the_kernel_that_encodes_compiles(capability, block):
    pytest.importorskip("triton")
    from vbrt.kernels.cuda.e2m1.encode_triton import encode_kernel

    types = {"w_ptr": "*bf16", "value_ptr": "*fp32", "code_ptr": "*u8", "byte_ptr": "*u8"}
    types |= dict.fromkeys(("K", "blocks", "total", "low", "high", "shift"), "i32")
    types |= {"per_unit": "fp32", "least": "fp32", "square_ptr": "*fp32", "rows_each": "i32"}
    constants = {"ROWS": 128, "BLOCK": block, "LEVELS": block.bit_length() - 1, "FIRST": -2}
    constants |= {"CANDIDATES": 9, "E4M3": block == 16, "WEIGHED": block == 16}
    assert "div.rn.f32" in compiled(encode_kernel, types, constants, capability, gluon=False).asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (768, 2048), (4096, 1000)])
def test_a_gpu_encodes_to_the_bits_that_a_cpu_gives(name, dtype, shape):
    torch.manual_seed(0)
    w_ENK = torch.stack([weight(shape, dtype), weight(shape, dtype, 0.0)])
    squares, fmt = torch.randn(2, shape[1]).exp2().square(), get_format(name)
    encode = resolve("encode_many", "auto", torch.device("cuda"), name)
    expected = [*reference.encode_many(fmt, w_ENK), *reference.encode_many(fmt, w_ENK, squares=squares)]
    given = [*encode(fmt, w_ENK.cuda()), *encode(fmt, w_ENK.cuda(), squares=squares.cuda())]
    for one, other in zip(given, expected, strict=True):
        assert one.members == other.members
        torch.testing.assert_close(as_bytes(one.coarse), as_bytes(other.coarse), rtol=0, atol=0)
        coarse, many = other.coarse, (shape[0] * len(one.members), shape[1])
        if tiles.fits(name, coarse):
            packed = as_bytes(tiles.pack_tiles(name, one.coarse, many))
            torch.testing.assert_close(packed, as_bytes(tiles.pack_tiles(name, coarse, many)), rtol=0, atol=0)
