"""Ctrl-C anywhere loses nothing."""

import gc
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import eventually
from tests.tiers.stacks import CPU, UNIT, WatchedTier, add_all, assert_at_rest, run, scripted, use, within
from tests.torture.interrupting import Interrupts, interrupted
from vbrt.errors import TierError
from vbrt.residency.lru import LRUPolicy
from vbrt.residency.simulate import PASS, Announce, make_policy
from vbrt.tiers import Level, MemoryTier, SsdTier, TierStack

pytestmark = pytest.mark.usefixtures("no_fsync")


def interrupt_each(
    step: int, make: Callable[[Path], TierStack], work: Callable[[TierStack], object], trace: list
) -> None:
    """Interrupt `work` at every `step`-th place, each time on a new stack, of which nothing may be lost then."""
    at, hit = step // 2, True
    while hit:
        at += step
        with tempfile.TemporaryDirectory() as root:
            stack = make(Path(root))
            hit = interrupted(at, lambda stack=stack: work(stack))
            gc.collect()
            within(30, lambda stack=stack: run(stack, trace))
            assert_at_rest(stack)
            within(30, lambda stack=stack: work(stack))
            run(stack, trace)
            assert_at_rest(stack)
            stack.close()
            assert os.listdir(root) == []
    assert at > 4 * step


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a __del__ it is only printed
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize(("kind", "warm"), [("lru", True), ("scheduled", False), ("scheduled", True)])
def test_ctrl_c_anywhere_loses_nothing(kind, warm, levels, quick_to_look):
    sizes = {f"page{i}": 1 + i % 2 for i in range(5)}
    one_pass = [PASS, ("page0",), ("page1",), ("page2", "page3"), ("page4",)]

    def make(root):
        tiers = [
            Level(MemoryTier("near", CPU, 5 * UNIT), make_policy(kind, 5 * UNIT)),
            Level(MemoryTier("far", CPU, 4 * UNIT), make_policy(kind, 4 * UNIT)),
        ][:levels]
        stack = add_all(TierStack([*tiers, SsdTier(root, 1 << 40)], workers=1), sizes)
        if warm:
            run(stack, one_pass * 2)
        return stack

    interrupt_each(127, make, lambda stack: run(stack, one_pass), one_pass * 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_in_a_scan_through_experts_loses_nothing(quick_to_look):
    keys = [f"layer.experts#coarse.{i}" for i in range(5)]
    sizes = {key: 1 + i % 2 for i, key in enumerate(keys)} | {"page": 1}
    one_pass = [PASS, ("page",), tuple(keys[1:3]), Announce(tuple(keys)), *((key,) for key in keys)]

    def make(root):
        near = Level(MemoryTier("near", CPU, 5 * UNIT), make_policy("experts", 5 * UNIT))
        stack = add_all(TierStack([near, SsdTier(root, 1 << 40)], workers=1), sizes)
        run(stack, one_pass)
        return stack

    interrupt_each(149, make, lambda stack: run(stack, one_pass), one_pass)


@pytest.mark.sample(2)
@pytest.mark.parametrize("below", ["far", "ssd"])
@pytest.mark.parametrize(("before", "after"), [(9, 6), (6, 9)])
def test_an_interrupted_budget_change_keeps_every_page(below, before, after, quick_to_look):
    sizes = {f"page{i}": 1 + i % 2 for i in range(6)}
    one_pass = [PASS, *((key,) for key in sizes)]

    def make(root):
        tiers = [
            Level(MemoryTier("near", CPU, 9 * UNIT), make_policy("scheduled", 0)),
            Level(MemoryTier("far", CPU, 9 * UNIT), make_policy("scheduled", 0)),
        ][: 1 + (below == "far")]
        stack = add_all(TierStack([*tiers, SsdTier(root, 1 << 40)]), sizes, dict.fromkeys(sizes, "near"))
        stack.set_budget("near", before * UNIT)
        run(stack, one_pass * 2)
        return stack

    interrupt_each(113, make, lambda stack: stack.set_budget("near", after * UNIT), one_pass)


def test_ctrl_c_while_pages_are_given_back_holds_none_though_its_frames_are_kept(tmp_path, request):
    request.addfinalizer(gc.enable)
    gc.disable()  # in a `__del__` of what is collected meanwhile Ctrl-C is printed, and not raised
    stack, *_ = scripted(tmp_path, 2, {"a": 2, "b": 2})
    use(stack, "a")
    interrupted = Interrupts(keep_frames=True)
    interrupted(0, lambda: use(stack, "a"))
    places = [at for at, (code, _) in enumerate(interrupted.places, 1) if code.co_name in ("release", "_release")]
    assert len(places) > 5
    for at in places:
        use(stack, "a")
        assert interrupted(at, lambda: use(stack, "a")) and interrupted.raised is not None
        within(10, lambda: use(stack, "b"))
    assert_at_rest(stack)
    stack.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("room", [2, 3, 4])
def test_ctrl_c_as_a_call_through_c_returns_loses_no_room(room, tmp_path, quick_to_look):
    """CPython looks for signals there before the caller has stored the result."""
    sizes = dict.fromkeys([f"page{i}" for i in range(6)], 1)
    near = Level(WatchedTier("cpu", room), LRUPolicy(room * UNIT))  # nothing is staged ahead: this thread reserves
    stack = add_all(TierStack([near, SsdTier(tmp_path, 1 << 40)]), sizes)
    one_pass, interrupted = [PASS, *((key,) for key in sizes)], Interrupts()
    run(stack, one_pass * 3)
    interrupted(0, lambda: run(stack, one_pass))
    behind = {
        place: at for at, place in reversed([*enumerate(interrupted.places, 1)]) if place[1] % 2
    }  # the first time
    mine = [at for (code, _), at in behind.items() if f"{os.sep}vbrt{os.sep}" in code.co_filename]
    assert len(mine) > 5
    for at in mine:
        assert interrupted(at, lambda: run(stack, one_pass))
        within(30, lambda: run(stack, one_pass))
        assert_at_rest(stack)
    stack.close()


def test_nothing_that_locks_in_python_is_entered_under_the_stacks_lock(tmp_path):
    sizes = {f"page{i}": 1 + i % 2 for i in range(8)}
    one_pass = [PASS, *((key,) for key in sizes)]
    levels = [
        Level(MemoryTier("near", CPU, 12 * UNIT), make_policy("scheduled", 0)),
        Level(MemoryTier("far", CPU, 4 * UNIT), make_policy("scheduled", 4 * UNIT)),
    ]
    stack = add_all(TierStack([*levels, SsdTier(tmp_path, 1 << 40)]), sizes, dict.fromkeys(sizes, "near"))
    locking, entered, lock = (threading.__file__, "concurrent/futures", "queue.py"), set(), stack.guard.lock

    def trace(frame, event, _):
        if event == "call" and any(name in frame.f_code.co_filename for name in locking) and lock._is_owned():
            entered.add(f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})")

    tracing = sys.gettrace()
    sys.settrace(trace)
    try:
        for budget in (6, 5, 12, 6):
            stack.set_budget("near", budget * UNIT)
            run(stack, one_pass * 3)
        stack.close()
    finally:
        sys.settrace(tracing)
    assert not entered


def test_ctrl_c_during_a_read_reaches_this_thread_and_others_get_an_error(tmp_path):
    class Interrupted(SsdTier):
        def get(self, room, out, *, key):
            others.start()
            eventually(lambda: stack.guard.bells, "a thread that waits for this read")
            raise KeyboardInterrupt

    def wait():
        try:
            use(stack, "a")
        except TierError as error:
            told.append(str(error))

    told: list[str] = []
    others = threading.Thread(target=wait, daemon=True)
    ssd = Interrupted(tmp_path, 1 << 40)
    stack = add_all(TierStack([Level(WatchedTier("cpu", 2), LRUPolicy(2 * UNIT)), ssd]), {"a": 2})
    with pytest.raises(KeyboardInterrupt):
        use(stack, "a")
    others.join(30)
    assert told == ["a: its copy was interrupted; run the forward again"]
    ssd.__class__ = SsdTier
    use(stack, "a")
    assert_at_rest(stack)
    stack.close()
