"""The stack: turns a policy's decisions into movement between gpu, cpu and ssd.

Every page has one home: the tier that holds it for good. Tiers above the home hold copies while the policy wants
them; weights are read-only, so eviction drops a copy and never writes. The top tier is where kernels compute.

    with stack.lease(("layers.0.q_proj#coarse",)) as (tensors,):   # tensors: field name -> view into the page
        y = op(x, tensors)

All decisions are made under one lock, in the order of the accesses, by the thread that asks; only the copies run in
the background. A slot is a page's place in a tier: QUEUED (decided, nothing moved), LOADING, READY or FAILED. Whoever
needs a QUEUED slot first, a worker or the thread that leases it, claims it and moves the bytes itself.

A page that is evicted while its bytes are still coming is `doomed`: its buffer goes back when the copy has ended, and
whoever waits for room waits for that. A thread that waits holds no lease, so waiting ends.
"""

import contextlib
import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from vbrt.errors import TierError
from vbrt.formats.page import PageLayout, unpack
from vbrt.policy import Decision, LRUPolicy, Policy
from vbrt.tiers.memory import Buffer, MemoryTier
from vbrt.tiers.ssd import SsdTier

__all__ = ["Lease", "Level", "Page", "TierStack", "detached_stack"]


class _State(Enum):
    QUEUED = auto()
    LOADING = auto()
    READY = auto()
    FAILED = auto()


@dataclass(slots=True, eq=False)
class Page:
    """One plane of one layer, and the counters of its life. `home` is the index of its tier, 0 on top."""

    key: str
    layout: PageLayout
    home: int
    references: int = 1
    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    wait_ns: int = 0
    bytes_moved: Counter[str] = field(default_factory=Counter)  # by link, such as "ssd>cpu"

    @property
    def nbytes(self) -> int:
        """Bytes of the page."""
        return self.layout.nbytes


class _Slot:
    """A page's place in a memory tier."""

    __slots__ = ("arrived", "buffer", "doomed", "error", "leases", "level", "page", "source", "state", "tensors")

    def __init__(self, page: Page, level: "Level", source: "_Slot | None" = None) -> None:
        self.page, self.level, self.source = page, level, source
        self.state = _State.QUEUED
        self.buffer: Buffer | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.arrived: torch.cuda.Event | None = None
        self.error: BaseException | None = None
        self.leases, self.doomed = 0, False


class Level:
    """One memory tier of the stack with its policy and its slots."""

    def __init__(self, tier: MemoryTier, policy: Policy) -> None:
        self.tier, self.policy = tier, policy
        self.index = 0
        self.slots: dict[str, _Slot] = {}
        self.leased: set[str] = set()
        self.stream = torch.cuda.Stream(tier.device) if tier.device.type == "cuda" else None


class TierStack:
    """Memory tiers from the computing one outward, and at most one ssd tier below them.

    Args:
        levels: memory tiers with their policies, the computing tier first.
        ssd: the file tier below them, or None.
        workers: threads that move pages ahead of their use.
    """

    def __init__(self, levels: Sequence[Level], ssd: SsdTier | None = None, *, workers: int = 2) -> None:
        self.levels, self.ssd = list(levels), ssd
        for index, level in enumerate(self.levels):
            level.index = index
        self.pages: dict[str, Page] = {}
        self.closed = False
        self.names = [level.tier.name for level in self.levels] + (["ssd"] if ssd else [])
        self._changed = threading.Condition(threading.Lock())
        self.encoding = threading.RLock()  # one weight is encoded at a time: bounded scratch, and no weight twice
        self._workers = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="vbrt-tier")
        self._retired: deque[str] = deque()  # keys whose owners were collected; dropped at the next access

    def __deepcopy__(self, memo: dict) -> "TierStack":
        return self  # copies of a model share the pages: they are read-only

    def __reduce__(self):
        return detached_stack, ()  # what is unpickled brings its pages along

    @property
    def device(self) -> torch.device:
        """Where leased pages live and kernels compute."""
        return self.levels[0].tier.device

    # -- pages --------------------------------------------------------------------------------------------------------

    def add(self, key: str, layout: PageLayout, home: str, fill: Callable[[torch.Tensor], object]) -> Page:
        """Store a new page in its home; `fill` writes the page's bytes into the uint8 tensor it is given.

        Raises:
            TierError: no room within the budget, or the ssd cannot be written; nothing of the page stays behind.
        """
        page = Page(key, layout, self.names.index(home))
        if page.home == len(self.levels):
            self._add_file(page, fill)
        else:
            self._add_resident(page, fill)
        self.pages[key] = page
        return page

    def _add_file(self, page: Page, fill: Callable[[torch.Tensor], object]) -> None:
        staging = torch.empty(page.nbytes, dtype=torch.uint8)
        fill(staging)
        with self._changed:
            self._check_open(page.key)
            self._drop_retired()
            self.ssd.write(page.key, staging, page.layout.to_dict())

    def _add_resident(self, page: Page, fill: Callable[[torch.Tensor], object]) -> None:
        level = self.levels[page.home]
        with self._changed:
            self._check_open(page.key)
            self._drop_retired()
            buffer = level.tier.allocate(page.nbytes)
        if buffer is None:
            name = level.tier.name
            raise TierError(f"{page.key}: {page.nbytes} bytes do not fit into tiers.{name}.budget = "
                            f"{level.tier.capacity_bytes} ({level.tier.held_bytes} held); raise the budget or enable "
                            "a tier below it")
        slot = _Slot(page, level)
        try:
            fill(buffer.tensor)
            slot.buffer, slot.tensors = buffer, unpack(buffer.tensor, page.layout)
        except BaseException:
            level.tier.release(buffer)
            raise
        slot.state = _State.READY
        if level.stream is not None:
            torch.cuda.current_stream(level.tier.device).synchronize()  # once a page: leases of it wait for nothing
        level.slots[page.key] = slot

    def share(self, keys: Collection[str]) -> None:
        """One more owner of these pages."""
        with self._changed:
            for key in keys:
                self.pages[key].references += 1

    def retire(self, keys: Collection[str]) -> None:
        """One owner fewer; a page without owners is dropped at the next access. Takes no lock: safe in a finalizer."""
        self._retired.extend(keys)

    def _drop_retired(self) -> None:
        while self._retired:
            page = self.pages.get(self._retired.popleft())
            if page is None:
                continue
            page.references -= 1
            if page.references == 0:
                self._drop(page)

    def _drop(self, page: Page) -> None:
        del self.pages[page.key]
        for level in self.levels[: page.home]:
            level.policy.forget(page.key)
            if page.key in level.slots:
                self._evict(level, page.key)
        if page.home == len(self.levels):
            self.ssd.drop(page.key)
        else:
            slot = self.levels[page.home].slots.pop(page.key)
            slot.level.tier.discard(slot.buffer)  # views that the caller still holds keep the memory alive

    def close(self) -> None:
        """Drop every page, stop the threads, remove the files. Calling it twice is fine."""
        with self._changed:
            self.closed = True
        self._workers.shutdown(wait=True, cancel_futures=True)
        with self._changed:
            self._retired.clear()
            for page in list(self.pages.values()):
                self._drop(page)
            for level in self.levels:
                level.tier.trim()
        if self.ssd is not None:
            self.ssd.close()

    def _check_open(self, key: str) -> None:
        if self.closed:
            raise TierError(f"{key}: the model was closed, its pages are gone; wrap it again, or call unwrap() before "
                            "close() to keep the weights")

    # -- leases -------------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """The next lease starts a new pass over the model."""
        with self._changed:
            self._drop_retired()
            for level in self.levels:
                level.policy.begin_pass()

    def lease(self, keys: Sequence[str]) -> "Lease":
        """Borrow pages in the top tier: `with stack.lease(keys) as tensors` yields one dict of views for each key.

        The views are valid inside the `with` block only, unless the page's home is the top tier.

        Raises:
            TierError: (on entering) a page cannot be read or verified, or cannot fit beside what is in use.
        """
        return Lease(self, keys)

    def _acquire(self, keys: Sequence[str]) -> list[_Slot]:
        top = self.levels[0]
        with self._changed:
            self._check_open(keys[0])
            if self._retired:
                self._drop_retired()
            while (slots := self._try_acquire(keys)) is None:
                if not top.leased:
                    sizes = [self.pages[key].nbytes for key in keys]
                    raise TierError(f"{' + '.join(keys)}: {sum(sizes)} bytes do not fit into tiers.{top.tier.name}."
                                    f"budget = {top.tier.capacity_bytes}; raise the budget")
                self._changed.wait()
            if len(self.names) > 1:
                self._look_ahead()
            return slots

    def _try_acquire(self, keys: Sequence[str]) -> list[_Slot] | None:
        """Admit all keys or none; None when pages that other threads hold leave no room."""
        slots: list[_Slot] = []
        busy = self.levels[0].leased.union(keys)
        for key in keys:
            slot = self._admit(0, self.pages[key], busy)
            if slot is None:
                for taken in slots:
                    self._return(taken)
                return None
            slots.append(slot)
        return slots

    def _admit(self, index: int, page: Page, busy: Collection[str]) -> _Slot | None:
        """A leased slot of the page in level `index`, decided now and filled by whoever needs it first."""
        level = self.levels[index]
        hit, prefetched = True, False
        if page.home == index:
            slot = level.slots[page.key]
        else:
            decision = level.policy.access(page.key, page.nbytes, busy)
            slot = decision and self._place(index, page, decision)
            if slot is None:
                return None
            hit, prefetched = decision.hit, decision.prefetched
        slot.leases += 1
        level.leased.add(page.key)
        if index == 0:
            page.hits += hit
            page.misses += not hit
            page.prefetched += prefetched
        return slot

    def _place(self, index: int, page: Page, decision: Decision) -> _Slot | None:
        """Act on a decision: evict, then find or make the slot. None when the level below has no room."""
        level = self.levels[index]
        for key in decision.evict:
            self._evict(level, key)
        slot = level.slots.get(page.key)
        if slot is not None:
            return slot
        source = None
        if index + 1 < len(self.levels):
            source = self._admit(index + 1, page, self.levels[index + 1].leased)
            if source is None:
                level.policy.forget(page.key)
                return None
        slot = level.slots[page.key] = _Slot(page, level, source)
        return slot

    def _look_ahead(self) -> None:
        for index, level in enumerate(self.levels):
            for decision in level.policy.ahead(level.leased):
                page = self.pages.get(decision.key)
                if page is None:  # retired since its last pass
                    level.policy.forget(decision.key)
                    continue
                slot = self._place(index, page, decision)
                if slot is not None and slot.state is _State.QUEUED:
                    self._workers.submit(self._fetch, slot)

    def _evict(self, level: Level, key: str) -> None:
        slot = level.slots.pop(key)
        slot.doomed = True
        if slot.state is _State.READY and not slot.leases:
            level.tier.release(slot.buffer)
        elif slot.state is _State.QUEUED:
            slot.state = _State.FAILED
            self._return_source(slot)
        self._changed.notify_all()

    def _release(self, slots: Sequence[_Slot]) -> None:
        with self._changed:
            for slot in slots:
                self._return(slot)
            self._changed.notify_all()

    def _return(self, slot: _Slot) -> None:
        slot.leases -= 1
        level = slot.level
        if level.stream is not None and slot.buffer is not None and slot.page.home != level.index:
            slot.buffer.fence(torch.cuda.current_stream(level.tier.device))
        if slot.leases:
            return
        level.leased.discard(slot.page.key)
        if slot.doomed and slot.state is _State.READY:
            level.tier.release(slot.buffer)

    def _return_source(self, slot: _Slot) -> None:
        source, slot.source = slot.source, None
        if source is not None:
            self._return(source)

    # -- movement -----------------------------------------------------------------------------------------------------

    def _await_counted(self, slot: _Slot) -> None:
        start = time.perf_counter_ns()
        try:
            self._await(slot)
        finally:
            slot.page.wait_ns += time.perf_counter_ns() - start

    def _await(self, slot: _Slot) -> None:
        """Return when the slot's bytes are there; moves them in this thread if nobody has begun."""
        with self._changed:
            while slot.state is _State.LOADING:
                self._changed.wait()
            claimed = slot.state is _State.QUEUED
            if claimed:
                slot.state = _State.LOADING
        if claimed:
            self._load(slot)
        if slot.state is _State.FAILED:
            raise TierError(str(slot.error)) from slot.error

    def _fetch(self, slot: _Slot) -> None:
        """A worker's turn: what fails here is raised to whoever leases the page."""
        with self._changed:
            if slot.state is not _State.QUEUED:
                return
            slot.state = _State.LOADING
        with contextlib.suppress(Exception):  # kept in slot.error, and the page is read again when it is demanded
            self._load(slot)

    def _load(self, slot: _Slot) -> None:
        try:
            buffer = self._allocate(slot)
            try:
                self._copy(slot, buffer)
                slot.tensors = unpack(buffer.tensor, slot.page.layout)
            except BaseException:
                with self._changed:
                    slot.level.tier.release(buffer)
                raise
        except BaseException as error:
            self._fail(slot, error)
            raise
        with self._changed:
            slot.buffer, slot.state = buffer, _State.READY
            self._return_source(slot)
            if slot.doomed and not slot.leases:
                slot.level.tier.release(buffer)
            self._changed.notify_all()

    def _fail(self, slot: _Slot, error: BaseException) -> None:
        with self._changed:
            slot.state, slot.error = _State.FAILED, error
            if not isinstance(error, Exception):  # Ctrl-C: waiters get an error, this thread the interrupt
                slot.error = TierError(f"{slot.page.key}: its copy was interrupted; run the forward again")
            if slot.level.slots.get(slot.page.key) is slot:
                del slot.level.slots[slot.page.key]
                slot.level.policy.forget(slot.page.key)
            self._return_source(slot)
            self._changed.notify_all()

    def _allocate(self, slot: _Slot) -> Buffer:
        """Room for the slot; waits for copies into evicted slots to end. The policy has made sure that it comes."""
        tier = slot.level.tier
        with self._changed:
            while (buffer := tier.allocate(slot.page.nbytes)) is None:
                if slot.doomed or self.closed:
                    raise TierError(f"{slot.page.key}: no longer wanted")
                self._changed.wait()
        return buffer

    def _copy(self, slot: _Slot, buffer: Buffer) -> None:
        page, level, source = slot.page, slot.level, slot.source
        if source is None:
            for fence in buffer.fences.values():  # copies to the GPU that still read this buffer
                fence.synchronize()
            buffer.fences.clear()
            self.ssd.read(page.key, buffer.tensor)
            link = f"ssd>{level.tier.name}"
        else:
            self._await(source)
            link = f"{source.level.tier.name}>{level.tier.name}"
            self._copy_memory(slot, buffer, source)
        with self._changed:
            page.bytes_moved[link] += page.nbytes

    def _copy_memory(self, slot: _Slot, buffer: Buffer, source: _Slot) -> None:
        stream = slot.level.stream
        if stream is None:
            buffer.tensor.copy_(source.buffer.tensor)
            return
        for fence in buffer.fences.values():  # kernels that still read this buffer
            stream.wait_event(fence)
        buffer.fences.clear()
        with torch.cuda.stream(stream):
            buffer.tensor.copy_(source.buffer.tensor, non_blocking=True)
        slot.arrived = source.buffer.fence(stream)  # the source is not refilled before its copy has left


class Lease:
    """Pages borrowed from a stack, for one `with` block."""

    __slots__ = ("_keys", "_slots", "_stack")

    def __init__(self, stack: TierStack, keys: Sequence[str]) -> None:
        self._stack, self._keys = stack, keys

    def __enter__(self) -> list[dict[str, torch.Tensor]]:
        self._slots = self._stack._acquire(self._keys)
        try:
            for slot in self._slots:
                if slot.state is not _State.READY:
                    self._stack._await_counted(slot)
                if slot.arrived is not None:
                    torch.cuda.current_stream(slot.level.tier.device).wait_event(slot.arrived)
        except BaseException:
            self._stack._release(self._slots)
            raise
        return [slot.tensors for slot in self._slots]

    def __exit__(self, *exc_info: object) -> None:
        self._stack._release(self._slots)


@functools.cache
def detached_stack() -> TierStack:
    """Where layers live that were unpickled apart from their wrapper: CPU memory, without a budget."""
    return TierStack([Level(MemoryTier("cpu", torch.device("cpu"), 1 << 62), LRUPolicy(0))])
