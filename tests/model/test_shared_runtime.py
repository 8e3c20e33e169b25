"""Models that share a runtime: one stack, one budget for each tier, whoever comes and goes."""

import copy
import threading

import pytest
import torch
from torch import nn

import vbrt
from tests.models import FORMATS, config, mlp, wrap_streamed
from vbrt.config import PolicyConfig, load_config
from vbrt.errors import ConfigError, TierError, WrapError
from vbrt.layers import VBLinear
from vbrt.model.runtime import Runtime
from vbrt.tiers import SsdTier

PAGE = 16384  # of a dense layer of `mlp`


def weights(format="dense"):
    return {"weights": config(format)["weights"]}


def streamed(path, pages=4, format="dense", **sections):
    """A config with room for some dense pages in memory and for all on the ssd."""
    tiers = {"gpu": {"enabled": False}, "cpu": {"budget": pages * PAGE}}
    return weights(format) | {"tiers": tiers | {"ssd": {"enabled": True, "path": str(path)}}} | sections


def pair(path, pages, format="dense", second="dense"):
    """Two wrapped models on one runtime, and what they gave before."""
    one, two = mlp(depth=4), mlp(depth=3)
    x = torch.randn(2, 64)
    a = vbrt.wrap(one, streamed(path, pages, format))
    b = vbrt.wrap(two, weights(second), runtime=a.runtime)
    return a, b, x


def outputs(*models, x):
    with torch.no_grad():
        return [model(x) for model in models]


def held(vb):
    tier = vb.stats().tiers["cpu"]
    assert tier.held_bytes <= tier.peak_bytes <= tier.budget_bytes
    return tier.held_bytes


@pytest.mark.parametrize("pages", [2, 4, 6, 100])
@pytest.mark.parametrize("second", FORMATS)
def test_two_models_give_what_each_gives_alone_within_one_budget(second, pages, tmp_path):
    x = torch.randn(2, 64)
    alone = [vbrt.wrap(mlp(depth=4), config("dense")), vbrt.wrap(mlp(depth=3), config(second))]
    want = outputs(*alone, x=x)
    a = vbrt.wrap(mlp(depth=4), streamed(tmp_path, pages))
    b = vbrt.wrap(mlp(depth=3), weights(second), runtime=a.runtime)
    assert b.runtime is a.runtime and b.stack is a.stack
    for _ in range(4):
        assert all(map(torch.equal, outputs(a, b, x=x), want))
        assert held(a) == held(b)
    assert (a.stats().passes, b.stats().passes, a.runtime.stats().passes) == (4, 4, 8)
    a.runtime.close()
    assert not any(tmp_path.iterdir())


def test_a_model_with_two_planes_widens_the_room_that_policies_keep_for_a_lease(tmp_path):
    a, x = vbrt.wrap(mlp(depth=4), streamed(tmp_path, 6)), torch.randn(2, 64, dtype=torch.bfloat16)
    assert a.stack.levels[0].policy.group == 1
    b = vbrt.wrap(mlp(depth=6, dtype=torch.bfloat16), weights("exact"), runtime=a.runtime)
    want = mlp(depth=6, dtype=torch.bfloat16)(x)
    assert b.plan.group == 2 == a.stack.levels[0].policy.group
    for _ in range(3):
        assert torch.equal(*outputs(b, x=x), want) and held(b)
    a.runtime.close()


def test_each_model_has_its_stats_and_the_runtime_those_of_all(tmp_path):
    a, b, x = pair(tmp_path, 4)
    for _ in range(3):
        outputs(a, b, b, x=x)
    one, two, both = a.stats(), b.stats(), a.runtime.stats()
    assert list(two.layers) == ["0", "2", "4"]
    assert both.layers == one.layers | {f"Sequential-2/{name}": layer for name, layer in two.layers.items()}
    assert both.hits == one.hits + two.hits and both.misses == one.misses + two.misses
    assert both.tiers == one.tiers and both.tiers["cpu"].held_bytes > max(one.device_bytes, two.device_bytes) - 3000
    assert (one.passes, two.passes, both.passes) == (3, 6, 9)
    assert "Sequential-2/0" in str(both)
    a.runtime.close()


def test_a_timeline_of_one_model_has_its_layers_under_their_own_names(tmp_path):
    a, b, x = pair(tmp_path / "pages", 4)
    outputs(a, b, x=x)
    with b.timeline(tmp_path / "b.json"):
        outputs(b, x=x)
    assert set(b.stats().timeline.layers) == {"0", "2", "4"} and a.stats().timeline is None
    a.runtime.close()


def test_a_budget_that_either_sets_is_that_of_both(tmp_path):
    a, b, x = pair(tmp_path, 100)
    want = outputs(a, b, x=x)
    for vb, other, pages in ((a, b, 3), (b, a, 2), (a, b, 50), (b, a, 5)):
        assert vb.set_budget("cpu", pages * PAGE) == pages * PAGE
        for one in (vb, other):
            assert one.plan.budgets["cpu"] == one.settings.tiers.cpu.budget == pages * PAGE
            assert held(one) <= pages * PAGE
        for _ in range(2):
            assert all(map(torch.equal, outputs(a, b, x=x), want))
            held(a)
    with pytest.raises(ConfigError, match=rf"smaller than the largest layer's pages \({PAGE} bytes\)"):
        b.set_budget("cpu", PAGE - 4096)
    assert a.settings.weights == load_config(weights()).weights
    a.runtime.close()


@pytest.mark.parametrize("end", ["close", "unwrap"])
@pytest.mark.parametrize("first", [0, 1])
def test_one_that_ends_frees_its_pages_and_the_other_runs_on(first, end, tmp_path):
    a, b, x = pair(tmp_path, 5)
    want = outputs(a, b, x=x)
    gone, stays = (a, b) if first == 0 else (b, a)
    model = getattr(gone, end)()
    assert model is None or torch.equal(model(x), want[first])
    assert not stays.stack.closed and stays.runtime.attachments == (stays._attachment,)
    assert sum(page.nbytes for page in stays.stack.pages.values()) == stays.plan.page_bytes
    for _ in range(3):
        assert torch.equal(*outputs(stays, x=x), want[1 - first]) and held(stays)
    with pytest.raises(WrapError, match="closed or unwrapped"):
        gone.set_budget("cpu", 3 * PAGE)
    if stays.plan.page_bytes <= 5 * PAGE:  # the room that was freed is used: nothing streams any more
        misses = stays.stats().misses
        outputs(stays, x=x)
        assert stays.stats().misses == misses and stays.stack.at_rest
    stays.unwrap()
    assert stays.stack.closed and not any(tmp_path.iterdir())


def test_a_third_model_takes_the_room_of_one_that_has_gone(tmp_path):
    a, b, x = pair(tmp_path, 5)
    want = outputs(a, b, x=x)
    b.close()
    c = vbrt.wrap(mlp(depth=3), weights(), runtime=a.runtime)
    assert all(map(torch.equal, outputs(a, c, x=x), want)) and held(a)
    a.close()
    c.close()
    with pytest.raises(WrapError, match="the runtime was closed with its last model"):
        vbrt.wrap(mlp(), weights(), runtime=a.runtime)


def test_a_model_that_nobody_holds_leaves_the_runtime(tmp_path):
    a, b, x = pair(tmp_path, 5)
    want = outputs(a, b, x=x)[0]
    del b
    assert torch.equal(*outputs(a, x=x), want)
    assert a.runtime.attachments == (a._attachment,) and len(a.stack.pages) == 4
    a.close()


def test_a_further_model_moves_the_first_ones_pages_where_one_plan_for_both_has_them(tmp_path):
    one = mlp(depth=4)
    a, x = vbrt.wrap(one, streamed(tmp_path, 5)), torch.randn(2, 64)
    want = outputs(a, x=x)
    assert a.stack.at_rest and a.stats().layers["0"].home == "cpu"
    b = vbrt.wrap(mlp(depth=3), weights(), runtime=a.runtime)
    outputs(b, x=x)
    assert {layer.home for layer in a.runtime.stats().layers.values()} == {"ssd"}  # none is in the other one's way
    for _ in range(3):
        assert torch.equal(*outputs(a, x=x), *want) and held(a)
        outputs(b, x=x)
    assert a.stats().layers["0"].misses > 0
    a.runtime.close()


def test_passes_that_alternate_hit_as_their_phases_are_learned(tmp_path):
    a, b, x = pair(tmp_path, 6)
    for _ in range(4):
        outputs(a, b, x=x)
    before = a.runtime.stats()
    for _ in range(10):
        outputs(a, b, x=x)
    after = a.runtime.stats()
    hits, misses = after.hits - before.hits, after.misses - before.misses
    assert hits >= 2 * 10 and misses <= 5 * 10  # seven pages a round, room for six with two of them a ring
    a.runtime.close()


def test_passes_in_threads_give_the_same_and_lose_no_count(tmp_path):
    a, b, x = pair(tmp_path, 4)
    want, wrong = outputs(a, b, x=x), []
    before = a.runtime.stats()

    def work(vb, y):
        for _ in range(10):
            if not torch.equal(*outputs(vb, x=x), y):
                wrong.append(vb)

    threads = [threading.Thread(target=work, args=pair) for pair in zip((a, b), want, strict=True)]
    [thread.start() for thread in threads]
    for budget in (3, 5, 4):
        a.set_budget("cpu", budget * PAGE)
    [thread.join() for thread in threads]
    after, tier = a.runtime.stats(), a.stats().tiers["cpu"]
    assert not wrong and after.hits + after.misses - before.hits - before.misses == 10 * 7
    # pages of five may have been on loan as the budget fell to four, and then the peak begins with them
    assert tier.held_bytes <= tier.budget_bytes and tier.peak_bytes <= 5 * PAGE
    a.runtime.close()


def test_models_come_and_go_while_another_one_runs_in_a_thread(tmp_path):
    a, x = vbrt.wrap(mlp(depth=4), streamed(tmp_path, 5)), torch.randn(2, 64)
    want, other = outputs(a, mlp(depth=3), x=x)
    wrong, done = [], threading.Event()

    def work():
        while not done.is_set():
            try:
                if not torch.equal(*outputs(a, x=x), want):
                    wrong.append("bits")
            except Exception as error:  # noqa: BLE001 - shown below
                wrong.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for end in ("close", "unwrap") * 4:
            b = vbrt.wrap(mlp(depth=3), weights(), runtime=a.runtime)
            assert torch.equal(*outputs(b, x=x), other) and held(b)
            a.runtime.stats()
            getattr(b, end)()
    finally:
        done.set()
        thread.join()
    assert not wrong and len(a.stack.pages) == 4
    a.close()


@pytest.mark.parametrize("accident", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["a layer is swapped", "pages move"])
def test_a_second_wrap_that_fails_leaves_both_models_as_they_were(when, accident, tmp_path, monkeypatch):
    two, x = mlp(depth=3), torch.randn(2, 64)
    a = vbrt.wrap(mlp(depth=4), streamed(tmp_path, 5))
    want = outputs(a, two, x=x)
    before = {key: page.home for key, page in a.stack.pages.items()}, a.plan, a.settings
    kept = [(type(layer), dict(vars(layer))) for layer in two]

    if when == "a layer is swapped":
        adopt = VBLinear.adopt_.__func__

        def fail(cls, module, handle):
            if module is two[4]:
                raise accident("no")
            return adopt(cls, module, handle)

        monkeypatch.setattr(VBLinear, "adopt_", classmethod(fail))
    else:
        put, calls = SsdTier.put, []

        def fail(tier, room, page, **named):
            calls.append(room)
            if len(calls) == 3:
                raise accident("no")
            return put(tier, room, page, **named)

        monkeypatch.setattr(SsdTier, "put", fail)
    with pytest.raises(accident, match="no"):
        vbrt.wrap(two, weights(), runtime=a.runtime)
    monkeypatch.undo()
    assert [(type(layer), dict(vars(layer))) for layer in two] == kept and not two._forward_pre_hooks
    assert ({key: page.home for key, page in a.stack.pages.items()}, a.plan, a.settings) == before
    a.stack.retire_unowned()  # what the error's frames have held
    assert a.runtime.attachments == (a._attachment,) and a.stack.at_rest
    assert all(map(torch.equal, outputs(a, two, x=x), want))
    b = vbrt.wrap(two, weights(), runtime=a.runtime)  # and then it goes
    assert all(map(torch.equal, outputs(a, b, x=x), want)) and held(a)
    a.runtime.close()


def test_a_model_that_does_not_fit_beside_the_first_is_refused(tmp_path):
    a = vbrt.wrap(mlp(depth=4), weights() | {"tiers": {"gpu": {"enabled": False}, "cpu": {"budget": 5 * PAGE}}})
    x = torch.randn(2, 64)
    want = outputs(a, x=x)
    two = mlp(depth=3)
    with pytest.raises(ConfigError, match=r"the tiers hold cpu 80\.0 KiB"):
        vbrt.wrap(two, weights(), runtime=a.runtime)
    assert type(two[0]) is nn.Linear and torch.equal(*outputs(a, x=x), *want)
    b = vbrt.wrap(mlp(depth=1), weights(), runtime=a.runtime)
    assert b(x).isfinite().all() and held(b) == 5 * PAGE
    with pytest.raises(TierError, match="no tier below cpu has room"):
        a.set_budget("cpu", 4 * PAGE)
    a.runtime.close()


@pytest.mark.parametrize(
    ("given", "overrides", "says"),
    [
        ({"tiers": {"cpu": {"budget": "1GiB"}}}, {}, r"tiers\.cpu\.budget = '1GiB', and the runtime has 65536"),
        ({"tiers": {"cpu": {"budget": "auto"}}}, {}, r"tiers\.cpu\.budget = 'auto'"),  # the default, but said
        (None, {"tiers": {"ssd": {"enabled": False}}}, r"tiers\.ssd\.enabled = False"),
        (None, {"policy": {"kind": "lru"}}, r"policy\.kind = 'lru', and the runtime has 'scheduled'"),
        (None, {"policy": PolicyConfig(kind="lru")}, r"policy\.kind = 'lru'"),
        ("lru", {}, r"policy\.kind = 'lru'"),
        (load_config(policy={"prefetch": 7}), {}, r"policy\.prefetch = 7"),
        (None, {"mode": "train"}, r"mode = \"train\" on a runtime"),
    ],
)
def test_what_a_second_config_says_otherwise_of_tiers_and_policy_is_refused_by_name(given, overrides, says, tmp_path):
    a, two = vbrt.wrap(mlp(depth=3), streamed(tmp_path, 4)), mlp(depth=2)
    with pytest.raises(ConfigError, match=says):
        vbrt.wrap(two, given, runtime=a.runtime, **overrides)
    assert type(two[0]) is nn.Linear
    a.close()


def test_a_wrapper_in_the_place_of_its_runtime_is_refused():
    a, two = vbrt.wrap(mlp(depth=2), config("dense")), mlp(depth=2)
    with pytest.raises(vbrt.ArgumentError, match=r"runtime = Sequential; expected `vb\.runtime`"):
        vbrt.wrap(two, weights(), runtime=a)
    assert type(two[0]) is nn.Linear
    a.close()


def test_a_second_config_may_repeat_what_the_runtime_has(tmp_path):
    a = vbrt.wrap(mlp(depth=3), streamed(tmp_path, 4))
    for given in (streamed(tmp_path, 4), {"tiers": {"cpu": {"budget": "64KiB"}}}, load_config("nf4"), "exact", None):
        b = vbrt.wrap(mlp(depth=2), given, runtime=a.runtime)
        assert b.settings.tiers == a.settings.tiers and b.settings.policy == a.settings.policy
        b.close()
    a.close()


def test_errors_of_a_further_model_name_it(tmp_path):
    a, b, _ = pair(tmp_path, 4, second="nvfp4")
    with pytest.raises(vbrt.FormatError, match=r"Sequential-2/2: "):
        with torch.no_grad():
            b.module[2].weight.fill_(float("nan"))
        b.materialize()
    assert len({key for key in a.stack.pages if key.startswith("Sequential-2/")}) == 1
    a.runtime.close()


def test_a_copy_of_a_model_is_another_one_on_its_runtime(tmp_path):
    import copy

    a, b, x = pair(tmp_path, 6)
    want = outputs(a, b, x=x)
    c = copy.deepcopy(b)
    assert c.runtime is a.runtime and len(a.runtime.attachments) == 3
    assert a.runtime.page_bytes == 7 * PAGE  # the copy shares its pages
    assert len(a.runtime.stats().layers) == 4 + 3 + 3
    b.close()
    assert torch.equal(*outputs(c, x=x), want[1])
    c.close()
    assert torch.equal(*outputs(a, x=x), want[0]) and len(a.stack.pages) == 4
    a.close()
    assert a.stack.closed


def test_a_runtime_is_a_runtime_of_its_stack():
    a = vbrt.wrap(mlp(depth=2), config("dense"))
    assert isinstance(a.runtime, Runtime) and a.runtime.stack is a.stack
    assert type(a.module[0]) is VBLinear
    a.close()


@pytest.mark.parametrize("kind", ["save", "checkpoint"])
def test_a_model_is_loaded_beside_another_one(kind, tmp_path):
    from safetensors.torch import save_file

    plain, x = mlp(depth=3), torch.randn(2, 64)
    if kind == "save":
        vbrt.wrap(plain, config("nvfp4")).save(tmp_path / "files")
        want = vbrt.load(tmp_path / "files", mlp(depth=3))
    else:
        (tmp_path / "files").mkdir()
        save_file(plain.state_dict(), tmp_path / "files" / "model.safetensors")
        want = vbrt.wrap(plain, config("nvfp4"))
    want = outputs(want, x=x)[0]
    a = vbrt.wrap(mlp(depth=4), streamed(tmp_path / "pages", 3))
    before = outputs(a, x=x)
    with torch.device("meta"):
        two = mlp(depth=3)
    b = vbrt.load(tmp_path / "files", two, None if kind == "save" else weights("nvfp4"), runtime=a.runtime)
    assert b.runtime is a.runtime and b.settings.weights.format == "nvfp4"
    for _ in range(2):
        assert all(map(torch.equal, outputs(a, b, x=x), [*before, want])) and held(a)
    with pytest.raises(ConfigError, match=r"policy\.kind = 'lru', and the runtime has 'scheduled'"):
        vbrt.load(tmp_path / "files", mlp(depth=3), runtime=a.runtime, policy={"kind": "lru"})
    a.runtime.close()


def test_a_load_that_fails_leaves_the_first_model_and_its_homes(tmp_path):
    vbrt.wrap(mlp(depth=3), config("dense")).save(tmp_path / "files")
    file = next((tmp_path / "files").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8] + b"damaged!")
    a, two, x = vbrt.wrap(mlp(depth=4), streamed(tmp_path / "pages", 5)), mlp(depth=3), torch.randn(2, 64)
    want = outputs(a, two, x=x)
    homes = {key: page.home for key, page in a.stack.pages.items()}
    with pytest.raises(vbrt.CheckpointError, match="damaged"):
        vbrt.load(tmp_path / "files", two, runtime=a.runtime)
    a.stack.retire_unowned()
    assert {key: page.home for key, page in a.stack.pages.items()} == homes
    assert a.runtime.attachments == (a._attachment,) and all(map(torch.equal, outputs(a, two, x=x), want))
    a.close()


@pytest.mark.parametrize("format", FORMATS)
def test_a_save_of_a_further_model_is_that_of_the_model_alone(format, tmp_path):
    a, b, x = pair(tmp_path / "pages", 4, second=format)
    want = outputs(b, x=x)
    b.save(tmp_path / "saved")
    names = {name for file in (tmp_path / "saved").iterdir() for name in file.read_text("latin-1").split('"')}
    assert not any("Sequential-2" in name for name in names)
    state = b.state_dict()
    loaded = vbrt.load(tmp_path / "saved", mlp(depth=3))
    assert torch.equal(*outputs(loaded, x=x), *want) and state.keys() == loaded.state_dict().keys()
    b.load_state_dict(mlp(depth=3, width=64).state_dict())
    assert outputs(b, x=x)[0].isfinite().all() and held(b)
    a.runtime.close()


def test_tables_of_a_further_model_pass_through_no_tier(tmp_path):
    def tables():
        torch.manual_seed(5)
        return nn.Sequential(nn.Embedding(512, 64), nn.Linear(64, 64)).eval()

    a, x, tokens = vbrt.wrap(mlp(depth=4), streamed(tmp_path, 3)), torch.randn(2, 64), torch.arange(7)
    want, rows = outputs(a, x=x)[0], tables()(tokens)
    b = vbrt.wrap(tables(), {"weights": weights()["weights"] | {"embeddings": True}}, runtime=a.runtime)
    assert b.plan.page_bytes > 2 * a.plan.budgets["cpu"]  # the table alone is larger than the tier
    for _ in range(3):
        assert torch.equal(b(tokens), rows) and torch.equal(*outputs(a, x=x), want) and held(b)
    c = vbrt.wrap(mlp(depth=3), weights(), runtime=a.runtime)  # beside a table that is stored
    assert outputs(c, x=x)[0].isfinite().all() and torch.equal(b(tokens), rows)
    a.runtime.close()


def test_pages_that_a_closed_copy_leaves_do_not_take_the_room_of_layers_that_are_yet_to_be_encoded(tmp_path):
    """Four layers of the copy fill the budget, and would live there: nothing could pass."""
    vb, x = wrap_streamed(mlp(), "nf4", tmp_path), torch.randn(3, 64)
    clone = copy.deepcopy(vb)
    expected = clone(x)
    layers = [copy.deepcopy(clone.module[at]) for at in (0, 2, 4, 6)]
    clone.close()
    assert torch.equal(vb(x), expected) and len(layers) == 4
