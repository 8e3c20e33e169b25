"""Missed experts that the CPU computes where they lie, beside a memory that stands for a GPU's."""

import threading
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import vbrt
from tests.kernels.cpu.test_cpu_tiles import tiled_pages
from tests.layers.experts.beside_gpu import wrap_beside
from tests.matrix import matrix
from tests.models import TOKENS, config, qwen3_moe, wrap
from tests.tiers.stacks import assert_at_rest
from tests.zoo.experts import EXPERTS, Holder, experts_module, routed
from vbrt.errors import KernelError
from vbrt.host import accelerator
from vbrt.kernels.cpu import build
from vbrt.kernels.cpu.expert_team import ExpertTeam
from vbrt.kernels.experts import Gate
from vbrt.layers.experts import cpu_experts
from vbrt.layers.experts.cpu_experts import HostLayer, Operands
from vbrt.layers.experts.missed_experts import MissedExperts
from vbrt.model import expert_cache
from vbrt.residency.lru import LRUPolicy
from vbrt.residency.miss_policy import MissRates

WHY = build.refusal(torch.device("cpu"), "experts")
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))
NAME = "model.layers.0.mlp.experts"
EVEN = MissRates(1e9, 1e9)  # as fast as the link: half of the misses each


def _layer(vb):
    return vb.module.get_submodule(NAME)


def _outputs(vb, ids, tokens=1, seed=1):
    """The layer's output for a row of ids after the other."""
    torch.manual_seed(seed)
    k = len(ids[0])
    return [
        _layer(vb)(torch.randn(tokens, 64, dtype=torch.bfloat16), torch.tensor([row] * tokens), torch.rand(tokens, k))
        for row in ids
    ]


@matrix(format=("nvfp4", "mxfp4", "nf4", "quantile", "mxint8"), miss=("compute", "auto"))
@torch.no_grad()
def test_experts_that_are_computed_where_they_lie_give_what_fetched_ones_give(monkeypatch, format, miss):
    trace = [[0, 1], [1, 2], [3, 4], [0, 1], [5, 6], [1, 7]]
    want = _outputs(wrap_beside(monkeypatch, qwen3_moe(), format, room=6), trace)
    monkeypatch.setattr(MissedExperts, "rates_of", lambda self, layer: EVEN)
    vb = wrap_beside(monkeypatch, qwen3_moe(), format, room=6, miss=miss)
    for got, expected in zip(_outputs(vb, trace), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-3)
    counts = vb.stats().layers[NAME]
    assert counts.experts.computed and counts.misses >= counts.experts.computed
    assert counts.hits + counts.misses == counts.experts.touched == 12


def _in_a_thread(monkeypatch):
    """Have no team compute: a thread of Python's does."""
    monkeypatch.setattr(HostLayer, "product", lambda *args: None)


@torch.no_grad()
def test_experts_are_computed_in_a_thread_and_move_nothing(monkeypatch):
    threads, compute = [], cpu_experts.HostWork._compute
    monkeypatch.setattr(
        cpu_experts.HostWork, "_compute", lambda self: threads.append(threading.get_ident()) or compute(self)
    )
    _in_a_thread(monkeypatch)
    vb = wrap_beside(monkeypatch, qwen3_moe(), room=2, miss="compute")
    _outputs(vb, [[0, 1], [0, 1], [2, 3], [4, 5], [0, 1]])
    stats = vb.stats()
    experts = stats.layers[NAME].experts
    assert threads and threading.get_ident() not in threads
    assert experts.computed == 8 and experts.resident == 1  # expert 0 came into the layer's slot, which was free
    assert sum(stats.layers[NAME].bytes_moved.values()) == next(iter(vb.stack.pages.values())).nbytes
    assert "computed" in str(stats)


@torch.no_grad()
def test_the_same_experts_on_the_device_give_the_same_bits(monkeypatch):
    trace, found = [[0, 1], [1, 2], [3, 4], [0, 3]], []
    for _ in range(2):
        vb = wrap_beside(monkeypatch, qwen3_moe(), room=4, miss="compute")
        found.append(_outputs(vb, trace, tokens=3))
        assert vb.stats().layers[NAME].experts.computed
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


@torch.no_grad()
def test_generated_tokens_are_those_of_fetched_experts(monkeypatch):
    tokens = torch.arange(3, 9).reshape(1, 6)
    plain, vb = (wrap_beside(monkeypatch, qwen3_moe(), room=6, miss=miss) for miss in ("fetch", "compute"))
    want = plain.generate(tokens, max_new_tokens=8, do_sample=False)
    assert torch.equal(vb.generate(tokens, max_new_tokens=8, do_sample=False), want)
    counts = vb.stats().layers[NAME].experts
    assert counts.scans == 1 and counts.computed and not vb.stats().fallbacks


@torch.no_grad()
def test_drafts_are_refused_by_name_where_rounding_depends_on_the_calls_before(monkeypatch):
    how = {"max_new_tokens": 12, "do_sample": False, "drafter": "ngrams", "speculate": 2}
    tokens = torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]])
    for miss, exactness, drafts in (
        ("compute", "tokens", False), ("compute", "distribution", True), ("fetch", "tokens", True),
    ):  # fmt: skip
        vb = wrap_beside(monkeypatch, qwen3_moe(), room=6, miss=miss)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            vb.generate(tokens, exactness=exactness, **how)
        whys = [why for why in vb.stats().fallbacks if "experts.miss" in why]
        assert (vb.stats().speculation is not None) == drafts, vb.stats().fallbacks
        assert len(whys) == (not drafts) == sum("experts.miss" in str(each.message) for each in said), whys
    with vbrt.wrap(qwen3_moe(), config("nvfp4", include=["*experts"]) | {"experts": {"miss": "compute"}}) as vb:
        vb.generate(tokens, **how)
        assert vb.stats().speculation, vb.stats().fallbacks  # nothing is missing


@torch.no_grad()
def test_pages_on_a_drive_are_read_into_host_memory_and_computed_there(monkeypatch, tmp_path):
    want = _outputs(wrap_beside(monkeypatch, qwen3_moe(), room=6), [[0, 1], [2, 3], [0, 5]])
    tiers = {"cpu": {"budget": 4 * 4096}, "ssd": {"enabled": True, "path": str(tmp_path)}}
    vb = wrap_beside(monkeypatch, qwen3_moe(), room=2, miss="compute", **tiers)
    got = _outputs(vb, [[0, 1], [2, 3], [0, 5]])
    layer = vb.stats().layers[NAME]
    assert layer.home == "ssd" and layer.experts.computed and layer.bytes_moved["ssd>cpu"]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)
    vb.close()


@matrix(format=("nvfp4", "mxint8"))
@torch.no_grad()
def test_a_team_gives_the_bits_of_a_thread_and_holds_no_page_when_it_is_done(monkeypatch, format):
    trace, works, run = [[0, 1], [1, 2], [3, 4], [0, 1]], [], cpu_experts.HostWork.run
    monkeypatch.setattr(cpu_experts.HostWork, "run", lambda self: works.append(self) or run(self))
    vb = wrap_beside(monkeypatch, qwen3_moe(), format, room=2, miss="compute")
    found = _outputs(vb, trace, tokens=3)
    assert_at_rest(vb.stack)
    assert not works and vb.stats().layers[NAME].experts.computed == 7
    _in_a_thread(monkeypatch)
    want = _outputs(wrap_beside(monkeypatch, qwen3_moe(), format, room=2, miss="compute"), trace, tokens=3)
    assert works and all(map(torch.equal, found, want))


@torch.no_grad()
def test_pages_of_a_pass_that_is_interrupted_beside_a_team_are_released(monkeypatch):
    vb = wrap_beside(monkeypatch, qwen3_moe(), room=2, miss="compute")
    slots = vb.stack.levels[1].slots
    with monkeypatch.context() as patched:
        patched.setattr(cpu_experts.TeamWork, "rows", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt) as kept:
            _outputs(vb, [[2, 3]])
    limit = time.monotonic() + 10
    while slots[f"{NAME}#coarse.2"].holders and time.monotonic() < limit:  # 20 ms and what the machine has to do
        time.sleep(0.001)
    assert kept and not slots[f"{NAME}#coarse.2"].holders
    assert _outputs(vb, [[2, 3], [6, 7]])[0].isfinite().all()
    assert_at_rest(vb.stack)
    vb.close()


def _interrupted_after(call):
    """A function that is interrupted once, when it has done its work."""
    left = [KeyboardInterrupt]

    def run(*args):
        result = call(*args)
        if left:
            raise left.pop()
        return result

    return run


@pytest.mark.parametrize("name", ["post", "finish"])
@torch.no_grad()
def test_an_interrupt_within_a_call_of_the_team_leaves_no_page_held(monkeypatch, name):
    vb = wrap_beside(monkeypatch, qwen3_moe(), room=2, miss="compute")
    _outputs(vb, [[0, 1]])
    with monkeypatch.context() as patched:
        patched.setattr(ExpertTeam, name, _interrupted_after(getattr(ExpertTeam, name)))
        with pytest.raises(KeyboardInterrupt) as kept:
            _outputs(vb, [[2, 3]])
    assert kept  # with whoever held the pages
    assert_at_rest(vb.stack)  # at once: nobody looks after what was fetched
    vb.close()


@torch.no_grad()
def test_a_job_without_memory_holds_no_page(monkeypatch):
    vb = wrap_beside(monkeypatch, qwen3_moe(), room=2, miss="compute")
    team = vb._attachment.missed._awake()
    with monkeypatch.context() as patched:
        patched.setattr(team._memory, "library", _WithoutMemory(team._memory.library))
        with pytest.raises(MemoryError, match="2 pairs") as kept:
            _outputs(vb, [[2, 3]])
    assert kept and team._posted is None
    assert_at_rest(vb.stack)
    assert _outputs(vb, [[2, 3]])[0].isfinite().all()


class _WithoutMemory:
    def __init__(self, library):
        self._library = library

    def __getattr__(self, name):
        return (lambda *args: 0) if name == "vbrt_team_experts" else getattr(self._library, name)


@torch.no_grad()
def test_a_team_has_the_threads_that_torch_has_now(monkeypatch):
    vb = wrap_beside(monkeypatch, qwen3_moe(), room=2, miss="compute")
    missed, places = vb._attachment.missed, []
    for threads in (8, 8, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        team = missed._awake()
        places.append(team._places)
        assert missed._awake() is team
    assert places == [6, 6, 3]  # less those that work meanwhile


@torch.no_grad()
def test_biases_are_read_in_their_own_order_and_computed_in_fp64_without_a_team(monkeypatch):
    x, ids, weights = routed(experts_module("GptOssExperts"), tokens=1)
    want = None
    for change in (lambda bias: bias, lambda bias: bias.t().contiguous().t(), lambda bias: bias.double()):
        vb = wrap_beside(monkeypatch, Holder(experts_module("GptOssExperts")), room=3, miss="compute")
        experts = vb.module.experts
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            torch.manual_seed(2)
            bias = torch.randn(experts._parameters[name].shape, dtype=x.dtype)
            experts._parameters[name] = torch.nn.Parameter(change(bias))
        host = vb._attachment.missed._with_biases(experts)
        assert host.up.is_contiguous() and host.down.is_contiguous()
        got = experts(x, ids, weights)
        want = got if want is None else want
        torch.testing.assert_close(got.to(want.dtype), want, rtol=2e-2, atol=2e-3)


@torch.no_grad()
def test_what_fails_on_the_cpu_names_the_layer_and_the_experts_and_the_next_pass_runs(monkeypatch):
    _in_a_thread(monkeypatch)
    vb = wrap_beside(monkeypatch, qwen3_moe(), room=2, miss="compute")
    with monkeypatch.context() as broken:
        broken.setattr(cpu_experts, "host_pages", lambda *args: 1 / 0)
        with pytest.raises(KernelError, match=rf"{NAME}: computing experts 4, 6 on the CPU failed: division by zero"):
            _outputs(vb, [[6, 4]])
    assert _outputs(vb, [[6, 4]])[0].isfinite().all()
    assert_at_rest(vb.stack)


@torch.no_grad()
def test_an_interrupt_while_the_cpu_computes_leaves_pages_to_their_thread(monkeypatch):
    _in_a_thread(monkeypatch)
    vb = wrap_beside(monkeypatch, qwen3_moe(), room=2, miss="compute")
    going, entered, compute = threading.Event(), threading.Event(), cpu_experts.HostWork._compute

    def slow(self):
        entered.set()
        assert going.wait(30)
        return compute(self)

    def interrupted(self):
        assert entered.wait(30)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(cpu_experts.HostWork, "_compute", slow)
        patched.setattr(cpu_experts.HostWork, "rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _outputs(vb, [[2, 3]])
        page = vb.stack.levels[1].slots[f"{NAME}#coarse.2"]
        assert page.holders
        going.set()
    assert _outputs(vb, [[2, 3], [6, 7]])[0].isfinite().all()  # the thread has one work after the other
    assert_at_rest(vb.stack)
    vb.close()


@pytest.mark.parametrize(
    ("format", "options", "words"),
    [
        ("dense", {}, "held as dense"),
        ("exact", {}, r"held as nvfp4\+exact"),
        ("nvfp4", {"policy": LRUPolicy}, "the policy lru decides"),
    ],
)
@torch.no_grad()
def test_what_the_cpu_does_not_compute_is_fetched_and_said_once(monkeypatch, format, options, words):
    vb = wrap_beside(monkeypatch, qwen3_moe(), format, room=8, miss="compute", **options)
    with pytest.warns(UserWarning, match=words):
        _outputs(vb, [[0, 1], [2, 3]])
    stats = vb.stats()
    assert not stats.layers[NAME].experts.computed and sum(words[:8] in reason for reason in stats.fallbacks) == 1


@pytest.mark.parametrize("name", ["GptOssExperts", "AriaExperts", "NemotronHExperts", "MuseSparkExperts"])
@torch.no_grad()
def test_gates_biases_and_norms_count_where_experts_are_computed(monkeypatch, name):
    """Interleaved gates with biases, turned matrices, no gates, a norm behind."""
    found = {}
    for miss in ("fetch", "compute"):
        x, ids, weights = routed(experts_module(name), tokens=1)
        vb = wrap_beside(monkeypatch, Holder(experts_module(name)), room=3, miss=miss)
        found[miss] = [vb.module.experts(x, (ids + turn) % EXPERTS, weights) for turn in range(3)]
        assert bool(vb.stats().layers["experts"].experts.computed) is (miss == "compute"), vb.stats().fallbacks
    for got, want in zip(found["compute"], found["fetch"], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)


def test_prompts_and_passes_with_gradients_fetch(monkeypatch):
    vb = wrap_beside(monkeypatch, qwen3_moe(dtype=torch.float32), room=6, miss="compute")
    x, ids = torch.randn(1, 64, requires_grad=True), torch.tensor([[2, 3]])
    _layer(vb)(x, ids, torch.rand(1, 2)).sum().backward()
    with torch.no_grad():
        _layer(vb)(torch.randn(4, 64), torch.arange(8).reshape(4, 2), torch.rand(4, 2))
    experts = vb.stats().layers[NAME].experts
    assert x.grad.abs().sum() and experts.scans == 1 and not experts.computed


@torch.no_grad()
def test_where_the_cpu_computes_anyway_it_changes_nothing(tmp_path):
    vb = wrap(qwen3_moe(), "nvfp4")
    settings = config("nvfp4") | {"experts": {"miss": "compute"}}
    settings["tiers"] |= {"cpu": {"budget": "64KiB"}, "ssd": {"enabled": True, "path": str(tmp_path)}}
    same = vbrt.wrap(qwen3_moe(), settings)
    assert torch.equal(same(TOKENS).logits, vb(TOKENS).logits)
    assert torch.equal(_outputs(same, [[0, 1]])[0], _outputs(vb, [[0, 1]])[0])
    assert not same.stats().fallbacks and not same.stats().layers[NAME].experts.computed


@torch.no_grad()
def test_rates_are_measured_once_and_misses_divided_by_them(monkeypatch):
    vb = wrap_beside(monkeypatch, qwen3_moe(), room=4, miss="auto")
    _outputs(vb, [[0, 1], [2, 3]])
    rates = vb._attachment.missed.rates
    assert min(rates.link_bytes_s, rates.cpu_bytes_s, rates.call_s, rates.host_s) > 0
    _outputs(vb, [[5, 6]])
    assert vb._attachment.missed.rates is rates and "GB/s on the CPU" in vb.stats().missed


@torch.no_grad()
def test_the_device_decides_where_the_host_would_take_longer_or_cannot_compute(monkeypatch):
    vb = wrap_beside(monkeypatch, qwen3_moe(), room=4, miss="compute")
    handles = [_layer(vb).handle]
    asked, slow, fast = vb._attachment.missed, MissedExperts("auto"), MissedExperts("auto")
    slow.rates, fast.rates = MissRates(50e9, 20e9, host_s=1e-4), MissRates(1e6, 1e9, host_s=1e-4)
    left = [missed.left_to_device(handles, 4096, "no compiler") for missed in (asked, slow, fast)]
    assert left == [False, True, False]
    words = "the GPU decides, which is faster at 50.0 GB/s over the link and 20.0 GB/s on the CPU, and then no compiler"
    assert slow.fallbacks == [f'experts.miss = "auto": missed experts are fetched: {words}']
    exact = wrap_beside(monkeypatch, qwen3_moe(), "exact", room=8, miss="compute")
    with pytest.warns(UserWarning, match="held as"):
        assert exact._attachment.missed.left_to_device([_layer(exact).handle], 4096, "no compiler")


@pytest.mark.parametrize(("miss", "said"), [("compute", 0), ("auto", 1)])
def test_that_the_device_cannot_decide_is_said_only_where_it_would(monkeypatch, miss, said):
    vb = wrap_beside(monkeypatch, qwen3_moe(), room=4, miss=miss)
    cache = vb._attachment.expert_cache
    monkeypatch.setattr(accelerator, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(expert_cache, "why_host", lambda handle: "its kernels do not take pages by address")
    cache.follow()
    assert len(cache.fallbacks) == said and all("by address" in why for why in cache.fallbacks)


@torch.no_grad()
def test_pages_in_the_order_of_a_gpu_are_computed_as_they_lie_or_put_in_order(monkeypatch):
    tiles, layout, _ = tiled_pages("nvfp4", {"up": (64, 64), "down": (64, 32)})
    handle = _layer(wrap_beside(monkeypatch, qwen3_moe(), room=4)).handle
    stand_in = SimpleNamespace(
        spec=SimpleNamespace(experts=4),
        device=handle.device,
        form=lambda pages: replace(tiles, pages=pages),
        coder=SimpleNamespace(encoded_joint=lambda _: layout),
    )
    host = HostLayer(stand_in, cpu_experts.host_ops(handle)[0], Gate("silu"), None, None)
    views, ids = {e: tiles.pages[e] for e in (1, 3)}, torch.tensor([[1, 3], [3, -1]])
    x = torch.randn(2, 64).bfloat16()
    found = host.rows(Operands(x, ids), views)
    monkeypatch.setattr(cpu_experts, "takes_tiles", lambda *args: False)
    torch.testing.assert_close(host.rows(Operands(x, ids), views), found, rtol=2e-2, atol=1e-2)
    assert found.abs().sum(1).bool().tolist() == [True, True, True, False]
