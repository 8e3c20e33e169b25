"""Streamed passes on a GPU: by programmes, as CUDA graphs, and both with everything that may come between."""

import contextlib

import pytest
import torch
from torch import nn

import vbrt
from vbrt.errors import TierError
from vbrt.tiers.schedule.graph_recorder import GraphRecorder

pytestmark = pytest.mark.gpu

WIDTH, LAYERS = 512, 12


def wrapped(preset: str, share: float) -> tuple[vbrt.VBModelWrapper, torch.Tensor, torch.Tensor]:
    """A wrapped model, an input of one token, and what the model gives with all pages on the GPU."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH * (1 + i % 2)) if i % 3 else nn.Linear(WIDTH, WIDTH) for i in range(LAYERS)]
    model = nn.Sequential(*(nn.Sequential(layer, Half(layer.out_features)) for layer in layers)).bfloat16().eval()
    x = torch.randn(1, 1, WIDTH, device="cuda", dtype=torch.bfloat16)
    settings = {"weights": {"min_parameters": 0, "keep_head": False}, "compute": {"where": "device"}}
    vb = vbrt.wrap(model, preset, **settings).materialize()
    with torch.no_grad():
        want = vb(x).clone()
    vb.set_budget("gpu", int(vb.plan.page_bytes * share))
    return vb, x, want


class Half(nn.Module):
    """Back to WIDTH columns, of a size that stays."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x[..., -WIDTH:], (WIDTH,))


def capture(vb, x) -> tuple[torch.cuda.CUDAGraph, object, torch.Tensor]:
    recording, graph = vb.runtime.recording("decode"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), recording:
        out = vb(x)
    return graph, recording, out


@pytest.mark.parametrize("preset", ["fp4", "exact", "dense"])
@pytest.mark.parametrize("share", [0.4, 0.7])
@torch.no_grad()
def test_programmes_and_graphs_of_them_give_the_bits_of_the_resident_model(preset, share):
    vb, x, want = wrapped(preset, share)
    for _ in range(8):
        assert torch.equal(vb(x), want)
    assert vb.stack.ledger.running is not None, vb.stack.ledger.programmes.reason
    graph, recording, out = capture(vb, x)
    first = vb.stats().phases["decode"]
    for turn in range(9):
        if turn and turn % 3 == 0 and not recording.replay(graph):
            assert "it has moved since the recording" in recording.ended  # the other order took its room
            graph, recording, out = capture(vb, x)
        before = vb.stats().phases["decode"]
        out.zero_()
        assert recording.replay(graph), recording.ended
        assert torch.equal(out, want)
        if turn % 3 == 1:
            assert torch.equal(vb(x), want)
            vb(x.expand(1, 5, WIDTH))
        if turn % 3 == 2:  # another order, and a stream of its own
            for layer in list(vb.runtime.attachments[0].layers.values())[4:8]:
                layer.handle.weight()
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                assert torch.equal(vb(x), want)
                torch.cuda.current_stream().synchronize()
        after = vb.stats().phases["decode"]
        assert after.passes - before.passes == (1, 2, 2)[turn % 3]
    assert after.prefetched > first.prefetched
    vb.close()


@torch.no_grad()
def test_a_recording_ends_when_pages_move_and_another_one_can_be_made():
    vb, x, want = wrapped("fp4", 0.6)
    for _ in range(4):
        vb(x)
    graph, recording, out = capture(vb, x)
    for share in (0.4, 0.8, 2.0, 0.5):
        vb.set_budget("gpu", int(vb.plan.page_bytes * share))
        assert not recording.replay(graph)
        assert recording.ended
        assert torch.equal(vb(x), want)
        graph, recording, out = capture(vb, x)
        for _ in range(3):
            out.zero_()
            assert recording.replay(graph)
            assert torch.equal(out, want)
    vb.close()
    assert not recording.replay(graph)


@torch.no_grad()
def test_what_cannot_be_recorded_is_refused_with_the_reason():
    vb, x, want = wrapped("fp4", 0.5)
    vb(x)
    with pytest.raises(TierError, match="none has run yet"):
        vb.runtime.recording("verify")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(TierError, match="a CUDA graph cannot record a pass whose pages move"):
        with torch.cuda.graph(graph):
            vb(x)
    recording, graph = vb.runtime.recording("decode"), torch.cuda.CUDAGraph()
    with pytest.raises(TierError, match="the recorded pass ended before its order"):
        with torch.cuda.graph(graph), recording:
            vb.module[:4](x)
    assert torch.equal(vb(x), want)
    vb.close()
    vb = vbrt.wrap(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).bfloat16(), "fp4", policy={"kind": "lru"})
    assert vb.runtime.recordable("decode") is None  # everything lives on the GPU
    vb.close()


def test_gradients_through_programmes_are_those_of_the_resident_model():
    vb, x, _ = wrapped("fp4", 0.5)
    x = x.expand(1, 64, WIDTH).clone().requires_grad_()
    grads = []
    for _ in range(10):
        x.grad = None
        vb(x).float().square().sum().backward()
        grads.append(x.grad.clone())
    assert vb.stack.ledger.running is not None, vb.stack.ledger.programmes.reason
    vb.set_budget("gpu", vb.plan.page_bytes * 2)
    x.grad = None
    vb(x).float().square().sum().backward()
    assert all(torch.equal(grad, x.grad) for grad in grads)
    vb.close()


def test_memory_that_torch_caches_is_given_back_where_a_capture_needs_it():
    """In a capture torch's allocator does not free what it caches."""
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    held = torch.cuda.memory_reserved()
    size = 1 << 30
    torch.cuda.set_per_process_memory_fraction((held + 3 * size) / total)
    try:
        cached = torch.empty(2 * size, dtype=torch.uint8, device="cuda")
        del cached
        found = []

        def step():
            if torch.cuda.is_current_stream_capturing():
                found.append(torch.ones(2 * size, dtype=torch.uint8, device="cuda"))

        recorder = GraphRecorder(torch.device("cuda"))
        graph = recorder.record(step, contextlib.nullcontext)
        graph.replay()
        assert found[-1].min() == 1
        recorder.release()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
