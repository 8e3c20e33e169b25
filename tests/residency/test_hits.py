"""Hits of the policies: closed forms, Belady's optimum, leases of several pages."""

import math
from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.residency.traces import workloads
from vbrt.residency.hosted_share import HostRates, Use, hosted_keys, step_seconds
from vbrt.residency.simulate import PASS, simulate

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


@pytest.mark.parametrize("kind", KINDS)
def test_hosted_pages_are_counted_and_leave_their_room_to_the_others(kind):
    """The policy decides as on a trace without them; a lease of hosted pages alone is none."""
    sizes = {f"page{i}": 10 for i in range(12)}
    hosted = hosted_keys([Use(key, size) for key, size in sizes.items()], 60, HostRates(1000, 1000))
    trace, left = cycle(12, 6), [item for item in cycle(12, 6) if item not in hosted]
    counts, alone = simulate(kind, trace, 60, sizes=sizes, hosted=hosted), simulate(kind, left, 60, sizes=sizes)
    assert counts.hosted == dict.fromkeys(hosted, 6) and 0 < len(hosted) < 12
    assert (counts.hits, counts.misses, counts.bytes_in) == (alone.hits, alone.misses, alone.bytes_in)
    assert counts.bytes_in < simulate(kind, trace, 60, sizes=sizes).bytes_in
    assert simulate(kind, [(key,) for key in hosted], 0, sizes=sizes, hosted=hosted).phases == {}


def test_the_time_of_a_pass_is_that_of_the_bytes_that_the_policy_moves():
    sizes = {f"page{i}": 10 for i in range(40)}
    uses, rates = [Use(key, size) for key, size in sizes.items()], HostRates(1000, 500)
    hosted = hosted_keys(uses, 200, rates)
    moved = [simulate("scheduled", cycle(40, n), 200, sizes=sizes, hosted=hosted).bytes_in for n in (6, 7)]
    longer = max((moved[1] - moved[0]) / 1000, 10 * len(hosted) / 500)
    assert step_seconds(uses, hosted, 200, rates) == pytest.approx(longer)
    assert step_seconds(uses, (), 200, rates) == pytest.approx(
        0.23
    )  # 17 of 40 pages are pinned, besides a ring of three


def test_room_for_everything_needs_no_second_copy_of_anything():
    for kind in KINDS:
        counts = simulate(kind, cycle(6, 4), 30, sizes={f"page{i}": i + 1 for i in range(6)})
        assert counts.bytes_in == 21 and set(counts.misses.values()) == {1}


def test_a_lease_of_pages_that_no_policy_hears_of_is_one():
    """It is where pages are prefetched, too: those after a page at home in the tier come no later than in a stack."""
    trace, sizes = [PASS, (), (), "page2", "page3"] * 2, {"page2": 1, "page3": 3}
    counts = simulate("scheduled", trace, 3, sizes=sizes, prefetch=1)
    without = simulate("scheduled", [item for item in trace if item != ()], 3, sizes=sizes, prefetch=1)
    assert (counts.hits, counts.prefetched) != (without.hits, without.prefetched)
