"""Models that share a runtime on a CUDA device."""

import copy

import pytest
import torch
from torch import nn

import vbrt

pytestmark = pytest.mark.gpu

WIDTH = 256


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))).to(torch.bfloat16).eval()


def pair(gpu_pages: float):
    """Two models, a wrapper of the first, an input, and what both give; room for some dense pages on the GPU."""
    one, two = network(1), network(2)
    x = torch.randn(3, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        want = [copy.deepcopy(model).cuda()(x) for model in (one, two)]
    page = vbrt.make_plan(one, vbrt.load_config("dense")).page_bytes // 8
    room = {"gpu": {"budget": int(gpu_pages * page)}, "cpu": {"budget": 20 * page}}
    return vbrt.wrap(one, "dense", tiers=room), two, x, want


def check(vbs, x, want):
    with torch.no_grad():
        for _ in range(3):
            for vb, y in zip(vbs, want, strict=True):
                assert torch.equal(vb(x), y)
                for tier in vb.stats().tiers.values():
                    assert tier.held_bytes <= tier.peak_bytes <= tier.budget_bytes


@pytest.mark.parametrize("gpu_pages", [4, 9, 17])
def test_two_models_stream_through_one_gpu_budget_and_the_last_one_has_it_to_itself(gpu_pages):
    a, two, x, want = pair(gpu_pages)
    check([a], x, want[:1])
    b = vbrt.wrap(two, "dense", runtime=a.runtime)
    check([a, b], x, want)
    assert a.stack.at_rest is (gpu_pages == 17)
    a.set_budget("gpu", 5 * b.plan.page_bytes // 8)
    check([b, a], x, want[::-1])
    a.set_budget("gpu", gpu_pages * b.plan.page_bytes // 8)
    b.close()
    check([a], x, want[:1])
    assert a.stack.at_rest is (gpu_pages > 8) and len(a.stack.pages) == 8
    a.close()


def test_an_auto_budget_counts_the_pages_of_both_models():
    one, two = network(1), network(2)
    a = vbrt.wrap(one, "dense")
    b = vbrt.wrap(two, "dense", runtime=a.runtime)
    x = torch.randn(3, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(3):
            a(x), b(x)
    assert a.runtime.balance is not None and a.runtime.page_bytes == a.plan.page_bytes + b.plan.page_bytes
    assert a.stack.at_rest and b.stats().hits == 3 * 8 and not a.runtime.stats().fallbacks
    a.runtime.close()


def test_a_model_that_would_move_pages_of_a_recorded_graph_is_refused():
    a, two, x, want = pair(9)
    check([a], x, want[:1])
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = a(x)
    with pytest.raises(vbrt.TierError, match="a CUDA graph has recorded where the pages lie"):
        vbrt.wrap(two, "dense", runtime=a.runtime)
    assert type(two[0]) is nn.Linear and a.stack.at_rest
    graph.replay()
    assert torch.equal(y, want[0])
    a.close()
