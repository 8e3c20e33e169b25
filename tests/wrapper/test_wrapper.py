"""vbrt.wrap and VBModelWrapper: what it changes, what it gives back, and what survives accidents."""

import gc
import json
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

import vbrt
from tests.models import FORMATS, TOKENS, config, llama, mlp, wrap, wrap_streamed
from vbrt.config import load_config
from vbrt.errors import ConfigError, KernelError, TierError, WrapError
from vbrt.layers import VBLinear
from vbrt.model.machine import release_host_memory
from vbrt.residency.simulate import PASS, simulate
from vbrt.tiers import TierStack
from vbrt.training import TrainedLinear

pytestmark = pytest.mark.usefixtures("plain_torch")


def dtype_of(format):
    return torch.bfloat16 if format == "exact" else torch.float32


@pytest.fixture(params=FORMATS)
def format(request):
    return request.param


@pytest.fixture(params=["resident", "streamed"])
def wrapped(request, format, tmp_path):
    """(wrapper, its model before wrapping, an input), in every holding."""
    model, original = mlp(dtype=dtype_of(format)), mlp(dtype=dtype_of(format))
    vb = wrap(model, format) if request.param == "resident" else wrap_streamed(model, format, tmp_path)
    yield vb, original, torch.linspace(-1, 1, 192, dtype=dtype_of(format)).reshape(3, 64)
    vb.close()


# -- wrap --------------------------------------------------------------------------------------------------------------


def test_wrap_moves_no_byte_and_keeps_every_object():
    model = llama()
    modules = list(model.modules())
    before = [(id(p), p.data_ptr(), p._version) for p in model.parameters()]
    vb = wrap(model, "nvfp4", keep_head=False)
    assert [(id(p), p.data_ptr(), p._version) for p in vb.model.parameters()] == before
    assert list(vb.model.modules()) == modules and vb.model is model
    assert vb.stats().tiers["cpu"].held_bytes == 0 and not any(x.materialized for x in vb.registry.values())


@pytest.mark.parametrize("given", ["dense", {"weights": {"format": "dense"}}, load_config("dense")])
def test_a_config_may_be_a_preset_a_dict_or_an_object(given):
    vb = vbrt.wrap(mlp(), given)
    assert vb.settings.weights.format == "dense" and len(vb.registry) == 6
    assert vbrt.wrap(mlp(), given, weights={"exclude": ["0"]}).plan.skipped["0"].reason == "weights.exclude has '0'"


def test_a_config_may_be_a_file(tmp_path):
    (tmp_path / "my.toml").write_text('[weights]\nformat = "nf4"\n')
    for given in (tmp_path / "my.toml", str(tmp_path / "my.toml")):
        assert vbrt.wrap(mlp(), given).settings.weights.format == "nf4"


def test_the_default_is_nvfp4():
    assert vbrt.wrap(mlp()).settings.weights.format == "nvfp4"


def test_everything_of_the_model_is_reachable():
    model = llama()
    vb = wrap(model)
    assert vb.config is model.config and vb.generation_config is model.generation_config
    assert vb.dtype is torch.float32 and vb.get_input_embeddings() is model.get_input_embeddings()
    assert vb.num_parameters() == model.num_parameters() and isinstance(vb, nn.Module)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = vb.nonsense


def test_wrapping_twice_is_refused():
    vb = wrap(mlp())
    with pytest.raises(WrapError, match="wrapped already"):
        vbrt.wrap(vb)
    with pytest.raises(WrapError, match=r"VB layer already.*unwrap"):
        vbrt.wrap(vb.model)
    with pytest.raises(WrapError, match=r"list; expected a torch\.nn\.Module"):
        vbrt.wrap([vb])


def test_a_refused_wrap_leaves_the_model_and_the_disk_as_they_were(tmp_path):
    model = mlp()
    settings = config("dense")
    settings["tiers"] |= {"cpu": {"budget": 3 * 16384}, "ssd": {"enabled": True, "path": str(tmp_path)}}
    with pytest.raises(KernelError, match="triton"):
        vbrt.wrap(model, settings, compute={"backend": "triton"})
    with pytest.raises(ConfigError):
        vbrt.wrap(model, settings, weights={"format": "fp3"})
    assert all(type(layer) is nn.Linear for layer in model[::2]) and not any(tmp_path.iterdir())
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("accident", [RuntimeError, KeyboardInterrupt])
def test_a_wrap_that_fails_half_way_gives_the_model_back_and_closes_the_tiers(mode, accident, tmp_path, monkeypatch):
    model, stacks = mlp(), []
    before = [(type(layer), dict(vars(layer))) for layer in model]
    swapped = {"infer": VBLinear, "train": TrainedLinear}[mode]
    adopt, close = swapped.adopt_, TierStack.close

    def fail_at_the_fourth(cls, module, handle):
        if module is model[6]:
            raise accident("no")
        return adopt.__func__(cls, module, handle)

    monkeypatch.setattr(swapped, "adopt_", classmethod(fail_at_the_fourth))
    monkeypatch.setattr(TierStack, "close", lambda stack: (stacks.append(stack), close(stack)))
    settings = config("dense") | {"mode": mode}
    settings["tiers"] |= {"cpu": {"budget": 4 * 16384}, "ssd": {"enabled": True, "path": str(tmp_path)}}
    with pytest.raises(accident, match="no"):
        vbrt.wrap(model, settings)
    assert [(type(layer), dict(vars(layer))) for layer in model] == before and not model._forward_pre_hooks
    assert [stack.closed for stack in stacks] == [True] and not any(tmp_path.iterdir())


def test_a_bare_linear_can_be_wrapped(format):
    layer, x = nn.Linear(64, 32, dtype=dtype_of(format)).eval(), torch.randn(2, 64, dtype=dtype_of(format))
    y = layer(x)
    vb = wrap(layer, format)
    assert list(vb.registry) == ["(root)"] and type(layer) is VBLinear
    assert torch.equal(vb(x), y) or format == "nvfp4"
    assert type(vb.unwrap()) is nn.Linear


def test_a_model_without_linears_is_wrapped_and_says_that_nothing_was_swapped():
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), torch.randn(1, 3, 8, 8)
    with pytest.warns(UserWarning, match=r"nothing is swapped.*no linear layers; its largest part is 0 \(Conv2d"):
        vb = wrap(model)
    assert torch.equal(vb(x), model(x)) and "nothing is swapped" in vb.plan.notes[0]
    assert vb.stats().hit_rate is None and vb.materialize().unwrap() is model


def test_a_model_of_which_nothing_is_swapped_warns_once_with_the_most_frequent_reason():
    model = mlp(depth=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            vbrt.wrap(model, config("dense", min_parameters=5000, exclude=["0"])).unwrap()
    (warning,) = caught
    assert "4 of 5 linear layers stay because: 4096 parameters; weights.min_parameters = 5000" in str(warning.message)
    assert warning.filename == __file__


def test_wrap_and_load_warn_where_much_is_not_swapped(tmp_path):
    says = r"65.8 KiB of the model's 425.8 KiB are not swapped .* the largest part is model\.embed_tokens"
    with pytest.warns(UserWarning, match=f"vbrt.wrap: {says}"):
        vb = wrap(llama(), "nvfp4")
    vb.save(tmp_path)
    with pytest.warns(UserWarning, match=f"vbrt.load: {says}"):
        vbrt.load(tmp_path, llama())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_wrap_refuses_to_do_without_the_gpu_that_was_asked_for():
    model = mlp()
    with pytest.raises(ConfigError, match=r"tiers\.gpu\.enabled = true; this machine has no GPU"):
        vbrt.wrap(model, tiers={"gpu": {"enabled": True}})
    for given in ({"budget": "6GiB"}, {"enabled": "auto"}):
        assert vbrt.wrap(model, tiers={"gpu": given}).unwrap() is model


@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize("how", ["a file", "below a file", "no drive", "a name that is too long"])
def test_an_ssd_path_that_cannot_be_written_is_refused_at_wrap_needed_or_not(how, needed, tmp_path):
    (tmp_path / "file").write_text("mine")
    path = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "pages",
        "no drive": "/proc/vbrt",
        "a name that is too long": tmp_path / ("x" * 300),
    }[how]
    model, settings = mlp(), config("dense")
    settings["tiers"] |= {"ssd": {"enabled": True, "path": str(path)}}
    settings["tiers"] |= {"cpu": {"budget": 4 * 16384}} if needed else {}
    with pytest.raises(TierError, match=f"tier ssd: cannot write in .*{os.path.basename(path)}"):
        vbrt.wrap(model, settings)
    assert type(model[0]) is nn.Linear and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_trying_an_ssd_path_leaves_no_directory(tmp_path):
    settings = config("dense")
    settings["tiers"] |= {"ssd": {"enabled": True, "path": str(tmp_path / "a" / "b")}}
    vb = vbrt.wrap(mlp(), settings)
    assert vb.plan.home_bytes("ssd") == 0 and not any(tmp_path.iterdir())


def test_giving_memory_back_collects_no_garbage():
    collections = []
    gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
    try:
        release_host_memory()  # runs in the second forward: a full collection takes 0.4 s where transformers is loaded
    finally:
        gc.callbacks.pop()
    assert 2 not in collections


# -- unwrap and close --------------------------------------------------------------------------------------------------


def test_unwrap_gives_the_same_objects_classes_flags_and_bits_back(wrapped, format):
    vb, original, x = wrapped
    model, layers = vb.model, list(vb.model)
    layers[2].weight.requires_grad_(False)
    y = vb(x)
    unwrapped = vb.unwrap()
    assert unwrapped is model and list(unwrapped) == layers and not unwrapped._forward_pre_hooks
    assert [type(layer) for layer in unwrapped] == [type(layer) for layer in original]
    assert [layer.weight.requires_grad for layer in unwrapped[::2]] == [True, False, True, True, True, True]
    assert layers[0].__dict__.keys() == original[0].__dict__.keys()
    assert torch.equal(unwrapped(x), y)
    if format != "nvfp4":
        for name, value in original.state_dict().items():
            assert torch.equal(unwrapped.state_dict()[name], value)
    assert vb.stats().layers == {} and torch.equal(vb(x), y)
    again = wrap(unwrapped, format)
    assert torch.equal(again(x), y)


def test_unwrapping_shells_gives_the_very_parameters_back(wrapped):
    vb, _, _ = wrapped
    before = [id(p) for p in vb.model.parameters()]
    assert [id(p) for p in vb.unwrap().parameters()] == before


def test_unwrap_trains_again():
    model = wrap(mlp().train(), "dense").unwrap()
    model(torch.randn(2, 64)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_after_close_a_forward_is_an_error_that_says_what_to_do(wrapped):
    vb, _, x = wrapped
    vb(x)
    vb.close()
    vb.close()
    for use in (lambda: vb(x), vb.state_dict, vb.unwrap, lambda: vb.model[0].weight):
        with pytest.raises(TierError, match="closed"):
            use()
    assert vb.stats().tiers["cpu"].held_bytes == 0


def test_what_a_closed_or_unwrapped_model_cannot_do_is_refused_by_name(tmp_path):
    for end in ("close", "unwrap"):
        for vb in (wrap(mlp()), wrap(mlp()).materialize()):
            getattr(vb, end)()
            for use in (
                lambda vb=vb: vb.set_budget("cpu", "1GiB"),
                lambda vb=vb: vb.save(tmp_path / "saved"),
                lambda vb=vb: vb.timeline(tmp_path / "x.html"),
                vb.__enter__,
            ):
                with pytest.raises(WrapError, match="closed or unwrapped"):
                    use()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("preset", "dtype", "lossless"),
    [
        ("dense", torch.float32, True),
        ("exact", torch.bfloat16, True),
        ("exact", torch.float32, True),
        ("nvfp4", torch.float32, False),
    ],
)
def test_lossless_says_whether_unwrap_gives_the_original_bits(preset, dtype, lossless):
    model, original = mlp(dtype=dtype), mlp(dtype=dtype).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vb = wrap(model, preset).materialize()
        assert vb.lossless is lossless
        given_back = vb.unwrap().state_dict()
    assert all(torch.equal(given_back[name], value) for name, value in original.items()) is lossless
    assert vb.lossless is lossless and vbrt.wrap(mlp(), config("nvfp4"), mode="train").lossless


def test_leaving_the_context_closes_and_removes_the_files(tmp_path):
    with wrap_streamed(mlp(), "dense", tmp_path) as vb:
        vb(torch.randn(1, 64))
        assert list(tmp_path.rglob("*.page"))
    assert vb.stack.closed and not any(tmp_path.iterdir())
    with pytest.raises(ValueError, match="mine"), wrap_streamed(mlp(), "dense", tmp_path) as vb:
        vb(torch.randn(1, 64))
        raise ValueError("mine")
    assert not any(tmp_path.iterdir())


def test_a_dropped_wrapper_frees_pages_files_and_threads(tmp_path):
    vb = wrap_streamed(mlp(), "dense", tmp_path)
    for _ in range(3):
        vb(torch.randn(1, 64))
    stack, layer = weakref.ref(vb.stack), weakref.ref(vb.model[0])
    del vb
    gc.collect()
    assert layer() is None
    until = time.monotonic() + 10  # a read ahead may be under way in a worker, which holds the stack until it is done
    while any(tmp_path.iterdir()) and time.monotonic() < until:
        time.sleep(0.01)
    assert stack() is None and not any(tmp_path.iterdir())


# -- accidents ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("accident", "when"), [(RuntimeError, "after"), (KeyboardInterrupt, "before")])
def test_an_exception_in_the_middle_of_a_forward_leaves_the_model_usable(wrapped, accident, when):
    vb, _, x = wrapped
    y = vb(x)
    failing = []

    def fail(*_):
        if failing:
            raise accident("in a hook")

    register = vb.model[4].register_forward_pre_hook if when == "before" else vb.model[4].register_forward_hook
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
    handle, add = vb.model[2].handle, vb.stack.add
    monkeypatch.setattr(vb.stack, "add", lambda *args: (_ for _ in ()).throw(accident("no")))
    with pytest.raises(accident):
        vb.model[2](x)
    assert not vb.model[2].materialized and not handle.keys
    monkeypatch.setattr(vb.stack, "add", add)
    assert vb.materialize()(x).isfinite().all()


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
with torch.no_grad():
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(24)]).eval()
    vbrt.wrap(nn.Sequential(nn.Linear(64, 64)).eval(), sys.argv[1]).materialize()  # imports and thread pools
    before = resident()
    vb = vbrt.wrap(model, sys.argv[1], tiers={"gpu": {"enabled": False}})
    if sys.argv[2] == "materialize":
        vb.materialize()
    else:
        x = torch.zeros(1, 1024)
        vb(x), vb(x)
print(before - resident(), vb.plan.swapped_bytes)
"""


@pytest.mark.parametrize(("how", "share"), [("materialize", 0.75), ("two forwards", 0.6)])  # forwards leave scratch
def test_the_processes_memory_falls_with_the_dense_weights(how, share):
    command = [sys.executable, "-c", MEMORY, "fp4", how]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    fell, dense_bytes = map(int, done.stdout.split())
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


def test_a_progress_bar_names_the_large_layers_and_is_silent_away_from_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("vbrt.report.progress._LARGE_BYTES", 16000)
    wrap(mlp()).materialize()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    vb, shown = wrap(mlp(depth=3)), threading.Event()
    threading.Timer(0.5, shown.set).start()
    store = vb.model[4].handle.store
    vb.model[4].handle.store = lambda planes: (shown.wait(5), store(planes))
    vb.materialize(progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "4 (16.0 KiB)" in err and "2/3" in err


def test_stats_count_every_lease_and_every_byte(wrapped):
    vb, _, x = wrapped
    for _ in range(5):
        vb(x)
    stats = vb.stats()
    assert stats.passes == 5
    for swap in vb.plan.swaps:
        layer = stats.layers[swap.name]
        assert (layer.forwards, layer.materialized, layer.kernel) == (5, True, "reference")
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
    _ = vb.model[0].weight
    vb.materialize()
    _ = vb.model[0].weight
    stats = vb.stats()
    assert stats.layers["0"].weight_reads == 1 and stats.layers["0"].hits == 1
    kept = vb.plan.kept_bytes
    assert stats.virtual_capacity == vb.plan.dense_bytes / (kept + stats.tiers["cpu"].held_bytes) > 3


def test_stats_are_plain_data_for_json_and_a_table_for_people(wrapped):
    vb, _, x = wrapped
    vb(x)
    data = json.loads(json.dumps(vb.stats().to_dict()))
    assert set(data["layers"]) == set(vb.registry) and data["passes"] == 1
    assert "10" in str(vb.stats()) and "virtual capacity" in str(vb.stats())


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
        assert torch.equal(fast, y) or (format == "nvfp4" and materialized)
    assert all(layer.forwards == 0 for layer in vb.stats().layers.values())
    if materialized or format == "dense":  # otherwise the slow path, which calls the layers, encodes them now
        torch.testing.assert_close(vb(x), fast)


def test_no_warning_in_a_whole_life():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*not swapped.*the largest part is model.embed_tokens")
        vb = wrap(llama(), "nvfp4")
        vb.generate(TOKENS, max_new_tokens=3, do_sample=False)
        vb.unwrap()


# -- budgets -----------------------------------------------------------------------------------------------------------


def test_a_budget_may_shrink_and_grow_while_the_model_runs(format, tmp_path):
    model, original = mlp(dtype=dtype_of(format)), mlp(dtype=dtype_of(format))
    x = torch.linspace(-1, 1, 192, dtype=dtype_of(format)).reshape(3, 64)
    tiers = {"cpu": {"budget": "1GiB"}, "ssd": {"enabled": True, "path": str(tmp_path)}}
    vb = vbrt.wrap(model, config(format) | {"tiers": tiers})
    with torch.no_grad():
        want = vb(x)
        assert torch.equal(vb(x), want)
        largest, pages = max(swap.page_bytes for swap in vb.plan.swaps), vb.plan.page_bytes
        for budget in (largest, pages // 2, "1GiB", largest + 4096):
            nbytes = vb.set_budget("cpu", budget)
            assert nbytes == vb.plan.budgets["cpu"] == vb.stats().tiers["cpu"].budget_bytes
            for _ in range(3):
                assert torch.equal(vb(x), want)
                tier = vb.stats().tiers["cpu"]
                assert tier.held_bytes <= tier.peak_bytes <= nbytes
        assert vb.settings.tiers.cpu.budget == largest + 4096
        vb.set_budget("cpu", "1GiB")
        vb(x), vb(x)
        misses = vb.stats().misses
        assert torch.equal(vb(x), want) and vb.stats().misses == misses
    if format in ("dense", "exact"):
        assert torch.equal(original(x), want)
    vb.close()


def test_impossible_budgets_are_refused_and_the_model_runs_on(tmp_path):
    vb, x = wrap(mlp(), "dense"), torch.randn(2, 64)
    want = vb(x)
    for tier, budget, error, says in [
        ("cpu", 4096, ConfigError, "smaller than the largest layer's pages"),
        ("cpu", "lots", ConfigError, 'tiers.cpu.budget = "lots"'),
        ("cpu", "900TiB", ConfigError, "this machine has"),
        ("ssd", "1GiB", TierError, "tiers.ssd: this model has the tiers cpu"),
        ("tpu", "1GiB", ConfigError, "tiers.tpu is not a known section"),
        ("cpu", vb.plan.page_bytes - 4096, TierError, "no tier below cpu has room"),
    ]:
        with pytest.raises(error, match=says.replace("(", r"\(")):
            vb.set_budget(tier, budget)
        assert torch.equal(vb(x), want)
    vb.close()


def test_a_budget_of_a_model_of_which_nothing_is_swapped_may_be_set():
    with pytest.warns(UserWarning, match="nothing is swapped"):
        vb = wrap(nn.Sequential(nn.Conv2d(3, 4, 3)))
    assert vb.set_budget("cpu", "1MiB") == 1 << 20 == vb.stats().tiers["cpu"].budget_bytes


def test_a_budget_of_one_tier_does_not_ask_for_those_of_the_others_again(tmp_path, monkeypatch):
    free = psutil.disk_usage(str(tmp_path)).free
    tiers = {"cpu": {"budget": "1MiB"}, "ssd": {"enabled": True, "path": str(tmp_path), "budget": free}}
    monkeypatch.setattr(psutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    vb = vbrt.wrap(mlp(), config("dense") | {"tiers": {**config("dense")["tiers"], **tiers}})
    monkeypatch.setattr(psutil, "disk_usage", lambda path: SimpleNamespace(free=free - 4096))  # pages, or others
    assert vb.set_budget("cpu", "2MiB") == 2 << 20
    with pytest.raises(ConfigError, match=r"tiers\.ssd\.budget"):
        vb.set_budget("ssd", free)
    vb.close()


def test_the_source_of_the_settings_does_not_grow_with_each_budget():
    vb = wrap(mlp())
    for _ in range(3):
        vb.set_budget("cpu", "1GiB")
    assert vb.settings.source == "dict with overrides"


@pytest.mark.parametrize("prefetch", ["auto", 3])
def test_the_prefetch_depth_follows_from_the_pages_unless_it_is_given(tmp_path, prefetch):
    tiers = {"cpu": {"budget": "1MiB"}, "ssd": {"enabled": True, "path": str(tmp_path)}}
    vb = vbrt.wrap(mlp(), config("dense") | {"tiers": tiers, "policy": {"prefetch": prefetch}})
    assert vb.stack.levels[0].policy.prefetch == (2 if prefetch == "auto" else 3)
    vb.close()
