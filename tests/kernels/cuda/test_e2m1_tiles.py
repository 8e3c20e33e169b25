"""Tiles hold every bit of a format's plane, in the order that the kernels read."""

import weakref

import pytest
import torch

from vbrt.errors import KernelError
from vbrt.formats import WeightPlanes, get_format
from vbrt.formats.page import unpack
from vbrt.kernels import reference, resolve
from vbrt.kernels.cuda.e2m1 import linear as e2m1_linear
from vbrt.kernels.cuda.e2m1 import tiles as e2m1_tiles
from vbrt.kernels.cuda.e2m1.tiles import TILES, page_of, parts_of, tile_layout

NAMES = ("nvfp4", "mxfp4")


SHAPES = [(16, 128), (1, 16), (33, 200), (200, 416), (5, 2730), (129, 1000)]


def raw(tensor):
    return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_tiles_hold_every_code_and_scale(name, shape):
    torch.manual_seed(0)
    coarse = get_format(name).encode(torch.randn(shape) * 0.05)
    packing = e2m1_linear.packing(name)
    tensors = packing.pack(coarse, shape)
    fields = {f.name: (f.dtype, f.shape) for f in packing.layout(shape).fields}
    assert fields == {k: (str(v.dtype).removeprefix("torch."), tuple(v.shape)) for k, v in tensors.items()}
    back = packing.unpack(tensors, shape)
    assert back.keys() == coarse.keys()
    for key, value in coarse.items():
        assert torch.equal(raw(back[key]), raw(value)), key


def test_tiles_cost_what_the_format_promises():
    assert e2m1_tiles.tile_layout("nvfp4", (4096, 4096)).nbytes * 8 / 4096**2 == pytest.approx(4.5, abs=0.01)
    assert e2m1_tiles.tile_layout("mxfp4", (4096, 4096)).nbytes * 8 / 4096**2 == pytest.approx(4.25, abs=0.01)


def test_masked_pairs_are_levels_in_bf16():
    torch.manual_seed(0)
    word = torch.randint(-(2**31), 2**31, (4096,), dtype=torch.int64).to(torch.int32)
    pairs = torch.stack(e2m1_tiles.decode_words(word)).to(torch.int64) & 0xFFFFFFFF
    assert not (pairs & ~0x81C081C0).any()
    halves = torch.stack((pairs & 0xFFFF, pairs >> 16)).to(torch.int32)
    bf16 = torch.where(halves > 0x7FFF, halves - 0x10000, halves).to(torch.int16).view(torch.bfloat16)
    magnitudes = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0}
    assert set((bf16.double() * 2.0**126).abs().unique().tolist()) == magnitudes


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_lane_multiplies_each_weight_with_its_own_column(name):
    """The kernel's walk in plain torch: lane, instruction and pair give row and column, the sum is x @ w.T."""
    torch.manual_seed(0)
    n, k = 40, 300
    coarse = get_format(name).encode(torch.randn(n, k))
    want = get_format(name).decode(coarse, (n, k), torch.float64)
    tensors = e2m1_linear.packing(name).pack(coarse, (n, k))
    tiles, scale = tensors[TILES], tensors["tensor_scale"].double()
    got = torch.zeros(tiles.shape[0] * 16, tiles.shape[1] * 128, dtype=torch.float64)
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    for tile in range(tiles.shape[0]):
        for column in range(tiles.shape[1]):
            words, tail = tiles[tile, column, :256].view(2, 32, 4), tiles[tile, column, 256:].contiguous()
            scale_bytes = tail.view(torch.uint8).view(32, 2, -1)  # lane, row half, block
            if name == "nvfp4":
                scales = scale_bytes.view(torch.float8_e4m3fn).double()
            else:
                scales = torch.exp2(scale_bytes.double() - 239)
            pairs = torch.stack(e2m1_tiles.decode_words(words))  # pair, part, lane, word
            for lane in range(32):
                g, t = divmod(lane, 4)
                for pair in range(4):
                    half, c = pair % 2, pair // 2
                    for part in range(2):
                        for word in range(4):
                            bits = int(pairs[pair, part, lane, word]) & 0xFFFFFFFF
                            p = 2 * part + word // 2
                            first = 128 * column + 32 * t + 8 * (p ^ (t // 2)) + 4 * (word % 2) + 2 * c
                            s = scales[lane, half, part if name == "nvfp4" else 0]
                            for e, code in enumerate((bits & 0xFFFF, bits >> 16)):
                                value = levels[(code >> 6) & 7] * (-1 if code >> 15 else 1)
                                got[16 * tile + 8 * half + g, first + e] = value * s
    assert torch.equal(got[:n, :k] * scale, want)
    assert not got[n:].any() and not got[:, -(-k // 32) * 32 :].any()


def test_scales_too_far_apart_stay_as_they_are():
    coarse = {
        "codes": torch.full((1, 32), 0x22, dtype=torch.uint8),
        "scales": torch.tensor([[0, 200]], dtype=torch.uint8),
    }
    assert e2m1_linear.packing("mxfp4").pack(coarse, (1, 64)) is None
    with pytest.raises(KernelError, match="plain coarse plane"):
        e2m1_tiles.pack_tiles("mxfp4", coarse, (1, 64))


@pytest.mark.parametrize("name", NAMES)
def test_without_a_gpu_tiles_are_computed_by_the_reference(name):
    torch.manual_seed(0)
    shape = (24, 200)
    coarse = get_format(name).encode(torch.randn(shape))
    plain = WeightPlanes(name, shape, torch.float32, coarse)
    tiled = WeightPlanes(name, shape, torch.float32, e2m1_linear.packing(name).pack(coarse, shape))
    x = torch.randn(3, 200)
    assert e2m1_linear.route(x, tiled) == "reference"
    assert torch.equal(e2m1_linear.decode_weight(tiled), reference.decode_weight(plain))
    assert torch.equal(e2m1_linear.linear(x, tiled, None, "silu"), reference.linear(x, plain, None, "silu"))


def test_the_cpu_keeps_the_reference():
    kernel = resolve("linear", "auto", torch.device("cpu"))
    assert kernel.run is reference.linear and kernel.page_order("nvfp4") is None
    assert e2m1_linear.packing("nf4") is None


def test_tiles_and_their_scale_come_apart_again():
    layout = tile_layout("nvfp4", (40, 200))
    planes = unpack(torch.randint(255, (layout.nbytes,), dtype=torch.uint8), layout)
    page = page_of(planes[TILES], planes["tensor_scale"])
    assert page.data_ptr() == planes[TILES].data_ptr() and page.dim() == 1
    for one in (page, page.clone()):
        parts = parts_of(one, "nvfp4", (40, 200))
        for got, want in zip(parts, planes.values(), strict=True):
            assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    seen = weakref.ref(page)
    del page, one, parts
    assert seen() is None  # nothing keeps a page's memory
