"""What every policy keeps to: its room, its books, busy pages, pages that are gone."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.residency.traces import ExpertLoad, Workload, expert_loads, policy_of, workloads
from vbrt.residency.lru import LRUPolicy
from vbrt.residency.policy import Policy, PolicyBase
from vbrt.residency.scheduled import ScheduledPolicy
from vbrt.residency.simulate import Announce, Pass, make_policy, simulate

KINDS = ("lru", "scheduled", "experts")


def replay(policy: Policy, load: Workload | ExpertLoad) -> dict[str, int]:
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

    def stage(busy):
        decisions = policy.ahead(busy=busy)
        for decision in decisions:
            assert decision.prefetched and not decision.hit and decision.key not in books
            unused.add(decision.key)
            act(decision, busy)
        assert len(decisions) <= load.prefetch * (2 if load.kind == "experts" else 1)  # experts, and other layers

    for item in load.trace:
        if isinstance(item, Pass):
            policy.begin_pass(item.phase)
            continue
        if isinstance(item, Announce):
            policy.announce({key: load.sizes[key] for key in item.keys})
            stage(())
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
        stage(item)
        assert sorted(books) == sorted(policy.resident())
        assert policy.resident_bytes == sum(books.values()) <= policy.capacity_bytes
    return books


@given(workloads())
def test_decisions_keep_the_books_within_the_room(load):
    replay(make_policy(load.kind, load.room, prefetch=load.prefetch, group=load.group), load)


@given(expert_loads())
def test_decisions_on_experts_and_other_layers_keep_the_books_within_the_room(load):
    replay(policy_of(load), load)


@given(expert_loads(), st.integers(-1, 20))
def test_a_policy_of_experts_that_loses_room_gives_pages_up_and_goes_on(load, room):
    policy = policy_of(load)
    books = replay(policy, load)
    victims = policy.resize(room)
    assert len(set(victims)) == len(victims) and set(policy.resident()) == set(books) - set(victims)
    assert policy.resident_bytes <= max(room, 0)
    policy.reset()
    assert policy.resident() == () and policy.resident_bytes == 0
    policy.resize(load.room)
    replay(policy, load)


@settings(max_examples=15)
@given(st.randoms(use_true_random=False), st.sampled_from(KINDS), st.integers(5, 12))
def test_a_lease_that_fits_beside_those_that_are_held_always_gets_its_pages(random, kind, room):
    """What the stack relies on: it counts the room of pages in use, and asks the policy only where a lease fits."""
    names = [*(f"layer{i % 2}.experts#coarse.{i}" for i in range(6)), *(f"page{i}" for i in range(5))]
    sizes = {name: random.randint(1, 3) for name in names}
    policy = make_policy(kind, room, prefetch=random.randint(0, 2), scope=random.choice(["layer", "model"]))
    books: dict[str, int] = {}
    held: list[list[str]] = []

    def act(decision, busy):
        assert not busy & {*decision.evict}
        for key in decision.evict:
            del books[key]
        books.setdefault(decision.key, decision.charge)

    for turn in range(60):
        if turn % 9 == 0:
            policy.begin_pass()
        if kind == "experts" and turn % 7 == 0:
            policy.announce({key: sizes[key] for key in random.sample(names, 4)})
        lease = random.sample(names, 2) if turn % 4 else names[6 + turn % 5 :][:2]
        busy = {*lease, *chain(*held)}
        if sum(books.get(key, sizes[key]) for key in busy) > room:
            held.clear()
            continue
        for key in lease:
            act(policy.access(key, sizes[key], busy), busy)
        for decision in policy.ahead(busy):
            act(decision, busy)
        held += [lease] * random.randint(0, 1)
        assert sum(books.values()) == policy.resident_bytes <= room and set(books) == set(policy.resident())


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
    policy.remove("a")
    policy.remove("never there")
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
    policy.remove("b")
    assert [decision.key for decision in policy.ahead(busy="a")] == ["c", "d"]
    for key in "bcdef":
        policy.access(key, 1)
    policy.begin_pass()
    policy.access("a", 1)
    assert [decision.key for decision in policy.ahead(busy="a")] == ["b", "c"]


def test_an_abstract_policy_and_an_unknown_one_are_refused():
    with pytest.raises(TypeError, match="abstract"):
        PolicyBase(1)
    with pytest.raises(ValueError, match=r"policy\.kind = 'mru'"):
        make_policy("mru", 1)
    with pytest.raises(ValueError, match="does not fit into 2 bytes"):
        simulate("lru", [("a", "b", "c")], 2)


def test_simulate_takes_a_policy_of_ones_own():
    assert simulate(LRUPolicy(2), ["a", "b", "a", "c", "a"], 99).hits == {"a": 2, "b": 0, "c": 0}
    assert simulate("lru", [], 1).hit_rate == 0.0
