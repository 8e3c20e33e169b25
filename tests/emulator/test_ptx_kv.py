"""The kernels for pages of a KV cache as they are compiled, run on the CPU: see `ptx`."""

import pytest
import torch

from tests.emulator.test_ptx import copies, gpu  # noqa: F401  # fixtures
from vbrt.generation.kv.paged_codes import PagedCodes
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


@pytest.mark.parametrize(("bits", "width"), [(8, 32), (4, 64), pytest.param(4, 48, marks=pytest.mark.exhaustive)])
def test_tokens_of_any_pages_are_gathered_as_torch_does(bits, width, gpu, monkeypatch):  # noqa: F811
    kv_pages._launchers.cache_clear()
    torch.manual_seed(0)
    code = page_code(KVShape(1, 2, 64, width, width, torch.bfloat16), bits)
    pages = code.encode(*(torch.randn(1, 2, 64 * 4, width).bfloat16() for _ in range(2))).view(2, 2, -1)
    tokens = PagedCodes(code, 2).over(pages, 256)
    numbers = torch.tensor([[0, 3], [1, 0], [1, 63], [0, 31], [1, 5]]) @ torch.tensor([256, 1])
    tokens.begin(numbers[:0], numbers)
    plain = tokens.read(1)
    monkeypatch.setattr(kv_pages, "gathers", lambda codes: True)
    assert all(torch.equal(a, b) for a, b in zip(tokens.read(1), plain, strict=True))
    assert plain[0].abs().max() > 1 and gpu == ["gather_kernel"] * 2
    kv_pages._launchers.cache_clear()
