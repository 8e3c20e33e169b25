"""Kernels of trellis-coded weights, as they are compiled, run on the CPU."""

import pytest
import torch

from tests.emulator.test_ptx import gpu
from tests.formats.test_t3 import random_plane
from tests.kernels.cuda.gpu_cases import error
from tests.matrix import matrix
from vbrt.formats import WeightPlanes, get_format, t3
from vbrt.kernels import reference
from vbrt.kernels.cuda.trellis import linear as trellis_linear
from vbrt.kernels.cuda.trellis import viterbi

__all__ = ["gpu"]

pytest.importorskip("triton.experimental.gluon")
FORMAT = get_format("t3")


def planes_of(shape, dtype):
    coarse = random_plane(*shape)
    coarse["scales"][3] = 0
    return WeightPlanes("t3", shape, dtype, coarse), FORMAT.decode(coarse, shape, torch.float64)


@pytest.mark.sample(1)
@matrix(gpu=[90, 80], k=[192, 2048, 100, 1088], tokens=[1, 11, 32], indirect=("gpu",), at_most=3)
def test_few_tokens(gpu, k, tokens):
    """Rows that end within a tile of rows, blocks of 64 and 128, more columns than a step of all warps takes."""
    planes, weight = planes_of((40, k), torch.bfloat16)
    x, bias = torch.randn(tokens, k).bfloat16(), torch.randn(40).bfloat16()
    y = trellis_linear._product(x, *trellis_linear._fields(planes), bias, "silu")
    assert error(y, reference.ACTIVATIONS["silu"](x.double() @ weight.T + bias.double())) < 4e-3
    y = trellis_linear._product(x, *trellis_linear._fields(planes), None, "none")
    assert error(y, x.double() @ weight.T) < 4e-3 and not y[:, 3].any()
    assert gpu == ["rotate_kernel", "linear_kernel"] * 2


@pytest.mark.sample(1)
@matrix(gpu=[90, 80], k=[64, 100, 256], dtype=[torch.bfloat16, torch.float32, torch.float16], indirect=("gpu",))
def test_decoded_weights_are_the_references(gpu, k, dtype):
    planes, _ = planes_of((40, k), dtype)
    assert torch.equal(trellis_linear._decode(planes, dtype), reference.decode_weight(planes))
    large = planes.coarse | {"tensor_scale": torch.full((1,), 2.0**30)}
    planes = WeightPlanes("t3", (40, k), dtype, large)
    assert torch.equal(trellis_linear._decode(planes, dtype), reference.decode_weight(planes))
    assert gpu == ["decode_kernel"] * 2


def test_paths_are_closed_and_lose_what_the_reference_loses(gpu):
    """Of short tiles: two programs, a few steps, and weights that lie on a path."""
    table, pairs, warm = t3.codebook(torch.device("cpu")), 6, 2
    x = torch.randn(2, pairs, 2, generator=torch.Generator().manual_seed(0))
    found = viterbi.paths(x, warm)
    assert torch.equal(found >> 6, found.roll(1, 1) & 0xFF)
    losses = [(table[states.long()] - x).square().sum((1, 2)) for states in (found, t3.trellis_path(x, warm))]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=0)
    assert torch.equal(viterbi.paths(table[found.long()], warm), found)
    assert gpu == ["path_kernel"] * 2
