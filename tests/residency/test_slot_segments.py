"""Segments of slots: equal parts of every pool, the last one first to go."""

import pytest

from vbrt.residency.expert_room import ExpertRoom
from vbrt.residency.slot_segments import SlotSegments


def test_a_segment_has_slots_of_every_pool_and_sums_are_those_of_its_pages():
    division = SlotSegments([7, 7, 6], [10, 20, 10], most=4)
    assert division.ends == [(2, 2, 2), (4, 4, 4), (6, 6, 6), (7, 7, 6)]
    assert division.nbytes == [80, 160, 240, 270]
    assert [division.begin(n) for n in range(3)] == [(0, 0, 0), (2, 2, 2), (4, 4, 4)]
    assert [division.own_bytes(n) for n in range(4)] == [80, 80, 80, 30]
    assert [division.within(room) for room in (79, 80, 200, 270, 999)] == [0, 1, 2, 4, 4]


def test_one_segment_holds_everything_where_slots_must_be_one_tensor():
    assert SlotSegments([9, 4], [10, 10], most=1).ends == [(9, 4)]


@pytest.mark.parametrize(("needed", "least"), [([1, 1], 1), ([2, 1], 1), ([3, 1], 2), ([8, 99], 4), ([1, 3], 2)])
def test_segments_that_captured_graphs_need_stay(needed, least):
    assert SlotSegments([8, 3], [10, 10], most=4).least(needed) == least


@pytest.mark.parametrize("room", range(40, 400, 13))
def test_pools_keep_the_slots_that_the_policy_would_divide_less_room_into(room):
    """But for the remainder, of which the policy gives the first pools one slot each."""
    policy = ExpertRoom(by_layer=True, layers={"a#coarse": 10, "b#coarse": 20})
    division = SlotSegments([13, 13], [10, 20], most=32)
    policy.resize(room)
    slots = [share // size for share, size in zip(policy.shares().values(), (10, 20), strict=True)]
    kept = division.ends[division.within(room) - 1]
    assert all(0 <= had - has <= 1 for had, has in zip(slots, kept, strict=True)) or min(slots) >= 13
