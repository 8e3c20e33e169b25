"""Budgets that change while a model trains from the tiers, at any point of a step: an end, and the same bits."""

import contextlib
import itertools
import threading

import pytest
import torch

import vbrt
from tests.tiers.stacks import within
from tests.training.full.full_models import Tiny, adamw, batches, loss_of, resident, train
from vbrt.tiers.stack.decider import Decider
from vbrt.tiers.stack.mover import Mover
from vbrt.tiers.stack.page_rewrites import Rewriter
from vbrt.training.full.host_gradients import Gradient, Outlet
from vbrt.training.full.optimizer_update import Updater

pytestmark = pytest.mark.usefixtures("no_fsync")
KIB = 1024
POINTS = {
    "lease, asked for": (Decider, "acquire"),
    "lease, waiting for its page": (Mover, "await_all"),
    "copy, before it has room": (Mover, "_reserve"),
    "gradient, on its way": (Outlet, "send"),
    "gradient, before it is put down": (Gradient, "begin_"),
    "update, submitted": (Updater, "submit"),
    "update, under way": (Updater, "_compute"),
    "high half, being rewritten": (Rewriter, "_refresh"),
}


@contextlib.contextmanager
def small_and_twin(tmp_path, pages: int):
    """A model whose pages lie partly in files, and its twin that trains resident."""
    model = Tiny(10)
    twin = resident(model)
    tiers = {"cpu": {"budget": pages * 8 * KIB}, "ssd": {"enabled": True, "path": str(tmp_path)}}
    with vbrt.wrap(model, "full", optimizer=adamw(model.parameters()), tiers=tiers) as vb:
        yield vb, twin


@contextlib.contextmanager
def budgets_at(vb, point, every: int):
    """Have another thread change the host's budget at a call of a method, again and again; the call waits for it, but
    not for long: it may be what the change waits for."""
    owner, name = point
    plain, calls, budgets, threads = getattr(owner, name), itertools.count(), itertools.cycle((5, 9, 6, 12)), []

    def called(self, *args, **options):
        if next(calls) % every == 0 and threading.current_thread() not in threads:
            threads.append(threading.Thread(target=vb.set_budget, args=("cpu", next(budgets) * 8 * KIB)))
            threads[-1].start()
            threads[-1].join(0.05)
        return plain(self, *args, **options)

    setattr(owner, name, called)
    try:
        yield
    finally:
        setattr(owner, name, plain)
        [thread.join() for thread in threads]
    assert len(threads) > 3


@pytest.mark.sample(5)
@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS)
def test_budgets_change_from_another_thread_at_any_point_of_a_step(tmp_path, point):
    with small_and_twin(tmp_path, 10) as (vb, twin):
        expected, found = train(twin, adamw(twin.parameters())), []

        def work():
            with budgets_at(vb, point, 7):
                found.extend(train(vb, vb.optimizer))

        within(30, work)
        assert found == expected
        assert all(torch.equal(value, vb.state_dict()[name]) for name, value in twin.state_dict().items())


def test_budgets_change_between_forward_and_backward_in_its_hooks_and_after_the_step(tmp_path):
    with small_and_twin(tmp_path, 10) as (vb, twin):
        budgets = itertools.cycle((5, 9, 6, 12))

        def change(*_):
            vb.set_budget("cpu", next(budgets) * 8 * KIB)

        def work():
            for step, (ids, target) in enumerate(batches(6)):  # two passes a step
                loss = loss_of(vb, ids, target)
                change()
                hooks = [layer.register_full_backward_hook(change) for layer in vb.module.layers[::3]]
                loss.backward()
                [hook.remove() for hook in hooks]
                if step % 2:
                    vb.step()
                    change()
                    vb.zero_grad()

        within(30, work)
        theirs = adamw(twin.parameters())
        for step, (ids, target) in enumerate(batches(6)):
            loss_of(twin, ids, target).backward()
            if step % 2:
                theirs.step()
                theirs.zero_grad()
        assert all(torch.equal(value, vb.state_dict()[name]) for name, value in twin.state_dict().items())


@pytest.mark.parametrize("pages", [5, 8])
def test_gradients_that_come_after_a_budget_was_lowered_leave_room_for_pages_that_pass(tmp_path, pages):
    with small_and_twin(tmp_path, 100) as (vb, twin):
        vb.set_budget("cpu", pages * 8 * KIB)
        assert train(vb, vb.optimizer, 2) == train(twin, adamw(twin.parameters()), 2)
        assert any("#gradient" in line and "no room" in line for line in vb.stats().fallbacks)
