"""Stacks that tests can watch, slow down, stop and break; pages with known contents."""

import contextlib
import faulthandler
import functools
import random
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

from vbrt.errors import TierError
from vbrt.formats.page import PageLayout, build_layout
from vbrt.residency.lru import LRUPolicy
from vbrt.residency.policy import Decision
from vbrt.residency.simulate import Announce, Pass
from vbrt.tiers import Level, MemoryTier, Owner, Page, SsdTier, TierStack
from vbrt.tiers.stack.slots import State

UNIT = 4096
CPU = torch.device("cpu")


class WatchedTier(MemoryTier):
    """Notes each reservation at which the buffers that are really alive are not those that are counted, and each one
    that is granted beyond the budget. One that is refused may find more held than a budget that was lowered while pages
    were leased or copied: their room goes when that ends."""

    def __init__(self, name: str, units: int) -> None:
        super().__init__(name, CPU, units * UNIT)
        self.alive: weakref.WeakSet = weakref.WeakSet()
        self.violations: list[str] = []

    def _new(self, nbytes):
        buffer = super()._new(nbytes)
        self.alive.add(buffer)
        return buffer

    def reserve(self, nbytes, holder, **options):
        granted = super().reserve(nbytes, holder, **options)
        alive = sum(b.nbytes for b in self.alive)
        most = self.capacity_bytes if granted else self.held_bytes
        if not alive == self.held_bytes <= min(most, self.peak_bytes):
            self.violations.append(f"alive {alive}, held {self.held_bytes}, peak {self.peak_bytes}")
        return granted


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


def add(stack: TierStack, key: str, units: int, home: str = "ssd") -> Page:
    owner = Owner(stack)
    page = stack.add(key, layout(units), home, lambda out: out.copy_(content(key, units)), owner)
    owners.setdefault(stack, {})[key] = owner
    return page


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
        elif isinstance(item, Announce):
            stack.announce(item.keys)
        else:
            use(stack, *item)


def slots(stack: TierStack):
    return [slot for level in stack.levels for slot in level.slots.values()]


def assert_at_rest(stack: TierStack) -> None:
    """Nothing is leased, promised, lost or over its budget once the workers are idle."""
    for _ in range(2_000):
        stack.retire_unowned()
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


def assert_counts(stack: TierStack, counts) -> None:
    pages = stack.pages.values()
    assert {page.key: page.hits for page in pages if page.hits} == +counts.hits
    assert {page.key: page.misses for page in pages if page.misses} == +counts.misses
    assert {page.key: page.prefetched for page in pages if page.prefetched} == +counts.prefetched


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


def file_of(stack: TierStack, key: str) -> Path:
    return stack.levels[-1].slots[key].room.path
