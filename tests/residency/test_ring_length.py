"""The length of the ring: tried out for passes that use pages more than once, in small steps."""

import gc
import time

import pytest
from hypothesis import given

from tests.residency.traces import checkpointed, misses_of_pass, workloads
from vbrt.residency.policy import Policy
from vbrt.residency.ring_length import RingSearch
from vbrt.residency.scheduled import ScheduledPolicy


def steady_misses(policy: Policy, order: list[str]) -> int:
    """Misses of the sixth pass."""
    return [misses_of_pass(policy, order) for _ in range(6)][-1]


@pytest.mark.sample(2)
@pytest.mark.parametrize("room", [12, 24, 60, 120])
def test_activation_checkpointing_costs_no_third_read(room):
    order, short = checkpointed(32, 7), ScheduledPolicy(room)
    forward = order[: 32 * 7]
    twice = steady_misses(ScheduledPolicy(room), forward + forward[::-1])
    misses = steady_misses(ScheduledPolicy(room), order)
    assert misses <= twice + 1
    short._rings.enabled = False  # as if the order had no repeats
    assert misses < steady_misses(short, order)


@given(workloads())
def test_trying_rings_out_never_moves_more(load):
    order = [key for keys in load.passes[0] for key in keys] * 2 + ["tail"]
    sizes = load.sizes | {"tail": 1}
    moved = []
    for tried in (False, True):
        policy = ScheduledPolicy(load.room, prefetch=load.prefetch)
        if not tried:
            policy._rings.enabled = False
        for _ in range(7):
            policy.begin_pass()
            total = 0
            for key in order:
                total += 0 if policy.access(key, sizes[key], (key,)).hit else sizes[key]
                policy.ahead((key,))
        moved.append(total)
    assert moved[1] <= moved[0]


@pytest.fixture
def no_garbage_collection():
    """Collecting what thousands of tests have left takes longer than what is timed."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("blocks", [32, 120])
def test_no_beginning_of_a_pass_and_no_access_takes_long(blocks, no_garbage_collection):
    """They happen under the stack's lock: 1,344 and 5,040 accesses of pages of many sizes."""
    order = checkpointed(blocks, 14)
    sizes = {key: 100 * (1 + at % 3) + at % 7 for at, key in enumerate(sorted(set(order)))}
    policy, slowest, begins = ScheduledPolicy(sum(sizes.values()) // 3), 0.0, 0.0
    for room in (3, 3, 3, 4):
        policy.resize(sum(sizes.values()) // room)
        start = time.thread_time()
        policy.begin_pass()
        begins = max(begins, time.thread_time() - start)
        for key in order:
            start = time.thread_time()
            policy.access(key, sizes[key], (key,))
            slowest = max(slowest, time.thread_time() - start)
            policy.ahead((key,))
    assert begins < 0.06 and slowest < 0.06


def test_a_room_that_hardly_changes_keeps_the_ring_that_was_found_for_it(monkeypatch):
    order, trials, begin = checkpointed(16, 7), [], RingSearch._begin
    policy = ScheduledPolicy(40)
    monkeypatch.setattr(
        policy._rings, "_begin", lambda *args: trials.append(policy.capacity_bytes) or begin(policy._rings, *args)
    )

    def misses(rooms):
        for room in rooms:
            policy.resize(room)
            last = misses_of_pass(policy, order)
        return last

    misses([40, 41, 42] * 8)  # as a budget that follows the memory that is free
    assert trials == []  # there were no two passes in one room
    misses([40] * 4)
    assert abs(misses([41, 38] * 3 + [42] * 4) - steady_misses(ScheduledPolicy(42), order)) <= 4
    assert trials == [40]
    misses([12] * 4)
    assert trials == [40, 12]
