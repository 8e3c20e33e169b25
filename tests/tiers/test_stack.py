"""The stack: right bytes, exact counts, hard budgets, whatever threads, disks and Ctrl-C do."""

import contextlib
import copy
import faulthandler
import functools
import gc
import os
import pickle
import random
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.residency.traces import Workload, workloads
from tests.torture.interrupting import Interrupts, interrupted
from vbrt.errors import FormatError, TierError
from vbrt.formats.page import PageLayout, build_layout
from vbrt.residency.counts import PhaseCounts
from vbrt.residency.lru import LRUPolicy
from vbrt.residency.policy import Decision, Policy
from vbrt.residency.scheduled import ScheduledPolicy
from vbrt.residency.simulate import PASS, Pass, make_policy, simulate
from vbrt.tiers import Level, MemoryTier, Owner, SsdTier, TierStack, detached_stack
from vbrt.tiers.slots import State

UNIT = 4096
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def no_fsync():
    """What a disk needs to be sure is not what is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


# -- tools ------------------------------------------------------------------------------------------------------------


class WatchedTier(MemoryTier):
    """Notes each moment at which the buffers that are really alive exceed the budget."""

    def __init__(self, name: str, units: int) -> None:
        super().__init__(name, CPU, units * UNIT)
        self.alive: weakref.WeakSet = weakref.WeakSet()
        self.violations: list[str] = []

    def _new(self, nbytes):
        buffer = super()._new(nbytes)
        self.alive.add(buffer)
        return buffer

    def reserve(self, nbytes, **options):
        buffer = super().reserve(nbytes, **options)
        alive = sum(b.nbytes for b in self.alive)
        if not alive == self.held_bytes <= self.peak_bytes <= self.capacity_bytes:
            self.violations.append(f"alive {alive}, held {self.held_bytes}, peak {self.peak_bytes}")
        return buffer


class ScriptedPolicy(LRUPolicy):
    """LRU that fetches ahead what it is told."""

    def __init__(self, units: int, sizes: dict[str, int]) -> None:
        super().__init__(units * UNIT)
        self.sizes, self.script, self.unused = sizes, [], set()

    def access(self, key, size, busy=()):
        decision = super().access(key, size, busy)
        if key in self.unused:
            self.unused.remove(key)
            return decision._replace(hit=False, prefetched=True)
        return decision

    def ahead(self, busy=()):
        decisions = []
        while self.script:
            key = self.script.pop(0)
            victims = self._make_room(self.sizes[key] * UNIT, busy)
            self._pages[key] = self.sizes[key] * UNIT
            self.resident_bytes += self.sizes[key] * UNIT
            self.unused.add(key)
            decisions.append(Decision(key, hit=False, evict=victims, prefetched=True))
        return decisions

    def _evict(self, key):
        self.unused.discard(key)
        super()._evict(key)


class SlowSsd(SsdTier):
    """Reads take a random time."""

    def __init__(self, root, capacity_bytes, *, seed: int, most_ms: float) -> None:
        super().__init__(root, capacity_bytes)
        self.random, self.most_s = random.Random(seed), most_ms / 1000

    def get(self, room, out, *, key):
        time.sleep(self.random.random() * self.most_s)
        super().get(room, out, key=key)


class GatedSsd(SsdTier):
    """Reads of a page whose gate is there wait until it opens."""

    def __init__(self, root, capacity_bytes=1 << 40) -> None:
        super().__init__(root, capacity_bytes)
        self.gates: dict[str, threading.Event] = {}
        self.began: dict[str, threading.Event] = {}

    def close_gate(self, key: str) -> None:
        self.gates[key], self.began[key] = threading.Event(), threading.Event()

    def get(self, room, out, *, key):
        if key in self.gates:
            self.began[key].set()
            assert self.gates[key].wait(30)
        super().get(room, out, key=key)


class FlakySsd(SlowSsd):
    """Some reads fail."""

    def __init__(self, *args, share: float, **options) -> None:
        super().__init__(*args, **options)
        self.share = share

    def get(self, room, out, *, key):
        if self.random.random() < self.share:
            out.fill_(255)
            raise TierError(f"{key}: cannot read {room.path}: Input/output error")
        super().get(room, out, key=key)


def layout(units: int) -> PageLayout:
    return build_layout("dense", "dense", [("weight", "uint8", (units * UNIT,))])


@functools.cache
def content(key: str, units: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.randint(0, 256, (units * UNIT,), dtype=torch.uint8, generator=generator)


owners: "weakref.WeakKeyDictionary[TierStack, dict[str, Owner]]" = weakref.WeakKeyDictionary()


def add(stack: TierStack, key: str, units: int, home: str = "ssd") -> None:
    owner = Owner(stack)
    stack.add(key, layout(units), home, lambda out: out.copy_(content(key, units)), owner)
    owners.setdefault(stack, {})[key] = owner


def retire(stack: TierStack, key: str) -> None:
    stack.retire(owners[stack][key])


def add_all(stack: TierStack, sizes: dict[str, int], homes: dict[str, str] | None = None) -> TierStack:
    for key, units in sizes.items():
        add(stack, key, units, homes[key] if homes else "ssd")
    return stack


def scripted(root: Path, units: int, sizes: dict[str, int]) -> tuple[TierStack, ScriptedPolicy, GatedSsd]:
    """One memory tier whose prefetches are told, above an ssd that can be stopped."""
    policy, ssd = ScriptedPolicy(units, sizes), GatedSsd(root)
    return add_all(TierStack([Level(WatchedTier("cpu", units), policy), ssd]), sizes), policy, ssd


def check(keys: Iterable[str], tensors: list[dict[str, torch.Tensor]]) -> None:
    for key, fields in zip(keys, tensors, strict=True):
        weight = fields["weight"]
        assert torch.equal(weight, content(key, weight.numel() // UNIT)), key


def use(stack: TierStack, *keys: str) -> None:
    with stack.lease(keys) as tensors:
        check(keys, tensors)


def run(stack: TierStack, trace: Iterable) -> None:
    for item in trace:
        if isinstance(item, Pass):
            stack.begin_pass(item.phase)
        else:
            use(stack, *item)


def slots(stack: TierStack):
    return [slot for level in stack.levels for slot in level.slots.values()]


def assert_at_rest(stack: TierStack) -> None:
    """Nothing is leased, promised, lost or over its budget once the workers are idle."""
    for _ in range(2_000):
        stack.collect()
        with stack.guard.lock:
            used = [level.tier.used_bytes for level in stack.levels]
            kept = [level.policy.resident_bytes + level.home_bytes for level in stack.levels]
            if used == kept and all(slot.state is State.READY for slot in slots(stack)):
                break
        time.sleep(0.005)
    else:
        states = [(slot.level.tier.name, slot.page.key, slot.state, slot.holders) for slot in slots(stack)]
        pytest.fail(f"not at rest: {used} used, {kept} kept, {states}")
    for level in stack.levels:
        overhead = level.tier.overhead_bytes
        living = sum(page.nbytes + overhead for page in stack.pages.values() if page.home == level.index)
        assert level.home_bytes == living
        assert not level.pending and not level.leased
        assert not any(slot.holders for slot in level.slots.values())
        assert sorted(key for key, slot in level.slots.items() if not slot.at_home) == sorted(level.policy.resident())
        assert level.policy.resident_bytes <= level.policy.capacity_bytes
        assert level.tier.held_bytes <= level.tier.capacity_bytes
        assert getattr(level.tier, "violations", []) == []


def within(seconds: float, work: Callable[[], object]) -> None:
    """Run `work` in a thread; a hang shows where, and fails."""
    failures: list[BaseException] = []

    def target() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)
            if not isinstance(error, (Exception, KeyboardInterrupt)):
                raise

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        faulthandler.dump_traceback()
        pytest.fail("hangs")
    if failures:
        raise failures[0]


@contextlib.contextmanager
def in_background(work: Callable[[], object]) -> Iterator[threading.Thread]:
    """`work` runs beside the block; its exception is raised after it."""
    failures: list[Exception] = []

    def target() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    yield thread
    thread.join(30)
    if thread.is_alive():
        faulthandler.dump_traceback()
        pytest.fail("hangs")
    if failures:
        raise failures[0]


def live(load: Workload, ssd: Callable[[Path], SsdTier] = lambda root: SsdTier(root, 1 << 40)) -> None:
    """Run a workload on a real stack and hold its counts against `simulate`."""
    counts = simulate(load.kind, load.trace, load.room, sizes=load.sizes, prefetch=load.prefetch, group=load.group)
    policy = make_policy(load.kind, load.room * UNIT, prefetch=load.prefetch, group=load.group)
    with tempfile.TemporaryDirectory() as root:
        stack = TierStack([Level(WatchedTier("cpu", load.room), policy), ssd(Path(root))])
        within(60, lambda: run(add_all(stack, load.sizes), load.trace))
        assert_at_rest(stack)
        assert_counts(stack, counts)
        assert stack.phases() == {phase: of for phase, of in counts.phases.items() if of != PhaseCounts()}
        if not load.prefetch or load.kind == "lru":
            moved = sum(page.bytes_moved["ssd>cpu"] for page in stack.pages.values())
            assert moved == counts.bytes_in * UNIT
        stack.close()
        assert stack.levels[0].tier.held_bytes == 0 and os.listdir(root) == []


def assert_counts(stack: TierStack, counts) -> None:
    pages = stack.pages.values()
    assert {page.key: page.hits for page in pages if page.hits} == +counts.hits
    assert {page.key: page.misses for page in pages if page.misses} == +counts.misses
    assert {page.key: page.prefetched for page in pages if page.prefetched} == +counts.prefetched


# -- live = simulated -------------------------------------------------------------------------------------------------


@given(workloads())
def test_live_counts_are_simulated_counts_and_contents_are_right(load):
    live(load)


@settings(max_examples=25)
@given(workloads(most_pages=6, most_passes=4), st.integers(0, 1 << 20))
def test_slow_reads_change_no_count(load, seed):
    live(load, lambda root: SlowSsd(root, 1 << 40, seed=seed, most_ms=3))


@pytest.mark.parametrize(
    ("kind", "room", "hits"),
    [("lru", 7, 0), ("lru", 8, 8), ("scheduled", 3, 0), ("scheduled", 7, 4), ("scheduled", 8, 8)],
)
def test_hit_rates_are_the_closed_forms(tmp_path, kind, room, hits):
    sizes = {f"page{i}": 1 for i in range(8)}
    stack = TierStack([Level(WatchedTier("cpu", room), make_policy(kind, room * UNIT)), SsdTier(tmp_path, 1 << 40)])
    one_pass = [PASS, *((key,) for key in sizes)]
    run(add_all(stack, sizes), one_pass * 3)
    before = sum(page.hits for page in stack.pages.values())
    run(stack, one_pass * 4)
    assert sum(page.hits for page in stack.pages.values()) - before == 4 * hits
    stack.close()


def test_a_steady_pass_over_pages_of_all_sizes_asks_for_no_memory(tmp_path):
    sizes = {f"page{i}": (1, 4, 3)[i % 3] for i in range(12)}
    tier = WatchedTier("cpu", 20)
    stack = add_all(TierStack([Level(tier, ScheduledPolicy(20 * UNIT)), SsdTier(tmp_path, 1 << 40)]), sizes)
    one_pass = [PASS, *((key,) for key in sizes)]
    run(stack, one_pass * 4)
    for _ in range(20):  # a busy machine may need one more buffer once
        buffers, misses = set(tier.alive), sum(page.misses for page in stack.pages.values())
        run(stack, one_pass * 3)
        if set(tier.alive) == buffers:
            break
    assert set(tier.alive) == buffers
    assert sum(page.misses for page in stack.pages.values()) - misses >= 3 * 6
    stack.close()


def test_where_cores_are_shared_only_who_needs_a_page_copies_it(tmp_path):
    threads, ahead = set(), []

    class NotedSsd(SsdTier):
        def get(self, room, out, *, key):
            threads.add(threading.get_ident())
            super().get(room, out, key=key)

        def read_ahead(self, room):
            ahead.append(room)
            super().read_ahead(room)

    sizes = {f"page{i}": 1 for i in range(8)}
    stack = TierStack(
        [Level(WatchedTier("cpu", 5), ScheduledPolicy(5 * UNIT)), NotedSsd(tmp_path, 1 << 40, io="buffered")],
        share_cores=True,
    )
    trace = [PASS, *((key,) for key in sizes)] * 4
    run(add_all(stack, sizes), trace)
    for _ in range(1_000):
        if len(ahead) > 8:
            break
        time.sleep(0.005)
    assert threads == {threading.get_ident()} and len(ahead) > 8
    assert_counts(stack, simulate("scheduled", trace, 5))
    stack.close()


# -- three levels -----------------------------------------------------------------------------------------------------


@st.composite
def placed_workloads(draw: st.DrawFn) -> tuple[Workload, dict[str, str], int, str]:
    """A workload, a home for each page, room for copies in the middle tier, and its policy."""
    load = draw(workloads(most_pages=6, most_passes=4))
    homes = {key: draw(st.sampled_from(["near", "far", "ssd", "ssd"])) for key in load.sizes}
    far = draw(st.integers(max(load.sizes.values()), sum(load.sizes.values()) + 1))
    return load, homes, far, draw(st.sampled_from(["lru", "scheduled"]))


def live_in_three(placed, ssd: Callable[[Path], SsdTier]) -> None:
    load, homes, far, far_kind = placed
    live_there = {tier: sum(load.sizes[key] for key in homes if homes[key] == tier) for tier in ("near", "far")}
    moving = [
        item if isinstance(item, Pass) else tuple(key for key in item if homes[key] != "near") for item in load.trace
    ]
    counts = simulate(load.kind, moving, load.room, sizes=load.sizes, prefetch=load.prefetch, group=load.group)
    options = {"prefetch": load.prefetch, "group": load.group}
    levels = [
        Level(WatchedTier("near", load.room + live_there["near"]), make_policy(load.kind, load.room * UNIT, **options)),
        Level(WatchedTier("far", far + live_there["far"]), make_policy(far_kind, far * UNIT, **options)),
    ]
    with tempfile.TemporaryDirectory() as root:
        stack = add_all(TierStack([*levels, ssd(Path(root))]), load.sizes, homes)
        within(60, lambda: run(stack, load.trace))
        assert_at_rest(stack)
        missed = {phase: (of.passes, of.misses, of.prefetched) for phase, of in stack.phases().items()}
        for page in stack.pages.values():
            if page.home == 0:
                page.hits = 0
        assert_counts(stack, counts)
        for phase, of in counts.phases.items():
            assert missed.get(phase, (0, 0, 0)) == (of.passes, of.misses, of.prefetched)
        assert set(stack.pages) == set(load.sizes)
        stack.close()
        assert [level.tier.held_bytes for level in levels] == [0, 0] and os.listdir(root) == []


@given(placed_workloads())
def test_three_levels_hold_their_budgets_and_count_as_simulated(placed):
    live_in_three(placed, lambda root: SsdTier(root, 1 << 40))


@settings(max_examples=25)
@given(placed_workloads(), st.integers(0, 1 << 20))
def test_three_levels_with_slow_reads_count_the_same(placed, seed):
    live_in_three(placed, lambda root: SlowSsd(root, 1 << 40, seed=seed, most_ms=2))


def test_a_middle_tier_with_room_for_one_page_is_enough(tmp_path):
    sizes = {f"page{i}": 1 for i in range(9)}
    near = Level(WatchedTier("near", 5), make_policy("scheduled", 5 * UNIT, prefetch=3))
    far = Level(WatchedTier("far", 1), make_policy("scheduled", UNIT, prefetch=3))
    stack = add_all(TierStack([near, far, SlowSsd(tmp_path, 1 << 40, seed=0, most_ms=2)], workers=3), sizes)
    within(60, lambda: run(stack, [PASS, *((key,) for key in sizes)] * 5))
    assert_at_rest(stack)
    moved = Counter()
    for page in stack.pages.values():
        moved.update(page.bytes_moved)
    assert set(moved) == {"far>near", "ssd>far"} and moved["ssd>far"] >= moved["far>near"] - 9 * UNIT
    stack.close()


def test_pages_pass_a_middle_tier_that_is_too_small_never(tmp_path):
    levels = [Level(WatchedTier("near", 8), LRUPolicy(8 * UNIT)), Level(WatchedTier("far", 2), LRUPolicy(2 * UNIT))]
    stack = add_all(TierStack([*levels, SsdTier(tmp_path, 1 << 40)]), {"small": 1, "large": 3})
    with pytest.raises(TierError, match=r"large: 12288 bytes do not fit into tiers\.far\.budget = 8192"):
        use(stack, "large")
    use(stack, "small")
    assert_at_rest(stack)
    stack.close()


# -- leases -----------------------------------------------------------------------------------------------------------


def test_a_lease_larger_than_the_budget_is_refused_and_another_works(tmp_path):
    stack, *_ = scripted(tmp_path, 3, {"a": 2, "b": 2, "c": 4})
    with pytest.raises(TierError, match=r"a \+ b: 16384 bytes do not fit into tiers\.cpu\.budget = 12288"):
        use(stack, "a", "b")
    with pytest.raises(TierError, match=r"c: 16384 bytes do not fit"):
        use(stack, "c")
    use(stack, "a")
    assert [page.misses for page in stack.pages.values()] == [1, 0, 0]  # a refusal is not an access
    assert_at_rest(stack)
    stack.close()


def test_a_second_lease_of_a_thread_that_cannot_fit_beside_its_first_is_refused_instead_of_waiting(tmp_path):
    stack, *_ = scripted(tmp_path, 3, {"a": 2, "b": 1, "c": 2})
    with stack.lease(("a",)) as first:
        use(stack, "b")
        use(stack, "a")
        with pytest.raises(TierError, match=r"c: .* this thread has leased a\); raise the budget"):
            use(stack, "c")
        check(("a",), first)
    use(stack, "c")
    assert_at_rest(stack)
    stack.close()


def test_a_lease_waits_for_the_room_that_another_thread_has_leased(tmp_path):
    stack, *_ = scripted(tmp_path, 3, {"a": 2, "b": 2})
    with contextlib.ExitStack() as afterwards, stack.lease(("a",)) as tensors:
        thread = afterwards.enter_context(in_background(lambda: use(stack, "b")))
        thread.join(0.05)
        assert thread.is_alive()
        check(("a",), tensors)
    assert stack.pages["b"].misses == 1 and stack.pages["b"].hits == 0
    assert_at_rest(stack)
    stack.close()


def test_an_exception_in_the_block_gives_the_pages_back(tmp_path):
    stack, *_ = scripted(tmp_path, 2, {"a": 2, "b": 2})
    with pytest.raises(ZeroDivisionError), stack.lease(("a",)):
        raise ZeroDivisionError
    use(stack, "b")
    assert_at_rest(stack)
    stack.close()


def test_a_lease_that_was_lost_is_given_back_when_it_is_collected(tmp_path):
    stack, *_ = scripted(tmp_path, 2, {"a": 2, "b": 2})
    stack.lease(("a",)).__enter__()  # as if Ctrl-C had come before the block began
    gc.collect()
    use(stack, "b")
    assert_at_rest(stack)
    lost = stack.lease(("a",))
    lost.__enter__()

    def lose():
        nonlocal lost
        lost = None

    timer = threading.Timer(0.05, lose)
    timer.start()
    within(20, lambda: use(stack, "b"))  # waits, and nobody tells it
    stack.close()


def test_waiting_is_counted(tmp_path):
    stack, _, ssd = scripted(tmp_path, 2, {"a": 2})
    ssd.close_gate("a")
    threading.Timer(0.03, ssd.gates["a"].set).start()
    use(stack, "a")
    first = stack.pages["a"].wait_ns
    assert first >= 20_000_000
    use(stack, "a")
    assert stack.pages["a"].wait_ns == first
    stack.close()


# -- copies in flight -------------------------------------------------------------------------------------------------


def test_a_page_evicted_in_flight_keeps_its_room_until_its_copy_has_ended(tmp_path):
    stack, policy, ssd = scripted(tmp_path, 2, {"a": 1, "b": 1, "c": 1, "d": 1})
    ssd.close_gate("b")
    policy.script = ["b"]
    use(stack, "a")
    assert ssd.began["b"].wait(30)
    use(stack, "c")  # a leaves
    with in_background(lambda: use(stack, "d")) as thread:  # b leaves, and cannot yet
        thread.join(0.05)
        assert thread.is_alive() and stack.levels[0].tier.held_bytes == 2 * UNIT
        ssd.gates["b"].set()
    assert_at_rest(stack)
    stack.close()


def test_a_page_demanded_again_while_its_doomed_copy_is_in_flight_is_read_again(tmp_path):
    stack, policy, ssd = scripted(tmp_path, 3, {"a": 1, "b": 1})
    ssd.close_gate("b")
    policy.script = ["b"]
    use(stack, "a")
    assert ssd.began["b"].wait(30)
    with stack.guard.lock:
        stack.levels[0].evict("b")
        policy.remove("b")
    ssd.began["b"].clear()
    with in_background(lambda: use(stack, "b")):
        assert ssd.began["b"].wait(30)
        ssd.gates["b"].set()
    use(stack, "b")
    assert_at_rest(stack)
    stack.close()


def test_a_demand_takes_over_a_prefetch_that_nobody_has_begun(tmp_path):
    sizes = {"a": 1, "b": 1, "c": 1, "d": 1}
    stack, policy, ssd = scripted(tmp_path, 4, sizes)
    for key in "bc":
        ssd.close_gate(key)
    policy.script = ["b", "c", "d"]  # two workers: d stays in the queue
    use(stack, "a")
    within(20, lambda: use(stack, "d"))
    for key in "bc":
        ssd.gates[key].set()
    use(stack, "b", "c")
    assert [page.prefetched for page in stack.pages.values()] == [0, 1, 1, 1]
    assert_at_rest(stack)
    stack.close()


def test_a_prefetch_evicted_before_it_began_moves_nothing(tmp_path):
    stack, policy, ssd = scripted(tmp_path, 4, {"a": 1, "b": 1, "c": 1, "d": 1, "e": 4})
    for key in "bc":
        ssd.close_gate(key)
    policy.script = ["b", "c", "d"]
    use(stack, "a")
    assert ssd.began["b"].wait(30) and ssd.began["c"].wait(30)
    with in_background(lambda: use(stack, "e")):
        for key in "bc":
            ssd.gates[key].set()
    assert_at_rest(stack)
    assert stack.pages["d"].bytes_moved == {"ssd>cpu": 0}
    stack.close()


# -- errors -----------------------------------------------------------------------------------------------------------


def file_of(stack: TierStack, key: str) -> Path:
    return stack.levels[-1].slots[key].room.path


def test_a_read_that_fails_is_raised_to_whoever_leases_the_page_and_only_then(tmp_path):
    stack, policy, _ = scripted(tmp_path, 4, {"a": 1, "b": 2, "c": 1})
    path = file_of(stack, "b")
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    policy.script = ["b"]
    use(stack, "a")  # b is fetched ahead, and fails
    assert_at_rest(stack)
    use(stack, "c")
    for keys in (("b",), ("a", "b"), ("b", "a")):
        with pytest.raises(TierError) as caught:
            use(stack, *keys)
        assert str(caught.value).startswith("b: ") and str(path) in str(caught.value)
        assert_at_rest(stack)
    use(stack, "a")
    path.write_bytes(good)
    use(stack, "b")
    assert_at_rest(stack)
    stack.close()


def test_who_waits_for_a_prefetch_that_fails_gets_its_error(tmp_path):
    stack, policy, ssd = scripted(tmp_path, 4, {"a": 1, "b": 2})
    good = file_of(stack, "b").read_bytes()
    file_of(stack, "b").unlink()
    ssd.close_gate("b")
    policy.script = ["b"]
    use(stack, "a")
    assert ssd.began["b"].wait(30)
    threading.Timer(0.03, ssd.gates["b"].set).start()
    with pytest.raises(TierError, match=r"b: .*\.page is missing"):
        use(stack, "b")
    file_of(stack, "b").write_bytes(good)
    use(stack, "b")
    assert_at_rest(stack)
    stack.close()


def test_a_failing_source_fails_every_level_above_it(tmp_path):
    levels = [Level(WatchedTier("near", 3), LRUPolicy(3 * UNIT)), Level(WatchedTier("far", 2), LRUPolicy(2 * UNIT))]
    stack = add_all(TierStack([*levels, SsdTier(tmp_path, 1 << 40)]), {"a": 1, "b": 2})
    good = file_of(stack, "a").read_bytes()
    file_of(stack, "a").write_bytes(good[:5000])
    for keys in (("a",), ("b", "a"), ("a", "b")):
        with pytest.raises(TierError, match=r"a: .* truncated"):
            use(stack, *keys)
        assert_at_rest(stack)
    use(stack, "b")
    file_of(stack, "a").write_bytes(good)
    use(stack, "a", "b")
    assert_at_rest(stack)
    stack.close()


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
        with pytest.raises(TierError, match=r"b: .* was dropped"):
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


# -- pages that live in a tier, and copies beside them ----------------------------------------------------------------


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


# -- owners -----------------------------------------------------------------------------------------------------------


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
    with pytest.raises(TierError, match="a: its page was dropped"):
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
        stack.collect()
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


# -- close ------------------------------------------------------------------------------------------------------------


def test_close_ends_everything_and_may_come_twice(tmp_path):
    stack, *_ = scripted(tmp_path, 3, {"a": 1, "b": 2})
    use(stack, "a")
    stack.close()
    stack.close()
    assert stack.levels[0].tier.held_bytes == 0 and os.listdir(tmp_path) == [] and not stack.pages
    for late in (lambda: use(stack, "a"), lambda: add(stack, "c", 1), lambda: add(stack, "c", 1, "cpu")):
        with pytest.raises(TierError, match="the model was closed, its pages are gone"):
            late()
    stack.begin_pass()
    retire(stack, "a")
    stack.collect()


def test_close_waits_for_the_copy_that_a_worker_is_making(tmp_path):
    stack, policy, ssd = scripted(tmp_path, 3, {"a": 1, "b": 2})
    ssd.close_gate("b")
    policy.script = ["b"]
    use(stack, "a")
    assert ssd.began["b"].wait(30)
    with in_background(stack.close) as closing:
        closing.join(0.05)
        assert closing.is_alive()
        ssd.gates["b"].set()
    assert stack.levels[0].tier.held_bytes == 0 and os.listdir(tmp_path) == []


def test_close_wakes_those_who_wait_and_lets_a_lease_end(tmp_path):
    stack, *_ = scripted(tmp_path, 3, {"a": 2, "b": 2})
    waiting = []

    def wait():
        with pytest.raises(TierError, match="b: the model was closed"):
            use(stack, "b")
        waiting.append("told")

    with stack.lease(("a",)) as tensors:
        with in_background(wait) as thread:
            thread.join(0.05)
            assert thread.is_alive()
            stack.close()
        assert waiting == ["told"]
        check(("a",), tensors)
        assert stack.levels[0].tier.held_bytes == 2 * UNIT
    assert stack.levels[0].tier.held_bytes == 0


def test_close_while_a_thread_reads_a_page_ends_in_the_page_or_an_error(tmp_path):
    stack, _, ssd = scripted(tmp_path, 3, {"a": 2})
    ssd.close_gate("a")
    outcome = []

    def read():
        try:
            use(stack, "a")
            outcome.append("page")
        except TierError as error:
            outcome.append(str(error))

    with in_background(read):
        assert ssd.began["a"].wait(30)
        stack.close()  # waits for workers, not for this one
        ssd.gates["a"].set()
    assert len(outcome) == 1 and (outcome == ["page"] or outcome[0].startswith("a: "))
    assert stack.levels[0].tier.held_bytes == 0


def test_a_stack_that_is_not_closed_leaves_no_files_and_no_threads(tmp_path):
    before = threading.active_count()
    stack, policy, _ = scripted(tmp_path, 3, {"a": 1, "b": 1})
    policy.script = ["b"]
    use(stack, "a")
    assert_at_rest(stack)
    gone = weakref.ref(stack)
    del stack, policy, _
    gc.collect()
    assert gone() is None and os.listdir(tmp_path) == []
    for _ in range(1_000):
        if threading.active_count() <= before:
            break
        time.sleep(0.005)
    assert threading.active_count() <= before


# -- copies and pickles of a stack ------------------------------------------------------------------------------------


def test_a_copied_stack_is_the_same_and_an_unpickled_one_is_new_in_memory(tmp_path):
    stack, *_ = scripted(tmp_path, 3, {"a": 1})
    assert copy.deepcopy(stack) is stack
    first, second = pickle.loads(pickle.dumps([stack, stack]))
    assert first is second and first.names == ["cpu"]
    other = pickle.loads(pickle.dumps(stack))
    assert other is not first
    add(first, "a", 50, "cpu")
    other.close()  # one model's end is not another's
    use(first, "a")
    first.close()
    stack.close()
    assert detached_stack().device == CPU


# -- threads ----------------------------------------------------------------------------------------------------------


def hammer(
    stack: TierStack,
    sizes: dict[str, int],
    most_units: int,
    *,
    threads: int = 4,
    turns: int = 120,
    tolerant: bool = False,
) -> int:
    """Threads that lease random pages; returns how many reads failed."""
    failed, wrong = [], []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for turn in range(turns):
            keys = choose.sample(list(sizes), choose.randint(1, 2))
            if sum(sizes[key] for key in keys) > most_units:
                keys = keys[:1]
            if turn % 10 == 0:
                stack.begin_pass()
            try:
                with stack.lease(keys) as tensors:
                    check(keys, tensors)
                    time.sleep(choose.random() * 0.001)
                    check(keys, tensors)
            except TierError as error:
                failed.append(error)
                if not tolerant or str(error).split(":")[0] not in keys:
                    wrong.append(error)

    def target(seed: int) -> None:
        try:
            work(seed)
        except BaseException as error:
            wrong.append(error)
            raise

    workers = [threading.Thread(target=target, args=(seed,), daemon=True) for seed in range(threads)]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + 60
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    if any(worker.is_alive() for worker in workers):
        faulthandler.dump_traceback()
        pytest.fail("deadlock")
    assert not wrong, wrong[0]
    return len(failed)


SIZES = {f"page{i}": 1 + i % 3 for i in range(12)}


@pytest.mark.parametrize("kind", ["lru", "scheduled"])
@pytest.mark.parametrize("room", [4, 9])
def test_threads_under_a_tight_budget_get_the_right_bytes_and_no_deadlock(tmp_path, kind, room):
    stack = TierStack(
        [
            Level(WatchedTier("cpu", room), make_policy(kind, room * UNIT)),
            SlowSsd(tmp_path, 1 << 40, seed=room, most_ms=1),
        ]
    )
    hammer(add_all(stack, SIZES), SIZES, room)
    assert_at_rest(stack)
    leases = sum(page.hits + page.misses for page in stack.pages.values())
    assert 4 * 120 <= leases <= 2 * 4 * 120
    stack.close()


@pytest.mark.parametrize("kind", ["lru", "scheduled"])
def test_threads_through_three_levels(tmp_path, kind):
    levels = [
        Level(WatchedTier("near", 6), make_policy(kind, 6 * UNIT)),
        Level(WatchedTier("far", 3), make_policy("scheduled", 3 * UNIT)),
    ]
    stack = TierStack([*levels, SlowSsd(tmp_path, 1 << 40, seed=3, most_ms=1)], workers=3)
    hammer(add_all(stack, SIZES), SIZES, 6)
    assert_at_rest(stack)
    stack.close()


@pytest.mark.parametrize("levels", [1, 2])
def test_threads_with_reads_that_fail_get_errors_for_their_own_pages_only(tmp_path, levels):
    tiers = [
        Level(WatchedTier("near", 6), make_policy("scheduled", 6 * UNIT)),
        Level(WatchedTier("far", 4), make_policy("lru", 4 * UNIT)),
    ][:levels]
    ssd = FlakySsd(tmp_path, 1 << 40, seed=5, most_ms=1, share=0.2)
    stack = TierStack([*tiers, ssd])
    assert hammer(add_all(stack, SIZES), SIZES, 6, tolerant=True) > 10
    ssd.share = 0.0
    assert_at_rest(stack)
    run(stack, [(key,) for key in SIZES])
    assert_at_rest(stack)
    stack.close()


@pytest.mark.parametrize("budgets", [(12, 7, 9, 5), (60, 12, 60, 7)], ids=str)
def test_threads_while_budgets_change(tmp_path, budgets):
    levels = [
        Level(MemoryTier("near", torch.device("cpu"), 12 * UNIT), make_policy("scheduled", 12 * UNIT)),
        Level(MemoryTier("far", torch.device("cpu"), 30 * UNIT), make_policy("scheduled", 30 * UNIT)),
    ]
    stack = add_all(TierStack([*levels, SlowSsd(tmp_path, 1 << 40, seed=2, most_ms=1)]), SIZES)
    done = threading.Event()

    def change():
        for turn in range(1000):
            if done.is_set():
                break
            stack.set_budget("near", budgets[turn % 4] * UNIT)
            stack.set_budget("far", (30, 8, 5)[turn % 3] * UNIT)
            time.sleep(0.002)

    changer = threading.Thread(target=change)
    changer.start()
    hammer(stack, SIZES, 5)
    done.set()
    changer.join(30)
    assert not changer.is_alive()
    assert_at_rest(stack)
    for level in levels:
        assert level.tier.peak_bytes <= max(30, *budgets) * UNIT
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
        stack.collect()
        real(slot, write)

    monkeypatch.setattr(stack.mover, "fill", fill)
    stack.set_budget("near", 4 * UNIT)
    monkeypatch.undo()
    stack.collect()
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


def test_a_copy_in_a_slot_makes_way_for_a_lease_that_needs_the_room(tmp_path):
    sizes = {"a": 1, "b": 3, "large": 5}
    stack = add_all(
        TierStack(
            [Level(WatchedTier("cpu", 6), make_policy("scheduled", 6 * UNIT, prefetch=0)), SsdTier(tmp_path, 1 << 40)]
        ),
        sizes,
    )
    run(stack, [PASS, ("a",), ("b",), ("a",), PASS, ("a",), ("b",), ("a",)])
    stack.levels[0].policy._division = stack.levels[0].policy._division._replace(pins=frozenset(), slot_bytes=3 * UNIT)
    stack.levels[0].policy.remove("a")
    with stack.guard.lock:
        stack.levels[0].evict("a")
    run(stack, [("a",)])
    assert stack.levels[0].slots["a"].charge == 3 * UNIT
    run(stack, [("a", "large")])
    assert_at_rest(stack)
    stack.close()


def test_threads_while_pages_come_and_go(tmp_path):
    sizes = dict(list(SIZES.items())[:6])
    stack = TierStack(
        [
            Level(WatchedTier("cpu", 10), make_policy("scheduled", 7 * UNIT)),
            SlowSsd(tmp_path, 1 << 40, seed=1, most_ms=1),
        ]
    )
    add_all(stack, sizes)
    done = threading.Event()

    def come_and_go():
        turn = 0
        while not done.is_set():
            home = ("cpu", "ssd")[turn % 2]
            add(stack, f"guest{turn}", 1 + turn % 3, home)
            use(stack, f"guest{turn}")
            retire(stack, f"guest{turn}")
            turn += 1

    with in_background(come_and_go):
        try:
            hammer(stack, sizes, 5, threads=3)
        finally:
            done.set()
    assert_at_rest(stack)
    assert set(stack.pages) == set(sizes)
    stack.close()


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick_to_look(monkeypatch, request):
    """What a `__del__` prints is expected, and what is there already need not be collected each time."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    request.addfinalizer(gc.unfreeze)
    gc.freeze()


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


def test_ctrl_c_while_pages_are_given_back_holds_none_though_its_frames_are_kept(tmp_path):
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
            time.sleep(0.05)
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


# -- fork -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_can_use_the_pages_and_leaves_its_parents_alone(tmp_path):
    code = f"""
        import os, threading, time, torch
        from vbrt.formats.page import build_layout
        from vbrt.residency.simulate import make_policy
        from vbrt.tiers import Level, MemoryTier, Owner, SsdTier, TierStack

        class Slow(SsdTier):
            def get(self, room, out, *, key):
                reading.set()
                time.sleep(0.01)
                super().get(room, out, key=key)

        reading = threading.Event()
        tier = MemoryTier("cpu", torch.device("cpu"), 5 * 4096)
        stack = TierStack([Level(tier, make_policy("scheduled", 4 * 4096)), Slow({str(tmp_path)!r}, 1 << 30)])
        layout, owner = build_layout("dense", "dense", [("weight", "uint8", (4096,))]), Owner(stack)
        for i in range(8):
            stack.add(f"page{{i}}", layout, "ssd" if i else "cpu", lambda out, i=i: out.fill_(i), owner)
        def one_pass():
            stack.begin_pass()
            for i in range(8):
                with stack.lease((f"page{{i}}",)) as (fields,):
                    assert (fields["weight"] == i).all()
        one_pass()
        for _ in range(5):
            reading.clear()
            one_pass()
            assert reading.wait(10)  # a worker is in the middle of a copy now
            child = os.fork()
            if child == 0:
                try:
                    one_pass()
                    one_pass()
                    assert tier.held_bytes <= tier.capacity_bytes
                    stack.close()
                    assert tier.held_bytes == 0
                    os._exit(0)
                finally:
                    os._exit(1)
            one_pass()
            assert os.waitpid(child, 0)[1] == 0
            one_pass()
        stack.close()
        assert not os.listdir({str(tmp_path)!r})
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], check=True, timeout=120)


# -- policies of others -----------------------------------------------------------------------------------------------


def test_a_policy_that_refuses_is_not_asked_when_it_would(tmp_path):
    """The stack knows from sizes alone when a lease fits, so that a refused lease leaves no trace in a policy."""

    class Strict(LRUPolicy):
        def access(self, key, size, busy=()):
            decision = super().access(key, size, busy)
            assert decision is not None
            return decision

    stack = TierStack([Level(WatchedTier("cpu", 5), Strict(5 * UNIT)), SlowSsd(tmp_path, 1 << 40, seed=0, most_ms=1)])
    hammer(add_all(stack, SIZES), SIZES, 5)
    assert_at_rest(stack)
    assert isinstance(stack.levels[0].policy, Policy)
    stack.close()
