"""Experts' pages that lie in the order of a GPU's tiles, put back into the order of their format by C."""

import pytest
import torch

from tests.matrix import matrix
from vbrt.errors import KernelError
from vbrt.formats import get_format
from vbrt.formats.experts import join_fields, join_layouts
from vbrt.formats.page import new_page, pack, unpack
from vbrt.kernels.cpu import build
from vbrt.kernels.cpu.tiles import in_rows
from vbrt.kernels.cuda.e2m1.tiles import pack_tiles, tile_layout
from vbrt.kernels.experts import ExpertPages

WHY = build.refusal(torch.device("cpu"), "tiles")
built = pytest.mark.skipif(WHY is not None, reason=str(WHY))
SHAPES = {"up": (72, 160), "down": (33, 144)}  # rows and columns that fill no whole tile


@built
@matrix(format=("nvfp4", "mxfp4"))
def test_tiles_come_back_as_the_rows_that_they_were_made_of(format):
    compare_tiles(format)


def compare_tiles(format):
    fmt, pages, want = get_format(format), [], []
    in_order = join_layouts({part: fmt.layout(shape, torch.bfloat16) for part, shape in SHAPES.items()})
    tiled = join_layouts({part: tile_layout(format, shape) for part, shape in SHAPES.items()})
    for _ in range(2):
        coarse = {
            part: fmt.encode(torch.randn(n, k) * torch.logspace(-3, 3, n)[:, None]) for part, (n, k) in SHAPES.items()
        }
        tiles = {part: pack_tiles(format, tensors, SHAPES[part]) for part, tensors in coarse.items()}
        pages.append(pack(join_fields(tiles), tiled, new_page(tiled)))
        want.append(join_fields(coarse))
    got = in_rows(ExpertPages(format, torch.bfloat16, SHAPES, tiled, [None, pages[0], None, pages[1]]), in_order)
    assert got.layout == in_order and got.pages[0] is got.pages[2] is None
    for page, fields in zip(got.pages[1::2], want, strict=True):
        for name, tensor in unpack(page, in_order).items():
            assert torch.equal(tensor.view(torch.uint8), fields[name].view(torch.uint8)), name


def test_pages_in_an_unknown_order_are_refused_by_their_parts():
    layouts = [join_layouts({"up": tile_layout("nvfp4", shape)}) for shape in ((16, 128), (32, 128))]
    strange = ExpertPages("nvfp4", torch.bfloat16, {"down": (16, 128)}, layouts[0], [None])
    with pytest.raises(KernelError, match="pages of down are neither"):
        in_rows(strange, layouts[1])
