"""Pages, the slots that they have in tiers, and the levels of a stack.

A slot is a page's place in a tier: QUEUED (decided, nothing moved), LOADING, READY or FAILED. A page that is evicted
while its bytes are still coming, or in use, is `doomed`: its room is freed when the copy has ended and the last holder
has released it; threads that wait for room wait for that.
"""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import torch

from vbrt.errors import TierError
from vbrt.formats.page import PageLayout
from vbrt.residency.lru import LRUPolicy
from vbrt.residency.policy import Policy
from vbrt.tiers.protocols.carrier import Carrier
from vbrt.tiers.protocols.tier import Room, Tier
from vbrt.tiers.stack.page_counters import Tally
from vbrt.tiers.stack.stack_lock import Guard
from vbrt.tiers.storage.pinned_staging import Relay

__all__ = ["Borrower", "Claim", "Level", "Owner", "Page", "Slot", "State", "slot_below"]


class State(Enum):
    """How far a slot has got."""

    QUEUED = auto()
    LOADING = auto()
    READY = auto()
    FAILED = auto()


@dataclass(slots=True, eq=False)
class Page:
    """One plane of one layer, and the counters of its life.

    Attributes:
        home: the index of its tier, 0 on top.
        passes: False if only rows of it are read, where it lives: it needs no slot in the tiers above.
        tally: of its layer, which counts what the page counts; None where a layer has a page or two.
        put: the claim of an owner whose kernels read the page where it lies: it is not rehomed while the claim holds.
        pinned: whether its host memory is page-locked, where a tier's is.
        due: tokens of rewrites that are expected; while there are any, no lease and no copy of the page begins.
        borrowers: of leases of the page, where pages are rewritten.
        readers: slots that threads are copying the page into.
        refreshed: copies that are held while they get the page's new bytes.
        writer: the thread that rewrites the page now; 0 without one.
    """

    key: str
    layout: PageLayout
    home: int
    passes: bool = True
    owners: "set[Claim]" = field(default_factory=set)
    tally: Tally | None = None
    put: "Claim | None" = None
    pinned: bool = True
    refreshed: "list[Slot]" = field(default_factory=list)
    due: "set[object]" = field(default_factory=set)
    writer: int = 0
    borrowers: "set[Borrower]" = field(default_factory=set)
    readers: "set[Slot]" = field(default_factory=set)
    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    wait_ns: int = 0
    bytes_moved: dict[str, int] = field(default_factory=dict)  # by link, such as "ssd>cpu"
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = self.layout.nbytes


class Claim(weakref.ref):
    """An owner's hold on its pages. Joins the retired claims when the owner is collected: in C, without a call in
    between."""

    __slots__ = ("keys",)
    __eq__, __hash__ = object.__eq__, object.__hash__  # the owner's would do, but it is gone when they count


class _Retiring(Protocol):
    retired: deque[Claim]


class _Books(Protocol):
    levels: "list[Level]"


class Owner:
    """Owns pages of one stack: a page without owners is retired at the next access. `tally`: of the pages that are
    added under it."""

    __slots__ = ("__weakref__", "claim", "tally")

    def __init__(self, stack: _Retiring, tally: Tally | None = None) -> None:
        self.tally = tally
        self.claim = Claim(self, stack.retired.append)
        self.claim.keys = []


class Borrower:
    """Holds slots for one lease; an object of its own, so that a lost lease can be collected."""

    __slots__ = ("thread",)

    def __init__(self) -> None:
        self.thread = threading.get_ident()


_tickets = itertools.count()


class Slot:
    """A page's place in a tier. `holders`: leases, and slots above that are filled from this one."""

    __slots__ = (
        "arrived",
        "at_home",
        "charge",
        "doomed",
        "error",
        "holders",
        "level",
        "loader",
        "page",
        "room",
        "source",
        "state",
        "tensors",
        "ticket",
    )

    def __init__(self, page: Page, level: "Level", charge: int = 0, *, at_home: bool = False) -> None:
        self.page, self.level = page, level
        self.at_home = at_home  # True if this is the page's home
        self.charge = charge or page.nbytes + level.overhead_bytes  # of its room: a ring's slot may be larger
        self.ticket = next(_tickets)  # the order of decisions
        self.state = State.QUEUED
        self.loader = 0  # the thread that moves the bytes
        self.source: Slot | None = None
        self.room: Room | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.arrived: torch.cuda.Event | None = None
        self.error: BaseException | None = None
        self.holders: set[Slot | Borrower] = set()
        self.doomed = False

    @property
    def tier(self) -> Tier:
        """Where the page is."""
        return self.level.tier

    @property
    def view(self) -> torch.Tensor:
        """The page's bytes in a memory."""
        return self.room.tensor[: self.page.nbytes]


class Level:
    """One tier of the stack with its policy and its slots. Everything is called under the stack's lock.

    Args:
        tier: any that keeps the protocol.
        policy: decides on copies of pages from further down; None: there are none, those pages pass by.
    """

    def __init__(self, tier: Tier, policy: Policy | None = None) -> None:
        self.tier, self.overhead_bytes = tier, tier.overhead_bytes
        self.keeps_copies = policy is not None
        self.policy = policy = LRUPolicy(0) if policy is None else policy
        self.guard = Guard()  # a stack sets its own, and the index
        self.index = 0
        self.copies_bytes = policy.capacity_bytes  # room for copies, less where pages at home need it
        self.home_bytes = 0
        self.living: dict[Slot, None] = {}  # slots of pages that live here, or are on their way in or out
        self.slots: dict[str, Slot] = {}
        self.leased: set[str] = set()  # copies that threads use: the policy must let them stay
        self.pending: dict[Slot, None] = {}  # decided and without room yet, earliest first
        self.leaving: set[Slot] = set()  # evicted, with room that is still filled or held
        self.stream = torch.cuda.Stream(tier.device) if tier.device.type == "cuda" else None
        self.relay = Relay(tier.fallbacks)  # for pages in host memory that is not page-locked
        self.lanes: Carrier | None = None  # where pages come over the links of several GPUs
        self._fit()

    # -- room ---------------------------------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """Bytes in which pages can still be given a home; copies that are there are evicted for them."""
        return self.tier.capacity_bytes - self.tier.stuck_bytes - self.home_bytes

    def brings(self, source: Slot) -> bool:
        """True if lanes bring the page of a slot below into this level."""
        return self.lanes is not None and self.lanes.take(source)

    def check(self) -> None:
        """Verify what lanes have brought since the last time. Raises TierError, on all ranks."""
        if self.lanes is not None:
            self.lanes.check()

    def resize(self, nbytes: int) -> None:
        """Take another budget, in which the pages that live here fit, and evict the copies that do not."""
        self.tier.capacity_bytes = self.copies_bytes = nbytes
        self._evict_all(self.policy.resize(nbytes - self.home_bytes))

    def move_in(self, slot: Slot) -> None:
        """Count a page that will live here, and evict the copies that are in its way."""
        if slot not in self.living:  # no call in between
            self.living[slot] = None
            self.home_bytes += slot.charge
        self._evict_all(self._fit())

    def recount(self, slot: Slot) -> None:
        """Count what a page that lives here really takes: a store may need less than was reserved."""
        nbytes = slot.room.nbytes
        if slot in self.living:  # no call in between
            self.home_bytes += nbytes - slot.charge
            slot.charge = nbytes

    def _move_out(self, slot: Slot) -> None:
        if slot in self.living:  # no call in between
            del self.living[slot]
            self.home_bytes -= slot.charge
        self._evict_all(self._fit())

    def _fit(self) -> tuple[str, ...]:
        """Resize the policy to the room beside pages at home; return the copies to evict."""
        room = min(self.copies_bytes, self.free_bytes)
        return () if room == self.policy.capacity_bytes else self.policy.resize(room)

    def exceeds_until_copied(self) -> bool:
        """True if more is held than a lowered budget, and other threads' copies end soon that free room: those of pages
        that were evicted meanwhile and that no lease waits for."""
        if self.tier.held_bytes <= self.tier.capacity_bytes:
            return False
        me, leaving = threading.get_ident(), [slot for slot in self.leaving if not slot.holders]
        return any(slot.room is not None and slot.state is State.LOADING and slot.loader != me for slot in leaving)

    def make_way(self, reserve: Callable[[], bool]) -> None:
        """Evict copies that nobody uses, one by one, until `reserve` returns True.

        It is for a slot that was evicted while a lease waits for it, as a budget was lowered: no policy counts it, so
        where policies keep the room full nothing else would ever free its bytes.
        """
        for key in [key for key, slot in self.slots.items() if not (slot.at_home or slot.holders)]:
            self.policy.remove(key)
            self.evict(key)
            if reserve():
                return

    # -- the end of slots ---------------------------------------------------------------------------------------------

    def evict(self, key: str) -> None:
        """Take a page out of the level; its room is freed when nobody uses it any more."""
        slot = self.slots[key]
        slot.doomed = True
        self.leased.discard(key)
        self.free(slot)
        del self.slots[key]
        self.guard.ring()

    def _evict_all(self, keys: tuple[str, ...]) -> None:
        for key in keys:
            self.evict(key)

    def evict_copies(self) -> None:
        """Evict every copy, and every page whose home is elsewhere by now; reset the policy."""
        self.policy.reset()
        for key, slot in list(self.slots.items()):
            if not slot.at_home or slot.page.home != self.index:
                self.evict(key)
        self._fit()

    def free(self, slot: Slot) -> None:
        """Free what a doomed slot has, unless it is held, or being filled: then this is called again."""
        if slot.holders or slot.state is State.LOADING:
            self.leaving.add(slot)
            return
        if slot.state is State.QUEUED:
            self.pending.pop(slot, None)
            self.release_source(slot)
            slot.state = State.FAILED
        self._free_room(slot)

    def _free_room(self, slot: Slot) -> None:
        self.leaving.discard(slot)
        if slot.at_home:
            if slot.room is not None:
                self.tier.free(slot.room, reuse=False)  # views that the caller still has keep the memory alive
                slot.room = None
            self._move_out(slot)
        elif slot.room is not None:
            self.tier.free(slot.room, reuse=True)  # no call in between
            slot.room = None
            self.tier.trim(0 if self.guard.closed else self.tier.capacity_bytes)
        slot.tensors = {}

    def release(self, slot: Slot, holder: Slot | Borrower) -> None:
        """End a holder's use of a slot of this level."""
        if slot.state is State.LOADING and slot.loader == threading.get_ident():
            self.cancel(slot, KeyboardInterrupt())  # this thread began and is not at it any more
        slot.holders.discard(holder)
        if slot.holders:
            return
        if slot.doomed:
            self.free(slot)
        elif slot.state is State.QUEUED:  # nobody is going to fill it
            self.policy.remove(slot.page.key)
            self.evict(slot.page.key)
        else:
            self.leased.discard(slot.page.key)

    def release_source(self, slot: Slot) -> None:
        """End a slot's use of the slot below that it is filled from, if it has one."""
        source = slot.source
        if source is not None:
            source.level.release(source, slot)
            slot.source = None

    def cancel(self, slot: Slot, error: BaseException) -> None:
        """Cancel a load, as if it had never been decided. Threads that wait for the slot get the error."""
        if slot.state is not State.LOADING:
            return
        key = slot.page.key
        if not isinstance(error, Exception):  # Ctrl-C: this thread gets it, those that wait get an error
            error = TierError(f"{key}: its copy was interrupted; run the forward again")
        slot.error, slot.doomed = error, True
        self.pending.pop(slot, None)
        self.release_source(slot)
        if self.slots.get(key) is slot:
            self.policy.remove(key)
            self.leased.discard(key)
            del self.slots[key]
        self._free_room(slot)
        slot.state = State.FAILED
        self.guard.ring()

    def after_fork(self) -> None:
        """Keep, in a forked child, what is there: pages at home, without the threads that used them."""
        self.policy.reset()
        self.pending.clear()
        self.leased.clear()
        self.leaving.clear()
        self.slots = {key: slot for key, slot in self.slots.items() if slot.at_home}
        self.living, self.home_bytes = dict.fromkeys(self.slots.values()), 0
        for slot in self.slots.values():
            slot.holders.clear()
            self.home_bytes += slot.charge
        self.tier.after_fork([slot.room for slot in self.slots.values()])


def slot_below(ledger: "_Books", page: Page) -> Slot | None:
    """Return the slot that a page's bytes come from in one step to the top tier: its home in memory, or in a store that
    lanes bring it from, with no tier between that keeps copies; also of a page that lives on top. None if they come in
    another way."""
    between, home = ledger.levels[1 : page.home], ledger.levels[page.home]
    slot = home.slots[page.key]
    if any(level.keeps_copies for level in between) or not (home.tier.memory or ledger.levels[0].brings(slot)):
        return None
    return slot
