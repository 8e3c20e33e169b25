"""Threads and forks: right bytes, no deadlock, and an end."""

import copy
import gc
import os
import pickle
import threading
import time
import weakref

import pytest
import torch

from tests.tiers.pages import forked
from tests.tiers.stacks import (
    CPU,
    SIZES,
    UNIT,
    FlakySsd,
    SlowSsd,
    WatchedTier,
    add,
    add_all,
    assert_at_rest,
    check,
    hammer,
    in_background,
    retire,
    run,
    scripted,
    use,
)
from vbrt.errors import TierError
from vbrt.residency.simulate import PASS, make_policy
from vbrt.tiers import Level, MemoryTier, SsdTier, TierStack, detached_stack

pytestmark = pytest.mark.usefixtures("no_fsync")


def test_close_ends_everything_and_may_come_twice(tmp_path):
    stack, *_ = scripted(tmp_path, 3, {"a": 1, "b": 2})
    use(stack, "a")
    stack.close()
    stack.close()
    assert stack.levels[0].tier.held_bytes == 0 and os.listdir(tmp_path) == [] and not stack.pages
    for late in (lambda: use(stack, "a"), lambda: add(stack, "c", 1), lambda: add(stack, "c", 1, "cpu")):
        with pytest.raises(TierError, match="the model was closed, its pages are gone"):
            late()
    stack.begin_pass()
    retire(stack, "a")
    stack.retire_unowned()


def test_close_waits_for_the_copy_that_a_worker_is_making(tmp_path):
    stack, policy, ssd = scripted(tmp_path, 3, {"a": 1, "b": 2})
    ssd.close_gate("b")
    policy.script = ["b"]
    use(stack, "a")
    assert ssd.began["b"].wait(30)
    with in_background(stack.close) as closing:
        closing.join(0.05)
        assert closing.is_alive()
        ssd.gates["b"].set()
    assert stack.levels[0].tier.held_bytes == 0 and os.listdir(tmp_path) == []


def test_close_wakes_those_who_wait_and_lets_a_lease_end(tmp_path):
    stack, *_ = scripted(tmp_path, 3, {"a": 2, "b": 2})
    waiting = []

    def wait():
        with pytest.raises(TierError, match="b: the model was closed"):
            use(stack, "b")
        waiting.append("told")

    with stack.lease(("a",)) as tensors:
        with in_background(wait) as thread:
            thread.join(0.05)
            assert thread.is_alive()
            stack.close()
        assert waiting == ["told"]
        check(("a",), tensors)
        assert stack.levels[0].tier.held_bytes == 2 * UNIT
    assert stack.levels[0].tier.held_bytes == 0


def test_close_while_a_thread_reads_a_page_ends_in_the_page_or_an_error(tmp_path):
    stack, _, ssd = scripted(tmp_path, 3, {"a": 2})
    ssd.close_gate("a")
    outcome = []

    def read():
        try:
            use(stack, "a")
            outcome.append("page")
        except TierError as error:
            outcome.append(str(error))

    with in_background(read):
        assert ssd.began["a"].wait(30)
        stack.close()  # waits for workers, not for this one
        ssd.gates["a"].set()
    assert len(outcome) == 1 and (outcome == ["page"] or outcome[0].startswith("a: "))
    assert stack.levels[0].tier.held_bytes == 0


def test_a_stack_that_is_not_closed_leaves_no_files_and_no_threads(tmp_path):
    before = threading.active_count()
    stack, policy, _ = scripted(tmp_path, 3, {"a": 1, "b": 1})
    policy.script = ["b"]
    use(stack, "a")
    assert_at_rest(stack)
    gone = weakref.ref(stack)
    del stack, policy, _
    gc.collect()
    assert gone() is None and os.listdir(tmp_path) == []
    for _ in range(1_000):
        if threading.active_count() <= before:
            break
        time.sleep(0.005)
    assert threading.active_count() <= before


def test_a_copied_stack_is_the_same_and_an_unpickled_one_is_new_in_memory(tmp_path):
    stack, *_ = scripted(tmp_path, 3, {"a": 1})
    assert copy.deepcopy(stack) is stack
    first, second = pickle.loads(pickle.dumps([stack, stack]))
    assert first is second and first.names == ["cpu"]
    other = pickle.loads(pickle.dumps(stack))
    assert other is not first
    add(first, "a", 50, "cpu")
    other.close()  # one model's end is not another's
    use(first, "a")
    first.close()
    stack.close()
    assert detached_stack().device == CPU


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["lru", "scheduled"])
@pytest.mark.parametrize("room", [4, 9])
def test_threads_under_a_tight_budget_get_the_right_bytes_and_no_deadlock(tmp_path, kind, room):
    stack = TierStack(
        [
            Level(WatchedTier("cpu", room), make_policy(kind, room * UNIT)),
            SlowSsd(tmp_path, 1 << 40, seed=room, most_ms=1),
        ]
    )
    hammer(add_all(stack, SIZES), SIZES, room)
    assert_at_rest(stack)
    leases = sum(page.hits + page.misses for page in stack.pages.values())
    assert 4 * 120 <= leases <= 2 * 4 * 120
    stack.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["lru", "scheduled"])
def test_threads_through_three_levels(tmp_path, kind):
    levels = [
        Level(WatchedTier("near", 6), make_policy(kind, 6 * UNIT)),
        Level(WatchedTier("far", 3), make_policy("scheduled", 3 * UNIT)),
    ]
    stack = TierStack([*levels, SlowSsd(tmp_path, 1 << 40, seed=3, most_ms=1)], workers=3)
    hammer(add_all(stack, SIZES), SIZES, 6)
    assert_at_rest(stack)
    stack.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_threads_that_lease_experts_while_others_are_announced(tmp_path, scope):
    sizes = {f"layer{i % 2}.experts#coarse.{i}": 1 + i % 3 for i in range(10)} | {"page0": 1, "page1": 2}
    levels = [
        Level(WatchedTier("near", 7), make_policy("experts", 7 * UNIT, scope=scope)),
        Level(WatchedTier("far", 4), make_policy("experts", 4 * UNIT, scope=scope)),
    ]
    stack = add_all(TierStack([*levels, SlowSsd(tmp_path, 1 << 40, seed=4, most_ms=1)], workers=3), sizes)
    done = threading.Event()

    def announce():
        while not done.wait(0.003):
            stack.announce(list(sizes)[::2])

    with in_background(announce):
        try:
            hammer(stack, sizes, 6)
        finally:
            done.set()
    assert_at_rest(stack)
    assert sum(page.prefetched for page in stack.pages.values()) > 0
    stack.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("levels", [1, 2])
def test_threads_with_reads_that_fail_get_errors_for_their_own_pages_only(tmp_path, levels):
    tiers = [
        Level(WatchedTier("near", 6), make_policy("scheduled", 6 * UNIT)),
        Level(WatchedTier("far", 4), make_policy("lru", 4 * UNIT)),
    ][:levels]
    ssd = FlakySsd(tmp_path, 1 << 40, seed=5, most_ms=1, share=0.2)
    stack = TierStack([*tiers, ssd])
    assert hammer(add_all(stack, SIZES), SIZES, 6, tolerant=True) > 10
    ssd.share = 0.0
    assert_at_rest(stack)
    run(stack, [(key,) for key in SIZES])
    assert_at_rest(stack)
    stack.close()


@pytest.mark.parametrize("budgets", [(12, 7, 9, 5), (60, 12, 60, 7)], ids=str)
def test_threads_while_budgets_change(tmp_path, budgets):
    levels = [
        Level(MemoryTier("near", torch.device("cpu"), 12 * UNIT), make_policy("scheduled", 12 * UNIT)),
        Level(MemoryTier("far", torch.device("cpu"), 30 * UNIT), make_policy("scheduled", 30 * UNIT)),
    ]
    stack = add_all(TierStack([*levels, SlowSsd(tmp_path, 1 << 40, seed=2, most_ms=1)]), SIZES)
    done = threading.Event()

    def change():
        for turn in range(1000):
            if done.is_set():
                break
            stack.set_budget("near", budgets[turn % 4] * UNIT)
            stack.set_budget("far", (30, 8, 5)[turn % 3] * UNIT)
            time.sleep(0.002)

    changer = threading.Thread(target=change)
    changer.start()
    hammer(stack, SIZES, 5)
    done.set()
    changer.join(30)
    assert not changer.is_alive()
    assert_at_rest(stack)
    for level in levels:
        assert level.tier.peak_bytes <= max(30, *budgets) * UNIT
    stack.close()


def test_threads_while_pages_come_and_go(tmp_path):
    sizes = dict(list(SIZES.items())[:6])
    stack = TierStack(
        [
            Level(WatchedTier("cpu", 10), make_policy("scheduled", 7 * UNIT)),
            SlowSsd(tmp_path, 1 << 40, seed=1, most_ms=1),
        ]
    )
    add_all(stack, sizes)
    done = threading.Event()

    def come_and_go():
        turn = 0
        while not done.is_set():
            home = ("cpu", "ssd")[turn % 2]
            add(stack, f"guest{turn}", 1 + turn % 3, home)
            use(stack, f"guest{turn}")
            retire(stack, f"guest{turn}")
            turn += 1

    with in_background(come_and_go):
        try:
            hammer(stack, sizes, 5, threads=3)
        finally:
            done.set()
    assert_at_rest(stack)
    assert set(stack.pages) == set(sizes)
    stack.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks beside threads
def test_a_forked_child_can_use_the_pages_and_leaves_its_parents_alone(tmp_path):
    class Slow(SsdTier):
        def get(self, room, out, *, key):
            reading.set()
            time.sleep(0.01)
            super().get(room, out, key=key)

    reading, sizes = threading.Event(), {f"page{i}": 1 for i in range(8)}
    tier = MemoryTier("cpu", CPU, 5 * UNIT)
    stack = TierStack([Level(tier, make_policy("scheduled", 4 * UNIT)), Slow(tmp_path, 1 << 30)])
    add_all(stack, sizes, {key: "ssd" if key != "page0" else "cpu" for key in sizes})
    one_pass = [PASS, *((key,) for key in sizes)]

    def use_and_close() -> None:
        run(stack, one_pass * 2)
        assert tier.held_bytes <= tier.capacity_bytes
        stack.close()
        assert tier.held_bytes == 0

    run(stack, one_pass)
    for _ in range(5):
        reading.clear()
        run(stack, one_pass)
        assert reading.wait(10)  # a worker is in the middle of a copy now
        child = forked(use_and_close)
        run(stack, one_pass)
        assert os.waitpid(child, 0)[1] == 0
        run(stack, one_pass)
    stack.close()
    assert not os.listdir(tmp_path)
