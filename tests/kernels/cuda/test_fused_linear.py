"""One launch for several layers, or for a sum and its norm, against float64 on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.cuda.gpu_cases import error, poison, replayed, tiled
from vbrt.errors import KernelError
from vbrt.kernels.cuda.e2m1 import fused_linear
from vbrt.kernels.cuda.e2m1.tiles import TILES, weight_of

NAMES = ("nvfp4", "mxfp4")


def parts_of(weights):
    """Tiles and scale of each, as operators take them."""
    return [part for weight in weights for part in (weight.tiles, weight.scale)]


@pytest.mark.gpu
@pytest.mark.parametrize("k", [64, 200, 2730, 4096, 32768])
def test_a_sum_and_its_norm_match_float64(k):
    gain = torch.randn(k, device="cuda", dtype=torch.bfloat16)
    for tokens in (1, 3, 16):
        x, other = (torch.randn(2 * tokens, k, device="cuda").bfloat16()[::2] for _ in range(2))
        poison()
        total, y = fused_linear.normed_sum(x, other, gain, 1e-5)
        assert torch.equal(total, x + other)
        assert error(y, F.rms_norm(total.double(), (k,), gain.double(), 1e-5)) < 3e-3
    torch.library.opcheck(torch.ops.vbrt.normed_sum, (x, other, gain, 1e-5))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 256), (416, 200), (2736, 72), (4096, 1024), (8256, 1024)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_gated_pair_matches_float64(name, shape):
    (gate, gate_weight), (up, up_weight) = tiled(name, shape), tiled(name, shape)
    for tokens in (1, 3, 8, 9, 16):
        x = (3 * torch.randn(tokens, shape[1], device="cuda") + 0.5).bfloat16()
        assert fused_linear.gates_in_one(x.dtype, tokens, *shape)
        poison()
        y = fused_linear.gated(x, weight_of(gate), weight_of(up), "silu")
        want = F.silu(x.double() @ gate_weight.T) * (x.double() @ up_weight.T)
        assert error(y, want) < 3e-3, tokens


@pytest.mark.gpu
def test_gated_results_do_not_change_and_survive_graphs_and_compile():
    gate, up = (weight_of(tiled("nvfp4", (1024, 1024))[0]) for _ in range(2))
    x = torch.randn(1, 4, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        want = fused_linear.gated(x, gate, up, "silu")
        assert all(torch.equal(fused_linear.gated(x, gate, up, "silu"), want) for _ in range(20))
        assert torch.equal(replayed(lambda: fused_linear.gated(x, gate, up, "silu")), want)
        given = ([gate.tiles, gate.scale, up.tiles, up.scale], "nvfp4", 1024, "silu")
        torch.library.opcheck(torch.ops.vbrt.fp4_gated, (x, *given))
        run = torch.compile(lambda v: torch.ops.vbrt.fp4_gated(v, *given), fullgraph=True)
        assert torch.equal(run(x), want)


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", [(256, 64), (1000, 40, 72), (4096, 1024, 1024)], ids=str)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_several_products_of_one_input_match_float64(name, shapes):
    made = [tiled(name, (n, 1024)) for n in shapes]
    weights = [weight_of(planes) for planes, _ in made]
    for tokens in (1, 3, 8, 9, 40):
        x = torch.randn(1, tokens, 1024, device="cuda", dtype=torch.bfloat16)
        torch.full((1 << 24,), float("nan"), device="cuda")
        ys = fused_linear.siblings(x, weights)
        for y, (_, weight) in zip(ys, made, strict=True):
            assert y.shape == (1, tokens, len(weight)) and error(y, x.double() @ weight.T) < 3e-3
    torch.library.opcheck(torch.ops.vbrt.fp4_linears, (x, parts_of(weights), name, list(shapes)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_a_scale_behind_its_tiles_is_found_by_every_operator(name):
    ops, x = torch.ops.vbrt, torch.randn(1, 5, 256, device="cuda", dtype=torch.bfloat16)
    made = [tiled(name, (512, 256))[0].coarse for _ in range(2)]
    (tiles, others), (scale, other_scale) = ([planes[part] for planes in made] for part in (TILES, "tensor_scale"))
    pages = [torch.cat([planes[TILES].flatten(), planes["tensor_scale"].view(torch.int32)]) for planes in made]
    parts, one, gated = [tiles, scale, others, other_scale], (None, name, 512, "silu"), (name, 512, "silu")
    assert torch.equal(ops.fp4_linear(x, pages[0], None, *one), ops.fp4_linear(x, tiles, scale, *one))
    assert torch.equal(ops.fp4_gated(x, pages, *gated), ops.fp4_gated(x, parts, *gated))
    got, want = (ops.fp4_linears(x, weights, name, [512, 512]) for weights in (pages, parts))
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    checks = "test_schema", "test_faketensor"  # others compute right after a copy of tiles, which kernels load early
    torch.library.opcheck(ops.fp4_linear, (x, pages[0], None, *one), test_utils=checks)
    torch.library.opcheck(ops.fp4_linears, (x, pages, name, [512, 512]), test_utils=checks)
    torch.library.opcheck(ops.fp4_gated, (x, pages, *gated), test_utils=checks)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(256, 64), (120, 200), (4096, 4096), (4096, 14336), (8200, 2730)], ids=str)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_layers_that_share_a_norm_match_float64(name, shape):
    (n, k), ops = shape, torch.ops.vbrt
    out, weight = tiled(name, shape)
    behind = [tiled(name, (rows, n)) for rows in (512, 512, 72)]
    parts = [parts_of([weight_of(planes)]) for planes, _ in behind]
    x, other, gain = (torch.randn(1, 1, size, device="cuda").bfloat16() for size in (k, n, n))
    gain = gain.flatten()
    given = (x, out.coarse[TILES], out.coarse["tensor_scale"], other, gain, name, n)
    poison()
    total, y, squares = ops.fp4_residual(*given)
    assert error(total, x.double() @ weight.T + other.double()) < 3e-3
    assert torch.equal(y, total * gain)
    torch.testing.assert_close(squares.sum(), total.float().square().sum())
    want = y.double() * torch.rsqrt(total.double().square().mean() + 1e-5)
    for count in (1, 2, 3):
        poison()
        rows = [512, 512, 72][:count]
        zs = ops.fp4_linears(y, [part for pair in parts[:count] for part in pair], name, rows, squares, 1e-5)
        for z, (_, w) in zip(zs, behind, strict=False):
            assert error(z, want @ w.T) < 3e-3
    poison()
    gated = ops.fp4_gated(y, parts[0] + parts[1], name, 512, "silu", squares, 1e-5)
    gate, up = (want @ w.T for _, w in behind[:2])
    assert error(gated, F.silu(gate) * up) < 3e-3
    for again in (ops.fp4_residual(*given) for _ in range(3)):
        assert all(torch.equal(*pair) for pair in zip(again, (total, y, squares), strict=True))
    checks = "test_schema", "test_faketensor"
    torch.library.opcheck(ops.fp4_residual, given, test_utils=checks)
    several = (y, [part for pair in parts for part in pair], name, [512, 512, 72], squares, 1e-5)
    torch.library.opcheck(ops.fp4_linears, several, test_utils=checks)


@pytest.mark.gpu
def test_layers_that_share_a_norm_take_one_token():
    planes, _ = tiled("nvfp4", (256, 128))
    tiles, scale = planes.coarse[TILES], planes.coarse["tensor_scale"]
    x, other = (torch.zeros(2, size, device="cuda", dtype=torch.bfloat16) for size in (128, 256))
    with pytest.raises(KernelError, match="one token of 128"):
        torch.ops.vbrt.fp4_residual(x, tiles, scale, other, other[0], "nvfp4", 256)
    squares = torch.zeros(8, device="cuda")
    with pytest.raises(KernelError, match="one token of 128"):
        torch.ops.vbrt.fp4_gated(x, [tiles, scale] * 2, "nvfp4", 256, "silu", squares, 1e-5)
