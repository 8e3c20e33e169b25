"""The stack: turns a policy's decisions into movement between gpu, cpu and ssd.

Every page has one home: the tier that holds it for good. Tiers above the home hold copies while the policy wants
them; weights are read-only, so eviction drops a copy and never writes. The top tier is where kernels compute.

    with stack.lease(("layers.0.q_proj#coarse",)) as (tensors,):   # tensors: field name -> view into the page
        y = op(x, tensors)

All decisions are made under one lock, in the order of the accesses, by the thread that asks; only the copies run in
the background. A slot is a page's place in a tier: QUEUED (decided, nothing moved), LOADING, READY or FAILED. Whoever
needs a QUEUED slot first, a worker or the thread that leases it, claims it and moves the bytes itself.

A page that is evicted while its bytes are still coming, or in use, is `doomed`: its buffer goes back when the copy has
ended and the last holder has left, and whoever waits for room waits for that. Policies never ask how far a copy has
got, so counts do not depend on timing.

Why waiting ends: slots are decided one after another, and a slot waits only for what was decided before it: its source
in the tier below (first, while it holds no buffer itself), the room that earlier slots have been promised (`pending`),
and the buffers of pages that were evicted for it. A thread that waits for room to lease holds no lease.

Ctrl-C may come anywhere: CPython raises it where a Python function begins, where a call into C has returned and where
a loop jumps back, in the main thread. So:

- The lock is entered in C, and nothing that takes a lock in Python code (executors, conditions, semaphores) is entered
  under it. Who waits, waits for a bell without the lock, and looks again every second in case nobody rang.
- What must hold together is written without a call in between: the bytes of a page and its home, a buffer and the list
  of free ones.
- Holders and owners are sets and giving back is repeatable, so what was interrupted is done again: by the `with` that
  is left, or, when it never began, by the next access after the lease was collected.
- A decision that was interrupted half way cannot be trusted: at the next one policies start anew.
- A page moves in three steps: its bytes are copied to the new home, the page is said to live there, the old copy goes.
  Who moves the next page ends what was begun: forwards from the second step on, back before it.
"""

import contextlib
import itertools
import os
import threading
import time
import weakref
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from itertools import pairwise, takewhile

import torch

from vbrt.errors import TierError
from vbrt.formats.page import PageLayout, unpack
from vbrt.host.crew import Crew
from vbrt.residency.policy import Decision, LRUPolicy, Policy, spread
from vbrt.tiers.memory import Buffer, MemoryTier
from vbrt.tiers.recorder import LeaseNote, Recorder
from vbrt.tiers.relay import Relay
from vbrt.tiers.ssd import HEADER_BYTES, SsdTier

__all__ = ["Lease", "Level", "Owner", "Page", "TierStack", "detached_stack"]

_PASSING_PAGES = 4  # slots that pages pass through, where a budget shrinks: two leased, two ahead
_LOOK_SECONDS = 1.0  # a thread that waits looks this often: a lease may be collected, a bell be lost, without a word


class _State(Enum):
    QUEUED = auto()
    LOADING = auto()
    READY = auto()
    FAILED = auto()


@dataclass(slots=True, eq=False)
class Page:
    """One plane of one layer, and the counters of its life. `home`: the index of its tier, 0 on top."""

    key: str
    layout: PageLayout
    home: int
    moves: int = 0  # from one home to another
    owners: "set[_Claim]" = field(default_factory=set)
    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    wait_ns: int = 0
    bytes_moved: dict[str, int] = field(default_factory=dict)  # by link, such as "ssd>cpu"
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = self.layout.nbytes


class _Claim(weakref.ref):
    """An owner's hold on its pages. Goes to the stack's list of retired ones when the owner is collected: in C, so that
    nothing comes in between."""

    __slots__ = ("keys",)
    __eq__, __hash__ = object.__eq__, object.__hash__  # its owner's would do, and is gone when it counts


class Owner:
    """Owns pages of one stack: without owners a page is dropped at the next access."""

    __slots__ = ("__weakref__", "claim")

    def __init__(self, stack: "TierStack") -> None:
        self.claim = _Claim(self, stack.retired.append)
        self.claim.keys = []


_tickets = itertools.count()


class _Slot:
    """A page's place in a memory tier. `holders`: leases, and slots above that are filled from this one."""

    __slots__ = (
        "arrived",
        "at_home",
        "buffer",
        "charge",
        "doomed",
        "error",
        "holders",
        "level",
        "loader",
        "page",
        "source",
        "state",
        "tensors",
        "ticket",
    )

    def __init__(self, page: Page, level: "Level", charge: int = 0, *, at_home: bool = False) -> None:
        self.page, self.level = page, level
        self.at_home = at_home  # whether the page lives here for good
        self.charge = charge or page.nbytes  # bytes of its buffer: a slot of a ring may be larger than the page
        self.ticket = next(_tickets)  # the order of decisions
        self.state = _State.QUEUED
        self.loader = 0  # the thread that moves the bytes
        self.source: _Slot | None = None
        self.buffer: Buffer | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.arrived: torch.cuda.Event | None = None
        self.error: BaseException | None = None
        self.holders: set[_Slot | _Borrower] = set()
        self.doomed = False

    @property
    def view(self) -> torch.Tensor:
        """The page's bytes in the buffer."""
        return self.buffer.tensor[: self.page.nbytes]


class Level:
    """One memory tier of the stack with its policy and its slots."""

    def __init__(self, tier: MemoryTier, policy: Policy) -> None:
        self.tier, self.policy = tier, policy
        self.room = policy.capacity_bytes  # for copies, as long as pages that live here leave that much
        self.index = 0
        self.home_bytes = 0
        self.living: dict[_Slot, None] = {}  # slots of pages that live here, or are on their way in or out
        self.slots: dict[str, _Slot] = {}
        self.leased: set[str] = set()  # copies that threads use: the policy must let them stay
        self.pending: dict[_Slot, None] = {}  # decided and without a buffer yet, earliest first
        self.stream = torch.cuda.Stream(tier.device) if tier.device.type == "cuda" else None
        self.relay = Relay(tier.fallbacks)  # for pages in host memory that is not page-locked
        self.fit()

    def resize(self, nbytes: int) -> tuple[str, ...]:
        """Another budget, in which the pages that live here fit; returns the copies that have to leave."""
        self.tier.capacity_bytes = self.room = nbytes
        return self.policy.resize(nbytes - self.home_bytes)

    def move_in(self, slot: _Slot) -> tuple[str, ...]:
        """A page will live here; returns the copies that have to leave for it."""
        if slot not in self.living:  # no call in between
            self.living[slot] = None
            self.home_bytes += slot.page.nbytes
        return self.fit()

    def move_out(self, slot: _Slot) -> tuple[str, ...]:
        """A page does not live here any more. Twice is fine."""
        if slot in self.living:  # no call in between
            del self.living[slot]
            self.home_bytes -= slot.page.nbytes
        return self.fit()

    def fit(self) -> tuple[str, ...]:
        """Give copies the room that living pages leave; returns those that have to leave for that."""
        room = min(self.room, self.tier.capacity_bytes - self.home_bytes)
        return () if room == self.policy.capacity_bytes else self.policy.resize(room)


@dataclass(slots=True, eq=False)
class _Arrival:
    """A page on its way to a home: `slot` is its place in a memory tier, None where it becomes a file."""

    page: Page
    home: int
    slot: _Slot | None


class TierStack:
    """Memory tiers from the computing one outward, and at most one ssd tier below them.

    Args:
        levels: memory tiers with their policies, the computing tier first.
        ssd: the file tier below them, or None.
        workers: threads that move pages ahead of their use.
        share_cores: where the CPU computes, workers would take the cores from it to copy pages out of the page cache:
            they only have the system read files ahead, and whoever needs a page copies it.

    Attributes:
        pages: by key, those that are stored.
        retired: claims of owners that gave up their pages; to be appended to, what goes goes at the next access.
    """

    def __init__(
        self, levels: Sequence[Level], ssd: SsdTier | None = None, *, workers: int = 2, share_cores: bool = False
    ) -> None:
        self.levels, self.ssd = list(levels), ssd
        self._share_cores = share_cores
        for index, level in enumerate(self.levels):
            level.index = index
        self.pages: dict[str, Page] = {}
        self.closed = False
        self.names = [level.tier.name for level in self.levels] + (["ssd"] if ssd else [])
        self._threads = workers
        self._travellers = 0  # pages whose home is below the top tier
        self.retired: deque[_Claim] = deque()  # of owners that are gone; taken from the pages at the next access
        self._lost: deque[Lease] = deque()  # collected without having been given back
        self._captured = False  # whether a CUDA graph knows where pages lie
        self._start()
        _stacks.add(self)

    def _start(self) -> None:
        self._lock = threading.RLock()  # entered by `_locked`
        self._bells: deque[LockType] = deque()  # of those who wait for a change
        self._half_done = False  # whether decisions are being made, or were when Ctrl-C came
        self._arrival: _Arrival | None = None  # of the page that gets a home, by whoever holds `encoding`
        self.encoding = threading.RLock()  # one weight is encoded at a time: bounded scratch, and no weight twice
        self._workers = Crew(self._threads)
        self.recorder: Recorder | None = None  # of a timeline

    def __deepcopy__(self, memo: dict) -> "TierStack":
        return self  # copies of a model share the pages: they are read-only

    def __reduce__(self):
        return detached_stack, ()  # what is unpickled brings its pages along

    @property
    def device(self) -> torch.device:
        """Where leased pages live and kernels compute."""
        return self.levels[0].tier.device

    @property
    def at_rest(self) -> bool:
        """Whether every page lives in the top tier and none is leaving: it may be used without a lease then, and
        whoever does counts the hit. Not while a timeline is recorded, which notes leases."""
        return not (self._travellers or self.retired or self._lost or self.recorder)

    # -- pages --------------------------------------------------------------------------------------------------------

    def add(
        self, key: str, layout: PageLayout, home: str, fill: Callable[[torch.Tensor], object], owner: Owner
    ) -> Page:
        """Store a new page in its home; `fill` writes the page's bytes into the uint8 tensor it is given.

        Raises:
            TierError: no room within the budget, the ssd cannot be written, the key is taken, or the stack was closed;
                nothing of the page stays behind.
        """
        page = Page(key, layout, self.names.index(home))
        page.bytes_moved = {f"{low}>{high}": 0 for high, low in pairwise(self.names[: page.home + 1])}
        page.owners.add(owner.claim)
        with self.encoding:
            self._finish_arrival()
            with self._locked:
                self._check_open(key)
                self._collect()
                if key in self.pages:
                    raise TierError(f"{key}: the stack holds a page of this name already; retire it first")
            owner.claim.keys.append(key)
            self._take_home(page, page.home, fill)
        return page

    def _take_home(self, page: Page, home: int, fill: Callable[[torch.Tensor], object]) -> None:
        """Have a page live in a tier: a new one, or one that lives elsewhere until its bytes are there."""
        level = self.levels[home] if home < len(self.levels) else None
        slot = None
        if level is not None:
            slot = _Slot(page, level, at_home=True)
            slot.state, slot.loader = _State.LOADING, threading.get_ident()
        self._arrival = _Arrival(page, home, slot)
        try:
            if slot is None:
                staging = torch.empty(page.nbytes, dtype=torch.uint8, device="cpu")
                fill(staging)
                self.ssd.write(page.key, staging, page.layout.to_dict())
            else:
                self._settle(slot)
                self._fill_home(slot, fill)
            with self._locked:
                self._check_open(page.key)
                self._begin()
                self._say_home(page, home, slot)
                self._leave_memory(page)
                self._half_done = False
        finally:
            self._finish_arrival()

    def _settle(self, slot: _Slot) -> None:
        """Make room for a page that will live in a memory tier: copies leave, if need be."""
        level, page = slot.level, slot.page
        with self._locked:
            self._begin()
            tier = level.tier
            if level.home_bytes + page.nbytes > tier.capacity_bytes:
                self._half_done = False
                raise TierError(
                    f"{page.key}: {page.nbytes} bytes do not fit into tiers.{tier.name}.budget = "
                    f"{tier.capacity_bytes} ({level.home_bytes} live there); raise the budget or enable a "
                    "tier below it"
                )
            for key in level.move_in(slot):
                self._evict(level, key)
            level.pending[slot] = None
            self._half_done = False

    def _fill_home(self, slot: _Slot, fill: Callable[[torch.Tensor], object]) -> None:
        self._allocate(slot)
        slot.buffer.synchronize()
        fill(slot.buffer.tensor)
        slot.tensors = unpack(slot.buffer.tensor, slot.page.layout)
        if slot.level.stream is not None:
            torch.cuda.current_stream(slot.level.tier.device).synchronize()  # once a page: its leases wait for nothing

    def _say_home(self, page: Page, home: int, slot: _Slot | None) -> None:
        """The page lives at `home` from now on, and is nowhere between there and where it was."""
        known = page.key in self.pages
        moved = {f"{low}>{high}": 0 for high, low in pairwise(self.names[: home + 1])} | page.bytes_moved
        for level in self.levels[home : page.home]:
            level.policy.forget(page.key)
            if page.key in level.slots:
                self._evict(level, page.key)
        slots = {} if slot is None else slot.level.slots
        # no call from here on: Ctrl-C finds the page here or there
        if slot is not None:
            slot.state = _State.READY
        slots[page.key] = slot
        self._travellers += (home > 0) - (known and page.home > 0)
        page.moves += known
        page.home, page.bytes_moved = home, moved
        self.pages[page.key] = page

    def _leave_memory(self, page: Page) -> None:
        """The page leaves the memory where it lived before."""
        for level in self.levels:
            slot = level.slots.get(page.key)
            if slot is not None and slot.at_home and level.index != page.home:
                self._evict(level, page.key)

    def _finish_arrival(self) -> None:
        """End what giving a page a home began, also when that was interrupted: its old file goes, or its new copy."""
        arrival = self._arrival
        if arrival is None:
            return
        page, slot = arrival.page, arrival.slot
        arrived = self.pages.get(page.key) is page and page.home == arrival.home
        if self.ssd is not None and arrived is (slot is not None):
            self.ssd.drop(page.key)
        with self._locked:
            self._begin()
            if slot is not None and not arrived:
                self._fail(slot, TierError(f"{page.key}: it did not get there"))
            self._half_done = False
            self._arrival = None
            self._tell()

    def attach(self, ssd: SsdTier) -> None:
        """Add an ssd tier below the others."""
        with self._locked:
            self.names, self.ssd = [*self.names, ssd.name], ssd

    def set_budget(self, name: str, nbytes: int) -> None:
        """Another budget for a tier, while forwards may run.

        Pages that live there and do not fit any more, beside slots for pages that pass through, move to a tier below
        for good; the others stay, evenly spread. When the top tier has room for all pages, they live there from now on.

        Raises:
            TierError: no tier below has room for what must move, a CUDA graph needs it where it is, or there is no tier
                of this name; the budget stays.
        """
        if name == "ssd" and self.ssd is not None:
            if nbytes < self.ssd.held_bytes:
                raise TierError(f"tiers.ssd.budget = {nbytes}: {self.ssd.held_bytes} bytes of pages live there")
            self.ssd.capacity_bytes = nbytes
            return
        level = next((level for level in self.levels if level.tier.name == name), None)
        if level is None:
            raise TierError(f"tiers.{name}: this model has the tiers {', '.join(self.names)}")
        with self.encoding:  # no page is added meanwhile
            self._finish_arrival()
            moves = self._new_homes(level, self._too_many(level, nbytes))
            if moves and self._captured:
                raise TierError(
                    f"tiers.{name}.budget = {nbytes}: a CUDA graph has recorded where the pages lie, they "
                    "cannot move; choose the budget before the capture, or wrap the model anew"
                )
            level.room = level.tier.capacity_bytes  # what leaves makes room for pages that pass through
            for page, home in moves:
                self._move(page, home)
            with self._locked:
                self._begin()
                for key in level.resize(nbytes):
                    self._evict(level, key)
                level.tier.shrink()
                level.tier.peak_bytes = level.tier.held_bytes
                self._half_done = False
                self._tell()
            self._settle_all()

    def _settle_all(self) -> None:
        """Where the top tier has room for every page, they live there from now on."""
        with self._locked:
            self._collect()
            below = [page for page in self.pages.values() if page.home > 0]
            nbytes = sum(page.nbytes for page in self.pages.values())
        if nbytes > self.levels[0].tier.capacity_bytes:
            return
        for page in below:
            self._move(page, 0)
        self.collect()

    def _too_many(self, level: Level, nbytes: int) -> list[Page]:
        """The pages that must find another home for a budget of `nbytes`."""
        with self._locked:
            self._collect()
            living = {key: slot.page for key, slot in level.slots.items() if slot.at_home}
            passing = self._passing_bytes()
            travel = any(page.home > level.index for page in self.pages.values())
        if level.home_bytes + travel * passing <= nbytes:
            return []
        stay = set(spread(list(living), {key: page.nbytes for key, page in living.items()}, nbytes - passing))
        return [page for key, page in living.items() if key not in stay]

    def _passing_bytes(self) -> int:
        return _PASSING_PAGES * max((page.nbytes for page in self.pages.values()), default=0)

    def _new_homes(self, level: Level, pages: Sequence[Page]) -> list[tuple[Page, int]]:
        """For each page the first tier below `level` that has room, beside slots for pages from further down."""
        homes = self._first_homes(level, pages, passing=0)
        deepest = max((home for _, home in homes), default=0)
        deepest = max([deepest, *(page.home for page in self.pages.values())])
        if deepest > level.index + 1:
            homes = self._first_homes(level, pages, passing=self._passing_bytes())
        return homes

    def _first_homes(self, level: Level, pages: Sequence[Page], *, passing: int) -> list[tuple[Page, int]]:
        """Leaving `passing` bytes in every memory tier that has one below it."""
        last = len(self.names) - 1
        room = {
            lower.index: lower.tier.capacity_bytes - lower.home_bytes - passing * (lower.index < last)
            for lower in self.levels[level.index + 1 :]
        }
        cost = dict.fromkeys(room, 0)
        if self.ssd is not None:
            ssd = len(self.levels)
            room[ssd], cost[ssd] = self.ssd.capacity_bytes - self.ssd.held_bytes, HEADER_BYTES
        homes = []
        for page in pages:
            home = next((index for index in room if room[index] >= page.nbytes + cost[index]), None)
            if home is None:
                raise TierError(
                    f"{page.key}: no tier below {level.tier.name} has room for {page.nbytes} more bytes; "
                    "raise its budget first, or enable tiers.ssd"
                )
            room[home] -= page.nbytes + cost[home]
            homes.append((page, home))
        return homes

    def _move(self, page: Page, home: int) -> None:
        """Give a page another home, unless it was dropped."""
        owner, retired = Owner(self), self.retired  # the page stays, whatever becomes of its owners meanwhile
        claims = (owner.claim,)
        try:
            if self._share(owner, page):
                self._take_home(page, home, partial(self._read_home, page))
        finally:
            retired += claims  # no call: Ctrl-C cannot come in between

    def _read_home(self, page: Page, target: torch.Tensor) -> None:
        """Copy a page from where it lives; returns when that is done."""
        if page.home == len(self.levels):
            staging = torch.empty(page.nbytes, dtype=torch.uint8, device="cpu")
            self.ssd.read(page.key, staging)
            target.copy_(staging)
        else:
            target.copy_(self.levels[page.home].slots[page.key].buffer.tensor)

    def share(self, keys: Collection[str]) -> Owner:
        """One more owner of these pages."""
        owner = Owner(self)
        for key in keys:
            self._share(owner, self.pages[key])
        return owner

    def _share(self, owner: Owner, page: Page) -> bool:
        """Whether the page is still there to be owned."""
        owner.claim.keys.append(page.key)
        with self._locked:
            if self.pages.get(page.key) is not page:
                return False
            page.owners.add(owner.claim)
            return True

    def retire(self, owner: Owner) -> None:
        """An owner gives up its pages, as it does when it is collected. Takes no lock: safe in a finalizer."""
        self.retired.append(owner.claim)

    def collect(self) -> None:
        """Drop the pages that have no owner now, not at the next access."""
        with self._locked:
            self._collect()

    def _collect(self) -> None:
        self._begin()
        while self._lost:
            self._give_back(self._lost[0])
            self._lost.popleft()
        while self.retired:
            for key in self.retired[0].keys:
                page = self.pages.get(key)
                if page is not None:
                    page.owners.discard(self.retired[0])
                    if not page.owners:
                        self._drop(page)
            self.retired.popleft()
        self._half_done = False

    def _drop(self, page: Page) -> None:
        for level in self.levels:
            if level.index < page.home:
                level.policy.forget(page.key)
            if page.key in level.slots:
                self._evict(level, page.key)
        if page.home == len(self.levels):
            self.ssd.drop(page.key)
        del self.pages[page.key]  # no call in between
        self._travellers -= page.home > 0

    def close(self) -> None:
        """Drop every page, stop the threads, remove the files. Calling it twice is fine.

        Threads that wait for a page get a TierError; a lease that is held stays valid to its end.
        """
        with self._locked:
            self.closed = True
            self._tell()
        self._workers.stop()
        with self._locked:
            self._begin()
            self.retired.clear()
            for page in list(self.pages.values()):
                self._drop(page)
            for level in self.levels:
                level.tier.trim()
            self._half_done = False
        if self.ssd is not None:
            self.ssd.close()

    def _check_open(self, key: str) -> None:
        if self.closed:
            raise TierError(
                f"{key}: the model was closed, its pages are gone; wrap it again, or call unwrap() before "
                "close() to keep the weights"
            )

    # -- decisions ----------------------------------------------------------------------------------------------------

    @property
    def _locked(self) -> threading.RLock:
        """The lock, for a `with`, never inside of another one: a thread that has it was interrupted while it left."""
        lock = self._lock
        while lock._is_owned():
            lock.release()
        return lock

    def _begin(self) -> None:
        """Decisions begin: under the lock, and `_half_done` is cleared when all of them are made."""
        if self._half_done:
            self._start_anew()
        self._half_done = True

    def _start_anew(self) -> None:
        """After an interrupted decision: policies forget, and every copy leaves as soon as it is not in use."""
        for level in self.levels:
            level.policy.reset()
            for key, slot in list(level.slots.items()):
                if not slot.at_home or slot.page.home != level.index:
                    self._evict(level, key)
            level.fit()
        self._half_done = False
        self._tell()

    def _tell(self) -> None:
        """Under the lock: something has changed, whoever waits should look."""
        while self._bells:
            self._bells.popleft().release()

    def _listen(self) -> LockType:
        """Under the lock: a bell that rings at the next change, to be waited for without the lock."""
        bell = allocate_lock()
        bell.acquire()
        self._bells.append(bell)
        return bell

    # -- leases -------------------------------------------------------------------------------------------------------

    def capturing(self) -> bool:
        """Whether a CUDA graph records what this thread computes; if so, pages stay where they are from now on.

        Raises:
            TierError: pages move, so that a graph could not find them again.
        """
        if self.levels[0].stream is None or not torch.cuda.is_current_stream_capturing():
            return False
        if self._travellers:
            raise TierError(
                "a CUDA graph cannot record a pass whose pages move; give tiers.gpu.budget room for all "
                f"pages ({sum(page.nbytes for page in self.pages.values())} bytes), or record parts of the "
                "model without VB layers"
            )
        self._captured = True
        return True

    def begin_pass(self) -> None:
        """The next lease starts a new pass over the model."""
        with self._locked:
            self._collect()
            self._begin()
            for level in self.levels:
                level.policy.begin_pass()
            self._half_done = False

    def lease(self, keys: Sequence[str]) -> "Lease":
        """Borrow pages in the top tier: `with stack.lease(keys) as tensors` yields one dict of views for each key.

        The views are valid inside the `with` block only, unless the page's home is the top tier.

        Raises:
            TierError: (on entering) a page cannot be read or verified, cannot fit beside what this thread has leased,
                or was retired.
        """
        return Lease(self, keys)

    def _acquire(self, lease: "Lease") -> None:
        lock = self._lock
        if lock._is_owned():
            lock = self._locked
        while True:
            with lock:
                if self.closed:
                    self._check_open(lease.keys[0])
                if self.retired or self._lost:
                    self._collect()
                pages = [self._page(key) for key in lease.keys]
                if self._half_done:
                    self._start_anew()
                if self._has_room(pages) or (self._shed_slots(pages) and self._has_room(pages)):
                    self._half_done = True
                    self._admit(lease, pages)
                    if len(self.names) > 1:
                        self._look_ahead()
                    self._half_done = False
                    return
                self._check_hope(pages)
                bell = self._listen()
            bell.acquire(timeout=_LOOK_SECONDS)

    def _page(self, key: str) -> Page:
        page = self.pages.get(key)
        if page is None:
            raise TierError(f"{key}: its page was dropped: the layer holds another weight now; run the forward again")
        return page

    def _has_room(self, pages: Sequence[Page]) -> bool:
        """Whether all fit beside what is leased: then every decision about them succeeds."""
        top, needed = self.levels[0], 0
        for page in pages:
            if page.home and page.key not in top.leased:
                here = top.slots.get(page.key)
                needed += here.charge if here else page.nbytes
            if page.home > 1 and self._blocked(page):
                return False
        if top.leased:
            needed += sum(top.slots[key].charge for key in top.leased)
        return needed <= top.policy.capacity_bytes

    def _shed_slots(self, pages: Sequence[Page]) -> bool:
        """Let copies leave that take whole slots and that nobody uses: they come again in their own sizes."""
        top, shed = self.levels[0], False
        self._half_done = True
        for page in pages:
            slot = top.slots.get(page.key)
            if slot is not None and slot.charge > page.nbytes and not slot.holders:
                top.policy.forget(page.key)
                self._evict(top, page.key)
                shed = True
        self._half_done = False
        return shed

    def _blocked(self, page: Page, above: int = 0) -> Level | None:
        """The tier between the page's home and level `above` that has no room for it, if there is one."""
        for level in self.levels[above + 1 : page.home]:
            if page.nbytes > level.policy.capacity_bytes:
                return level
        return None

    def _check_hope(self, pages: Sequence[Page]) -> None:
        """Waiting helps if only other threads hold what is in the way, or pages are about to leave for another tier."""
        top, me = self.levels[0], threading.get_ident()
        mine = [key for key in top.leased if any(holder.thread == me for holder in top.slots[key].holders)]
        blocked = next((level for level in map(self._blocked, pages) if level), None)
        if top.leased and not mine and blocked is None:
            return
        level = blocked or top
        if level.home_bytes > sum(slot.page.nbytes for slot in level.slots.values() if slot.at_home):
            return
        beside = f", and this thread has leased {', '.join(mine)}" if mine and not blocked else ""
        raise TierError(
            f"{' + '.join(page.key for page in pages)}: {sum(page.nbytes for page in pages)} bytes do not "
            f"fit into tiers.{level.tier.name}.budget = {level.tier.capacity_bytes} ({level.home_bytes} "
            f"bytes live there{beside}); raise the budget"
        )

    def _admit(self, lease: "Lease", pages: Sequence[Page]) -> None:
        """Decide on every page; what is missing is filled by whoever needs it first."""
        top = self.levels[0]
        busy = top.leased.union(page.key for page in pages if page.home)
        for page in pages:
            slot, decision = self._find(0, page, busy)
            lease.slots.append(slot)
            slot.holders.add(lease.borrower)
            if page.home:
                top.leased.add(page.key)
            if decision.hit:
                page.hits += 1
            else:
                page.misses += 1
                page.prefetched += decision.prefetched

    def _find(self, index: int, page: Page, busy: Collection[str]) -> tuple[_Slot, Decision]:
        level = self.levels[index]
        if page.home == index:
            return level.slots[page.key], Decision(page.key, hit=True)
        decision = level.policy.access(page.key, page.nbytes, busy)
        return self._place(level, page, decision), decision

    def _place(self, level: Level, page: Page, decision: Decision) -> _Slot:
        """Act on a decision: evict, then find or make the slot, and its source in the level below."""
        for key in decision.evict:
            self._evict(level, key)
        slot = level.slots.get(page.key)
        if slot is None:
            slot = level.slots[page.key] = _Slot(page, level, decision.charge)
            level.pending[slot] = None
            if level.index + 1 < len(self.levels):
                # nothing there is busy: a source that is evicted stays until it has been copied
                slot.source, _ = self._find(level.index + 1, page, ())
                slot.source.holders.add(slot)
        return slot

    def _look_ahead(self) -> None:
        for level in self.levels:
            for decision in level.policy.ahead(level.leased):
                page = self.pages.get(decision.key)
                if page is None or self._blocked(page, level.index):
                    for key in decision.evict:
                        self._evict(level, key)
                    level.policy.forget(decision.key)
                    continue
                slot = self._place(level, page, decision)
                if slot.state is not _State.QUEUED or self._issue(slot):
                    continue
                if self._share_cores and self.ssd is not None and self.ssd.mode == "buffered":
                    self._workers.give(self.ssd.read_ahead, page.key)
                else:
                    self._workers.give(self._fetch, slot)

    def _evict(self, level: Level, key: str) -> None:
        """The page leaves the level; its buffer does when nobody uses it any more."""
        slot = level.slots[key]
        slot.doomed = True
        level.leased.discard(key)
        self._free(slot)
        del level.slots[key]
        self._tell()

    def _free(self, slot: _Slot) -> None:
        """Take back what a doomed slot has, unless it is held, or being filled: then this is called again."""
        if slot.holders or slot.state is _State.LOADING:
            return
        if slot.state is _State.QUEUED:
            slot.level.pending.pop(slot, None)
            self._return_source(slot)
            slot.state = _State.FAILED
        self._free_buffer(slot)

    def _free_buffer(self, slot: _Slot) -> None:
        if slot.at_home:
            if slot.buffer is not None:
                slot.level.tier.discard(slot.buffer)  # views that the caller still has keep the memory alive
                slot.buffer = None
            for key in slot.level.move_out(slot):
                self._evict(slot.level, key)
        elif slot.buffer is not None:
            slot.level.tier.release(slot.buffer)  # no call in between
            slot.buffer = None
            slot.level.tier.shrink()
            if self.closed:
                slot.level.tier.trim()
        slot.tensors = {}

    def _release(self, lease: "Lease") -> None:
        lock = self._lock
        if lock._is_owned():
            lock = self._locked
        with lock:
            if self._half_done:
                self._start_anew()
            self._half_done = True
            self._give_back(lease)
            self._half_done = False

    def _give_back(self, lease: "Lease") -> None:
        for slot in lease.slots:
            if slot.level.stream is not None and slot.buffer is not None and not slot.at_home:
                slot.buffer.fence(torch.cuda.current_stream(slot.level.tier.device))
            self._return(slot, lease.borrower)
        lease.slots = []
        if self._bells:
            self._tell()

    def _return(self, slot: _Slot, holder: "_Slot | _Borrower") -> None:
        if slot.state is _State.LOADING and slot.loader == threading.get_ident():
            self._fail(slot, KeyboardInterrupt())  # this thread began and is not at it any more
        slot.holders.discard(holder)
        if slot.holders:
            return
        level = slot.level
        if slot.doomed:
            self._free(slot)
        elif slot.state is _State.QUEUED:  # nobody is going to fill it
            level.policy.forget(slot.page.key)
            self._evict(level, slot.page.key)
        else:
            level.leased.discard(slot.page.key)

    def _return_source(self, slot: _Slot) -> None:
        if slot.source is not None:
            self._return(slot.source, slot)
            slot.source = None

    # -- movement -----------------------------------------------------------------------------------------------------

    def _await_all(self, slots: Sequence[_Slot]) -> None:
        """Wait for every slot, earliest first, also when one fails: others wait for the room that they are promised."""
        failed: Exception | None = None
        for slot in sorted(slots, key=lambda slot: slot.ticket):
            try:
                self._await_counted(slot)
            except Exception as error:  # noqa: BLE001 - raised below
                failed = failed or error
        if failed is not None:
            raise failed

    def _await_counted(self, slot: _Slot) -> None:
        start = time.perf_counter_ns()
        try:
            self._await(slot)
        finally:
            with self._locked:
                slot.page.wait_ns += time.perf_counter_ns() - start

    def _await(self, slot: _Slot) -> None:
        """Return when the slot's bytes are there; moves them in this thread if nobody has begun."""
        while True:
            with self._locked:
                claimed = self._claim(slot)
                if slot.state is not _State.LOADING or claimed:
                    break
                bell = self._listen()
            bell.acquire(timeout=_LOOK_SECONDS)
        if claimed:
            self._load(slot)
        elif slot.state is _State.FAILED:
            raise TierError(str(slot.error)) from slot.error

    def _claim(self, slot: _Slot) -> bool:
        if slot.state is not _State.QUEUED:
            return False
        slot.loader = threading.get_ident()
        slot.state = _State.LOADING
        return True

    def _fetch(self, slot: _Slot) -> None:
        """A worker's turn: what fails here is raised to whoever leases the page."""
        with self._locked:
            claimed = self._claim(slot)
        if claimed:
            with contextlib.suppress(Exception):  # kept in slot.error; the page is read again when it is demanded
                self._load(slot)

    def _load(self, slot: _Slot) -> None:
        try:
            if slot.source is not None:
                self._await(slot.source)
            self._allocate(slot)
            self._copy(slot)
            slot.tensors = unpack(slot.view, slot.page.layout)
        except BaseException as error:
            with self._locked:
                self._begin()
                self._fail(slot, error)
                self._half_done = False
            raise
        with self._locked:
            self._begin()
            self._return_source(slot)
            slot.state = _State.READY
            if slot.doomed:
                self._free(slot)
            self._half_done = False
            self._tell()

    def _fail(self, slot: _Slot, error: BaseException) -> None:
        """The slot's bytes do not come: it is as if it had never been decided. Whoever waits for it gets the error."""
        if slot.state is not _State.LOADING:
            return
        level, key = slot.level, slot.page.key
        if not isinstance(error, Exception):  # Ctrl-C: this thread gets it, those that wait get an error
            error = TierError(f"{key}: its copy was interrupted; run the forward again")
        slot.error, slot.doomed = error, True
        level.pending.pop(slot, None)
        self._return_source(slot)
        if level.slots.get(key) is slot:
            level.policy.forget(key)
            level.leased.discard(key)
            del level.slots[key]
        self._free_buffer(slot)
        slot.state = _State.FAILED
        self._tell()

    def _issue(self, slot: _Slot) -> bool:
        """Start a copy to the GPU here and now, if nothing has to be waited for; a worker takes it otherwise."""
        source = slot.source
        if slot.level.stream is None or source is None or source.state is not _State.READY or not source.buffer.pinned:
            return False
        try:
            slot.loader, slot.state = threading.get_ident(), _State.LOADING
            if not self._try_allocate(slot):
                slot.state = _State.QUEUED
                return False
            self._copy_memory(slot, source)
            self._count_moved(slot)
            slot.tensors = unpack(slot.view, slot.page.layout)
            self._return_source(slot)
            slot.state = _State.READY
        except BaseException as error:
            self._fail(slot, error)
            if not isinstance(error, Exception):
                raise
        return True

    def _allocate(self, slot: _Slot) -> None:
        """Give the slot its buffer, once there is room beside what earlier slots have been promised."""
        while True:
            with self._locked:
                self._check_open(slot.page.key)
                if slot.doomed and not slot.holders:
                    raise TierError(f"{slot.page.key}: no longer wanted")
                if self._try_allocate(slot):
                    break
                bell = self._listen()
            bell.acquire(timeout=_LOOK_SECONDS)

    def _try_allocate(self, slot: _Slot) -> bool:
        level = slot.level
        earlier = takewhile(lambda other: other is not slot, level.pending)
        slot.buffer = level.tier.allocate(slot.charge, reserved_bytes=sum(e.charge for e in earlier))
        if slot.buffer is not None:
            del level.pending[slot]
        return slot.buffer is not None

    def _copy(self, slot: _Slot) -> None:
        page, source = slot.page, slot.source
        if source is None:
            slot.buffer.synchronize()
            recorder = self.recorder
            began = None if recorder is None else recorder.mark_on(None)
            self._read_file(page, slot.view)
            if recorder is not None:
                recorder.note(self._link(slot), page.key, began, recorder.mark_on(None), page.nbytes)
        else:
            self._copy_memory(slot, source)
        with self._locked:
            self._count_moved(slot)

    def _read_file(self, page: Page, target: torch.Tensor) -> None:
        """Fill a copy from the page's file, or from wherever it has moved while this thread was on its way there."""
        moves = page.moves
        try:
            self.ssd.read(page.key, target)
        except TierError:
            with self._locked:
                home = self.levels[page.home].slots.get(page.key) if page.home < len(self.levels) else None
                if home is None and page.moves == moves:
                    raise
            if home is None:
                self._read_file(page, target)
            else:
                target.copy_(home.buffer.tensor)

    def _count_moved(self, slot: _Slot) -> None:
        slot.page.bytes_moved[self._link(slot)] += slot.page.nbytes

    def _link(self, slot: _Slot) -> str:
        index = slot.level.index
        return f"{self.names[index + 1]}>{self.names[index]}"

    def _copy_memory(self, slot: _Slot, source: _Slot) -> None:
        stream, nbytes = slot.level.stream, slot.page.nbytes
        target, origin = slot.view, source.view
        recorder = self.recorder
        if stream is None:
            began = None if recorder is None else recorder.mark_on(None)
            target.copy_(origin)
            if recorder is not None:
                recorder.note(self._link(slot), slot.page.key, began, recorder.mark_on(None), nbytes)
            return
        for fence in slot.buffer.fences.values():  # kernels that still read this buffer
            stream.wait_event(fence)
        slot.buffer.fences.clear()
        began = None if recorder is None else recorder.mark_on(stream)
        if source.buffer.pinned:
            with torch.cuda.stream(stream):
                target.copy_(origin, non_blocking=True)
        else:
            slot.level.relay.copy(target, origin, stream)
        slot.arrived = source.buffer.fence(stream)  # the source is not refilled before its copy has left
        slot.buffer.fences[stream.cuda_stream] = slot.arrived  # and this one not given away before it has arrived
        if recorder is not None:
            recorder.note(self._link(slot), slot.page.key, began, recorder.mark_on(stream), nbytes)

    # -- fork ---------------------------------------------------------------------------------------------------------

    def _after_fork(self) -> None:
        """In a forked child: pages in memory and on the ssd are there, the threads and what they moved are not."""
        self._start()
        for level in self.levels:
            level.policy.reset()
            level.pending.clear()
            level.leased.clear()
            level.slots = {key: slot for key, slot in level.slots.items() if slot.at_home}
            level.living, level.home_bytes = dict.fromkeys(level.slots.values()), 0
            for slot in level.slots.values():
                slot.holders.clear()
                level.home_bytes += slot.page.nbytes
            level.tier.forget([slot.buffer for slot in level.slots.values()])


class _Borrower:
    """Who holds a slot: one lease. Apart from the lease, so that a lost lease can be collected."""

    __slots__ = ("thread",)

    def __init__(self) -> None:
        self.thread = threading.get_ident()


class Lease:
    """Pages borrowed from a stack, for one `with` block."""

    slots: Sequence[_Slot] = ()
    note: LeaseNote | None = None

    def __init__(self, stack: TierStack, keys: Sequence[str]) -> None:
        self.stack, self.keys = stack, keys

    def __enter__(self) -> list[dict[str, torch.Tensor]]:
        self.stack.capturing()
        recorder = self.stack.recorder
        if recorder is not None:
            self.note = recorder.lease(self.keys)
        self.slots, self.borrower = [], _Borrower()
        try:
            self.stack._acquire(self)
            missing = [slot for slot in self.slots if slot.state is not _State.READY]
            if missing:
                self.stack._await_all(missing)
            for slot in self.slots:
                if slot.arrived is not None:
                    torch.cuda.current_stream(slot.level.tier.device).wait_event(slot.arrived)
            if self.note is not None:
                self.note.arrived()
            return [slot.tensors for slot in self.slots]
        except BaseException:
            self.stack._release(self)
            raise

    def __exit__(self, *exc_info: object) -> None:
        if self.note is not None:
            self.note.done()
        if self.slots:
            try:
                self.stack._release(self)
            except BaseException:  # Ctrl-C, and whoever keeps its frames keeps this lease
                self.stack._release(self)
                raise

    def __del__(self) -> None:
        if self.slots:  # Ctrl-C came between entering and the `with`, or before the exit began
            self.stack._lost.append(self)


def detached_stack() -> TierStack:
    """Where layers live that were unpickled apart from their wrapper: CPU memory, without a budget."""
    return TierStack([Level(MemoryTier("cpu", torch.device("cpu"), 1 << 62), LRUPolicy(0))])


_stacks: "weakref.WeakSet[TierStack]" = weakref.WeakSet()
_forking: list[TierStack] = []
_fork = threading.Lock()


def _before_fork() -> None:
    _fork.acquire()
    _forking.extend(_stacks)
    for stack in _forking:
        stack._lock.acquire()


def _after_fork_in_parent() -> None:
    while _forking:
        _forking.pop()._lock.release()
    _fork.release()


def _after_fork_in_child() -> None:
    while _forking:
        _forking.pop()._after_fork()
    _fork.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
