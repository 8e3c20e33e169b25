"""Row gather from page-locked host memory, in Triton's interpreter and on a GPU."""

import textwrap

import pytest
import torch

from tests import forked
from vbrt.kernels.cuda.host_rows import gather_rows

#: dtype, shape of a row: words of 8, 4, 2 bytes and 1 byte
ROWS = [
    (torch.bfloat16, (2048,)),
    (torch.float32, (3,)),
    (torch.float16, (5,)),
    (torch.uint8, (7,)),
    (torch.uint8, ()),
    (torch.int16, (2, 3)),
    (torch.float8_e4m3fn, (16,)),
]


def test_rows_are_those_of_the_table_in_the_interpreter():
    """In a process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton")
    code = """
        import torch
        from tests.kernels.cuda.test_host_rows import ROWS
        from vbrt.kernels.cuda import host_rows
        for dtype, inner in ROWS:
            table = torch.randint(0, 120, (50, *inner), dtype=torch.uint8).to(dtype)
            index = torch.tensor([0, 49, 7, 7, 31])
            out = torch.full((5, *inner), 9, dtype=torch.uint8).to(dtype)
            host_rows.launch(table, index, out)
            assert torch.equal(out.view(torch.uint8), table.view(torch.uint8)[index]), (dtype, inner)
            host_rows.launch(table, torch.tensor([50, -1, 3, 0, 1]), out)  # no row is read outside of the table
            assert not out.view(torch.uint8)[:2].any() and out.view(torch.uint8)[2:].any()
        print("same bits")
    """
    done = forked.run(textwrap.dedent(code), interpreted=True)
    assert done.stdout.strip() == "same bits", done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "inner"), ROWS)
def test_rows_are_those_of_the_table_on_a_gpu(dtype, inner):
    torch.manual_seed(0)
    table = torch.randint(0, 120, (5000, *inner), dtype=torch.uint8).to(dtype).pin_memory()
    index = torch.randint(0, 5000, (301,), device="cuda")
    rows = gather_rows(table, index)
    assert rows.is_cuda and torch.equal(rows.cpu().view(torch.uint8), table.view(torch.uint8)[index.cpu()])
    assert gather_rows(table, index[:0]).shape == (0, *inner)
