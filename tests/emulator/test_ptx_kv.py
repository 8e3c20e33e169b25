"""The kernels for pages of a KV cache as they are compiled, run on the CPU: see `ptx`."""

import pytest
import torch

from tests.emulator.test_ptx import copies, gpu  # noqa: F401  # fixtures
from vbrt.generation.kv.quantized import KVShape, page_code
from vbrt.kernels.cuda import kv_pages

pytest.importorskip("triton.experimental.gluon")


@pytest.mark.parametrize("bits", [16, pytest.param(8, marks=pytest.mark.exhaustive), 4])
def test_pages_are_copied_and_decoded_as_torch_does(bits, gpu):  # noqa: F811
    kv_pages._launchers.cache_clear()
    code = page_code(KVShape(2, 1, 64, 32, 64, torch.bfloat16), bits)
    pages = code.encode(*(torch.randn(2, 1, 128, dim).bfloat16() for dim in code.shape.dims))
    for rows in (None, torch.tensor([1, 0])):
        found = [tuple(torch.zeros(2, 1, 130, dim).bfloat16() for dim in code.shape.dims) for _ in range(2)]
        plain, kernel = (tuple(x[:, :, 2:] for x in pair) for pair in found)
        code.decode(pages, plain, rows)
        parts = code._parts.views(pages)
        if bits == 16:
            assert all(kv_pages.copy(part, x, rows) for part, x in zip(parts, kernel, strict=True))
        else:
            kv_pages.decode(*parts[:2], kv_pages.Groups(code.token_group, 1, bits), kernel[0], rows)
            kv_pages.decode(*parts[2:], kv_pages.Groups(1, code.channel_group, bits), kernel[1], rows)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert gpu == ["copy_kernel" if bits == 16 else "decode_kernel"] * 4
    kv_pages._launchers.cache_clear()
