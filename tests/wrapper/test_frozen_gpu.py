"""Weights that are read on a GPU while their dense values are in host memory."""

import pytest
import torch

import vbrt
from tests.wrapper.test_frozen import Reader

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("format", ["dense", "nvfp4"])
@pytest.mark.parametrize("holds", [False, True])
def test_a_weight_in_host_memory_that_a_pass_reads_is_decoded_on_the_gpu(format, holds):
    dtype = torch.bfloat16
    vb = vbrt.wrap(Reader(dtype).eval(), {"weights": {"min_parameters": 0, "format": format}})
    x = torch.randn(2, 64, dtype=dtype, device="cuda")
    held = vb.module.read.weight if holds else None
    with torch.no_grad():
        first = vb(x)
        assert vb.module.read.weight.is_cuda and torch.equal(vb(x), first)
    assert held is None or (held is vb.module.read.weight and vb.stats().layers["read"].materialized)
