"""Policies and `simulate`: closed forms, invariants, what is learned from a pass."""

import math
import time
from bisect import bisect_right
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.residency.traces import Workload, workloads
from vbrt.residency.policy import (
    PASS,
    LRUPolicy,
    Policy,
    ScheduledPolicy,
    divide,
    make_policy,
    rebalanced,
    simulate,
    spread,
)

KINDS = ("lru", "scheduled")


def cycle(n: int, passes: int, *, marked: bool = True) -> list:
    return ([PASS] * marked + [f"page{i}" for i in range(n)]) * passes


def steady_hits(kind: str, n: int, room: int, *, prefetch: int = 2, marked: bool = True, passes: int = 6) -> float:
    """Hits of one pass, once the order is known and the pins are in."""

    def hits(count):
        return simulate(kind, cycle(n, count, marked=marked), room, prefetch=prefetch).hits.total()

    return (hits(passes + 3) - hits(3)) / passes


def belady_hits(trace: list[str], room: int) -> int:
    """Hits of the optimal policy for equal pages: the page whose next use is farthest leaves."""
    places: dict[str, list[int]] = {}
    for at, key in enumerate(trace):
        places.setdefault(key, []).append(at)

    def next_use(key: str, at: int) -> float:
        after = bisect_right(places[key], at)
        return places[key][after] if after < len(places[key]) else math.inf

    resident: set[str] = set()
    hits = 0
    for at, key in enumerate(trace):
        hits += key in resident
        if key not in resident and len(resident) == room:
            resident.remove(max(resident, key=lambda k: next_use(k, at)))
        resident.add(key)
    return hits


# -- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 5, 9])
@pytest.mark.parametrize("marked", [True, False])
def test_lru_misses_everything_on_a_cyclic_scan_that_does_not_fit_and_nothing_on_one_that_does(n, marked):
    for room in range(1, n):
        assert simulate("lru", cycle(n, 5, marked=marked), room).hits.total() == 0
    for room in (n, n + 3):
        counts = simulate("lru", cycle(n, 5, marked=marked), room)
        assert counts.hits.total() == 4 * n
        assert counts.misses == dict.fromkeys((f"page{i}" for i in range(n)), 1)
        assert counts.bytes_in == n


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [4, 7, 12])
def test_scheduled_reaches_its_closed_form_on_a_cyclic_scan(n, prefetch, marked):
    for room in range(1, n):
        expected = max(0, room - 1 - prefetch)
        assert steady_hits("scheduled", n, room, prefetch=prefetch, marked=marked) == expected
    assert steady_hits("scheduled", n, n, prefetch=prefetch, marked=marked) == n


@pytest.mark.parametrize(("n", "room"), [(6, 3), (10, 6), (9, 8)])
def test_beladys_optimum_on_a_cyclic_scan_is_what_the_docs_say(n, room):
    passes = 60
    optimum = belady_hits(cycle(n, passes, marked=False), room) / (passes * n)
    assert optimum == pytest.approx((room - 1) / (n - 1), abs=1 / passes)
    assert steady_hits("scheduled", n, room, prefetch=0) / n <= optimum + 1 / passes


@given(n=st.integers(2, 9), turns=st.integers(1, 5), data=st.data())
def test_lru_is_optimal_on_palindromes(n, turns, data):
    room = data.draw(st.integers(1, n + 1))
    there = [f"page{i}" for i in range(n)]
    trace = (there + there[::-1]) * turns
    assert simulate("lru", trace, room).hits.total() == belady_hits(trace, room)


@given(workloads())
def test_no_policy_hits_more_than_belady(load):
    equal = [key for leases in load.passes for keys in leases for key in keys]
    room = max(1, min(load.room, len(load.sizes)))
    for kind in KINDS:
        assert simulate(kind, equal, room, prefetch=load.prefetch).hits.total() <= belady_hits(equal, room)


def test_a_lease_of_two_pages_counts_both():
    trace = [PASS, ("a", "b"), ("c", "d")] * 4
    counts = simulate("lru", trace, 4)
    assert counts.misses.total() == 4 and counts.hits.total() == 12
    assert counts.hit_rate == 0.75
    assert simulate("lru", trace, 2).hits.total() == 0


def test_room_for_everything_needs_no_second_copy_of_anything():
    for kind in KINDS:
        counts = simulate(kind, cycle(6, 4), 30, sizes={f"page{i}": i + 1 for i in range(6)})
        assert counts.bytes_in == 21 and set(counts.misses.values()) == {1}


# -- invariants -------------------------------------------------------------------------------------------------------


def replay(policy: Policy, load: Workload) -> dict[str, int]:
    """Run the trace and keep books from the decisions alone; returns the room that each resident page takes."""
    books: dict[str, int] = {}
    unused: set[str] = set()

    def act(decision, busy):
        for key in decision.evict:
            assert key in books and key not in busy
            del books[key]
            unused.discard(key)
        if decision.key not in books:
            books[decision.key] = decision.charge
            assert decision.charge >= load.sizes[decision.key]
        assert sorted(books) == sorted(policy.resident()) or decision.prefetched
        assert policy.resident_bytes <= policy.capacity_bytes

    for item in load.trace:
        if item is PASS:
            policy.begin_pass()
            continue
        for key in item:
            was_there, was_unused = key in books, key in unused
            decision = policy.access(key, load.sizes[key], busy=item)
            assert decision.key == key
            assert decision.hit == (was_there and not was_unused)
            assert decision.prefetched == was_unused
            assert not (was_there and decision.evict)
            unused.discard(key)
            act(decision, item)
        ahead = policy.ahead(busy=item)
        for decision in ahead:
            assert decision.prefetched and not decision.hit and decision.key not in books
            unused.add(decision.key)
            act(decision, item)
        assert len(ahead) <= load.prefetch
        assert sorted(books) == sorted(policy.resident())
        assert policy.resident_bytes == sum(books.values()) <= policy.capacity_bytes
    return books


@given(workloads())
def test_decisions_keep_the_books_within_the_room(load):
    replay(make_policy(load.kind, load.room, prefetch=load.prefetch, group=load.group), load)


@given(workloads())
def test_counts_of_simulate_add_up(load):
    counts = simulate(load.kind, load.trace, load.room, sizes=load.sizes, prefetch=load.prefetch, group=load.group)
    accesses = [key for leases in load.passes for keys in leases for key in keys]
    assert counts.hits.total() + counts.misses.total() == len(accesses)
    assert all(counts.prefetched[key] <= counts.misses[key] for key in load.sizes)
    assert counts.bytes_in == sum(load.sizes[key] * n for key, n in counts.misses.items())


@given(workloads(), st.integers(0, 20))
def test_a_policy_that_loses_room_gives_pages_up_and_goes_on(load, room):
    policy = make_policy(load.kind, load.room, prefetch=load.prefetch, group=load.group)
    books = replay(policy, load)
    before = set(books)
    victims = set(policy.resize(room))
    assert victims <= before and set(policy.resident()) == before - victims
    assert policy.resident_bytes == sum(books[key] for key in before - victims) <= max(room, 0)
    policy.reset()
    assert policy.resident() == () and policy.resident_bytes == 0
    policy.resize(load.room)
    replay(policy, load)


@pytest.mark.parametrize("kind", KINDS)
def test_no_room_beside_busy_pages_changes_nothing(kind):
    policy = make_policy(kind, 3)
    for key in "abc":
        policy.access(key, 1)
    before = set(policy.resident())
    assert policy.access("d", 2, busy=("a", "b", "d")) is None
    assert policy.access("d", 4) is None
    assert set(policy.resident()) == before and policy.resident_bytes == 3
    assert policy.access("d", 2, busy=("b", "d")).evict == ("a", "c")


@pytest.mark.parametrize("kind", KINDS)
def test_a_forgotten_page_is_a_miss_again(kind):
    policy = make_policy(kind, 3)
    policy.access("a", 2)
    policy.forget("a")
    policy.forget("never there")
    assert policy.resident_bytes == 0 and policy.resident() == ()
    assert not policy.access("a", 2).hit


def test_a_forgotten_page_is_not_fetched_ahead_until_it_is_accessed():
    policy = ScheduledPolicy(3, prefetch=2)
    for _ in range(2):
        policy.begin_pass()
        for key in "abcdef":
            policy.access(key, 1)
    policy.begin_pass()
    policy.access("a", 1)
    policy.forget("b")
    assert [decision.key for decision in policy.ahead(busy="a")] == ["c", "d"]
    for key in "bcdef":
        policy.access(key, 1)
    policy.begin_pass()
    policy.access("a", 1)
    assert [decision.key for decision in policy.ahead(busy="a")] == ["b", "c"]


def test_an_abstract_policy_and_an_unknown_one_are_refused():
    for call in (lambda p: p.access("a", 1), lambda p: p.forget("a"), lambda p: p.resident(), lambda p: p.resize(0)):
        with pytest.raises(TypeError, match="abstract"):
            call(Policy(1))
    with pytest.raises(ValueError, match=r"policy\.kind = 'mru'"):
        make_policy("mru", 1)
    with pytest.raises(ValueError, match="does not fit into 2 bytes"):
        simulate("lru", [("a", "b", "c")], 2)


def test_simulate_takes_a_policy_of_ones_own():
    assert simulate(LRUPolicy(2), ["a", "b", "a", "c", "a"], 99).hits == {"a": 2, "b": 0, "c": 0}
    assert simulate("lru", [], 1).hit_rate == 0.0


# -- what is pinned ---------------------------------------------------------------------------------------------------


@given(n=st.integers(1, 40), room=st.integers(0, 45), size=st.sampled_from([1, 3, 4096]), window=st.integers(1, 4))
def test_pins_of_equal_pages_are_spread_evenly(n, room, size, window):
    order = tuple(f"page{i}" for i in range(n))
    pins, _ = divide(order, dict.fromkeys(order, size), room * size + size // 2, group=1, prefetch=window - 1)
    assert len(pins) == (n if room >= n else max(0, room - window))
    places = [i for i, key in enumerate(order) if key in pins]
    if 0 < len(pins) < n:
        around = [*places, places[0] + n]
        gaps = {after - before for before, after in pairwise(around)}
        assert max(gaps) - min(gaps) <= 1


def test_pins_are_not_a_prefix():
    order = tuple(f"page{i}" for i in range(12))
    pins, _ = divide(order, dict.fromkeys(order, 1), 6, group=1, prefetch=2)
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
    assert divide(order, dict.fromkeys(order, 1), 3, group=1, prefetch=1) == ({"shared"}, 1)


@given(
    sizes=st.lists(st.sampled_from([2, 5, 11, 40]), min_size=1, max_size=30),
    room=st.integers(1, 700),
    group=st.integers(1, 2),
    prefetch=st.integers(0, 3),
)
def test_a_division_leaves_room_for_its_slots(sizes, room, group, prefetch):
    pages = {f"page{i}": size for i, size in enumerate(sizes)}
    pins, slot = divide(tuple(pages), pages, room, group=group, prefetch=prefetch)
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
    assert divide(tuple(pages), pages, 24, group=1, prefetch=1) == (
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


def checkpointed(blocks: int, layers: int) -> list[str]:
    """Forward, then block after block from the end: forward again and backward."""
    block = [[f"block{b}.{i}" for i in range(layers)] for b in range(blocks)]
    return [*chain(*block), *(key for b in reversed(block) for key in (*b, *reversed(b)))]


def misses_of_pass(policy: Policy, order: list[str]) -> int:
    """Begin a pass over pages of one byte and run it."""
    policy.begin_pass()
    misses = 0
    for key in order:
        misses += not policy.access(key, 1, (key,)).hit
        policy.ahead((key,))
    return misses


def steady_misses(policy: Policy, order: list[str]) -> int:
    """Misses of the sixth pass."""
    return [misses_of_pass(policy, order) for _ in range(6)][-1]


@pytest.mark.parametrize("room", [12, 24, 60, 120])
def test_activation_checkpointing_costs_no_third_read(room):
    order, short = checkpointed(32, 7), ScheduledPolicy(room)
    forward = order[: 32 * 7]
    twice = steady_misses(ScheduledPolicy(room), forward + forward[::-1])
    misses = steady_misses(ScheduledPolicy(room), order)
    assert misses <= twice + 1
    short._try_rings = lambda: None  # as if the order had no repeats
    assert misses < steady_misses(short, order)


@given(workloads())
def test_trying_rings_out_never_moves_more(load):
    order = [key for keys in load.passes[0] for key in keys] * 2 + ["tail"]
    sizes = load.sizes | {"tail": 1}
    moved = []
    for tried in (False, True):
        policy = ScheduledPolicy(load.room, prefetch=load.prefetch)
        if not tried:
            policy._try_rings = lambda: None
        for _ in range(7):
            policy.begin_pass()
            total = 0
            for key in order:
                total += 0 if policy.access(key, sizes[key], (key,)).hit else sizes[key]
                policy.ahead((key,))
        moved.append(total)
    assert moved[1] <= moved[0]


# -- learning ---------------------------------------------------------------------------------------------------------


def hits_of_last_pass(passes: list[list[str]], room: int, *, prefetch: int = 1) -> int:
    def total(some):
        return simulate("scheduled", [x for p in some for x in [PASS, *p]], room, prefetch=prefetch).hits.total()

    return total(passes) - total(passes[:-1])


FULL = [f"page{i}" for i in range(10)]


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(FULL[:3] + FULL[4:], id="skipped"),
        pytest.param([*FULL[:5], FULL[2], *FULL[5:]], id="repeated"),
        pytest.param(FULL[5:] + FULL[:5], id="reordered"),
        pytest.param([*FULL, "new0", "new1"], id="grown"),
    ],
)
def test_a_changed_order_is_learned_in_one_pass(changed):
    settled = hits_of_last_pass([changed] * 8, 6)
    learning = [FULL] * 5 + [changed] * 2  # one pass to learn it, one to bring the new pins in
    assert hits_of_last_pass([*learning, changed], 6) == settled
    assert settled >= 4


def test_the_learned_pass_is_fetched_ahead_at_once():
    counts = simulate("scheduled", [PASS, *FULL, PASS, *FULL[::-1], PASS, *FULL[::-1]], 6, prefetch=2)
    third = (
        counts.prefetched.total()
        - simulate("scheduled", [PASS, *FULL, PASS, *FULL[::-1]], 6, prefetch=2).prefetched.total()
    )
    misses = counts.misses.total() - simulate("scheduled", [PASS, *FULL, PASS, *FULL[::-1]], 6).misses.total()
    assert third >= misses - 2


@pytest.mark.parametrize("stop", [1, 4, 9])
def test_a_pass_that_stops_early_does_not_replace_the_order(stop):
    settled = hits_of_last_pass([FULL] * 6, 6)
    assert hits_of_last_pass([*[FULL] * 5, FULL[:stop], FULL], 6) >= settled == 4


@pytest.mark.parametrize("stop", [1, 4, 9])
def test_a_pass_that_stops_early_twice_in_a_row_is_the_order_from_then_on(stop):
    """Early exit, layers that are skipped: the part that is used gets all the room."""
    settled = hits_of_last_pass([FULL[:stop]] * 6, 6)
    assert hits_of_last_pass([*[FULL] * 5, *[FULL[:stop]] * 4], 6) == settled
    assert hits_of_last_pass([*[FULL] * 5, *[FULL[:stop]] * 4, *[FULL] * 3], 6) == hits_of_last_pass([FULL] * 6, 6)


def test_passes_that_stop_here_and_there_leave_room_for_the_longest_of_them():
    lengths = [5, 3, 4, 5, 4, 5, 3, 5]
    assert hits_of_last_pass([*[FULL] * 5, *(FULL[:n] for n in lengths)], 6) == 5


def test_interruptions_with_whole_passes_between_them_change_nothing():
    settled = hits_of_last_pass([FULL] * 6, 6)
    assert hits_of_last_pass([*[FULL] * 5, *[FULL[:4], FULL] * 5], 6) >= settled == 4


@pytest.mark.parametrize("marked", [1, 2, 7])
@pytest.mark.parametrize("shape", ["once", "first twice", "checkpointed"])
def test_passes_go_on_being_learned_after_their_marks_have_stopped(shape, marked):
    """A model is called, then compiled: its hook marks no pass from then on."""
    one_pass = {"once": FULL, "first twice": [*FULL[:3], FULL[0], *FULL[3:]], "checkpointed": checkpointed(4, 3)}[shape]

    def hits(passes, marks):
        trace = [item for at in range(passes) for item in ([PASS] if at < marks else []) + one_pass]
        return simulate("scheduled", trace, 6).hits.total()

    settled = hits(14, 14) - hits(13, 13)
    assert hits(marked + 9, marked) - hits(marked + 8, marked) == settled > 0
    assert hits(200, marked) - hits(199, marked) == settled


def test_marks_that_come_back_after_a_while_are_marks_again():
    trace = ([PASS, *FULL] + FULL * 9) * 4
    changed = [item for _ in range(4) for item in (PASS, *FULL, FULL[0], FULL[5])]
    settled = simulate("scheduled", changed * 3, 6).hits.total() - simulate("scheduled", changed * 2, 6).hits.total()
    before = simulate("scheduled", [*trace, *changed * 2], 6).hits.total()
    assert simulate("scheduled", [*trace, *changed * 3], 6).hits.total() - before == settled


def test_a_marked_pass_may_repeat_itself():
    """An inner model that is called three times in each pass, and a head behind it."""
    one_pass = [*FULL * 3, "head"]
    policy = ScheduledPolicy(6, prefetch=2)
    for _ in range(3):
        misses_of_pass(policy, one_pass)
    policy.begin_pass()
    assert policy._order == tuple(one_pass)


@pytest.mark.parametrize("blocks", [32, 120])
def test_no_beginning_of_a_pass_and_no_access_takes_long(blocks):
    """They happen under the stack's lock: 1,344 and 5,040 accesses of pages of many sizes."""
    order = checkpointed(blocks, 14)
    sizes = {key: 100 * (1 + at % 3) + at % 7 for at, key in enumerate(sorted(set(order)))}
    policy, slowest, begins = ScheduledPolicy(sum(sizes.values()) // 3), 0.0, 0.0
    for room in (3, 3, 3, 3, 4, 4, 5):
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
    order, trials, try_rings = checkpointed(16, 7), [], ScheduledPolicy._try_rings
    policy = ScheduledPolicy(40)
    monkeypatch.setattr(policy, "_try_rings", lambda: trials.append(policy.capacity_bytes) or try_rings(policy))

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


def test_after_a_pass_that_stopped_early_the_next_one_is_fetched_ahead_from_its_start():
    policy = ScheduledPolicy(6, prefetch=2)
    for keys in [FULL] * 3 + [FULL[:5]]:
        policy.begin_pass()
        for key in keys:
            policy.access(key, 1, busy=(key,))
            policy.ahead(busy=(key,))
    policy.begin_pass()
    policy.access(FULL[0], 1, busy=(FULL[0],))
    ahead = {decision.key for decision in policy.ahead(busy=(FULL[0],))}
    streamed = [key for key in FULL[1:] if key not in policy.resident() or key in ahead]
    assert ahead and ahead <= set(streamed[:2])


def test_no_page_is_given_up_for_one_that_is_needed_later():
    policy = ScheduledPolicy(3, prefetch=2)
    for keys in [FULL] * 3 + [FULL[:1]]:
        policy.begin_pass()
        for key in keys:
            policy.access(key, 1, busy=(key,))
            policy.ahead(busy=(key,))
    assert set(policy.resident()) == set(FULL[:3])
    assert policy.access(FULL[0], 1).hit  # repeated: what was staged ahead is still what comes next
    assert policy.ahead(busy=FULL[:1]) == [] and set(policy.resident()) == set(FULL[:3])


def test_pages_fetched_ahead_for_places_that_were_skipped_still_count_as_prefetched():
    policy = ScheduledPolicy(5, prefetch=2)
    for _ in range(3):
        policy.begin_pass()
        for key in FULL:
            policy.access(key, 1, busy=(key,))
            policy.ahead(busy=(key,))
    staged = list(policy._fresh)
    assert len(staged) == 2
    policy.begin_pass()
    far = FULL[FULL.index(staged[-1]) + 1]
    policy.access(far, 1, busy=(far,))  # jumps over both
    for key in staged:
        if key in policy.resident():
            decision = policy.access(key, 1)
            assert decision.prefetched and not decision.hit


def test_an_unmarked_pass_without_a_recurring_start_stays_bounded():
    policy = ScheduledPolicy(2)
    policy.access("first", 1)
    for turn in range(20_000):
        policy.access("ab"[turn % 2], 1)
    assert len(policy._current) < 5_000
    policy = ScheduledPolicy(2)
    for turn in range(3_000):
        policy.begin_pass()
        policy.access(f"generation{turn}", 1)
        policy.ahead()
        policy.forget(f"generation{turn}")
    assert len(policy._sizes) < 10 and len(policy._gone) < 10
