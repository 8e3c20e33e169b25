import pytest
import torch
import torch.nn.functional as F

from vbrt.formats import WeightPlanes
from vbrt.kernels import reference
from vbrt.kernels.cuda.e2m1 import linear as e2m1_linear
from vbrt.kernels.cuda.e2m1.tiles import TILES, tiled_weight


@pytest.fixture
def kernel_on_cpu():
    """Operators of ours as plain torch computes them."""

    def linear(x, tiles, scale, bias, format, n, activation):
        weight = tiled_weight(tiles, scale, format, n, x.shape[-1])
        planes = WeightPlanes(format, (n, x.shape[-1]), x.dtype, {TILES: weight.tiles, "tensor_scale": weight.scale})
        return reference.linear(x, e2m1_linear.plain(planes), bias, activation)

    def gated(x, weights, format, n, activation, squares=None, eps=0.0):
        (gate, scale), (up, other_scale) = pairs(weights, 2)
        x = divided(x, squares, eps)
        return linear(x, gate, scale, None, format, n, activation) * linear(x, up, other_scale, None, format, n, "none")

    def linears(x, weights, format, ns, squares=None, eps=0.0):
        x, given = divided(x, squares, eps), zip(pairs(weights, len(ns)), ns, strict=True)
        return [linear(x, *pair, None, format, n, "none") for pair, n in given]

    def pairs(weights, count):
        return (
            [(page, None) for page in weights]
            if len(weights) == count
            else zip(weights[::2], weights[1::2], strict=True)
        )

    def divided(x, squares, eps):
        return x if squares is None else (x.float() * torch.rsqrt(squares.sum() / x.shape[-1] + eps)).to(x.dtype)

    def residual(x, tiles, scale, other, gain, format, n):
        total = linear(x, tiles, scale, None, format, n, "none") + other
        return total, total * gain, F.pad(total.flatten(), (0, -n % 16)).float().square().view(-1, 16).sum(1)

    def normed_sum(x, other, gain, eps):
        total = x + other
        return total, F.rms_norm(total, gain.shape, gain, eps)

    torch.compiler.reset()
    with torch.library._scoped_library("vbrt", "IMPL") as library:
        library.impl("normed_sum", normed_sum, "CPU")
        library.impl("fp4_linear", linear, "CPU")
        library.impl("fp4_gated", gated, "CPU")
        library.impl("fp4_linears", linears, "CPU")
        library.impl("fp4_residual", residual, "CPU")
        yield
    torch.compiler.reset()
