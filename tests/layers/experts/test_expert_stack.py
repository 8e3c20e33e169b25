"""The matrices of leased experts as one tensor: what is read of it where they lie, and what gets a copy."""

import pytest
import torch

from tests.matrix import matrix
from vbrt.layers.experts.expert_stack import Bank

MATRICES = [torch.randn(16, 8).bfloat16() for _ in range(5)]
STACKED = torch.stack(MATRICES)
READS = {
    "number": lambda w: w[3],
    "tensor of no dimension": lambda w: w[torch.tensor(2)],
    "row of numbers": lambda w: w[torch.tensor([4, 0, 4])],
    "turned": lambda w: w.transpose(1, 2)[1],
    "turned row": lambda w: w.transpose(-2, -1)[torch.tensor([1, 3])],
    "twice turned": lambda w: w.transpose(-1, 1).transpose(2, -2)[2],
    "groups": lambda w: _grouped(torch.ones(7, 8).bfloat16(), w.transpose(1, 2), [2, 2, 5, 6, 7]),
    "groups of transposes": lambda w: _grouped(torch.ones(3, 16).bfloat16(), w, [0, 0, 0, 3, 3]),
    "no rows": lambda w: _grouped(torch.ones(0, 16).bfloat16(), w, [0, 0, 0, 0, 0]),
}
COPIES = {
    "slice": lambda w: w[1:3],
    "mask": lambda w: w[torch.tensor([True, False, True, False, True])],
    "two indices": lambda w: w[1, 2],
    "table of numbers": lambda w: w[torch.tensor([[0, 1], [2, 3]])],
    "other dimensions": lambda w: w.transpose(0, 1),
    "bmm": lambda w: torch.bmm(torch.ones(5, 2, 16).bfloat16(), w),
    "sum": lambda w: w.transpose(1, 2).sum(1),
    "view": lambda w: w.view(-1, 8),
    "list": lambda w: torch.cat([w, w]),
    "float": lambda w: w.float() + 1,
}


def _grouped(x, w, ends):
    return torch.nn.functional.grouped_mm(x, w, offs=torch.tensor(ends, dtype=torch.int32))


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_experts_are_read_where_they_lie(read, monkeypatch):
    monkeypatch.setattr(Bank, "stacked", lambda self: pytest.fail("all matrices were copied"))
    got = read(Bank.of(MATRICES))
    assert type(got) is torch.Tensor and torch.equal(got, read(STACKED))


def test_an_expert_is_the_page_itself():
    assert Bank.of(MATRICES)[2].data_ptr() == MATRICES[2].data_ptr()


@pytest.mark.parametrize("read", COPIES.values(), ids=COPIES)
def test_whatever_else_is_asked_gets_a_copy_of_all(read):
    got = read(Bank.of(MATRICES))
    assert type(got) is torch.Tensor and torch.equal(got, read(STACKED))


def test_it_looks_like_the_stacked_tensor(monkeypatch):
    monkeypatch.setattr(Bank, "stacked", lambda self: pytest.fail("all matrices were copied"))
    for bank, plain in ((Bank.of(MATRICES), STACKED), (Bank.of(MATRICES, turned=True), STACKED.transpose(1, 2))):
        for fact in ("shape", "dtype", "device", "ndim", "requires_grad"):
            assert getattr(bank, fact) == getattr(plain, fact)
        assert (len(bank), bank.dim(), bank.size(1), bank.numel()) == (5, 3, plain.size(1), 640)


@matrix(dtype=[torch.float32, torch.bfloat16], rows=[1, 2, 17], columns=[8, 96], inputs=[16, 200])
def test_groups_have_the_bits_of_torchs_own(dtype, rows, columns, inputs):
    matrices = [torch.randn(columns, inputs).to(dtype) for _ in range(3)]
    x, ends = torch.randn(2 * rows + 1, inputs).to(dtype), [rows, rows, 2 * rows]
    got = _grouped(x, Bank.of(matrices).transpose(1, 2), ends)
    want = _grouped(x, torch.stack(matrices).transpose(1, 2), ends)
    assert torch.equal(got[: ends[-1]], want[: ends[-1]])


def test_gradients_pass_through_groups():
    x = torch.randn(4, 8, requires_grad=True)
    matrices = [m.float() for m in MATRICES[:2]]
    _grouped(x, Bank.of(matrices).transpose(1, 2), [1, 3]).sum().backward()
    want = torch.stack([matrices[0].sum(0), matrices[1].sum(0), matrices[1].sum(0), torch.zeros(8)])
    torch.testing.assert_close(x.grad, want)
