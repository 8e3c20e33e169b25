"""Every wait in a stack ends: with the change, or with an error that names what is missing and who has it."""

import threading
import time
from collections.abc import Callable

import pytest

from tests.tiers.stacks import CPU, UNIT, add, assert_at_rest, in_background, run, scripted, use, within
from vbrt.errors import TierError
from vbrt.residency.lru import LRUPolicy
from vbrt.tiers import Level, MemoryTier, TierStack
from vbrt.tiers.protocols.tier import Reservation
from vbrt.tiers.stack import bounded_waits
from vbrt.tiers.stack.slots import State

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    monkeypatch.setattr(bounded_waits, "LOOK_SECONDS", 0.01)


def leased_by(stack: TierStack, key: str, until: threading.Event) -> tuple[threading.Thread, threading.Event]:
    """A thread that has leased a page."""
    begun = threading.Event()

    def work() -> None:
        with stack.lease((key,)):
            begun.set()
            until.wait(30)

    thread = threading.Thread(target=work, name="other", daemon=True)
    thread.start()
    assert begun.wait(10)
    return thread, begun


def test_room_that_nobody_has_is_an_error_that_says_how_much_and_not_an_endless_wait(tmp_path):
    stack, *_ = scripted(tmp_path, 2, {"a": 1, "b": 1, "c": 1})
    tier, nobody = stack.levels[0].tier, Reservation()
    tier.reserve(UNIT, nobody)
    told = (
        rf"b: waited \d+ s for room for {UNIT} bytes in tiers\.cpu\.budget = {2 * UNIT}, of which {2 * UNIT} bytes are "
        rf"used, {UNIT} of them no page's, and no other thread is left .*pages in use: .*raise tiers\.cpu\.budget"
    )
    use(stack, "a")
    with pytest.raises(TierError, match=told):
        within(20, lambda: use(stack, "b"))
    tier.free(nobody.room, reuse=True)
    run(stack, [("a",), ("b",), ("c",)])
    assert_at_rest(stack)
    stack.close()


def when_a_thread_is_gone(left: Callable[[], object], then: Callable[[], object]) -> None:
    """Run one thread after the other; the second one is there before, or it would get the first one's number."""
    gone = threading.Event()

    def wait() -> None:
        assert gone.wait(20)
        then()

    with in_background(wait):
        within(10, left)
        gone.set()


def test_a_lease_of_a_living_thread_is_waited_for(tmp_path):
    stack, *_ = scripted(tmp_path, 1, {"a": 1, "b": 1})
    until = threading.Event()
    thread, _ = leased_by(stack, "a", until)
    with in_background(lambda: use(stack, "b")) as waits:
        time.sleep(5 * bounded_waits._ALONE_LOOKS * bounded_waits.LOOK_SECONDS)
        assert waits.is_alive()
        until.set()
    thread.join()
    assert_at_rest(stack)
    stack.close()


def test_a_lease_that_ends_while_threads_are_counted_is_no_error(tmp_path, monkeypatch):
    stack, *_ = scripted(tmp_path, 1, {"a": 1, "b": 1})
    until, others = threading.Event(), bounded_waits.Waiting._others
    thread, _ = leased_by(stack, "a", until)

    def counted_late(waiting):
        until.set()
        thread.join()
        return others(waiting)

    monkeypatch.setattr(bounded_waits.Waiting, "_others", counted_late)
    with in_background(lambda: use(stack, "b")):
        pass
    assert_at_rest(stack)
    stack.close()


def test_a_lease_that_a_living_thread_never_ends_is_named_after_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(bounded_waits, "_STILL_LOOKS", 20)
    stack, *_ = scripted(tmp_path, 1, {"a": 1, "b": 1})
    until = threading.Event()
    thread, _ = leased_by(stack, "a", until)
    told = rf"nothing has changed for \d+ s .pages in use: a \({UNIT} bytes, leased by thread other\)"
    with pytest.raises(TierError, match=told):
        within(20, lambda: use(stack, "b"))
    until.set()
    thread.join()
    use(stack, "b")
    assert_at_rest(stack)
    stack.close()


def test_a_lease_of_a_thread_that_is_gone_is_not_waited_for(tmp_path):
    stack, *_ = scripted(tmp_path, 1, {"a": 1, "b": 1})
    kept = []

    def leave() -> None:
        kept.append(stack.lease(("a",)))
        kept[0].__enter__()

    with pytest.raises(TierError, match=r"no other thread is left .*a \(4096 bytes, leased by a thread that is gone\)"):
        when_a_thread_is_gone(leave, lambda: use(stack, "b"))
    kept.clear()
    within(20, lambda: use(stack, "b"))
    assert_at_rest(stack)
    stack.close()


def test_a_lease_in_a_garbage_cycle_is_collected(tmp_path):
    stack, *_ = scripted(tmp_path, 1, {"a": 1, "b": 1})

    def leave() -> None:
        lease = stack.lease(("a",))
        lease.__enter__()
        lease.cycle = lease

    when_a_thread_is_gone(leave, lambda: use(stack, "b"))
    assert_at_rest(stack)
    stack.close()


def test_a_slow_read_of_another_thread_is_waited_for(tmp_path):
    stack, _, ssd = scripted(tmp_path, 1, {"a": 1})
    ssd.close_gate("a")
    with in_background(lambda: use(stack, "a")), in_background(lambda: use(stack, "a")) as waits:
        assert ssd.began["a"].wait(10)
        time.sleep(5 * bounded_waits._ALONE_LOOKS * bounded_waits.LOOK_SECONDS)
        assert waits.is_alive()
        ssd.gates["a"].set()
    assert_at_rest(stack)
    stack.close()


def test_the_copy_of_a_thread_that_died_is_given_up_and_the_next_lease_reads_the_page(tmp_path):
    stack, policy, _ = scripted(tmp_path, 2, {"a": 1, "b": 1})

    def die() -> None:
        with stack.guard.lock, stack.ledger.deciding:
            slot = stack.decider.place(stack.levels[0], stack.pages["a"], policy.access("a", UNIT))
            slot.state, slot.loader = State.LOADING, threading.get_ident()

    with pytest.raises(TierError, match="a: the thread that copied it has died or left it"):
        when_a_thread_is_gone(die, lambda: use(stack, "a"))
    with pytest.raises(TierError, match="a: its copy was interrupted"):  # by this thread, which is not at it any more
        within(20, lambda: (die(), use(stack, "a")))
    run(stack, [("a",), ("b",)])
    assert_at_rest(stack)
    stack.close()


def test_room_that_this_threads_own_copy_was_interrupted_with_comes_back(tmp_path):
    """Ctrl-C came, and again while the copy was undone."""
    stack, policy, _ = scripted(tmp_path, 1, {"a": 1, "b": 1})

    def leave() -> None:
        with stack.guard.lock:
            stack.ledger.torn = True
            slot = stack.decider.place(stack.levels[0], stack.pages["a"], policy.access("a", UNIT))
            slot.state, slot.loader = State.LOADING, threading.get_ident()
            assert stack.mover._try_reserve(slot)

    within(20, lambda: (leave(), use(stack, "b")))
    run(stack, [("a",), ("b",)])
    assert_at_rest(stack)
    stack.close()


def test_who_never_gets_room_while_others_do_is_told_so(monkeypatch):
    monkeypatch.setattr(bounded_waits, "_LONGEST_SECONDS", 0.2)
    levels = [Level(MemoryTier("near", CPU, UNIT), LRUPolicy(UNIT)), MemoryTier("far", CPU, 8 * UNIT)]
    stack = TierStack(levels)
    add(stack, "a", 1, "far")
    add(stack, "b", 1, "far")
    until = threading.Event()
    thread, _ = leased_by(stack, "a", until)

    def ring() -> None:
        while not until.wait(0.002):
            with stack.guard.lock:
                stack.guard.ring()

    with in_background(ring):
        with pytest.raises(TierError, match=r"b: waited .*only other threads got room meanwhile"):
            within(20, lambda: use(stack, "b"))
        until.set()
    thread.join()
    use(stack, "b")
    assert_at_rest(stack)
    stack.close()


def test_a_rewriting_that_does_not_come_is_an_error_after_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(bounded_waits, "_STILL_LOOKS", 20)
    stack, *_ = scripted(tmp_path, 1, {"a": 1})
    stack.rewriter.expect(("a",), "step")
    with pytest.raises(TierError, match=r"a: waited .* for its rewriting, and nothing has changed"):
        within(20, lambda: use(stack, "a"))
    stack.rewriter.forgo(("a",), "step")
    use(stack, "a")
    stack.close()


def test_a_rewriting_waits_for_a_living_lease_only(tmp_path):
    stack, *_ = scripted(tmp_path, 1, {"a": 1})
    stack.rewriter.prepare()
    kept = []

    def leave() -> None:
        kept.append(stack.lease(("a",)))
        kept[0].__enter__()

    def rewrite() -> None:
        with stack.rewriter.rewriting("a"):
            pass

    with pytest.raises(TierError, match=r"a: waited .* for leases and copies of it that began before, and no other"):
        when_a_thread_is_gone(leave, rewrite)
    kept.clear()
    within(20, rewrite)
    stack.close()
