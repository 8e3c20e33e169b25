"""Hosted experts without a GPU: memory in front of host memory stands for one, and calls for its kernels; the choice,
the cache, the mailbox and its team are those of a GPU."""

import ctypes
import gc
import weakref
from dataclasses import replace

import pytest
import torch

from tests.layers.experts import tables
from tests.layers.experts.beside_gpu import wrap_beside
from tests.model.test_hosting import PlayedOutbox, device  # noqa: F401  # a fixture
from tests.models import qwen3_moe
from tests.zoo.experts import EXPERTS, Holder, experts_module, routed
from vbrt.errors import KernelError
from vbrt.kernels.cpu import build
from vbrt.kernels.cuda.experts import residency
from vbrt.layers.experts import hosted_experts
from vbrt.layers.experts.residency_owner import CachedLayer
from vbrt.model import expert_cache
from vbrt.residency.hosted_share import HostRates
from vbrt.tiers.storage.memory_tiers import Buffer

WHY = build.refusal(torch.device("cpu"), "hosted")
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))
NAME = "model.layers.0.mlp.experts"
EVEN = HostRates(1e9, 1e9)  # as fast as the link: half of the misses each


def _at(self, addresses):
    """Pages where a device's addresses say."""
    memory = [(ctypes.c_uint8 * self.form.layout.nbytes).from_address(at) for at in addresses.tolist()]
    return replace(self.form, pages=[torch.frombuffer(each, dtype=torch.uint8) for each in memory])


@pytest.fixture
def cached(device, monkeypatch):  # noqa: F811
    """What hosted experts ask of a GPU, on the CPU; wraps a model with room for some of its experts."""
    monkeypatch.setattr(residency, "_launch", tables.launch)
    monkeypatch.setattr(expert_cache, "why_host", lambda handle: "")
    monkeypatch.setattr(expert_cache.accelerator, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(hosted_experts, "refusal", lambda stack: None)
    monkeypatch.setattr(hosted_experts, "resident_seconds", lambda sizes, device: 0.0)
    monkeypatch.setattr(hosted_experts, "is_capturing", lambda: False)
    monkeypatch.setattr(hosted_experts, "posted_rates", lambda *args: EVEN)
    monkeypatch.setattr(CachedLayer, "at", _at)
    monkeypatch.setattr(Buffer, "pinned", True)

    def wrapped(model=None, format="nvfp4", room=8, miss="auto", **tiers):
        model = qwen3_moe() if model is None else model
        vb = wrap_beside(monkeypatch, model, format, room=room, miss=miss, **tiers)
        attachment = vb._attachment
        for handle in attachment.registry.handles:
            if hasattr(handle, "deciding"):
                handle.deciding.ask_with(attachment.expert_cache.follow)
        return vb

    return wrapped


def outputs(vb, rows, tokens=1, seed=1):
    """A layer's output for a row of ids after the other."""
    torch.manual_seed(seed)
    layer = vb.module.get_submodule(NAME)
    with torch.no_grad():
        return [
            layer(torch.randn(tokens, 64).bfloat16(), torch.tensor([row] * tokens), torch.rand(tokens, len(row)))
            for row in rows
        ]


TRACE = [[0, 1], [1, 2], [3, 4], [0, 1], [5, 6], [1, 7]]


@pytest.mark.parametrize("miss", ["auto", "compute"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_missed_experts_give_what_fetched_ones_give(cached, miss, tokens):
    room = 8 if tokens == 1 else 16  # else the GPU scans
    want = outputs(cached(room=room, miss="fetch"), TRACE, tokens)
    vb = cached(room=room, miss=miss)
    got = outputs(vb, TRACE, tokens)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)
    counts = vb.stats().layers[NAME]
    assert counts.experts.decides == "gpu" and 0 < counts.experts.computed <= counts.misses
    assert (counts.experts.computed == counts.misses) == (miss == "compute")
    assert counts.hits + counts.misses == 12
    moved = sum(counts.bytes_moved.values())
    assert moved == (counts.misses - counts.experts.computed) * counts.plane_bytes["coarse"] // counts.experts.experts


@torch.no_grad()
def test_generated_tokens_are_those_of_fetched_experts_and_equal_in_each_run(cached):
    ids, how = torch.arange(3, 9).reshape(1, 6), {"max_new_tokens": 8, "do_sample": False}
    want = cached(miss="fetch").generate(ids, **how)
    found = []
    for _ in range(2):
        vb = cached()
        out = vb.generate(ids, **how, output_logits=True, return_dict_in_generate=True)
        assert torch.equal(out.sequences, want)
        stats = vb.stats()
        assert stats.layers[NAME].experts.computed and not vb.stats().fallbacks
        assert "divided between CPU and link (1.0 GB/s over the link and 1.0 GB/s on the CPU), in 2" in stats.missed
        found.append(out.logits)
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


def test_experts_that_nobody_computes_raise_and_the_model_goes_on(cached, monkeypatch):
    vb = cached(miss="compute")
    outputs(vb, TRACE)
    monkeypatch.setattr(PlayedOutbox, "answers", False)
    (y,) = outputs(vb, [[4, 6]])
    assert y.isnan().all()
    with pytest.raises(KernelError, match=r"layers.0.mlp.experts: the CPU did not answer within 5 s.*compute\.where"):
        outputs(vb, [[4, 6]])
    monkeypatch.setattr(PlayedOutbox, "answers", True)
    again, want = outputs(vb, TRACE), outputs(cached(miss="fetch"), TRACE)
    for one, other in zip(again, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


def test_new_caches_and_new_weights_are_followed(cached):
    vb = cached(miss="compute")
    outputs(vb, TRACE)
    team, before = vb._attachment.hosting._host._team, vb.stats().layers[NAME].experts.computed
    boxes = [box for box in team._boxes if box is vb._attachment.hosting._host._handle]
    assert [len(box.jobs) for box in boxes] == [2] and before  # of two layers
    vb._attachment.expert_cache.reset()  # as a new budget does
    assert not boxes[0].jobs
    first = outputs(vb, TRACE)
    assert len(boxes[0].jobs) == 2 and vb.stats().layers[NAME].experts.computed > before
    vb._attachment.expert_cache.reset()
    vb.load_state_dict({name: -tensor for name, tensor in vb.state_dict().items()})
    assert not any(torch.equal(*both) for both in zip(outputs(vb, TRACE), first, strict=True))
    vb.close()


def test_a_cache_that_ends_frees_its_memory_at_once(cached):
    vb = cached(room=16)
    outputs(vb, TRACE, tokens=8)
    caches = vb._attachment.expert_cache
    assert caches._cache.has_ring
    memory = weakref.ref(caches._cache._segments[0].arena.memory.untyped_storage())
    gc.disable()
    try:
        caches.reset()
        outputs(vb, TRACE)
        assert caches._cache is not None and memory() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["GptOssExperts", "AriaExperts", "NemotronHExperts"])
@torch.no_grad()
def test_gates_and_biases_count_and_biases_are_followed(cached, name):
    """Interleaved gates with biases, turned matrices, no gates."""
    found = {}
    for miss in ("fetch", "compute"):
        x, ids, weights = routed(experts_module(name), tokens=1)
        vb = cached(Holder(experts_module(name)), room=5, miss=miss)
        found[miss] = [vb.module.experts(x, (ids + turn) % EXPERTS, weights) for turn in range(3)]
        for parameter in vb.module.experts.parameters():
            parameter += 1
        found[miss] += [vb.module.experts(x, (ids + turn) % EXPERTS, weights) for turn in range(3)]
        assert bool(vb.stats().layers["experts"].experts.computed) is (miss == "compute"), vb.stats().fallbacks
    for got, want in zip(found["compute"], found["fetch"], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4", "mxint8"])
def test_formats(cached, format):
    want = outputs(cached(miss="fetch", format=format), TRACE)
    vb = cached(miss="compute", format=format)
    for one, other in zip(outputs(vb, TRACE), want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)
    assert vb.stats().layers[NAME].experts.computed


@torch.no_grad()
def test_what_the_cpu_does_not_compute_is_fetched_and_said_once(cached, monkeypatch):
    vb = cached(Holder(experts_module("MuseSparkExperts")), room=5)
    x, ids, weights = routed(experts_module("MuseSparkExperts"), tokens=1)
    vb.module.experts(x, ids, weights)
    (why,) = vb.stats().fallbacks
    assert "it normalizes the rows of experts" in why
    monkeypatch.setattr(hosted_experts, "refusal", lambda stack: "no compiler was found")
    vb = cached()
    outputs(vb, TRACE)
    (why,) = vb.stats().fallbacks
    assert why.endswith("and then no compiler was found") and not vb.stats().layers[NAME].experts.computed
