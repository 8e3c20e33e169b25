"""The same promises on a CUDA device: pages stream gpu <- cpu <- ssd, outputs are bit-identical, budgets hold."""

import copy
import pickle

import pytest
import torch
from torch import nn

import vbrt
from vbrt.host import accelerator

pytestmark = pytest.mark.gpu

WIDTH = 512


MOVED = {"where": "device"}  # pages of rounded weights, too: the CPU's products round otherwise


def network(layers: int = 8, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).to(dtype).eval()


def tiers(model: nn.Module, *, gpu_pages: float, cpu_pages: float | None = None, ssd=None, preset="dense") -> dict:
    page = max(swap.page_bytes for swap in vbrt.make_plan(model, vbrt.load_config(preset)).swaps)
    given = {"gpu": {"budget": int(gpu_pages * page)}}
    if cpu_pages is not None:
        given["cpu"] = {"budget": int(cpu_pages * page)}
    if ssd is not None:
        given["ssd"] = {"enabled": True, "path": str(ssd)}
    return given


def expected(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).cuda()(x)


def outputs(vb: vbrt.VBModelWrapper, x: torch.Tensor, passes: int = 4) -> list[torch.Tensor]:
    with torch.no_grad():
        return [vb(x) for _ in range(passes)]


@pytest.mark.parametrize("policy", ["scheduled", "lru"])
@pytest.mark.parametrize("where", ["resident", "cpu", "ssd"])
@pytest.mark.parametrize("preset", ["dense", "exact"])
def test_lossless_weights_stream_to_the_gpu_bit_for_bit(preset, where, policy, tmp_path):
    model, x = network(), torch.randn(3, WIDTH, device="cuda", dtype=torch.bfloat16)
    want = expected(model, x)
    room = {
        "resident": tiers(model, gpu_pages=9, preset=preset),
        "cpu": tiers(model, gpu_pages=4, cpu_pages=9, preset=preset),
        "ssd": tiers(model, gpu_pages=3, cpu_pages=3, ssd=tmp_path, preset=preset),
    }[where]
    with vbrt.wrap(model, preset, tiers=room, policy={"kind": policy}) as vb:
        for y in outputs(vb, x):
            assert torch.equal(y, want)
        stats = vb.stats()
        assert stats.compute_tier == "gpu"
        for tier in stats.tiers.values():
            assert tier.peak_bytes <= tier.budget_bytes
        if where != "resident":
            assert stats.bytes_moved["cpu>gpu"] > 0


def test_pageable_memory_goes_through_a_relay_bit_for_bit(monkeypatch):
    monkeypatch.setattr(
        "vbrt.tiers.storage.pinned_staging._CHUNK_BYTES", 100_000
    )  # a page is several chunks and a rest
    model, x = network(), torch.randn(3, WIDTH, device="cuda", dtype=torch.bfloat16)
    want, room = expected(model, x), tiers(model, gpu_pages=3, cpu_pages=9)
    room["cpu"]["pinned"] = False
    with vbrt.wrap(model, "dense", tiers=room) as vb:
        vb.materialize()
        copies = vb.stack.levels[0].stream
        for _ in range(4):
            with torch.cuda.stream(copies):
                torch.cuda._sleep(5_000_000)
            assert torch.equal(outputs(vb, x, passes=1)[0], want)
        stats = vb.stats()
        assert stats.bytes_moved["cpu>gpu"] > 0 and not stats.fallbacks


def test_memory_that_cannot_be_locked_at_all_is_announced(monkeypatch):
    model, x = network(), torch.randn(3, WIDTH, device="cuda", dtype=torch.bfloat16)
    want, empty = expected(model, x), torch.empty

    def refuse(*size, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("no more locked memory")
        return empty(*size, **options)

    room = tiers(model, gpu_pages=3, cpu_pages=9)
    room["cpu"]["pinned"] = False
    with vbrt.wrap(model, "dense", tiers=room) as vb:
        monkeypatch.setattr(torch, "empty", refuse)
        assert all(torch.equal(y, want) for y in outputs(vb, x))
        assert any("no more locked memory" in line for line in vb.stats().fallbacks)


def resident(model: nn.Module, preset: str, x: torch.Tensor) -> torch.Tensor:
    with vbrt.wrap(copy.deepcopy(model), preset) as vb:
        return outputs(vb, x, passes=1)[0]


@pytest.mark.parametrize("preset", ["dense", "fp4"])  # fp4: its kernels read weights before the launch before has ended
def test_slow_copies_change_nothing(preset, tmp_path):
    model, x = network(), torch.randn(3, WIDTH, device="cuda", dtype=torch.bfloat16)
    want = resident(model, preset, x)
    room = tiers(model, gpu_pages=3, cpu_pages=4, ssd=tmp_path, preset=preset)
    with vbrt.wrap(model, preset, tiers=room, compute=MOVED) as vb:
        vb.materialize()
        copies = vb.stack.levels[0].stream
        for _ in range(4):
            with torch.cuda.stream(copies):
                torch.cuda._sleep(20_000_000)
            with torch.no_grad():
                assert torch.equal(vb(x), want)


@pytest.mark.parametrize("preset", ["dense", "fp4"])
def test_slow_compute_is_not_overtaken_by_the_next_copy(preset, tmp_path):
    model, x = network(), torch.randn(3, WIDTH, device="cuda", dtype=torch.bfloat16)
    want = resident(model, preset, x)

    def delay(module, args):
        torch.cuda._sleep(5_000_000)

    room = tiers(model, gpu_pages=3, cpu_pages=9, preset=preset)
    with vbrt.wrap(model, preset, tiers=room, compute=MOVED) as vb:
        for layer in vb.registry.values():
            layer.register_forward_pre_hook(delay)
        for y in outputs(vb, x):
            assert torch.equal(y, want)


def test_the_model_may_run_on_another_stream(tmp_path):
    model, x = network(), torch.randn(3, WIDTH, device="cuda", dtype=torch.bfloat16)
    want = expected(model, x)
    with vbrt.wrap(model, "dense", tiers=tiers(model, gpu_pages=3, cpu_pages=9)) as vb:
        vb.materialize()
        streams = [torch.cuda.Stream() for _ in range(3)]
        for turn in range(9):
            stream = streams[turn % 3]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), torch.no_grad():
                y = vb(x)
            torch.cuda.current_stream().wait_stream(stream)
            assert torch.equal(y, want)


def test_a_steady_streamed_pass_neither_synchronizes_nor_allocates_on_the_device():
    from torch.profiler import ProfilerActivity, profile

    model, x = network(), torch.randn(3, WIDTH, device="cuda", dtype=torch.bfloat16)
    with vbrt.wrap(model, "dense", tiers=tiers(model, gpu_pages=5, cpu_pages=9)) as vb:
        outputs(vb, x)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            outputs(vb, x, passes=2)
        calls = {event.name for event in trace.events() if event.name.startswith(("cuda", "cu"))}
        # the profiler itself synchronizes once, when it ends
        calls.discard("cudaDeviceSynchronize")
        assert any("Memcpy" in name for name in calls), calls
        assert not {name for name in calls if "Synchronize" in name or "Alloc" in name or "Free" in name}, calls
        assert vb.stats().bytes_moved["cpu>gpu"] > 0


def test_the_gpu_budget_shrinks_and_grows_between_passes():
    model, x = network(), torch.randn(3, WIDTH, device="cuda", dtype=torch.bfloat16)
    want = expected(model, x)
    with vbrt.wrap(model, "dense", tiers=tiers(model, gpu_pages=9, cpu_pages=9)) as vb:
        vb.materialize()
        page = vb.plan.page_bytes // 8
        for pages in (3, 1, 6, 9):
            before = torch.cuda.memory_allocated()
            vb.set_budget("gpu", pages * page)
            for y in outputs(vb, x):
                assert torch.equal(y, want)
            assert vb.stats().tiers["gpu"].peak_bytes <= pages * page
            if pages == 3:
                assert torch.cuda.memory_allocated() <= before - 4.5 * page  # outputs are held beside
        misses = vb.stats().misses
        outputs(vb, x)
        assert vb.stats().misses == misses and vb.stack.at_rest
        assert vb.stats().tiers["cpu"].held_bytes == 0


def test_an_auto_budget_gives_way_to_the_model_and_grows_back(monkeypatch):
    model, x = network(), torch.randn(3, WIDTH, device="cuda", dtype=torch.bfloat16)
    want = expected(model, x)
    with vbrt.wrap(model, "dense") as vb:
        assert all(torch.equal(y, want) for y in outputs(vb, x))
        page = vb.plan.page_bytes // 8
        vb.runtime.balance.margin_bytes = 8 * page
        monkeypatch.setattr("vbrt.model.auto_budget._LOOK_SECONDS", 0.0)
        monkeypatch.setattr("vbrt.model.auto_budget._LOOKS", 0)
        vb.runtime.balance._next_look = 0.0
        total = torch.cuda.mem_get_info()[1]
        monkeypatch.setattr(accelerator, "mem_get_info", lambda: (3 * page, total))
        monkeypatch.setattr(accelerator, "memory_reserved", lambda: 0)
        monkeypatch.setattr(accelerator, "memory_allocated", lambda: 0)
        with torch.no_grad():
            assert torch.equal(vb(x), want)
        assert vb.plan.budgets["gpu"] == 3 * page and vb.settings.tiers.gpu.budget == "auto"
        monkeypatch.setattr(accelerator, "mem_get_info", lambda: (20 * page, total))
        assert all(torch.equal(y, want) for y in outputs(vb, x))
        assert vb.plan.budgets["gpu"] == 8 * page and not vb.stats().fallbacks


class Hungry(nn.Module):
    """Takes GPU memory for a moment in the middle of a pass, more than there is beside `room` bytes of pages."""

    def __init__(self, vb_budget) -> None:
        super().__init__()
        self.budget, self.room, self.tries = vb_budget, None, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tries += 1
        if self.room is not None and self.budget() > self.room:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return x


def test_an_auto_budget_gives_way_when_the_model_runs_out_in_a_pass(monkeypatch):
    model, x = network(), torch.randn(3, WIDTH, device="cuda", dtype=torch.bfloat16)
    want = expected(model, x)
    model.insert(4, Hungry(lambda: vb.plan.budgets["gpu"]))
    vb = vbrt.wrap(model, "dense").materialize()
    page = vb.plan.page_bytes // 8
    vb.runtime.balance.margin_bytes = page
    total = torch.cuda.mem_get_info()[1]
    free = lambda: 9 * page - min(vb.plan.budgets["gpu"], 8 * page)  # noqa: E731
    monkeypatch.setattr(accelerator, "mem_get_info", lambda: (free(), total))
    monkeypatch.setattr(accelerator, "memory_reserved", lambda: 0)
    monkeypatch.setattr(accelerator, "memory_allocated", lambda: 0)
    assert torch.equal(vb(x), want)
    model[4].room = 5 * page
    assert torch.equal(vb(x), want) and model[4].tries == 4  # with eight pages, with seven, with five
    assert vb.plan.budgets["gpu"] == 5 * page and vb.settings.tiers.gpu.budget == "auto"
    assert any("ran out in a pass" in line for line in vb.stats().fallbacks)
    model[4].room = 3 * page
    with pytest.raises(torch.OutOfMemoryError):
        vb.train()(x)  # a second run could differ
    assert vb.plan.budgets["gpu"] == 5 * page
    vb.eval().runtime.balance.look_soon()
    assert torch.equal(vb(x), want)
    vb.close()


@pytest.mark.parametrize("preset", ["dense", "fp4"])
def test_a_graph_records_a_resident_pass_and_its_pages_stay(preset):
    model, x = network(), torch.randn(3, WIDTH, device="cuda", dtype=torch.bfloat16)
    with vbrt.wrap(model, preset) as vb, torch.no_grad():
        want = vb(x).clone()
        vb(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = vb(x)
        for _ in range(2):
            y.zero_()
            graph.replay()
            assert torch.equal(y, want)
        with pytest.raises(vbrt.TierError, match="a CUDA graph has recorded"):
            vb.set_budget("gpu", vb.plan.page_bytes // 2)
        graph.replay()
        assert torch.equal(y, want) and torch.equal(vb(x), want)


def test_a_graph_of_a_pass_whose_pages_move_is_refused():
    model, x = network(), torch.randn(3, WIDTH, device="cuda", dtype=torch.bfloat16)
    want = expected(model, x)
    with vbrt.wrap(model, "dense", tiers=tiers(model, gpu_pages=3, cpu_pages=9)) as vb, torch.no_grad():
        vb(x)
        torch.cuda.synchronize()
        with pytest.raises(vbrt.TierError, match="cannot record"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            vb(x)
        assert all(torch.equal(y, want) for y in outputs(vb, x))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4", "quantile"])
def test_coarse_formats_agree_with_the_cpu(format):
    model, x = network(dtype=torch.float32), torch.randn(3, WIDTH)
    on_cpu = vbrt.wrap(copy.deepcopy(model), "fp4", weights={"format": format}, tiers={"gpu": {"enabled": False}})
    on_gpu = vbrt.wrap(copy.deepcopy(model), "fp4", weights={"format": format})
    with torch.no_grad():
        want, got = on_cpu(x), on_gpu(x.cuda()).cpu()
    assert (got - want).norm() / want.norm() < 2e-3


def test_what_is_not_swapped_moves_to_the_gpu_and_dense_weights_leave_it():
    model = nn.Sequential(nn.Embedding(100, 1024), nn.Linear(1024, 8192, bias=False), nn.LayerNorm(8192))
    vb = vbrt.wrap(model, "fp4").materialize()
    assert model[0].weight.is_cuda and model[2].weight.is_cuda
    held = vb.stats().tiers["gpu"].held_bytes
    assert held < 0.15 * 1024 * 8192 * 4
    assert vb(torch.arange(4, device="cuda")).shape == (4, 8192)


def test_gradients_reach_the_input_through_streamed_weights():
    model = network(dtype=torch.float32)
    dense = copy.deepcopy(model).cuda()
    x = torch.randn(3, WIDTH, device="cuda", requires_grad=True)
    dense(x).square().sum().backward()
    want, x.grad = x.grad, None
    with vbrt.wrap(model, "dense", tiers=tiers(model, gpu_pages=3, cpu_pages=9)) as vb:
        vb(x).square().sum().backward()
        assert torch.equal(x.grad, want)


def test_a_cpu_input_meets_gpu_pages_with_a_fallback_that_is_announced():
    model = network(layers=1, dtype=torch.float32)
    vb = vbrt.wrap(model, "dense").materialize()
    layer = vb.registry["0"]
    layer.bias.data = layer.bias.data.cpu()
    y = layer(torch.randn(2, WIDTH))
    assert y.device.type == "cpu"
    assert any("input on cpu" in reason for reason in vb.stats().fallbacks)


def test_compiled_with_the_gpu_tier_gives_the_eager_result():
    model, x = network(), torch.randn(3, WIDTH, device="cuda", dtype=torch.bfloat16)
    vb = vbrt.wrap(model, "dense").materialize()
    compiled = torch.compile(vb.module, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), vb(x))


@pytest.mark.parametrize("streamed", [False, True])
def test_nvfp4_pages_lie_in_the_order_of_the_kernel_that_runs(streamed):
    model, x = network(dtype=torch.bfloat16), torch.randn(3, WIDTH, device="cuda", dtype=torch.bfloat16)
    on_cpu = vbrt.wrap(copy.deepcopy(model).float(), "fp4", tiers={"gpu": {"enabled": False}})
    room = tiers(model, gpu_pages=3, cpu_pages=9, preset="fp4") if streamed else {}
    with vbrt.wrap(model, "fp4", tiers=room) as vb, torch.no_grad():
        want = on_cpu(x.cpu().float())
        for y in outputs(vb, x):
            assert (y.cpu().float() - want).norm() / want.norm() < 2e-2
        assert {layer.kernel for layer in vb.stats().layers.values()} == {"triton"}
        again = pickle.loads(pickle.dumps(vb.module)).cpu().float()
        y = again(x.cpu().float())
        assert (y - want).norm() / want.norm() < 2e-3
