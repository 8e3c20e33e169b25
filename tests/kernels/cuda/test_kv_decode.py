"""The kernel that decodes pages of a KV cache, in Triton's interpreter; tests/generation has it on a GPU."""

import os
import subprocess
import sys
import textwrap

import pytest


def test_the_kernel_decodes_as_torch_does_in_the_interpreter():
    """In a process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton")
    code = """
        import torch
        from vbrt.generation.kv_codes import KVShape, page_code
        from vbrt.kernels.cuda import kv_decode
        from vbrt.kernels.cuda import kv_decode_triton as device

        def launch(index, grid, tensors, numbers, *, warps, specialized, **constants):
            device.decode_kernel[grid](*tensors, *numbers, **constants)

        torch.manual_seed(0)
        for bits, dims, dtype in ((8, (16, 24), torch.float32), (4, (24, 32), torch.float16)):
            code = page_code(KVShape(2, 3, 48, *dims, dtype), bits)
            pages = code.encode(*(torch.randn(2, 3, 96, dim).to(dtype) for dim in dims))
            for rows in (None, torch.tensor([1, 0, 1])):
                found = [[torch.zeros(2 if rows is None else 3, 3, 100, dim, dtype=dtype) for dim in dims]
                         for _ in range(2)]
                plain, kernel = ([x[:, :, 2:98] for x in pair] for pair in found)
                code.decode(pages, tuple(plain), rows)
                codes_K, bounds_K, codes_V, bounds_V = code._parts.views(pages)
                groups = [kv_decode.Groups(code.token_group, 1, bits), kv_decode.Groups(1, code.channel_group, bits)]
                kv_decode.launch(codes_K, bounds_K, groups[0], kernel[0], rows, launch)
                kv_decode.launch(codes_V, bounds_V, groups[1], kernel[1], rows, launch)
                assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), (bits, dims, rows)
        """
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, check=True, timeout=120)
