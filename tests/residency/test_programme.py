"""Programmes do what the live policy does, and their ring holds what each lease needs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.matrix import matrix
from vbrt.residency.programme import RESIDENT, PassOrder, Programme, compile_programme
from vbrt.residency.scheduled import ScheduledPolicy


def orders(leases: list[tuple[str, ...]], shape: str) -> list[PassOrder]:
    """A round: one pass, forward and backward, or a pass that uses every page twice."""
    if shape == "training":
        return [PassOrder("forward", tuple(leases)), PassOrder("backward", tuple(reversed(leases)))]
    return [PassOrder("decode", tuple(leases * (2 if shape == "twice" else 1)))]


def run_pass(policy: ScheduledPolicy, one: PassOrder, sizes: dict[str, int]) -> list:
    policy.begin_pass(one.phase)
    return run_leases(policy, one, sizes)


def run_leases(policy: ScheduledPolicy, one: PassOrder, sizes: dict[str, int]) -> list:
    decisions = []
    for keys in one.leases:
        decisions.append([policy.access(key, sizes[key], keys)[1::2] for key in keys])  # hit, prefetched
        policy.ahead(keys)
    return decisions


def settled(policy: ScheduledPolicy, round_: list[PassOrder], sizes: dict[str, int]) -> Programme | None:
    """Run rounds until one can be compiled, and begin the next one."""
    for _ in range(12):
        policy.begin_pass(round_[0].phase)
        programme = compile_programme(policy, round_, sizes)
        if programme is not None:
            return programme
        run_leases(policy, round_[0], sizes)
        for one in round_[1:]:
            run_pass(policy, one, sizes)
    return None


def holds(programme: Programme) -> None:
    """Run the ring of a programme for three rounds: each lease finds its pages, and no copy comes too early."""
    ring = {load.slot: load.key for load in programme.begin}
    assert len(ring) == len(programme.begin)
    for _ in range(3):
        begun = dict(ring)
        ring.update((load.slot, load.key) for load in programme.head)
        for step in programme.steps:
            for access in step.accesses:
                assert access.slot == RESIDENT or ring[access.slot] == access.key
            ring.update((load.slot, load.key) for load in step.loads)
        assert {load.slot: ring[load.slot] for load in programme.begin} == {slot: begun[slot] for slot in begun}
        ring = {load.slot: ring[load.slot] for load in programme.begin}


SIZES = {"equal": [4, 4, 4], "layers": [1, 4, 4, 2], "lm": [2, 1, 1, 2, 7, 7, 7]}


@matrix(sizes=SIZES, shape=["decode", "training"], room=[0.2, 0.5, 0.9], prefetch=[1, 2, 4])
def test_a_steady_round_has_a_programme(sizes, shape, room, prefetch):
    of = {f"page{i}": sizes[i % len(sizes)] for i in range(42)}
    leases = [(key,) for key in of]
    policy = ScheduledPolicy(max(int(sum(of.values()) * room), 3 * max(of.values())), prefetch=prefetch)
    programme = settled(policy, orders(leases, shape), of)
    assert programme is not None
    holds(programme)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_programme_says_what_the_policy_decides(data):
    sizes = {f"page{i}": data.draw(st.integers(1, 4)) for i in range(data.draw(st.integers(3, 12)))}
    group = data.draw(st.integers(1, 2))
    keys = list(sizes)
    leases = [tuple(keys[at : at + group]) for at in range(0, len(keys), group)]
    round_ = orders(leases, data.draw(st.sampled_from(["decode", "training", "twice"])))
    least = max(sizes.values()) * (group + 1)
    room = data.draw(st.integers(least, max(least, sum(sizes.values()) + 1)))
    policy = ScheduledPolicy(room, prefetch=data.draw(st.integers(0, 4)), group=group)
    programme = settled(policy, round_, sizes)
    if programme is None:
        return
    holds(programme)
    said = [[access[2:] for access in step.accesses] for step in programme.steps]
    for turn in range(2):
        done = []
        for number, one in enumerate(round_):
            if turn or number:
                policy.begin_pass(one.phase)
            assert policy.foresight.state() == programme.segments[number].state
            done += run_leases(policy, one, sizes)
            assert policy.foresight.residents() == programme.segments[number].after
        assert said == done
