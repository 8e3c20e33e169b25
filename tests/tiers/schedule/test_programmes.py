"""Programmes on a live stack: counts, contents, and every way in which a run ends."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.residency.traces import Workload, policy_of
from tests.tiers.stacks import UNIT, WatchedTier, add_all, assert_at_rest, assert_counts, check, slots
from vbrt.residency.access_counts import PhaseCounts
from vbrt.residency.simulate import Pass, make_policy, simulate
from vbrt.tiers import Level, TierStack
from vbrt.tiers.stack.slots import State


def stack_of(sizes: dict[str, int], room: int, policy=None, *, tier=WatchedTier) -> TierStack:
    """Memory above memory, as a GPU and page-locked host memory are."""
    policy = policy or make_policy("scheduled", room * UNIT)
    stack = TierStack([Level(tier("gpu", room), policy), Level(tier("cpu", sum(sizes.values())))])
    return add_all(stack, sizes, dict.fromkeys(sizes, "cpu"))


def begin(stack: TierStack, phase: str = "decode") -> None:
    """Begin a pass once the workers are idle: a run begins with what is there."""
    for _ in range(2_000):
        if all(slot.state is State.READY for slot in slots(stack)):
            break
        time.sleep(0.001)
    stack.begin_pass(phase)


def run(stack: TierStack, trace) -> int:
    """Run a trace; return how many leases a programme served."""
    served = 0
    for item in trace:
        if isinstance(item, Pass):
            begin(stack, item.phase)
            continue
        with stack.lease(item) as tensors:
            running = stack.ledger.running
            served += running is not None
            check(item, tensors)
    return served


SIZES = {f"page{i}": 1 + i % 3 for i in range(12)}
LEASES = [(key,) for key in SIZES]


def steady(room: int = 14, **options) -> TierStack:
    """A stack on which a programme runs, at the beginning of a pass."""
    stack = stack_of(SIZES, room, **options)
    run(stack, [Pass("decode"), *LEASES] * 5)
    begin(stack)
    assert stack.ledger.running is not None, stack.ledger.programmes.reason
    return stack


@st.composite
def recurring(draw: st.DrawFn) -> Workload:
    """Passes that repeat themselves, with some that are cut short, skip or turn around in between."""
    sizes = {f"page{i}": draw(st.integers(1, 4)) for i in range(draw(st.integers(4, 10)))}
    group = draw(st.integers(1, 2))
    keys = list(sizes)
    layers = [tuple(keys[at : at + group]) for at in range(0, len(keys), group)]
    backward = layers[::-1]
    passes: list[tuple[str, list]] = []
    for _ in range(draw(st.integers(1, 3))):
        round_ = draw(
            st.sampled_from(
                [[("decode", layers)], [("forward", layers), ("backward", backward)], [("twice", layers * 2)]]
            )
        )
        passes += round_ * draw(st.integers(4, 8))
        stop = draw(st.integers(1, len(layers)))
        passes += draw(st.sampled_from([[], [("decode", layers[:stop])], [("decode", layers[stop:])]]))
    largest = max(sum(sizes[key] for key in layer) for layer in layers)
    return Workload(
        sizes,
        tuple(tuple(leases) for _, leases in passes),
        marks=tuple(phase for phase, _ in passes),
        kind="scheduled",
        room=draw(st.integers(largest, sum(sizes.values()) + 1)),
        prefetch=draw(st.integers(0, 3)),
    )


@settings(max_examples=40, deadline=None)
@given(recurring())
def test_counts_under_programmes_are_simulated_counts_and_contents_are_right(load):
    counts = simulate(policy_of(load), load.trace, load.room, sizes=load.sizes)
    stack = stack_of(load.sizes, load.room, policy_of(load, UNIT))
    run(stack, load.trace)
    assert_counts(stack, counts)
    assert stack.phases() == {phase: of for phase, of in counts.phases.items() if of != PhaseCounts()}
    assert_at_rest(stack)
    stack.close()
    assert stack.levels[0].tier.held_bytes == 0


def test_layers_beside_experts_of_which_the_device_decides_have_a_programme():
    """The policy `experts` then decides on them alone; a lease of an expert's page ends that."""
    expert = "mlp.experts#coarse.0"
    stack = stack_of(SIZES | {expert: 1}, 14, make_policy("experts", 14 * UNIT))
    run(stack, [Pass("decode"), *LEASES] * 12)
    assert run(stack, [Pass("decode"), *LEASES] * 3) == 3 * len(LEASES), stack.ledger.programmes.reason
    assert run(stack, [Pass("decode"), *LEASES, (expert,)] * 6) < 2 * len(LEASES)
    assert "cannot predict its evictions" in stack.ledger.programmes.reason
    assert_at_rest(stack)


def test_the_last_order_is_that_of_the_phase_or_of_the_pass_that_has_just_run():
    stack = stack_of(SIZES, 14)
    assert stack.last_order("decode") == []
    run(stack, [Pass("prompt"), *LEASES])
    assert stack.last_order("decode") == list(SIZES)  # the prompt's, before its end is noticed
    run(stack, [Pass("decode"), *LEASES[::2], Pass("decode")])
    assert stack.last_order("decode") == list(SIZES)[::2]


def test_pages_that_are_left_out_are_not_expected_any_more_and_the_rest_recurs():
    stack = steady()
    out = set(list(SIZES)[1::2])
    stack.leave_out("decode", out)
    assert stack.last_order("decode") == list(SIZES)[::2]
    kept = [lease for lease in LEASES if lease[0] not in out]
    for _ in range(12):  # until a programme of the rest runs
        run(stack, [Pass("decode"), *kept])
        stack.ledger.programmes.hurry()
    begin(stack)
    assert stack.ledger.running is not None, stack.ledger.programmes.reason
    moved = {key: sum(stack.pages[key].bytes_moved.values()) for key in out}
    assert run(stack, kept) == len(kept)
    assert moved == {key: sum(stack.pages[key].bytes_moved.values()) for key in out}
    assert_at_rest(stack)
