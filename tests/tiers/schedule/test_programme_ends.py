"""How the run of a programme ends: other pages, other leases, budgets, pages that come and go, threads, Ctrl-C."""

import gc
import threading

import pytest

from tests.tiers.schedule.test_programmes import LEASES, SIZES, begin, run, stack_of, steady
from tests.tiers.stacks import CPU, UNIT, add, assert_at_rest, assert_counts, check, in_background, retire, use, within
from tests.torture.interrupting import interrupted
from vbrt.residency.simulate import Pass, simulate
from vbrt.tiers import MemoryTier, TierStack


def plain(name: str, units: int) -> MemoryTier:
    return MemoryTier(name, CPU, units * UNIT)


ROOM = 14
PASS = [Pass("decode"), *LEASES]
WARM = [item for _ in range(5) for item in PASS]


def counted(stack: TierStack, after: list) -> None:
    """Hold the counts of the steady stack's passes and those after them against `simulate`."""
    sizes = {key: page.nbytes for key, page in stack.pages.items()}
    assert_counts(stack, simulate("scheduled", [*WARM, *after], ROOM * UNIT, sizes=sizes))


@pytest.mark.parametrize("at", [0, 1, 5, 11])
def test_a_pass_that_takes_another_page_is_the_policys_from_there_on(at):
    stack = steady()
    trace = [*LEASES[:at], ("page7",), *LEASES[at:], Pass("decode"), *LEASES[:3], *PASS]
    assert run(stack, trace) < len(LEASES)
    counted(stack, [Pass("decode"), *trace])
    assert_at_rest(stack)
    assert run(stack, PASS * 8) > 3 * len(LEASES)  # and is worked out again
    stack.close()


def test_a_pass_may_end_early():
    stack = steady()
    run(stack, LEASES[:4])
    begin(stack)
    assert stack.ledger.running is None
    counted(stack, [Pass("decode"), *LEASES[:4], Pass("decode")])
    stack.close()


def test_a_second_lease_in_the_block_of_the_first_keeps_both_pages():
    stack = steady()
    run(stack, LEASES[:3])
    with stack.lease(LEASES[3]) as first:
        with stack.lease(LEASES[4]) as second:
            assert stack.ledger.running is None
            check(LEASES[3] + LEASES[4], [*first, *second])
        check(LEASES[3], first)
    run(stack, LEASES[5:])
    assert_at_rest(stack)
    stack.close()


@pytest.mark.parametrize("room", [8, 11, 17, sum(SIZES.values())])
def test_a_budget_in_the_middle_of_a_pass_ends_the_run_and_the_next_passes_have_another(room):
    stack = steady(tier=plain)  # whose copies that are on their way may exceed the budget, which a GPU's do not
    run(stack, LEASES[:5])
    stack.set_budget("gpu", room * UNIT)
    run(stack, LEASES[5:])
    assert_at_rest(stack)
    served = run(stack, PASS * 8)
    assert served > 3 * len(LEASES) or stack.at_rest
    stack.close()


def test_pages_come_and_go_in_the_middle_of_a_pass():
    stack = steady()
    run(stack, LEASES[:5])
    add(stack, "new", 2, "gpu")
    run(stack, LEASES[5:8])
    begin(stack)
    run(stack, WARM)
    retire(stack, "page3")
    left = [keys for keys in LEASES if keys != ("page3",)]
    run(stack, [("new",), *left, *[Pass("decode"), *left] * 5])
    assert stack.ledger.running is not None
    assert_at_rest(stack)
    stack.close()


def test_closing_a_stack_in_the_middle_of_a_pass_leaves_the_lease_its_page():
    stack = steady()
    run(stack, LEASES[:5])
    with stack.lease(LEASES[5]) as tensors:
        stack.close()
        check(LEASES[5], tensors)
    assert stack.levels[0].tier.held_bytes == stack.levels[1].tier.held_bytes == 0


def test_a_lost_lease_ends_the_run():
    stack = steady()
    lease = stack.lease(LEASES[0])
    lease.__enter__()
    del lease
    gc.collect()
    run(stack, LEASES[1:])
    assert_at_rest(stack)
    stack.close()


def fail() -> None:
    raise KeyboardInterrupt


def test_a_release_that_is_interrupted_among_its_copies_ends_the_run_and_pages_hold_their_bytes():
    steps = [step for step in steady().ledger.running.steps if step is not None]
    interrupted_copies = [(at, copy) for at, step in enumerate(steps) for copy in range(len(step.loads))]
    assert len(interrupted_copies) > 4
    for at, copy in interrupted_copies:
        stack = steady()
        loads = [step for step in stack.ledger.running.steps if step is not None][at].loads
        loads[copy] = loads[copy]._replace(start=fail)
        run(stack, LEASES[:at])
        with pytest.raises(KeyboardInterrupt):
            use(stack, *LEASES[at])
        assert stack.ledger.torn
        run(stack, LEASES)
        assert not stack.ledger.torn and stack.ledger.running is None
        assert_at_rest(stack)
        stack.close()


def test_threads_that_run_the_same_passes_get_their_pages():
    stack = steady(room=20)
    barrier = threading.Barrier(2)

    def work():
        barrier.wait()
        for _ in range(40):
            stack.begin_pass("decode")
            for keys in LEASES:
                use(stack, *keys)

    with in_background(work):
        within(60, work)
    assert_at_rest(stack)
    stack.close()


FEW = {f"page{i}": 1 + i % 2 for i in range(6)}
FEW_LEASES = [(key,) for key in FEW]


def few() -> TierStack:
    stack = stack_of(FEW, 6, tier=plain)
    run(stack, [Pass("decode"), *FEW_LEASES] * 4)
    begin(stack)
    assert stack.ledger.running is not None
    return stack


WORKS = {
    "passes": lambda stack: run(stack, [*FEW_LEASES, Pass("decode"), *FEW_LEASES[:2], Pass("decode")]),
    "another page": lambda stack: run(stack, [*FEW_LEASES[:2], FEW_LEASES[4]]),
    "two leases": lambda stack: nested(stack),
    "budget": lambda stack: (run(stack, FEW_LEASES[:2]), stack.set_budget("gpu", 5 * UNIT)),
}


def nested(stack: TierStack) -> None:
    with stack.lease(FEW_LEASES[0]) as first, stack.lease(FEW_LEASES[1]) as second:
        check(FEW_LEASES[0] + FEW_LEASES[1], [*first, *second])


def interrupt(work: str, at: int) -> bool:
    """Interrupt a work at its `at`-th place; nothing may be lost then. False if it ended before."""
    stack = few()
    hit = interrupted(at, lambda: WORKS[work](stack))
    gc.collect()
    within(30, lambda: run(stack, [*FEW_LEASES, Pass("decode"), *FEW_LEASES]))
    assert_at_rest(stack)
    within(30, lambda: run(stack, [Pass("decode"), *FEW_LEASES] * 4))
    assert_at_rest(stack)
    stack.close()
    assert [level.tier.held_bytes for level in stack.levels] == [0, 0]
    return hit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("work", WORKS)
def test_ctrl_c_anywhere_in_a_run_loses_nothing(work, quick_to_look):
    at = 30
    while interrupt(work, at):
        at += 61
    assert at > 4 * 61
