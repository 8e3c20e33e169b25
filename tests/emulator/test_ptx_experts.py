"""The kernels of routed experts as they are compiled, behind their own launches, run on the CPU: see `ptx`."""

import pytest
import torch

from tests.emulator.machine import Machine
from tests.emulator.test_ptx import copies, gpu  # noqa: F401  # fixtures
from tests.kernels.cuda.gpu_cases import error
from tests.kernels.expert_cases import exact_rows, expert_pages, routing
from tests.matrix import matrix
from vbrt.kernels.cuda.experts import many
from vbrt.kernels.cuda.experts.pairs import Groups, most_blocks
from vbrt.kernels.cuda.launch_table import GroupedLaunch
from vbrt.kernels.experts import Gate

pytest.importorskip("triton.experimental.gluon")

E = 3
GATES = {
    "silu": Gate("silu"),
    "gpt-oss": Gate("silu", interleaved=True, alpha=1.702, limit=0.5, shift=1.0),
    "relu2": Gate("relu2", gated=False),
    "none": None,
}


@pytest.fixture(autouse=True)
def pairs(monkeypatch):
    """Groups in plain torch: the machine has no atomics in shared memory."""

    def group_pairs(ids_Tk, experts, block):
        ids = ids_Tk.flatten()
        group = torch.where((ids >= 0) & (ids < experts), ids, experts)
        counts = group.bincount(minlength=experts + 1)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        blocks = [(e, at) for e in range(experts + 1) for at in range(offsets[e], offsets[e + 1], block)]
        room = most_blocks(len(ids), experts, block) - len(blocks)
        of, first = zip(*blocks, *[(-1, 0)] * room, strict=True)
        return Groups(group.argsort(stable=True).int(), offsets.int(), *torch.tensor([of, first]).int(), block)

    monkeypatch.setattr(many, "group_pairs", group_pairs)


@matrix(gate=GATES, format=["nvfp4", "mxfp4"], tokens=[32, 64])
def test_many_tokens(gate, format, tokens, gpu, monkeypatch):  # noqa: F811
    pages, weights = expert_pages(format, {"up": (96, 264), "down": (40, 48)}, E, tiled=True, missing=(1,))
    monkeypatch.setattr(Machine, "pages", [page for page in pages.pages if page is not None])
    ids, _ = routing(40, 2, E, sentinels=6)
    ids[ids == 1] = 2
    x, bias = torch.randn(40, 264).bfloat16(), torch.randn(E, 96).bfloat16()
    y = many.products(x, ids, pages, part="up", gate=gate, bias_EN=bias, config=GroupedLaunch(tokens, 3))
    assert error(y, exact_rows(x, ids, weights["up"], gate, bias)) < 4e-3
    assert gpu == ["gather_kernel", "grouped_kernel"]
