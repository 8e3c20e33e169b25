"""Live counts are simulated counts, through two levels and three."""

import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.residency.traces import ExpertLoad, Workload, expert_loads, policy_of, workloads
from tests.tiers.stacks import UNIT, SlowSsd, WatchedTier, add_all, assert_at_rest, assert_counts, run, use, within
from vbrt.errors import TierError
from vbrt.residency.access_counts import PhaseCounts
from vbrt.residency.lru import LRUPolicy
from vbrt.residency.scheduled import ScheduledPolicy
from vbrt.residency.simulate import PASS, Announce, Pass, make_policy, simulate
from vbrt.tiers import Level, SsdTier, TierStack

pytestmark = pytest.mark.usefixtures("no_fsync")


def live(load: Workload | ExpertLoad, ssd: Callable[[Path], SsdTier] = lambda root: SsdTier(root, 1 << 40)) -> None:
    """Run a workload on a real stack and hold its counts against `simulate`."""
    counts = simulate(policy_of(load), load.trace, load.room, sizes=load.sizes)
    policy = policy_of(load, UNIT)
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


@given(workloads())
def test_live_counts_are_simulated_counts_and_contents_are_right(load):
    live(load)


@given(expert_loads())
def test_live_counts_of_experts_are_simulated_counts(load):
    live(load)


@settings(max_examples=25)
@given(expert_loads(), st.integers(0, 1 << 20))
def test_slow_reads_change_no_count_of_experts(load, seed):
    live(load, lambda root: SlowSsd(root, 1 << 40, seed=seed, most_ms=3))


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


@pytest.mark.parametrize("cached", [True, False])
def test_where_cores_are_shared_only_who_needs_a_page_copies_it_and_workers_read_ahead_what_is_not_cached(
    tmp_path, cached
):
    threads, ahead = set(), []

    class NotedSsd(SsdTier):
        def get(self, room, out, *, key):
            threads.add(threading.get_ident())
            super().get(room, out, key=key)

        def is_cached(self, room):
            assert super().is_cached(room)  # it has just been written
            return cached

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
    for _ in range(0 if cached else 1_000):
        if len(ahead) > 8:
            break
        time.sleep(0.005)
    assert threads == {threading.get_ident()} and (not ahead if cached else len(ahead) > 8)
    assert_counts(stack, simulate("scheduled", trace, 5))
    stack.close()


@st.composite
def placed_workloads(draw: st.DrawFn) -> tuple[Workload, dict[str, str], int, str]:
    """A workload, a home for each page, room for copies in the middle tier, and its policy."""
    load = draw(workloads(most_pages=6, most_passes=4))
    homes = {key: draw(st.sampled_from(["near", "far", "ssd", "ssd"])) for key in load.sizes}
    far = draw(st.integers(max(load.sizes.values()), sum(load.sizes.values()) + 1))
    return load, homes, far, draw(st.sampled_from(["lru", "scheduled"]))


def without(trace: Iterable, homes: dict[str, str]) -> Iterator:
    """A trace without the pages that live in the top tier, which policies do not hear of."""
    for item in trace:
        if isinstance(item, Pass):
            yield item
        elif isinstance(item, Announce):
            yield Announce(tuple(key for key in item.keys if homes[key] != "near"))
        else:
            yield tuple(key for key in item if homes[key] != "near")


def live_in_three(placed, ssd: Callable[[Path], SsdTier]) -> None:
    load, homes, far, far_kind = placed
    live_there = {tier: sum(load.sizes[key] for key in homes if homes[key] == tier) for tier in ("near", "far")}
    counts = simulate(policy_of(load), list(without(load.trace, homes)), load.room, sizes=load.sizes)
    levels = [
        Level(WatchedTier("near", load.room + live_there["near"]), policy_of(load, UNIT)),
        Level(WatchedTier("far", far + live_there["far"]), policy_of(load, UNIT, kind=far_kind, room=far)),
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


@st.composite
def placed_experts(draw: st.DrawFn) -> tuple[ExpertLoad, dict[str, str], int, str]:
    """Experts and other layers, a home for each page, room for copies in the middle tier, and its policy."""
    load = draw(expert_loads())
    homes = {key: draw(st.sampled_from(["near", "far", "ssd", "ssd"])) for key in load.sizes}
    far = draw(st.integers(max(load.sizes.values()), sum(load.sizes.values()) + 1))
    return load, homes, far, draw(st.sampled_from(["lru", "experts"]))


@given(placed_workloads())
def test_three_levels_hold_their_budgets_and_count_as_simulated(placed):
    live_in_three(placed, lambda root: SsdTier(root, 1 << 40))


@pytest.mark.exhaustive
@settings(max_examples=50)
@given(placed_experts())
def test_three_levels_with_experts_count_as_simulated(placed):
    live_in_three(placed, lambda root: SlowSsd(root, 1 << 40, seed=0, most_ms=1))


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
