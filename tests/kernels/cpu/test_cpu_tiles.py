"""Pages of experts in the order of a GPU's tiles: put back into the order of their format by C, or multiplied."""

import pytest
import torch

from tests.matrix import matrix
from vbrt.errors import KernelError
from vbrt.formats import get_format
from vbrt.formats.joint_planes import join_fields, join_layouts
from vbrt.formats.page import new_page, pack, unpack
from vbrt.kernels.cpu import build
from vbrt.kernels.cpu.experts import experts_down, experts_up, takes_tiles
from vbrt.kernels.cpu.tiles import in_rows
from vbrt.kernels.cuda.e2m1.tiles import pack_tiles, tile_layout
from vbrt.kernels.experts import ExpertPages, Gate

WHY = build.refusal(torch.device("cpu"), "tiles")
built = pytest.mark.skipif(WHY is not None, reason=str(WHY))
SHAPES = {"up": (72, 160), "down": (33, 144)}  # rows and columns that fill no whole tile


@built
@matrix(format=("nvfp4", "mxfp4"))
def test_tiles_come_back_as_the_rows_that_they_were_made_of(format):
    compare_tiles(format)


def compare_tiles(format):
    tiles, in_order, want = tiled_pages(format, SHAPES)
    got = in_rows(tiles, in_order)
    assert got.layout == in_order and got.pages[0] is got.pages[2] is None
    for page, fields in zip(got.pages[1::2], want, strict=True):
        for name, tensor in unpack(page, in_order).items():
            assert torch.equal(tensor.view(torch.uint8), fields[name].view(torch.uint8)), name


def tiled_pages(format, shapes):
    """Pages of experts 1 and 3 in tile order, the layout of the format, and their fields in it."""
    fmt, pages, want = get_format(format), [], []
    in_order = join_layouts({part: fmt.layout(shape, torch.bfloat16) for part, shape in shapes.items()})
    tiled = join_layouts({part: tile_layout(format, shape) for part, shape in shapes.items()})
    for _ in range(2):
        coarse = {
            part: fmt.encode(torch.randn(n, k) * torch.logspace(-3, 3, n)[:, None]) for part, (n, k) in shapes.items()
        }
        tiles = {part: pack_tiles(format, tensors, shapes[part]) for part, tensors in coarse.items()}
        pages.append(pack(join_fields(tiles), tiled, new_page(tiled)))
        want.append(join_fields(coarse))
    return ExpertPages(format, torch.bfloat16, shapes, tiled, [None, pages[0], None, pages[1]]), in_order, want


GATES = {  # and rows of "up": whole tiles before the first value, or not
    "silu": (Gate("silu"), 96),
    "interleaved": (Gate("silu", interleaved=True, alpha=1.702, limit=7.0, shift=1.0), 72),
    "ungated": (Gate("relu2", gated=False), 72),
}


@built
@matrix(format=("nvfp4", "mxfp4"), gate=tuple(GATES))
def test_tiles_are_multiplied_as_the_rows_that_they_were_made_of(format, gate):
    gate, n = GATES[gate]
    tiles, in_order, _ = tiled_pages(format, {"up": (n, 160), "down": (33, gate.columns(n))})
    if not takes_tiles(tiles, torch.bfloat16, gate):
        pytest.skip("this CPU does not multiply bf16")
    rows, bias = in_rows(tiles, in_order), torch.randn(4, n).bfloat16()
    for ids in ([[3]], [[1, 3]], [[3, -1], [1, 3], [3, 1]], [[1]] * 5, [[3]] * 23):
        ids = torch.tensor(ids)
        found, want = (
            experts_up(x, ids, pages, gate=gate, bias_EN=bias)
            for x in [torch.randn(len(ids), 160).bfloat16()]
            for pages in (tiles, rows)
        )
        torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-3 * want.abs().max().item())
        found, want = (experts_down(want, ids, None, pages) for pages in (tiles, rows))
        torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-3 * want.abs().max().item())


@built
def test_a_scale_that_is_no_number_makes_its_results_no_numbers():
    tiles, _, _ = tiled_pages("nvfp4", {"up": (16, 128), "down": (16, 128)})
    if not takes_tiles(tiles, torch.bfloat16, Gate("none", gated=False)):
        pytest.skip("this CPU does not multiply bf16")
    at = tiles.offsets("down")["mma_tiles_v1"] + 1024
    tiles.pages[1][at + 4 * 4 * 2 + 2] = 0x7F  # lane 8, which has rows 2 and 10: the first scale of row 10
    found = experts_down(torch.ones(1, 128).bfloat16(), torch.tensor([[1]]), None, tiles)
    assert found.isnan().nonzero().tolist() == [[0, 10]]


def test_gates_that_share_a_row_of_tiles_with_values_are_put_in_order_first():
    tiles, _, _ = tiled_pages("nvfp4", {"up": (72, 128), "down": (16, 36)})
    assert not takes_tiles(tiles, torch.bfloat16, Gate("silu"))
    assert not takes_tiles(tiles, torch.float32, Gate("silu", interleaved=True))


def test_pages_in_an_unknown_order_are_refused_by_their_parts():
    layouts = [join_layouts({"up": tile_layout("nvfp4", shape)}) for shape in ((16, 128), (32, 128))]
    strange = ExpertPages("nvfp4", torch.bfloat16, {"down": (16, 128)}, layouts[0], [None])
    with pytest.raises(KernelError, match="pages of down are neither"):
        in_rows(strange, layouts[1])
