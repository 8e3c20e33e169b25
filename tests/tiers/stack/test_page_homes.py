"""Pages that live in a tier: room for them, their owners, and their homes when budgets change."""

import contextlib
import os
import threading

import pytest

from tests.patience import LONG_S, eventually
from tests.tiers.pages import reserved
from tests.tiers.stacks import (
    CPU,
    UNIT,
    ScriptedPolicy,
    SlowSsd,
    WatchedTier,
    add,
    add_all,
    assert_at_rest,
    check,
    in_background,
    layout,
    retire,
    run,
    scripted,
    use,
    within,
)
from vbrt.errors import FormatError, TierError
from vbrt.residency.lru import LRUPolicy
from vbrt.residency.simulate import PASS, make_policy
from vbrt.tiers import Level, MemoryTier, Owner, SsdTier, TierStack

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.mark.parametrize("home", ["cpu", "ssd"])
def test_a_page_that_cannot_be_added_leaves_nothing_behind(tmp_path, home):
    def fail(out):
        out.fill_(1)
        raise FormatError("layer: NaN")

    stack = TierStack([Level(WatchedTier("cpu", 4), LRUPolicy(2 * UNIT)), SsdTier(tmp_path, 5 * UNIT)])
    add(stack, "a", 2, home)
    held = (
        stack.levels[0].tier.held_bytes,
        stack.levels[-1].tier.held_bytes,
        sorted(os.listdir(stack.levels[-1].tier.directory)),
    )
    for _ in range(3):
        with pytest.raises(FormatError):
            stack.add("b", layout(1), home, fail, Owner(stack))
        with pytest.raises(TierError, match=rf"b: \d+ bytes do not fit into tiers\.{home}\.budget"):
            add(stack, "b", 5, home)
        with pytest.raises(TierError, match="a: the stack holds a page of this name already"):
            add(stack, "a", 1, home)
        with pytest.raises(TierError, match=r"b: .* was retired"):
            use(stack, "b")
    assert held == (
        stack.levels[0].tier.held_bytes,
        stack.levels[-1].tier.held_bytes,
        sorted(os.listdir(stack.levels[-1].tier.directory)),
    )
    assert list(stack.pages) == ["a"]
    use(stack, "a")
    assert_at_rest(stack)
    stack.close()


def test_a_full_disk_leaves_the_stack_usable(tmp_path, monkeypatch):
    stack, *_ = scripted(tmp_path, 2, {"a": 1})

    def full(fd, view, at):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(TierError, match=r"b: cannot write .*: the disk is full"):
            add(stack, "b", 1)
    use(stack, "a")
    add(stack, "b", 1)
    use(stack, "b")
    assert_at_rest(stack)
    stack.close()


def test_a_page_that_moves_in_displaces_copies_and_gives_their_room_back_when_it_leaves(tmp_path):
    stack = TierStack([Level(WatchedTier("cpu", 6), make_policy("scheduled", 4 * UNIT)), SsdTier(tmp_path, 1 << 40)])
    sizes = {"a": 1, "b": 1, "c": 1, "d": 1}
    run(add_all(stack, sizes), [PASS, *((key,) for key in sizes)] * 3)
    policy = stack.levels[0].policy
    add(stack, "fits", 2, "cpu")
    assert policy.capacity_bytes == 4 * UNIT and policy.resident_bytes == 4 * UNIT
    add(stack, "large", 3, "cpu")
    assert policy.capacity_bytes == UNIT
    run(stack, [PASS, *((key,) for key in sizes)] * 2)
    with pytest.raises(TierError, match=r"a \+ b: 8192 bytes do not fit .* \(20480 bytes live there\)"):
        use(stack, "a", "b")
    with pytest.raises(TierError, match=r"more: 8192 bytes do not fit into tiers\.cpu\.budget = 24576"):
        add(stack, "more", 2, "cpu")
    assert_at_rest(stack)
    retire(stack, "large")
    run(stack, [PASS, *((key,) for key in sizes)] * 4)
    assert policy.capacity_bytes == 4 * UNIT
    hits = sum(stack.pages[key].hits for key in sizes)
    run(stack, [PASS, *((key,) for key in sizes)])
    assert sum(stack.pages[key].hits for key in sizes) == hits + 4
    assert_at_rest(stack)
    stack.close()


def test_a_page_moves_in_only_after_evicted_copies_have_ended(tmp_path):
    stack, policy, ssd = scripted(tmp_path, 4, {"a": 1, "b": 3})
    ssd.close_gate("b")
    policy.script = ["b"]
    use(stack, "a")
    assert ssd.began["b"].wait(30)
    with in_background(lambda: add(stack, "home", 3, "cpu")) as thread:
        thread.join(0.05)
        assert thread.is_alive() and "home" not in stack.pages
        ssd.gates["b"].set()
    use(stack, "home", "a")
    assert_at_rest(stack)
    stack.close()


def test_a_policy_may_not_have_more_room_than_its_tier():
    level = Level(WatchedTier("cpu", 2), LRUPolicy(5 * UNIT))
    assert level.policy.capacity_bytes == 2 * UNIT


def test_pages_at_home_on_top_are_leased_without_moving_anything():
    stack = TierStack([Level(WatchedTier("cpu", 3), LRUPolicy(0))])
    add(stack, "a", 1, "cpu")
    add(stack, "b", 2, "cpu")
    for _ in range(3):
        use(stack, "a", "b")
        use(stack, "b", "b")
    assert [(page.hits, page.misses, page.bytes_moved) for page in stack.pages.values()] == [(3, 0, {}), (9, 0, {})]
    assert_at_rest(stack)
    stack.close()


@pytest.mark.parametrize("home", ["cpu", "ssd"])
def test_a_page_goes_with_its_last_owner_at_the_next_access(tmp_path, home):
    stack, *_ = scripted(tmp_path, 5, {"other": 1})
    add(stack, "a", 2, home)
    use(stack, "a")
    other = stack.share(("a",))
    retire(stack, "a")
    retire(stack, "a")  # once more changes nothing
    use(stack, "a")
    del other  # collected: as if it had retired
    assert "a" in stack.pages
    use(stack, "other")
    assert "a" not in stack.pages and len(list(stack.levels[-1].tier.directory.glob("*.page"))) == 1
    with pytest.raises(TierError, match="a: its page was retired"):
        use(stack, "a")
    retire(stack, "a")
    assert_at_rest(stack)
    add(stack, "a", 1, home)  # the name is free again
    use(stack, "a")
    stack.close()


@pytest.mark.parametrize("home", ["cpu", "ssd"])
def test_a_page_retired_while_it_is_leased_is_valid_and_held_to_the_end_of_the_lease(tmp_path, home):
    stack, *_ = scripted(tmp_path, 5, {"other": 1})
    add(stack, "a", 2, home)
    tier = stack.levels[0].tier
    with stack.lease(("a",)) as tensors:
        retire(stack, "a")
        stack.retire_unowned()
        use(stack, "other")
        check(("a",), tensors)
        assert tier.used_bytes == 3 * UNIT
        add(stack, "a", 1, home)  # another page of the same name
        use(stack, "a")
        check(("a",), tensors)
    assert_at_rest(stack)
    use(stack, "a")
    assert_at_rest(stack)
    stack.close()


def test_retiring_needs_no_lock_because_finalizers_run_anywhere(tmp_path):
    stack, *_ = scripted(tmp_path, 5, {"a": 1, "b": 1})
    with stack.guard.lock:
        within(5, lambda: retire(stack, "a"))
    use(stack, "b")
    assert list(stack.pages) == ["b"]
    stack.close()


@pytest.mark.parametrize("kind", ["lru", "scheduled"])
def test_pages_may_be_retired_and_replaced_while_the_policy_knows_them(tmp_path, kind):
    sizes = {f"page{i}": 1 + i % 2 for i in range(6)}
    levels = [
        Level(WatchedTier("near", 5), make_policy(kind, 5 * UNIT, prefetch=3)),
        Level(WatchedTier("far", 4), make_policy(kind, 4 * UNIT, prefetch=2)),
    ]
    stack = add_all(TierStack([*levels, SlowSsd(tmp_path, 1 << 40, seed=1, most_ms=1)]), sizes)
    keys = list(sizes)
    for turn in range(12):
        within(30, lambda: run(stack, [PASS, *((key,) for key in keys)]))
        old = keys[turn % 6]
        keys[turn % 6] = new = f"{old.split('@')[0]}@{turn}"
        retire(stack, old)
        add(stack, new, 1 + turn % 3)
    assert_at_rest(stack)
    assert set(stack.pages) == set(keys) and len(list(stack.levels[-1].tier.directory.glob("*.page"))) == 6
    stack.close()


def test_a_file_that_cannot_be_removed_takes_room_and_nobody_waits_for_it(tmp_path, monkeypatch):
    def fail(path, *, dir_fd=None):
        raise OSError(30, "Read-only file system")

    ssd = SsdTier(tmp_path, 4 * UNIT)
    stack = TierStack([Level(WatchedTier("cpu", 2), LRUPolicy(2 * UNIT)), ssd])
    add(stack, "a", 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        retire(stack, "a")
        stack.retire_unowned()
    add(stack, "b", 1)
    with pytest.raises(TierError, match=r"c: 8192 bytes do not fit into tiers\.ssd\.budget = 16384 \(16384 live there"):
        add(stack, "c", 1)
    use(stack, "b")
    assert ssd.held_bytes == 4 * UNIT and "cannot remove" in ssd.fallbacks[0]
    stack.close()


@pytest.mark.parametrize("below", ["far", "ssd"])
def test_pages_that_a_smaller_budget_has_no_room_for_move_down(tmp_path, below):
    sizes = {f"page{i}": 1 + i % 2 for i in range(10)}
    levels = [Level(WatchedTier("near", 15), make_policy("scheduled", 0))]
    if below == "far":
        levels.append(Level(WatchedTier("far", 15), make_policy("scheduled", 0)))
    stack = add_all(TierStack([*levels, SsdTier(tmp_path, 1 << 40)]), sizes, dict.fromkeys(sizes, "near"))
    trace = [PASS, *((key,) for key in sizes)]
    run(stack, trace)
    assert stack.at_rest
    stack.set_budget("near", 9 * UNIT)
    tier, homes = levels[0].tier, [stack.names[page.home] for page in stack.pages.values()]
    assert tier.held_bytes <= tier.capacity_bytes == 9 * UNIT and not stack.at_rest
    assert set(homes) == {"near", below}
    moved = [i for i, home in enumerate(homes) if home == below]
    assert max(moved) - min(moved) > 4  # spread, and not a prefix
    for _ in range(2):
        run(stack, trace)
        assert tier.held_bytes <= 9 * UNIT
    stack.set_budget("near", 14 * UNIT)
    run(stack, trace * 2)
    assert not stack.at_rest
    stack.set_budget("near", 15 * UNIT)  # room for all of them
    assert stack.at_rest and tier.held_bytes == 15 * UNIT
    assert stack.levels[1].tier.held_bytes == 0
    before = sum(page.misses for page in stack.pages.values())
    run(stack, trace * 2)
    assert sum(page.misses for page in stack.pages.values()) == before
    assert_at_rest(stack)
    stack.close()


def test_a_page_that_cannot_be_read_stays_where_it_is_when_the_budget_grows(tmp_path, monkeypatch):
    sizes = {f"page{i}": 1 for i in range(6)}
    stack = add_all(
        TierStack([Level(WatchedTier("near", 3), make_policy("scheduled", 3 * UNIT)), SsdTier(tmp_path, 1 << 40)]),
        sizes,
    )
    trace = [PASS, *((key,) for key in sizes)]
    run(stack, trace * 2)
    ssd = stack.levels[-1].tier
    real = ssd.get

    def get(room, target, *, key):
        if key == "page3":
            raise TierError("page3: cannot be read")
        real(room, target, key=key)

    monkeypatch.setattr(ssd, "get", get)
    with pytest.raises(TierError, match="page3"):
        stack.set_budget("near", 6 * UNIT)
    monkeypatch.undo()
    assert [stack.pages[key].home for key in sizes] == [0, 0, 0, 1, 1, 1]
    run(stack, trace * 2)
    assert_at_rest(stack)
    stack.set_budget("near", 6 * UNIT)
    assert stack.at_rest
    run(stack, trace)
    assert_at_rest(stack)
    stack.close()


def test_a_budget_that_holds_what_lives_there_still_leaves_room_to_pass_through(tmp_path):
    sizes = {f"page{i}": 2 for i in range(8)}
    homes = {key: ("near", "ssd")[i % 4 == 3] for i, key in enumerate(sizes)}
    stack = add_all(
        TierStack([Level(WatchedTier("near", 16), make_policy("scheduled", 4 * UNIT)), SsdTier(tmp_path, 1 << 40)]),
        sizes,
        homes,
    )
    stack.set_budget("near", 12 * UNIT)  # six pages of two units live there
    run(stack, [PASS, *((key,) for key in sizes)] * 3)
    assert_at_rest(stack)
    stack.close()


def test_a_page_that_loses_its_owner_while_it_moves_is_dropped_afterwards(tmp_path, monkeypatch):
    sizes = {f"page{i}": 1 for i in range(6)}
    levels = [Level(WatchedTier("near", 6), make_policy("lru", 0)), Level(WatchedTier("far", 6), make_policy("lru", 0))]
    stack = add_all(TierStack(levels), sizes, dict.fromkeys(sizes, "near"))
    real = stack.mover.fill

    def fill(slot, write):
        retire(stack, slot.page.key)
        stack.retire_unowned()
        real(slot, write)

    monkeypatch.setattr(stack.mover, "fill", fill)
    stack.set_budget("near", 4 * UNIT)
    monkeypatch.undo()
    stack.retire_unowned()
    assert not stack.pages  # all of them had to move
    assert_at_rest(stack)
    stack.close()


def test_a_budget_that_nothing_below_makes_up_for_is_refused_and_nothing_is_lost(tmp_path):
    sizes = {f"page{i}": 1 for i in range(8)}
    tiers = [Level(WatchedTier("near", 8), make_policy("lru", 0)), Level(WatchedTier("far", 2), make_policy("lru", 0))]
    stack = add_all(TierStack(tiers), sizes, dict.fromkeys(sizes, "near"))
    with pytest.raises(TierError, match=r"page\d: no tier below near has room for 4096 more bytes"):
        stack.set_budget("near", 2 * UNIT)
    assert tiers[0].tier.capacity_bytes == 8 * UNIT
    run(stack, [PASS, *((key,) for key in sizes)] * 2)
    with pytest.raises(TierError, match=r"tiers\.gpu: this model has the tiers near, far"):
        stack.set_budget("gpu", UNIT)
    assert_at_rest(stack)
    stack.close()


class Newest(LRUPolicy):
    """Evicts the page that came last."""

    def _candidates(self):
        return reversed(self._pages.items())


def test_a_page_that_a_lower_budget_evicts_while_a_lease_waits_for_it_gets_room(tmp_path):
    stack = TierStack([Level(WatchedTier("cpu", 4), Newest(4 * UNIT)), SsdTier(tmp_path, 99 * UNIT)])
    add_all(stack, dict.fromkeys("abcd", 1))
    run(stack, [("a",), ("b",), ("c",)])
    await_all = stack.mover.await_all

    def lowered(slots):
        stack.set_budget("cpu", 3 * UNIT)  # the policy keeps the three others, and the room is full
        await_all(slots)

    stack.mover.await_all = lowered
    within(10, lambda: use(stack, "d"))
    run(stack, [("a",), ("b",), ("c",)])
    assert_at_rest(stack)


def test_a_lower_budget_is_kept_once_set_budget_returns_although_a_page_was_on_its_way(tmp_path, monkeypatch):
    stack, policy, ssd = scripted(tmp_path, 6, {"a": 1, "b": 2, "c": 3})
    level, resized = stack.levels[0], threading.Event()
    ssd.close_gate("c")
    policy.script = ["b", "c"]
    use(stack, "a")
    assert ssd.began["c"].wait(30)  # a worker has the room of c and waits for its bytes
    resize = level.resize

    def lower(nbytes):
        resize(nbytes)
        resized.set()

    monkeypatch.setattr(level, "resize", lower)
    with in_background(lambda: stack.set_budget("cpu", 2 * UNIT)) as lowering:
        assert resized.wait(30)
        with stack.guard.lock:
            assert level.tier.held_bytes > level.tier.capacity_bytes
            assert reserved(level.tier, UNIT) is None
        assert lowering.is_alive()
        ssd.gates["c"].set()
    assert level.tier.held_bytes <= level.tier.peak_bytes <= 2 * UNIT
    run(stack, [("a",), ("b",)])
    assert_at_rest(stack)
    stack.close()


def with_a_tier_between():
    """Three memories with pages at home in the middle; the top holds two copies and prefetches as it is told."""
    policy, sizes = ScriptedPolicy(2, dict.fromkeys("abc", 1)), dict.fromkeys("abc", 1)
    near, far = Level(WatchedTier("near", 2), policy), Level(WatchedTier("far", 3))
    stack = TierStack([near, far, MemoryTier("last", CPU, 9 * UNIT)])
    return add_all(stack, sizes, dict.fromkeys(sizes, "far")), policy


@pytest.mark.parametrize("leased", [False, True])
def test_a_lower_budget_is_kept_once_set_budget_returns_although_an_old_home_was_read(leased, monkeypatch):
    stack, policy = with_a_tier_between()
    copy, near, far = stack.mover.copy_bytes, *stack.levels[:2]
    reading, go_on = threading.Event(), threading.Event()

    def held_up(slot, *args):
        if slot.page.key == "c":
            reading.set()
            assert go_on.wait(LONG_S)
        copy(slot, *args)

    monkeypatch.setattr(stack.mover, "copy_bytes", held_up)
    policy.script = ["c"]
    use(stack, "a")
    assert reading.wait(LONG_S)  # a worker copies c from its home
    with contextlib.ExitStack() as others:
        if leased:
            others.enter_context(in_background(lambda: use(stack, "c")))
            eventually(lambda: near.slots["c"].holders, "a lease that waits for the copy")
        lowering = others.enter_context(in_background(lambda: stack.set_budget("far", 0)))
        eventually(lambda: far.tier.capacity_bytes == 0, "the budget")
        with stack.guard.lock:
            assert far.tier.held_bytes == UNIT and stack.pages["c"].home == 2
        lowering.join(0.05)
        assert lowering.is_alive()
        go_on.set()
    assert far.tier.held_bytes == far.tier.peak_bytes == 0
    run(stack, [("a",), ("b",), ("c",)])
    assert_at_rest(stack)
    stack.close()


def test_a_copy_ahead_that_waits_for_room_does_not_keep_the_old_home_of_its_page(monkeypatch):
    stack, policy = with_a_tier_between()
    near, far = stack.levels[:2]
    reserve, asked = near.tier.reserve, threading.Event()

    def refuse(nbytes, holder, **options):
        if holder.page.key != "c":
            return reserve(nbytes, holder, **options)
        asked.set()
        return False

    monkeypatch.setattr(near.tier, "reserve", refuse)
    policy.script = ["c"]
    use(stack, "a")
    assert asked.wait(LONG_S)
    within(LONG_S, lambda: stack.set_budget("far", 0))
    assert far.tier.held_bytes == far.tier.peak_bytes == 0
    monkeypatch.setattr(near.tier, "reserve", reserve)
    run(stack, [("a",), ("b",), ("c",)])
    assert_at_rest(stack)
    stack.close()
