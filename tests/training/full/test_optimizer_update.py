"""Updates in the background: any optimizer that has a rule, any home of its state, and what happens when one fails."""

import errno
import functools
import itertools
import os
import threading
from pathlib import Path

import pytest
import torch

import vbrt
from tests.tiers.pages import forked
from tests.training.full.full_models import Tiny, adamw, batches, loss_of, resident, train
from vbrt.kernels import update
from vbrt.kernels.cpu import build
from vbrt.kernels.cpu import update as compiled
from vbrt.kernels.update import Step
from vbrt.tiers.storage import ssd_tier
from vbrt.training.full.lion import Lion
from vbrt.training.full.update_pages import StatePage
from vbrt.training.full.update_threads import Helpers

KIB = 1024
LAYERS = 12
#: room for all high halves and gradients, and for some of the rest of the state, in host memory
HALF = 2 * (LAYERS + 1) * 8 * KIB + (4 * 8 + 3 * 40 + 6 * 40) * KIB


def grouped(parameters):
    """Two groups with settings of their own."""
    parameters = list(parameters)
    return torch.optim.AdamW(
        [{"params": parameters[::2], "weight_decay": 0.3}, {"params": parameters[1::2], "lr": 3e-3}],
        lr=1e-2,
        fused=True,
    )


OPTIMIZERS = {
    "AdamW, two groups": grouped,
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, fused=True),
    "AMSGrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, fused=True),
    "SGD, Nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    "SGD, dampened, up": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, dampening=0.1, maximize=True, fused=True),
    "Lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
}


def partly_in_files(tmp_path: Path, budget: int = HALF) -> dict:
    return {"cpu": {"budget": budget}, "ssd": {"enabled": True, "path": str(tmp_path)}}


def assert_same(vb, twin):
    found = vb.state_dict()
    for name, value in twin.state_dict().items():
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_rule_trains_as_its_optimizer_does_resident(make):
    model = Tiny()
    twin = resident(model)
    with vbrt.wrap(model, "full", optimizer=make(model.parameters())) as vb:
        assert train(vb, vb.optimizer) == train(twin, make(twin.parameters()))
        assert_same(vb, twin)


def test_state_that_lives_partly_in_files_trains_with_the_same_bits(tmp_path):
    model = Tiny(LAYERS)
    twin = resident(model)
    with vbrt.wrap(model, "full", optimizer=adamw(model.parameters()), tiers=partly_in_files(tmp_path)) as vb:
        assert train(vb, vb.optimizer) == train(twin, adamw(twin.parameters()))
        homes = [layer.handle.state.memory.in_memory for layer in vb.module.layers]
        assert_same(vb, twin)
        assert any(homes) and not all(homes)
        files = list(tmp_path.glob("run-*/*state*.page"))
        assert len(files) == homes.count(False) + (not vb.module.head.handle.state.memory.in_memory)


class Broken:
    """A drive that fails `times` times, from the `skip`th access to a plane's pages on."""

    def __init__(self, skip, times, plane="state"):
        self.skip, self.times, self.plane = skip, times, plane

    def __call__(self, real):
        def access(tier, room, page, *, key, **options):
            if key.endswith(self.plane):
                self.skip -= 1
                if self.skip < 0 < self.times:
                    self.times -= 1
                    raise vbrt.TierError(f"{key}: no") from OSError(errno.ENOSPC, "No space left on device")
            return real(tier, room, page, key=key, **options)

        return access


@pytest.mark.sample(2)
@pytest.mark.parametrize("operation", ["get", "put"])
@pytest.mark.parametrize("where", ["forward", "settle"])
def test_a_step_that_fails_is_completed_by_who_tries_again(tmp_path, monkeypatch, operation, where):
    model = Tiny(LAYERS)
    twin = resident(model)
    theirs, losses = adamw(twin.parameters()), []
    with vbrt.wrap(model, "full", optimizer=adamw(model.parameters()), tiers=partly_in_files(tmp_path)) as vb:
        for at, (ids, target) in enumerate(batches(4)):
            loss_of(vb, ids, target).backward()
            if at == 1:
                broken = Broken(1, 2)
                monkeypatch.setattr(ssd_tier.SsdTier, operation, broken(getattr(ssd_tier.SsdTier, operation)))
            vb.step()
            vb.zero_grad()
            if at == 1:
                act = vb.settle if where == "settle" else functools.partial(loss_of, vb, ids, target)
                for _ in range(2):
                    with pytest.raises(vbrt.TierError, match=r"layers\.\d+.*: its update could not be completed"):
                        act()
                act()
                assert broken.times == 0
        for ids, target in batches(4):
            loss = loss_of(twin, ids, target)
            loss.backward()
            theirs.step()
            theirs.zero_grad()
            losses.append(loss)
        assert_same(vb, twin)


def test_a_step_that_is_repeated_after_a_failure_does_only_what_is_missing(tmp_path, monkeypatch):
    model = Tiny(LAYERS)
    twin = resident(model)
    theirs = adamw(twin.parameters())
    with vbrt.wrap(model, "full", optimizer=adamw(model.parameters()), tiers=partly_in_files(tmp_path)) as vb:
        ((ids, target),) = batches(1)
        for one in (vb, twin):
            loss_of(one, ids, target).backward()
        monkeypatch.setattr(ssd_tier.SsdTier, "put", Broken(1, 1)(ssd_tier.SsdTier.put))
        vb.step()
        with pytest.raises(vbrt.TierError):
            vb.settle()
        vb.step()  # the gradients of what stays on the device are still there
        vb.settle()
        theirs.step()
        assert_same(vb, twin)


def test_a_failure_that_stays_keeps_nobody_from_closing(tmp_path, monkeypatch):
    model = Tiny(LAYERS)
    optimizer = adamw(model.parameters())
    vb = vbrt.wrap(model, "full", optimizer=optimizer, tiers=partly_in_files(tmp_path))
    ((ids, target),) = batches(1)
    loss_of(vb, ids, target).backward()
    monkeypatch.setattr(ssd_tier.SsdTier, "put", Broken(0, 1000)(ssd_tier.SsdTier.put))
    vb.step()
    with pytest.raises(vbrt.TierError):
        vb.settle()
    vb.close()
    assert not list(tmp_path.glob("run-*/*.page"))
    assert optimizer._vb_updater.waiting  # which nobody will compute
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(vbrt.TierError, match="the model was closed"):
            use()


def test_an_optimizer_of_a_closed_model_says_so():
    model = Tiny(LAYERS)
    optimizer = adamw(model.parameters())
    vb = vbrt.wrap(model, "full", optimizer=optimizer)
    ((ids, target),) = batches(1)
    loss_of(vb, ids, target).backward()
    vb.close()
    with pytest.raises(vbrt.TierError, match=r"AdamW\.step\(\): the model was closed"):
        optimizer.step()


@pytest.mark.parametrize("threads", [1, 3])
def test_parts_cover_a_weight_once_and_the_first_error_is_raised(threads):
    helpers, done, lock = Helpers(threads), [], threading.Lock()

    def part(begin, end):
        with lock:
            done.append((begin, end))

    for count in (1, 64 * KIB, 64 * KIB + 1, 700 * KIB + 3):
        done.clear()
        helpers.run(count, part)
        done.sort()
        assert done[0][0] == 0 and done[-1][1] == count
        assert all(a[1] == b[0] and b[0] % KIB == 0 for a, b in itertools.pairwise(done))
    works = [lambda at=at: part(at, at) for at in range(20)]
    done.clear()
    helpers.each(works)
    assert sorted(done) == [(at, at) for at in range(20)]
    with pytest.raises(ZeroDivisionError):
        helpers.run(700 * KIB, lambda begin, end: 1 // (begin - begin))
    helpers.stop()


def compiled_step(helpers, count=31 * KIB + 3):
    """Do a compiled update of ones; return the masters. Of so few that torch, in a forked child, takes one thread."""
    halves, moments = update.split_master(torch.ones(count)), {"first": torch.ones(count), "second": torch.ones(count)}
    helpers.run(count, compiled.update(halves, moments, torch.ones(count), Step("adam", 1, 0.1, 0.9, 0.99)))
    return update.join_master(halves)


@pytest.mark.skipif(build.refusal(torch.device("cpu"), "update") is not None, reason="no C compiler")
def test_a_compiled_update_is_one_call_for_all_threads_and_a_forked_child_has_its_own(monkeypatch):
    monkeypatch.setattr(compiled.TeamPart, "__call__", lambda *part: pytest.fail("a part came through Python"))
    helpers = Helpers(3)
    expected = compiled_step(helpers)
    assert expected.unique().numel() == 1 and expected[0] < 1

    def child():
        assert torch.equal(compiled_step(helpers), expected)
        assert helpers._team.pid == os.getpid()
        helpers.stop()

    assert os.waitpid(forked(child), 0)[1] == 0
    assert torch.equal(compiled_step(helpers), expected)
    helpers.stop()


def clipped(model, optimizer, clip, steps=4, accumulate=1):
    """The losses and norms of some steps with clipping, and what is left of gradients after it."""
    found = []
    for at, (ids, target) in enumerate(batches(steps * accumulate)):
        loss = loss_of(model, ids, target)
        loss.backward()
        found.append(loss.item())
        if at % accumulate == accumulate - 1:
            found.append(clip(0.3).item())
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
def test_clipping_by_the_exact_norm_has_the_bits_of_torchs(tmp_path, accumulate):
    model = Tiny(LAYERS)
    twin = resident(model)
    with vbrt.wrap(model, "full", optimizer=adamw(model.parameters()), tiers=partly_in_files(tmp_path)) as vb:
        ours = clipped(vb, vb.optimizer, vb.clip_grad_norm_, accumulate=accumulate)
        assert all(norm > 0.3 for norm in ours[accumulate :: accumulate + 1])
        clip = functools.partial(torch.nn.utils.clip_grad_norm_, list(twin.parameters()))
        assert ours == clipped(twin, adamw(twin.parameters()), clip, accumulate=accumulate)
        assert_same(vb, twin)
        told = [line for line in vb.stats().fallbacks if "gradient.float32" in line]
        assert bool(told) == (accumulate > 1)  # host memory was full before sums in fp32 came


def test_gradients_that_were_clipped_are_read_and_added_to_as_such():
    model = Tiny()
    with vbrt.wrap(model, "full", optimizer=adamw(model.parameters())) as vb:
        ((ids, target),) = batches(1)
        loss_of(vb, ids, target).backward()
        before = model.layers[1].weight.grad.clone()
        norm = vb.clip_grad_norm_(0.1)
        factor = 0.1 / (norm + 1e-6)
        loss_of(vb, ids, target).backward()
        assert torch.allclose(model.layers[1].weight.grad, before * (1 + factor), rtol=1e-2)
        vb.clip_grad_norm_(0.1)
        assert torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]) <= 0.1001


@pytest.mark.parametrize("unscale", [False, True])
def test_gradients_of_a_scaled_loss_are_unscaled_and_overflows_skipped(unscale):
    model = Tiny()
    twin = resident(model)
    ((ids, target),) = batches(1)
    with vbrt.wrap(model, "full", optimizer=adamw(model.parameters())) as vb:
        for one, optimizer in ((vb, vb.optimizer), (twin, adamw(twin.parameters()))):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for at in range(3):
                scaler.scale(loss_of(one, ids, target) * (float("inf") if at == 1 else 1.0)).backward()
                if unscale:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scaler.get_scale() == 512.0
        assert_same(vb, twin)


def test_a_machine_without_a_compiler_trains_with_the_same_bits_and_says_so_once(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    caches = (build._build, compiled.refusal)
    [cache.cache_clear() for cache in caches]
    try:
        model = Tiny()
        twin = resident(model)
        with pytest.warns(UserWarning, match="no C compiler was found") as caught:
            vb = vbrt.wrap(model, "full", optimizer=adamw(model.parameters()))
        with vb:
            assert train(vb, vb.optimizer) == train(twin, adamw(twin.parameters()))
            assert sum("updates of weights" in str(one.message) for one in caught) == 1
            assert sum("updates of weights" in line for line in vb.stats().fallbacks) == 1
    finally:
        [cache.cache_clear() for cache in caches]


@pytest.mark.parametrize("operation", ["get", "put"])
def test_high_halves_in_files_are_updated_there_and_may_fail_too(tmp_path, monkeypatch, operation):
    model = Tiny(LAYERS)
    twin = resident(model)
    theirs = adamw(twin.parameters())
    room = 80 * KIB
    with vbrt.wrap(model, "full", optimizer=adamw(model.parameters()), tiers=partly_in_files(tmp_path, room)) as vb:
        assert list(tmp_path.glob("run-*/*dense*.page"))
        for at, (ids, target) in enumerate(batches(3)):
            for one, optimizer in ((vb, vb.optimizer), (twin, theirs)):
                loss_of(one, ids, target).backward()
                with monkeypatch.context() as patch:
                    if at == 1 and one is vb:
                        broken = Broken(2, 1, "dense")
                        patch.setattr(ssd_tier.SsdTier, operation, broken(getattr(ssd_tier.SsdTier, operation)))
                    optimizer.step()
                    if at == 1 and one is vb:
                        with pytest.raises(vbrt.TierError, match="its update could not be completed"):
                            vb.settle()
                        vb.settle()
                        assert broken.times == 0
                optimizer.zero_grad()
        assert_same(vb, twin)


@pytest.mark.parametrize("skip", [0, 1])
def test_a_state_that_a_budget_moves_into_a_file_as_its_update_begins_is_stored_though_the_drive_fails(
    tmp_path, monkeypatch, skip
):
    model = Tiny(LAYERS)
    twin = resident(model)
    theirs, begun = adamw(twin.parameters()), set()
    truth, plain = StatePage.in_memory.fget, StatePage.rewriting

    def rewriting(page):
        begun.add(id(page))
        return plain(page)

    with vbrt.wrap(model, "full", optimizer=adamw(model.parameters()), tiers=partly_in_files(tmp_path)) as vb:
        for at, (ids, target) in enumerate(batches(3)):
            for one, optimizer in ((vb, vb.optimizer), (twin, theirs)):
                loss_of(one, ids, target).backward()
                with monkeypatch.context() as patch:
                    if at == 1 and one is vb:
                        broken = Broken(skip, 1)
                        patch.setattr(StatePage, "in_memory", property(lambda p: id(p) not in begun or truth(p)))
                        patch.setattr(StatePage, "rewriting", rewriting)
                        patch.setattr(ssd_tier.SsdTier, "put", broken(ssd_tier.SsdTier.put))
                    optimizer.step()
                    if at == 1 and one is vb:
                        with pytest.raises(vbrt.TierError, match="its update could not be completed"):
                            vb.settle()
                        vb.settle()
                        assert broken.times == 0
                optimizer.zero_grad()
        assert_same(vb, twin)


def test_moments_of_8_bits_train_alike_from_memory_and_files_and_come_back_from_fp32(tmp_path):
    results = []
    for tiers in ({}, partly_in_files(tmp_path, HALF // 2)):
        torch.manual_seed(0)
        model = Tiny(LAYERS)
        twin = resident(model)
        training = {"moments": "8bit"}
        with vbrt.wrap(model, "full", optimizer=adamw(model.parameters()), tiers=tiers, training=training) as vb:
            losses = train(vb, vb.optimizer)
            exact = train(twin, adamw(twin.parameters()))
            assert max(abs(a - b) for a, b in zip(losses, exact, strict=True)) < 0.02
            vb.settle()
            states = [layer.handle.state for layer in vb.module.layers]
            held = [
                state._fields()[name].clone() for state in states for name in ("first", "first_scales", "second_scales")
            ]
            for state in states:
                state.moments = {name: moment.clone() for name, moment in state.moments.items()}
            again = [state._fields()[name] for state in states for name in ("first", "first_scales", "second_scales")]
            assert all(map(torch.equal, held, again))
            results.append((losses, vb.state_dict()))
    (one, weights), (two, others) = results
    assert one == two and all(torch.equal(weights[name], others[name]) for name in weights)
