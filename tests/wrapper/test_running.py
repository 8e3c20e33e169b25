"""A wrapped model at work: accidents, threads, memory, stats, generation."""

import json
import threading
import warnings

import pytest
import torch
from torch import nn

import vbrt
from tests import forked
from tests.models import TOKENS, config, dtype_of, llama, mlp, wrap, wrap_streamed
from vbrt.errors import TierError
from vbrt.residency.simulate import PASS, simulate

# -- accidents ---------------------------------------------------------------------------------------------------------


@pytest.mark.sample(6)
@pytest.mark.parametrize(("accident", "when"), [(RuntimeError, "after"), (KeyboardInterrupt, "before")])
def test_an_exception_in_the_middle_of_a_forward_leaves_the_model_usable(wrapped, accident, when):
    vb, _, x = wrapped
    y = vb(x)
    failing = []

    def fail(*_):
        if failing:
            raise accident("in a hook")

    register = vb.module[4].register_forward_pre_hook if when == "before" else vb.module[4].register_forward_hook
    register(fail)
    for _ in range(3):
        failing.append(True)
        with pytest.raises(accident, match="in a hook"):
            vb(x)
        failing.clear()
        assert torch.equal(vb(x), y)
    assert not vb.stack.levels[0].leased


@pytest.mark.parametrize("accident", [RuntimeError, KeyboardInterrupt])
def test_an_exception_while_a_layer_encodes_leaves_it_a_shell(accident, monkeypatch, format):
    vb, x = wrap(mlp(dtype=dtype_of(format)), format), torch.randn(2, 64, dtype=dtype_of(format))
    handle, add = vb.module[2].handle, vb.stack.add
    monkeypatch.setattr(vb.stack, "add", lambda *args, **how: (_ for _ in ()).throw(accident("no")))
    with pytest.raises(accident):
        vb.module[2](x)
    assert not vb.module[2].materialized and not handle.keys
    monkeypatch.setattr(vb.stack, "add", add)
    assert vb.materialize()(x).isfinite().all()


@pytest.mark.sample(3)
def test_two_threads_get_the_same_outputs_and_no_count_is_lost(wrapped):
    vb, _, x = wrapped
    y, results = vb(x), []
    base = vb.stats()

    def work():
        for _ in range(20):
            results.append(torch.equal(vb(x), y))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [True] * 40
    stats = vb.stats()
    pages = len(vb.stack.pages)
    assert stats.hits + stats.misses - base.hits - base.misses == 40 * pages


def test_two_threads_may_meet_in_the_first_forward(wrapped):
    vb, _, x = wrapped
    results, barrier = [], threading.Barrier(2)

    def work():
        barrier.wait()
        results.append(vb(x))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert torch.equal(*results) and len(vb.stack.pages) == sum(len(swap.pages) for swap in vb.plan.swaps)


def test_a_page_that_is_lost_is_named_and_the_model_is_usable_once_it_is_back(tmp_path):
    model, x = mlp(), torch.randn(1, 64)
    y = model(x)
    vb = wrap_streamed(model, "dense", tmp_path).materialize()
    page = next(path for path in tmp_path.rglob("*.page") if "4_dense" in path.name)
    content = page.read_bytes()
    page.unlink()
    with pytest.raises(TierError, match=r"4#dense.*4_dense"):
        vb(x)
    with pytest.raises(TierError, match="4#dense"):
        vb.unwrap()
    page.write_bytes(content)
    assert torch.equal(vb(x), y)
    assert torch.equal(vb.unwrap()(x), y)


# -- memory ------------------------------------------------------------------------------------------------------------

MEMORY = """
import gc, sys, psutil, torch
from torch import nn
import vbrt
torch.set_num_threads(1)
def resident():
    return psutil.Process().memory_info().rss
def materialized(vb):
    vb.materialize()
def run(vb):
    vb(x), vb(x)
x = torch.zeros(1, 1024)
with torch.no_grad():
    vbrt.wrap(nn.Sequential(nn.Linear(64, 64)).eval(), "fp4").materialize()  # imports and thread pools
    for encode in (materialized, run):
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(24)]).eval()
        before = resident()
        vb = vbrt.wrap(model, "fp4", tiers={"gpu": {"enabled": False}})
        encode(vb)
        print(before - resident(), vb.plan.swapped_bytes)
"""


def test_the_processes_memory_falls_with_the_dense_weights():
    done = forked.run(MEMORY)
    assert done.returncode == 0, done.stderr
    for line, share in zip(done.stdout.splitlines(), (0.75, 0.6), strict=True):  # forwards leave scratch
        fell, dense_bytes = map(int, line.split())
        assert dense_bytes == 24 * 1024 * 1024 * 4
        assert fell >= share * dense_bytes


def test_loading_a_state_dict_holds_one_dense_weight_at_a_time():
    vb = wrap(mlp(), "nvfp4").materialize()
    state = vb.state_dict()
    shells = []
    for layer in vb.registry.values():
        store = layer.handle.store
        layer.handle.store = lambda planes, store=store: (
            shells.append(sum(not other.materialized for other in vb.registry.values())),
            store(planes),
        )
    vb.load_state_dict(state)
    assert shells == [1] * 6


# -- materialize and stats ---------------------------------------------------------------------------------------------


def test_materialize_encodes_everything_once(wrapped):
    vb, _, _ = wrapped
    assert vb.materialize() is vb
    pages = set(vb.stack.pages)
    assert all(layer.materialized for layer in vb.registry.values())
    assert pages == {page.key for swap in vb.plan.swaps for page in swap.pages}
    vb.materialize()
    assert set(vb.stack.pages) == pages


def test_stats_count_every_lease_and_every_byte(wrapped):
    vb, _, x = wrapped
    for _ in range(5):
        vb(x)
    stats = vb.stats()
    assert stats.passes == 5
    for swap in vb.plan.swaps:
        layer = stats.layers[swap.name]
        assert (layer.forwards, layer.materialized, layer.kernel) == (5, True, vb.registry[swap.name].handle.kernel)
        assert layer.hits + layer.misses == 5 * len(layer.plane_bytes)
        assert layer.prefetched <= layer.misses and layer.weight_reads == 0
        assert layer.bytes_moved == vb.stack.pages[swap.pages[0].key].bytes_moved or len(swap.pages) > 1
    for page in vb.stack.pages.values():
        moves, rest = divmod(sum(page.bytes_moved.values()), page.nbytes)
        assert rest == 0 and moves - page.misses in (0, 1)  # 1: staged for the pass that has not come
    assert stats.hits == sum(layer.hits for layer in stats.layers.values())
    if stats.layers["0"].home == "cpu":
        assert stats.hit_rate == 1 and stats.bytes_moved == {}
    else:
        assert 0 < stats.hit_rate < 1 and set(stats.bytes_moved) == {"ssd>cpu"}


@pytest.mark.parametrize("policy", ["lru", "scheduled"])
def test_live_hits_are_those_of_the_simulation(policy, tmp_path):
    settings = config("dense") | {"policy": {"kind": policy}}
    settings["tiers"] |= {"cpu": {"budget": 4 * 16384}, "ssd": {"enabled": True, "path": str(tmp_path)}}
    vb, x = vbrt.wrap(mlp(depth=8), settings), torch.randn(1, 64)
    for _ in range(6):
        vb(x)
    order = [f"{2 * i}#dense" for i in range(8)]
    counted = simulate(policy, [PASS, *order] * 6, 4, prefetch=vb.stack.levels[0].policy.prefetch)
    live = {f"{name}#dense": layer.hits for name, layer in vb.stats().layers.items() if layer.hits}
    assert live == dict(+counted.hits)


def test_direct_reads_and_shells_show_in_the_stats():
    vb = wrap(mlp(), "nvfp4")
    assert vb.stats().virtual_capacity == 1
    _ = vb.module[0].weight
    vb.materialize()
    _ = vb.module[0].weight
    stats = vb.stats()
    assert stats.layers["0"].weight_reads == 1 and stats.layers["0"].hits == 1
    vb.registry["0"].handle.computed += 3  # as hosted products do
    assert vb.stats().layers["0"].computed == vb.stats().computed == 3
    kept = vb.plan.kept_bytes
    assert stats.virtual_capacity == vb.plan.dense_bytes / (kept + stats.tiers["cpu"].held_bytes) > 3


def test_stats_are_plain_data_for_json_and_a_table_for_people(wrapped):
    vb, _, x = wrapped
    vb(x)
    data = json.loads(json.dumps(vb.stats().to_dict()))
    assert set(data["layers"]) == set(vb.registry) and data["passes"] == 1
    assert "10" in str(vb.stats()) and "memory: " in str(vb.stats())
    assert "pages on cpu: " in str(vb.stats(verbose=True)) and "pages on cpu: " not in str(vb.stats())


def test_separation_counters_show_reuse_and_refresh():
    vb = vbrt.wrap(mlp(), config("quantile") | {"separation": {"refresh_every": 3}})
    x, state = torch.randn(1, 64), mlp().state_dict()
    vb(x)

    def counters():
        layer = vb.stats().layers["0"]
        return layer.separation_hits, layer.separation_refreshes

    assert counters() == (0, 1)
    vb.load_state_dict(state)  # too early for a refresh
    assert counters() == (1, 1)
    for _ in range(3):
        vb(x)
    assert counters() == (1, 1)  # the weight has not changed
    vb.load_state_dict(state)
    assert counters() == (1, 2)
    assert 0 <= vb.stats().layers["0"].clipped_share < 0.05


def test_stats_walk_the_vb_layers_and_no_other_module(monkeypatch):
    vb = wrap(nn.Sequential(mlp(), nn.Sequential(*[nn.Identity() for _ in range(100)])).eval()).materialize()
    vb.stats()
    for walk in ("named_modules", "modules", "named_parameters", "children"):
        monkeypatch.setattr(nn.Module, walk, lambda *args, **kwargs: pytest.fail("stats() walks the model"))
    assert len(vb.stats().layers) == 6


# -- generate ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_generate_gives_the_tokens_of_the_original(streamed, tmp_path):
    model = llama(dtype=torch.float32)
    tokens = model.generate(TOKENS, max_new_tokens=8, do_sample=False)
    vb = wrap_streamed(model, "dense", tmp_path) if streamed else wrap(model, "dense")
    assert torch.equal(vb.generate(TOKENS, max_new_tokens=8, do_sample=False), tokens)
    assert vb.stats().passes == 8


@pytest.mark.parametrize("format", ["dense", "nvfp4"])
@pytest.mark.parametrize("materialized", [False, True])
def test_the_fast_path_of_transformer_encoder_reads_decoded_weights(format, materialized):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 96, batch_first=True), 2).eval()
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        y = model(x)
        vb = wrap(model, format)
        if materialized:
            vb.materialize()
        fast = vb(x)
        assert torch.equal(fast, y) or format == "nvfp4"
    assert all(layer.materialized and not layer.forwards for layer in vb.stats().layers.values())
    torch.testing.assert_close(vb(x), fast)


def test_no_warning_in_a_whole_life():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vb = wrap(llama(), "nvfp4")
        vb.generate(TOKENS, max_new_tokens=3, do_sample=False)
        vb.stats()
        vb.close()


def test_metrics_are_the_counters_of_now():
    vb = wrap(mlp(), "nvfp4")
    with torch.no_grad():
        vb(torch.randn(2, 64))
        before = vb.metrics()
        vb(torch.randn(2, 64))
    assert vb.metrics() == vb.stats().metrics() != before
    assert 'vbrt_passes_total{phase="prompt"} 1' in before and 'vbrt_passes_total{phase="prompt"} 2' in vb.metrics()
