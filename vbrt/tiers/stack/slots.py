"""Pages, their slots in tiers, and the levels of a stack.

A slot is a page's place in a tier, with a load state: QUEUED (decided, nothing moved), LOADING, READY or FAILED. A slot
evicted while it is loading or in use is `doomed`: its room is freed once the copy has ended and the last holder has
released it; threads that wait for room wait for that.
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
from vbrt.host import accelerator
from vbrt.residency.lru import LRUPolicy
from vbrt.residency.policy import Policy
from vbrt.tiers.protocols.carrier import Carrier
from vbrt.tiers.protocols.tier import Room, Tier
from vbrt.tiers.stack.page_counters import Tally
from vbrt.tiers.stack.stack_lock import Guard
from vbrt.tiers.storage.pinned_staging import Relay

__all__ = ["Borrower", "Claim", "Level", "Owner", "Page", "Slot", "State", "detour", "slot_below"]


class State(Enum):
    """Load state of a slot."""

    QUEUED = auto()
    LOADING = auto()
    READY = auto()
    FAILED = auto()


@dataclass(slots=True, eq=False)
class Page:
    """Page: one plane of one layer, or of one of its experts, with its counters.

    Attributes:
        home: index of its home tier, 0 on top.
        passes: False if only rows of it are read, in its home: it needs no slot in the tiers above.
        tally: aggregate counters of its layer; None where a layer has a page or two.
        put: claim of an owner whose kernels read the page in place: it is not rehomed while the claim holds.
        pinned: True if its host memory is pinned, in a tier that pins.
        frozen: True if its bytes stay as they are once written, so that processes may share them.
        unseen: True if no lease reads it and no capture has its address: it does not count in `Ledger.changes`.
        due: tokens of expected rewrites; while there are any, no lease and no copy of the page begins.
        borrowers: of open leases of the page, in stacks with rewrites.
        readers: slots that are being filled from the page.
        refreshed: copies that are held for a refresh after a rewrite.
        writer: thread that rewrites the page; 0 without one.
        rewrites: number of rewrites that have begun.
    """

    key: str
    layout: PageLayout
    home: int
    passes: bool = True
    owners: "set[Claim]" = field(default_factory=set)
    tally: Tally | None = None
    put: "Claim | None" = None
    pinned: bool = True
    frozen: bool = False
    unseen: bool = False
    refreshed: "list[Slot]" = field(default_factory=list)
    due: "set[object]" = field(default_factory=set)
    writer: int = 0
    rewrites: int = 0
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
    """Weak reference to an owner, held by its pages. Its callback appends it to the retired claims when the owner is
    collected: in C, without a Python call in between."""

    __slots__ = ("keys",)
    __eq__, __hash__ = object.__eq__, object.__hash__  # by identity: the owner's hash is gone when they are needed


class _Retiring(Protocol):
    retired: deque[Claim]


class _Books(Protocol):
    levels: "list[Level]"


class Owner:
    """Owner of pages in one stack: a page without owners is retired at the next access. `tally`: counters of the pages
    added under this owner."""

    __slots__ = ("__weakref__", "claim", "tally")

    def __init__(self, stack: _Retiring, tally: Tally | None = None) -> None:
        self.tally = tally
        self.claim = Claim(self, stack.retired.append)
        self.claim.keys = []


class Borrower:
    """Holder of slots for one lease; separate from it, so that a lost lease can be collected."""

    __slots__ = ("thread",)

    def __init__(self) -> None:
        self.thread = threading.get_ident()


_tickets = itertools.count()


class Slot:
    """Place of a page in a tier. `holders`: borrowers of leases, and slots above that are filled from this one."""

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
        self.charge = charge or page.nbytes + level.overhead_bytes  # bytes of its room: a ring's slot may be larger
        self.ticket = next(_tickets)  # the order of decisions
        self.state = State.QUEUED
        self.loader = 0  # the thread that moves the bytes
        self.source: Slot | None = None
        self.room: Room | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.arrived: torch.Event | None = None
        self.error: BaseException | None = None
        self.holders: set[Slot | Borrower] = set()
        self.doomed = False

    @property
    def tier(self) -> Tier:
        """Tier of the slot."""
        return self.level.tier

    @property
    def view(self) -> torch.Tensor:
        """The page's bytes, uint8; of a memory tier only."""
        return self.room.tensor[: self.page.nbytes]


class Level:
    """Level of the stack: a tier with its policy and slots. All methods run under the stack's lock.

    Args:
        tier: any class with the `Tier` protocol.
        policy: decides which copies of pages from deeper tiers are cached; None: none, those pages bypass the tier.
    """

    def __init__(self, tier: Tier, policy: Policy | None = None) -> None:
        self.tier, self.overhead_bytes = tier, tier.overhead_bytes
        self.keeps_copies = policy is not None
        self.policy = policy = LRUPolicy(0) if policy is None else policy
        self.guard = Guard()  # a stack sets its own guard, and the index
        self.index = 0
        self.copies_bytes = policy.capacity_bytes  # room for copies, reduced where pages at home need it
        self.home_bytes = 0
        self.living: dict[Slot, None] = {}  # slots of pages at home here, or moving in or out
        self.slots: dict[str, Slot] = {}
        self.leased: set[str] = set()  # copies in use: the policy must not evict them
        self.pending: dict[Slot, None] = {}  # decided, without room yet; earliest first
        self.leaving: set[Slot] = set()  # evicted, with a load or a holder left
        self.stream = accelerator.Stream(tier.device) if accelerator.has_streams(tier.device) else None
        self.relay = Relay(tier.fallbacks)  # for pages in pageable host memory
        self.lanes: Carrier | None = None  # for pages that arrive by more than one copy
        self._fit()

    # -- room ---------------------------------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """Bytes free for new homes; includes copies, which would be evicted."""
        return self.tier.capacity_bytes - self.tier.stuck_bytes - self.home_bytes

    def brings(self, source: Slot) -> bool:
        """True if the carrier copies the page of a lower slot into this level."""
        return self.lanes is not None and self.lanes.take(source)

    def check(self) -> None:
        """Verify the carrier's copies since the last check. Raises TierError, on all ranks."""
        if self.lanes is not None:
            self.lanes.check()

    def resize(self, nbytes: int) -> None:
        """Set a new budget, in which the pages at home fit, and evict the copies that do not."""
        self.tier.capacity_bytes = self.copies_bytes = nbytes
        self._evict_all(self.policy.resize(nbytes - self.home_bytes))

    def move_in(self, slot: Slot) -> None:
        """Charge a page's new home here, and evict copies for it."""
        if slot not in self.living:  # no call in between
            self.living[slot] = None
            self.home_bytes += slot.charge
        self._evict_all(self._fit())

    def recount(self, slot: Slot) -> None:
        """Charge the actual size of a page at home here: a store may need less than was reserved."""
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
        """Resize the policy to the room left by pages at home; return the copies to evict."""
        room = min(self.copies_bytes, self.free_bytes)
        return () if room == self.policy.capacity_bytes else self.policy.resize(room)

    def exceeds_until_copied(self) -> bool:
        """True if a lowered budget is exceeded, and other threads' copies will soon free room: copies into slots that
        were evicted meanwhile and that no lease waits for, and copies that read from evicted slots."""
        if self.tier.held_bytes <= self.tier.capacity_bytes:
            return False
        return any(slot.room is not None and _ends_by_copies(slot) for slot in self.leaving)

    def make_way(self, reserve: Callable[[], bool]) -> None:
        """Evict unused copies, one by one, until `reserve` returns True.

        For a slot that was evicted, as a budget was lowered, while a lease waits for it: no policy accounts for it, so
        nothing else would free its bytes where policies keep the room full.
        """
        for key in [key for key, slot in self.slots.items() if not (slot.at_home or slot.holders)]:
            self.policy.remove(key)
            self.evict(key)
            if reserve():
                return

    # -- the end of slots ---------------------------------------------------------------------------------------------

    def evict(self, key: str) -> None:
        """Evict a page from the level; its room is freed once it is unused."""
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
        """Evict every copy, and every page rehomed elsewhere; reset the policy."""
        self.policy.reset()
        for key, slot in list(self.slots.items()):
            if not slot.at_home or slot.page.home != self.index:
                self.evict(key)
        self._fit()

    def free(self, slot: Slot) -> None:
        """Free a doomed slot's room; a no-op while it is held or loading: then this is called again."""
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
                self.tier.free(slot.room, reuse=False)  # views still in use keep the memory alive
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
            self.cancel(slot, KeyboardInterrupt())  # this thread's own load, left by an interrupt
        slot.holders.discard(holder)
        if slot.holders:
            return
        if slot.doomed:
            self.free(slot)
        elif slot.state is State.QUEUED:  # no thread will fill it
            self.policy.remove(slot.page.key)
            self.evict(slot.page.key)
        else:
            self.leased.discard(slot.page.key)

    def release_source(self, slot: Slot) -> None:
        """Release the lower slot that a slot is filled from, if any."""
        source = slot.source
        if source is not None:
            source.level.release(source, slot)
            slot.source = None

    def cancel(self, slot: Slot, error: BaseException) -> None:
        """Cancel a load and its decision. Threads that wait for the slot get the error."""
        if slot.state is not State.LOADING:
            return
        key = slot.page.key
        if not isinstance(error, Exception):  # Ctrl-C goes to this thread, a TierError to waiting ones
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
        """Reset in a forked child: pages at home stay, without holders; copies are dropped."""
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


def _ends_by_copies(slot: Slot) -> bool:
    """True if nothing but copies in flight keeps the room of an evicted slot: into it, and from it."""
    copies = (slot, *slot.holders) if slot.state is State.LOADING else tuple(slot.holders)
    return bool(copies) and all(isinstance(copy, Slot) and _is_copying(copy) for copy in copies)


def _is_copying(slot: Slot) -> bool:
    """True if another thread's load of a slot waits for nothing but its bytes, or ends because nobody wants it."""
    if slot.state is not State.LOADING or slot.loader == threading.get_ident():
        return False
    if slot.doomed and not slot.holders:
        return True
    return slot.room is not None and (slot in slot.page.readers or not slot.page.due)


def slot_below(ledger: "_Books", page: Page) -> Slot | None:
    """Return the home slot of a page that reaches the top tier by one direct copy: its home is a memory, or a store
    that the carrier copies from, with no caching tier in between; also for a home in the top tier. None otherwise."""
    between, home = ledger.levels[1 : page.home], ledger.levels[page.home]
    slot = home.slots[page.key]
    if any(level.keeps_copies for level in between) or not (home.tier.memory or ledger.levels[0].brings(slot)):
        return None
    return slot


def detour(ledger: "_Books", page: Page | None) -> str:
    """Return why a page does not reach the top tier by one copy that the host need not wait for; "" if it does."""
    if page is None:
        return "its page is gone"
    source, home = slot_below(ledger, page), ledger.levels[page.home].tier
    if source is None:
        return "copied through a tier between" if home.memory else f"in {home.name}, not in memory"
    if ledger.levels[0].stream is not None and page.home and not source.room.asynchronous:
        return "pageable memory"
    return ""
