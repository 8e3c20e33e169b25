"""How room is divided: pins, slots of the ring, a budget that follows free memory."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vbrt.residency.room_division import Room, divide, rebalanced, spread
from vbrt.residency.scheduled import ScheduledPolicy


@given(n=st.integers(1, 40), room=st.integers(0, 45), size=st.sampled_from([1, 3, 4096]), window=st.integers(1, 4))
def test_pins_of_equal_pages_are_spread_evenly(n, room, size, window):
    order = tuple(f"page{i}" for i in range(n))
    pins, _ = divide(order, dict.fromkeys(order, size), Room(room * size + size // 2, 1, window - 1))
    assert len(pins) == (n if room >= n else max(0, room - window))
    places = [i for i, key in enumerate(order) if key in pins]
    if 0 < len(pins) < n:
        around = [*places, places[0] + n]
        gaps = {after - before for before, after in pairwise(around)}
        assert max(gaps) - min(gaps) <= 1


def test_pins_are_not_a_prefix():
    order = tuple(f"page{i}" for i in range(12))
    pins, _ = divide(order, dict.fromkeys(order, 1), Room(6, 1, 2))
    assert sorted(order.index(key) for key in pins) == [3, 7, 11]


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=20), budget=st.integers(-5, 600))
def test_a_spread_keeps_to_its_budget_and_uses_what_it_can(sizes, budget):
    given_sizes = {f"page{i}": size for i, size in enumerate(sizes)}
    chosen = spread(list(given_sizes), given_sizes, budget)
    assert len(set(chosen)) == len(chosen)
    left = budget - sum(given_sizes[key] for key in chosen)
    assert left >= min(budget, 0)
    assert all(size > left for key, size in given_sizes.items() if key not in chosen)


def test_pages_that_a_pass_uses_more_often_are_pinned_first():
    order = ("a", "shared", "b", "c", "shared", "d", "e", "shared")
    assert divide(order, dict.fromkeys(order, 1), Room(3, 1, 1)) == ({"shared"}, 1)


@given(
    sizes=st.lists(st.sampled_from([2, 5, 11, 40]), min_size=1, max_size=30),
    room=st.integers(1, 700),
    group=st.integers(1, 2),
    prefetch=st.integers(0, 3),
)
def test_a_division_leaves_room_for_its_slots(sizes, room, group, prefetch):
    pages = {f"page{i}": size for i, size in enumerate(sizes)}
    pins, slot = divide(tuple(pages), pages, Room(room, group, prefetch))
    pinned, streamed = sum(pages[key] for key in pins), [pages[key] for key in pages if key not in pins]
    if not streamed:
        assert pinned <= room
    elif slot:
        assert max(streamed) <= slot and pinned + min(group + prefetch, room // slot) * slot <= room
        assert room >= (group + 1) * slot
    elif room >= max(sizes) * (group + max(prefetch, 1)):
        pytest.fail(f"{room} has room for slots of every page")


def test_a_division_keeps_a_page_that_would_make_every_slot_large():
    pages = {f"page{i}": 1 for i in range(20)} | {"large": 10}
    assert divide(tuple(pages), pages, Room(24, 1, 1)) == (
        frozenset(spread(list(pages)[:20], pages, 12)) | {"large"},
        1,
    )


def test_pages_of_all_sizes_pass_through_slots_of_one():
    sizes = {f"page{i}": (3, 8)[i % 2] for i in range(20)}
    policy, charges = ScheduledPolicy(60, prefetch=2), []
    for _ in range(4):
        policy.begin_pass()
        charges = []
        for key, size in sizes.items():
            for decision in (policy.access(key, size, busy=(key,)), *policy.ahead(busy=(key,))):
                charges += [] if decision.hit or not decision.charge else [decision.charge]
    assert set(charges) == {8} and len(charges) > 5
    assert policy.resident_bytes > 60 - 8


@given(budget=st.integers(0, 1000), wanted=st.integers(0, 1000), free=st.integers(0, 1000), margin=st.integers(2, 200))
def test_a_rebalanced_budget_restores_the_margin_and_does_not_swing(budget, wanted, free, margin):
    budget = min(budget, wanted)
    new = rebalanced(budget, wanted, free, margin)
    assert 0 <= new <= wanted
    if free < margin // 2:
        assert new == max(0, budget - (margin - free))
    elif free <= margin * 3 // 2:
        assert new == budget
    else:
        assert new >= budget
    left = free + budget - new
    assert rebalanced(new, wanted, left, margin) == new or new == 0
