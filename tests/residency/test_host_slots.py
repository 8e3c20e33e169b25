"""Slots in host memory for pages on a drive: random use keeps their invariants, and the pages of most demand stay."""

import random

import pytest

from vbrt.residency.host_slots import BATCHES, HostSlots, batch_pages, reserved_bytes, slots_wanted


def test_at_most_a_quarter_of_many_slots_is_not_fixed_and_a_batch_takes_an_expert():
    assert [batch_pages(slots, 1) for slots in (3, 12, 24, 40, 4000)] == [1, 1, 2, 3, 32]
    assert batch_pages(6, 2) == 2 and slots_wanted(100, 2) == (6, 100 + 3 * 32)


@pytest.mark.parametrize("planes", [1, 2])
def test_homes_leave_a_quarter_of_little_memory_to_slots_and_room_for_the_largest_batches_of_much(planes):
    assert reserved_bytes(10, planes, 40) == 10 * slots_wanted(99, planes)[0]
    assert reserved_bytes(10, planes, 40 * 24) == 10 * 24
    assert reserved_bytes(10, planes, 10**9) == 10 * BATCHES * 32


@pytest.mark.parametrize("seed", range(5))
def test_held_and_fixed_slots_are_not_given_to_other_pages(seed):
    choose, batch = random.Random(seed), 3
    slots, held, holds, fixed = HostSlots(BATCHES * batch + 4, batch), [], {}, {}
    read = {}  # page of each slot, as bytes would lie there
    for _ in range(400):
        if len(held) == BATCHES or (held and choose.random() < 0.4):
            taken = held.pop(choose.randrange(len(held)))
            assert all(read[slot] == page for page, slot in taken.items())
            slots.release(taken.values())
        elif choose.random() < 0.1:
            demand = [choose.random() for _ in range(40)]
            changes = slots.choose(demand)
            fixed = {p: s for p, s in (fixed | changes).items() if s is not None}
            assert len(fixed) <= 4 and all(read[slot] == page for page, slot in fixed.items())
            kept = [demand[page] for page in read.values() if slots._slots.get(page) is not None]
            assert sorted(demand[page] for page in fixed) == sorted(sorted(set(kept))[-len(fixed) :] if fixed else [])
        else:
            taken = slots.take([choose.randrange(40) for _ in range(choose.randrange(1, batch + 1))])
            fails = choose.random() < 0.1
            for page in taken.missing:
                read[taken.slots[page]] = None if fails else page
                if not fails:
                    slots.landed(page, taken.slots[page])
            if fails:
                slots.release(taken.slots.values())
            else:
                held.append(dict(taken.slots))
        holds = {slot for taken in held for slot in taken.values()}
        assert all(read[slot] == page for page, slot in fixed.items()) and len(holds) <= BATCHES * batch


def test_pages_that_two_threads_read_at_once_have_one_place():
    slots = HostSlots(6, 2)
    one, other = slots.take([5]), slots.take([5])
    assert one.missing == other.missing == [5] and one.slots[5] != other.slots[5]
    slots.landed(5, one.slots[5])
    slots.landed(5, other.slots[5])
    slots.release(other.slots.values())
    slots.release(one.slots.values())
    again = slots.take([5])
    assert again.missing == [] and again.slots == one.slots
    assert len({slot for page in range(5) for slot in slots.take([page]).slots.values()}) == 5


def test_at_equal_demand_what_is_fixed_stays():
    slots = HostSlots(5, 1)  # two of which are fixed
    for page in (4, 3, 2, 1):
        taken = slots.take([page])
        slots.landed(page, taken.slots[page])
        slots.release(taken.slots.values())
    assert set(slots.choose([0, 0, 1, 1, 0])) == {2, 3}
    assert slots.choose([1, 1, 1, 1, 1]) == {}
    changes = slots.choose([0, 9, 1, 1, 0])
    assert changes == {3: None, 1: slots._slots[1]}


@pytest.mark.parametrize("landing", [(0, 1, 2), (2, 0, 1)])
def test_what_gives_way_does_not_depend_on_the_order_in_which_pages_land(landing):
    slots = HostSlots(9, 3)
    for first in (0, 3, 6):
        taken = slots.take(range(first, first + 3))
        for at in landing:
            slots.landed(first + at, taken.slots[first + at])
        slots.release(taken.slots.values())
    slots.take([9])
    assert 0 not in slots._slots and set(slots._slots) == set(range(1, 9))
