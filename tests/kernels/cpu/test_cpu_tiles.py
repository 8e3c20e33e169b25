"""Pages of experts in the order of a GPU's tiles: put back into the order of their format by C, or multiplied."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.cuda.gpu_cases import error
from tests.matrix import matrix
from vbrt.errors import KernelError
from vbrt.formats import get_format
from vbrt.formats.joint_planes import join_fields, join_layouts
from vbrt.formats.page import new_page, pack, unpack
from vbrt.kernels.cpu import build, compiler
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


def of_many_sizes(n, k):
    return torch.randn(n, k) * torch.logspace(-3, 3, n)[:, None]


def tiled_pages(format, shapes, weights=of_many_sizes):
    """Pages of experts 1 and 3 in tile order, the layout of the format, and their fields in it."""
    fmt, pages, want = get_format(format), [], []
    in_order = join_layouts({part: fmt.layout(shape, torch.bfloat16) for part, shape in shapes.items()})
    tiled = join_layouts({part: tile_layout(format, shape) for part, shape in shapes.items()})
    for _ in range(2):
        coarse = {part: fmt.encode(weights(n, k)) for part, (n, k) in shapes.items()}
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
@matrix(gate=tuple(GATES), format=("nvfp4", "mxfp4"), dtype=(torch.bfloat16, torch.float16))
def test_tiles_are_multiplied_as_the_rows_that_they_were_made_of(gate, format, dtype):
    gate, n = GATES[gate]
    tiles, in_order, _ = tiled_pages(format, {"up": (n, 160), "down": (33, gate.columns(n))}, torch.randn)
    if not takes_tiles(tiles, dtype, gate):
        pytest.skip("this CPU does not multiply tiles")
    rows, bias = in_rows(tiles, in_order), torch.randn(4, n).to(dtype)
    for ids in ([[3]], [[1, 3]], [[3, -1], [1, 3], [3, 1]], [[1]] * 5, [[3]] * 23):
        ids = torch.tensor(ids)
        found, want = (
            experts_up(x, ids, pages, gate=gate, bias_EN=bias)
            for x in [torch.randn(len(ids), 160).to(dtype)]
            for pages in (tiles, rows)
        )
        torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-3 * want.abs().max().item())
        found, want = (experts_down(want, ids, None, pages) for pages in (tiles, rows))
        torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-3 * want.abs().max().item())


ROUNDING = {torch.bfloat16: 2.5e-3, torch.float16: 3e-4}  # of results


@pytest.fixture
def avx2(use_library, library_for):
    """The experts' kernels built for AVX2, in the place of this CPU's own: tiles are multiplied in integers."""
    found = {each.name: each for each in compiler.served(compiler.machine(), compiler.cpu_features())}
    if "avx2" not in found:
        pytest.skip("this CPU has no AVX2")
    use_library("experts", library_for("experts", found["avx2"]))


def check_products_of_tiles():
    """Products are as close to float64 as x's dtype allows, with the same bits among other tokens."""
    for format in ("nvfp4", "mxfp4"):
        for n, k in ((40, 272), (17, 48)):
            tiles, _, (_, fields) = tiled_pages(format, {"down": (n, k)}, torch.randn)
            coarse = {name.removeprefix("down."): tensor for name, tensor in fields.items()}
            w_NK = get_format(format).decode(coarse, (n, k), torch.float64)
            for dtype in ROUNDING:
                if not takes_tiles(tiles, dtype, Gate("none", gated=False)):
                    continue
                x = (torch.randn(7, k) * torch.randn(k).exp()).to(dtype)
                y = down(tiles, x)
                assert error(y, F.linear(x.double(), w_NK)) <= ROUNDING[dtype]
                assert all(torch.equal(down(tiles, x[m:last]), y[m:last]) for m, last in ((0, 1), (2, 4), (3, 7)))


def down(pages, x):
    """Products of tokens with expert 3."""
    return experts_down(x, torch.full((len(x), 1), 3), None, pages)


def test_products_in_integers_are_as_close_as_the_dtype_allows(avx2):
    tiles, *_ = tiled_pages("nvfp4", {"down": (16, 128)})
    assert all(takes_tiles(tiles, dtype, Gate("none", gated=False)) for dtype in ROUNDING)
    check_products_of_tiles()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_sums_of_the_largest_numbers_do_not_overflow(avx2, format, dtype):
    for value in (6.0, -6.0):
        tiles, *_ = tiled_pages(format, {"down": (16, 320)}, lambda n, k, value=value: torch.full((n, k), value))
        for x in (torch.ones(2, 320), -torch.ones(2, 320)):
            assert down(tiles, x.to(dtype)).eq(320 * value * x[0, 0]).all()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_x_that_is_no_number_shows_in_its_token_alone_and_tiny_x_is_zero(avx2, dtype):
    tiles, *_ = tiled_pages("mxfp4", {"down": (24, 208)}, torch.randn)
    for odd in (float("nan"), float("inf"), -float("inf")):
        x = torch.randn(4, 208).to(dtype)
        x[1, 77] = odd
        y = down(tiles, x)
        assert y[1].isnan().all() and y[[0, 2, 3]].isfinite().all()
    for tiny in (0.0, 1e-38, 1e-35):
        assert not down(tiles, torch.full((2, 208), tiny).to(dtype)).any()


@built
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_a_scale_that_is_no_number_makes_its_results_no_numbers(dtype):
    tiles, _, _ = tiled_pages("nvfp4", {"up": (16, 128), "down": (16, 128)})
    if not takes_tiles(tiles, dtype, Gate("none", gated=False)):
        pytest.skip("this CPU does not multiply tiles")
    for lane, half, row in ((8, 1, 10), (28, 0, 7), (31, 1, 15)):  # a lane has rows lane / 4 and lane / 4 + 8
        page = tiles.pages[1].clone()
        page[tiles.offsets("down")["mma_tiles_v1"] + 1024 + lane * 4 + half * 2] = 0x7F
        pages = replace(tiles, pages=[None, page, None, None])
        found = experts_down(torch.ones(1, 128).to(dtype) / 1024, torch.tensor([[1]]), None, pages)
        assert found.isnan().nonzero().tolist() == [[0, row]]


def test_gates_that_share_a_row_of_tiles_with_values_are_put_in_order_first():
    tiles, _, _ = tiled_pages("nvfp4", {"up": (72, 128), "down": (16, 36)})
    assert not takes_tiles(tiles, torch.bfloat16, Gate("silu"))
    assert not takes_tiles(tiles, torch.float32, Gate("silu", interleaved=True))
    assert not takes_tiles(tiles, torch.float64, Gate("silu", interleaved=True))


def test_pages_in_an_unknown_order_are_refused_by_their_parts():
    layouts = [join_layouts({"up": tile_layout("nvfp4", shape)}) for shape in ((16, 128), (32, 128))]
    strange = ExpertPages("nvfp4", torch.bfloat16, {"down": (16, 128)}, layouts[0], [None])
    with pytest.raises(KernelError, match="pages of down are neither"):
        in_rows(strange, layouts[1])
