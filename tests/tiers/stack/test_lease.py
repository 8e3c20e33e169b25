"""Leases: what fits, what waits, what is in flight, and what fails."""

import contextlib
import gc
import threading

import pytest

from tests.tiers.stacks import (
    SIZES,
    UNIT,
    SlowSsd,
    WatchedTier,
    add_all,
    assert_at_rest,
    check,
    file_of,
    hammer,
    in_background,
    run,
    scripted,
    use,
    within,
)
from vbrt.errors import TierError
from vbrt.residency.lru import LRUPolicy
from vbrt.residency.policy import Policy
from vbrt.residency.simulate import PASS, make_policy
from vbrt.tiers import Level, SsdTier, TierStack

pytestmark = pytest.mark.usefixtures("no_fsync")


def test_a_lease_larger_than_the_budget_is_refused_and_another_works(tmp_path):
    stack, *_ = scripted(tmp_path, 3, {"a": 2, "b": 2, "c": 4})
    with pytest.raises(TierError, match=r"a \+ b: 16384 bytes do not fit into tiers\.cpu\.budget = 12288"):
        use(stack, "a", "b")
    with pytest.raises(TierError, match=r"c: 16384 bytes do not fit"):
        use(stack, "c")
    use(stack, "a")
    assert [page.misses for page in stack.pages.values()] == [1, 0, 0]  # a refusal is not an access
    assert_at_rest(stack)
    stack.close()


def test_a_second_lease_of_a_thread_that_cannot_fit_beside_its_first_is_refused_instead_of_waiting(tmp_path):
    stack, *_ = scripted(tmp_path, 3, {"a": 2, "b": 1, "c": 2})
    with stack.lease(("a",)) as first:
        use(stack, "b")
        use(stack, "a")
        with pytest.raises(TierError, match=r"c: .* this thread has leased a\); raise the budget"):
            use(stack, "c")
        check(("a",), first)
    use(stack, "c")
    assert_at_rest(stack)
    stack.close()


def test_a_lease_waits_for_the_room_that_another_thread_has_leased(tmp_path):
    stack, *_ = scripted(tmp_path, 3, {"a": 2, "b": 2})
    with contextlib.ExitStack() as afterwards, stack.lease(("a",)) as tensors:
        thread = afterwards.enter_context(in_background(lambda: use(stack, "b")))
        thread.join(0.05)
        assert thread.is_alive()
        check(("a",), tensors)
    assert stack.pages["b"].misses == 1 and stack.pages["b"].hits == 0
    assert_at_rest(stack)
    stack.close()


def test_an_exception_in_the_block_gives_the_pages_back(tmp_path):
    stack, *_ = scripted(tmp_path, 2, {"a": 2, "b": 2})
    with pytest.raises(ZeroDivisionError), stack.lease(("a",)):
        raise ZeroDivisionError
    use(stack, "b")
    assert_at_rest(stack)
    stack.close()


def test_a_lease_that_was_lost_is_given_back_when_it_is_collected(tmp_path):
    stack, *_ = scripted(tmp_path, 2, {"a": 2, "b": 2})
    stack.lease(("a",)).__enter__()  # as if Ctrl-C had come before the block began
    gc.collect()
    use(stack, "b")
    assert_at_rest(stack)
    lost = stack.lease(("a",))
    lost.__enter__()

    def lose():
        nonlocal lost
        lost = None

    timer = threading.Timer(0.05, lose)
    timer.start()
    within(20, lambda: use(stack, "b"))  # waits, and nobody tells it
    stack.close()


def test_waiting_is_counted(tmp_path):
    stack, _, ssd = scripted(tmp_path, 2, {"a": 2})
    ssd.close_gate("a")
    threading.Timer(0.03, ssd.gates["a"].set).start()
    use(stack, "a")
    first = stack.pages["a"].wait_ns
    assert first >= 20_000_000
    use(stack, "a")
    assert stack.pages["a"].wait_ns == first
    stack.close()


def test_a_page_evicted_in_flight_keeps_its_room_until_its_copy_has_ended(tmp_path):
    stack, policy, ssd = scripted(tmp_path, 2, {"a": 1, "b": 1, "c": 1, "d": 1})
    ssd.close_gate("b")
    policy.script = ["b"]
    use(stack, "a")
    assert ssd.began["b"].wait(30)
    use(stack, "c")  # a leaves
    with in_background(lambda: use(stack, "d")) as thread:  # b leaves, and cannot yet
        thread.join(0.05)
        assert thread.is_alive() and stack.levels[0].tier.held_bytes == 2 * UNIT
        ssd.gates["b"].set()
    assert_at_rest(stack)
    stack.close()


def test_a_page_demanded_again_while_its_doomed_copy_is_in_flight_is_read_again(tmp_path):
    stack, policy, ssd = scripted(tmp_path, 3, {"a": 1, "b": 1})
    ssd.close_gate("b")
    policy.script = ["b"]
    use(stack, "a")
    assert ssd.began["b"].wait(30)
    with stack.guard.lock:
        stack.levels[0].evict("b")
        policy.remove("b")
    ssd.began["b"].clear()
    with in_background(lambda: use(stack, "b")):
        assert ssd.began["b"].wait(30)
        ssd.gates["b"].set()
    use(stack, "b")
    assert_at_rest(stack)
    stack.close()


def test_a_demand_takes_over_a_prefetch_that_nobody_has_begun(tmp_path):
    sizes = {"a": 1, "b": 1, "c": 1, "d": 1}
    stack, policy, ssd = scripted(tmp_path, 4, sizes)
    for key in "bc":
        ssd.close_gate(key)
    policy.script = ["b", "c", "d"]  # two workers: d stays in the queue
    use(stack, "a")
    within(20, lambda: use(stack, "d"))
    for key in "bc":
        ssd.gates[key].set()
    use(stack, "b", "c")
    assert [page.prefetched for page in stack.pages.values()] == [0, 1, 1, 1]
    assert_at_rest(stack)
    stack.close()


def test_a_prefetch_evicted_before_it_began_moves_nothing(tmp_path):
    stack, policy, ssd = scripted(tmp_path, 4, {"a": 1, "b": 1, "c": 1, "d": 1, "e": 4})
    for key in "bc":
        ssd.close_gate(key)
    policy.script = ["b", "c", "d"]
    use(stack, "a")
    assert ssd.began["b"].wait(30) and ssd.began["c"].wait(30)
    with in_background(lambda: use(stack, "e")):
        for key in "bc":
            ssd.gates[key].set()
    assert_at_rest(stack)
    assert stack.pages["d"].bytes_moved == {"ssd>cpu": 0}
    stack.close()


def test_a_read_that_fails_is_raised_to_whoever_leases_the_page_and_only_then(tmp_path):
    stack, policy, _ = scripted(tmp_path, 4, {"a": 1, "b": 2, "c": 1})
    path = file_of(stack, "b")
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    policy.script = ["b"]
    use(stack, "a")  # b is fetched ahead, and fails
    assert_at_rest(stack)
    use(stack, "c")
    for keys in (("b",), ("a", "b"), ("b", "a")):
        with pytest.raises(TierError) as caught:
            use(stack, *keys)
        assert str(caught.value).startswith("b: ") and str(path) in str(caught.value)
        assert_at_rest(stack)
    use(stack, "a")
    path.write_bytes(good)
    use(stack, "b")
    assert_at_rest(stack)
    stack.close()


def test_who_waits_for_a_prefetch_that_fails_gets_its_error(tmp_path):
    stack, policy, ssd = scripted(tmp_path, 4, {"a": 1, "b": 2})
    good = file_of(stack, "b").read_bytes()
    file_of(stack, "b").unlink()
    ssd.close_gate("b")
    policy.script = ["b"]
    use(stack, "a")
    assert ssd.began["b"].wait(30)
    threading.Timer(0.03, ssd.gates["b"].set).start()
    with pytest.raises(TierError, match=r"b: .*\.page is missing"):
        use(stack, "b")
    file_of(stack, "b").write_bytes(good)
    use(stack, "b")
    assert_at_rest(stack)
    stack.close()


def test_a_failing_source_fails_every_level_above_it(tmp_path):
    levels = [Level(WatchedTier("near", 3), LRUPolicy(3 * UNIT)), Level(WatchedTier("far", 2), LRUPolicy(2 * UNIT))]
    stack = add_all(TierStack([*levels, SsdTier(tmp_path, 1 << 40)]), {"a": 1, "b": 2})
    good = file_of(stack, "a").read_bytes()
    file_of(stack, "a").write_bytes(good[:5000])
    for keys in (("a",), ("b", "a"), ("a", "b")):
        with pytest.raises(TierError, match=r"a: .* truncated"):
            use(stack, *keys)
        assert_at_rest(stack)
    use(stack, "b")
    file_of(stack, "a").write_bytes(good)
    use(stack, "a", "b")
    assert_at_rest(stack)
    stack.close()


def test_a_copy_in_a_slot_makes_way_for_a_lease_that_needs_the_room(tmp_path):
    sizes = {"a": 1, "b": 3, "large": 5}
    stack = add_all(
        TierStack(
            [Level(WatchedTier("cpu", 6), make_policy("scheduled", 6 * UNIT, prefetch=0)), SsdTier(tmp_path, 1 << 40)]
        ),
        sizes,
    )
    run(stack, [PASS, ("a",), ("b",), ("a",), PASS, ("a",), ("b",), ("a",)])
    stack.levels[0].policy._division = stack.levels[0].policy._division._replace(pins=frozenset(), slot_bytes=3 * UNIT)
    stack.levels[0].policy.remove("a")
    with stack.guard.lock:
        stack.levels[0].evict("a")
    run(stack, [("a",)])
    assert stack.levels[0].slots["a"].charge == 3 * UNIT
    run(stack, [("a", "large")])
    assert_at_rest(stack)
    stack.close()


def test_a_policy_that_refuses_is_not_asked_when_it_would(tmp_path):
    """The stack knows from sizes alone when a lease fits, so that a refused lease leaves no trace in a policy."""

    class Strict(LRUPolicy):
        def access(self, key, size, busy=()):
            decision = super().access(key, size, busy)
            assert decision is not None
            return decision

    stack = TierStack([Level(WatchedTier("cpu", 5), Strict(5 * UNIT)), SlowSsd(tmp_path, 1 << 40, seed=0, most_ms=1)])
    hammer(add_all(stack, SIZES), SIZES, 5)
    assert_at_rest(stack)
    assert isinstance(stack.levels[0].policy, Policy)
    stack.close()
