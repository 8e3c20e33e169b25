"""Pairs sorted by expert: every one once, in order, in blocks that hold one expert's."""

import textwrap

import pytest
import torch

from tests import forked
from vbrt.kernels.cuda.experts import pairs
from vbrt.kernels.cuda.experts.pairs import group_pairs, most_blocks

#: (experts, tokens, k, pairs a block), for one launch and for two
CASES = [(4, 3, 2, 8), (7, 1, 1, 8), (130, 2, 8, 16), (5, 60, 4, 8), (1, 0, 2, 8)]


def routed(experts, tokens, k, device="cpu"):
    """Ids with sentinels on both sides, many pairs of one expert, and experts of which there are none."""
    ids = torch.randint(-1, experts + 2, (tokens, k), dtype=torch.int64, device=device)
    ids[1::2, 0] = experts // 2
    return ids


def check(groups, ids, experts):
    """Raises AssertionError if the groups are not those of ids."""
    flat = ids.reshape(-1).cpu()
    group = torch.where((flat >= 0) & (flat < experts), flat, experts)
    order, offsets, block_experts, firsts = (part.cpu() for part in groups[:4])
    assert torch.equal(order.long(), torch.argsort(group, stable=True))
    assert offsets.tolist() == [int((group < e).sum()) for e in range(experts + 2)]
    want = [(e, first) for e in range(experts + 1) for first in range(offsets[e], offsets[e + 1], groups.block)]
    got = list(zip(block_experts.tolist(), firsts.tolist(), strict=True))
    assert got[: len(want)] == want and all(e == -1 for e, _ in got[len(want) :])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_more_blocks_than_there_is_room_for(case):
    experts, tokens, k, block = case
    total = tokens * k
    worst = [1] * min(total, experts + 1)  # each group one pair, and one all others
    if worst:
        worst[0] += total - len(worst)
    assert sum(-(-count // block) for count in worst) <= most_blocks(total, experts, block) <= total


def test_pairs_are_sorted_in_one_launch_or_two_in_the_interpreter():
    """In a process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton")
    code = """
        import torch
        from tests.kernels.cuda.experts.test_pairs import CASES, check, interpreted, routed
        from vbrt.kernels.cuda.experts import pairs
        interpreted()
        torch.manual_seed(0)
        for case in CASES:
            *shape, block = case
            for few, span, dtype in ((4096, 32, torch.int32), (-1, 16, torch.int64)):
                pairs._FEW_PAIRS, pairs._SPAN, pairs._PART = few, span, 8
                ids = routed(*shape).to(dtype)
                check(pairs.group_pairs(ids, shape[0], block), ids, shape[0])
        print("sorted")
    """
    done = forked.run(textwrap.dedent(code), interpreted=True)
    assert done.stdout.strip() == "sorted", done.stderr


def interpreted():
    """Let launches run in Triton's interpreter, on tensors of the CPU."""
    from vbrt.kernels.cuda import devices, launcher

    def run(self, device, grid, tensors, numbers, *, warps, specialized=(), **constants):
        self._kernel[grid](*tensors, *numbers, **constants)

    launcher.Launcher.__call__ = run
    devices.capability = lambda index: (8, 0)


@pytest.mark.parametrize("kernel", ["group_kernel", "count_kernel", "place_kernel"])
def test_the_kernels_compile(kernel):
    pytest.importorskip("triton")
    from tests.kernels.cuda.gpu_cases import compiled
    from vbrt.kernels.cuda.experts import pairs_triton

    kernel = getattr(pairs_triton, kernel)
    sizes = {"BLOCK": 8, "BINS": 256, "RANKED": 32, "SPAN": 256, "PART": 32, "DEPENDENT": True}
    constants = {name: sizes[name] for name in kernel.arg_names if name in sizes}
    names = [name for name in kernel.arg_names if name not in sizes]
    types = {name: "i32" if not name.endswith("_ptr") else "*i64" if name == "id_ptr" else "*i32" for name in names}
    ptx = compiled(kernel, types, constants, 90, gluon=False).asm["ptx"]
    assert "griddepcontrol.wait" in ptx and ".local" not in ptx


@pytest.mark.gpu
@pytest.mark.parametrize("few", [4096, -1])
@pytest.mark.parametrize("case", [*CASES, (128, 64, 8, 8), (8, 3000, 2, 64), (512, 1000, 10, 128)], ids=str)
def test_pairs_are_sorted_on_a_gpu_and_in_graphs(case, few, monkeypatch):
    monkeypatch.setattr(pairs, "_FEW_PAIRS", few if case[1] < 500 else pairs._FEW_PAIRS)
    *shape, block = case
    experts, ids = shape[0], routed(*shape, device="cuda")
    for dtype in (torch.int64, torch.int32):
        given = ids.to(dtype)
        check(group_pairs(given, experts, block), given, experts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        groups = group_pairs(ids, experts, block)
    ids.copy_(routed(*shape, device="cuda"))
    graph.replay()
    check(groups, ids, experts)
