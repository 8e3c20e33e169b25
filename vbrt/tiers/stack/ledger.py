"""Shared state of a stack: its levels, its pages, and the lock of both."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from vbrt.errors import TierError
from vbrt.host import accelerator
from vbrt.residency.policy import Policy
from vbrt.tiers.protocols.tier import Tier
from vbrt.tiers.stack.page_census import Census
from vbrt.tiers.stack.scheduling import Borrowing, GraphRecording, Loan, Run, Schedule
from vbrt.tiers.stack.slots import Claim, Level, Page
from vbrt.tiers.stack.stack_lock import Guard

__all__ = ["Ledger"]


class Writing:
    """Context manager around writes to a ledger; enter it under the lock, do not nest it.

        with guard.lock, ledger.writing:
            ...

    The ledger is torn inside the block, and stays torn if an exception leaves it: then the next block resets it first.
    """

    __slots__ = ("_ledger",)

    def __init__(self, ledger: "Ledger") -> None:
        self._ledger = ledger

    def __enter__(self) -> None:
        ledger = self._ledger
        if ledger.torn:
            ledger.recover()
        ledger.torn = True

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        self._ledger.torn = kind is not None


class Deciding(Writing):
    """`Writing` for decisions of the policies: ends a programme's run first."""

    __slots__ = ()

    def __enter__(self) -> None:
        ledger = self._ledger
        if ledger.torn:
            ledger.recover()
        ledger.torn = True
        if ledger.running is not None:
            ledger.programmes.end()


class Ledger:
    """State of a stack, written under its guard.

    Attributes:
        levels, names: the tiers from the computing one down, and their names.
        copying: the levels that cache copies.
        pages: stored pages, by key.
        travellers: number of pages that move: home below the top tier, and not put.
        changes: version number; grows when a page is added, rehomed or retired, but for unseen ones.
        retired: claims of owners that were retired or collected; pages lose them at the next access.
        lost: leases that were collected before they were released.
        rewrites: True if pages are rewritten in their homes: leases are decided one by one, and pages stay at home.
        captured: True once a CUDA graph holds addresses of pages.
        writing, deciding: see `Writing` and `Deciding`.
        torn: True while the ledger is written, and after a block that an exception has left.
        recording: the open CUDA graph capture of a pass; None without one.
        running: the run that serves leases; None without one.
        loans: room of the top tier outside the policy; given back before a page gets a home, but for unseen ones below.
        programmes: starts and ends runs; a stack sets it.
        catch_up: `Decider.catch_up`; a stack sets it.
        encoding: lock: one weight is encoded, and one page given a home, at a time.
    """

    def __init__(self, tiers: Sequence[Level | Tier]) -> None:
        self.guard = Guard()
        self.levels: list[Level] = []
        self.names: list[str] = []
        self.copying: list[Level] = []
        for tier in tiers:
            self.attach(tier)
        self.pages: dict[str, Page] = {}
        self.travellers = self.changes = 0
        self._census = Census(self.pages, 0)
        self.retired: deque[Claim] = deque()
        self.lost: deque[Borrowing] = deque()
        self.captured = self.rewrites = self.torn = False
        self.writing, self.deciding = Writing(self), Deciding(self)
        self.recording: GraphRecording | None = None
        self.running: Run | None = None
        self.loans: weakref.WeakSet[Loan] = weakref.WeakSet()
        self.programmes: Schedule | None = None
        self.catch_up: Callable[[], None] | None = None
        self.encoding = threading.RLock()

    @property
    def device(self) -> torch.device:
        """Device of the top tier, where leased pages are and kernels compute."""
        return self.levels[0].tier.device

    def end_run(self) -> None:
        """End the current run of a programme, if any; call it under the lock."""
        with self.deciding:
            pass

    def recover(self) -> None:
        """Reset a torn ledger: reset the policies, and evict every copy as soon as it is not in use."""
        if self.running is not None:
            self.programmes.drop()
        for level in self.levels:
            level.evict_copies()
        self.torn = False
        self.guard.ring()

    def replace_policy(self, level: Level, policy: Policy) -> None:
        """Replace the policy of a tier; its present copies are evicted, once unused."""
        with self.guard.lock, self.deciding:
            level.policy = policy
            level.evict_copies()
            self.guard.ring()

    def attach(self, tier: Level | Tier) -> None:
        """Add a tier below the others; a bare `Tier` caches no copies."""
        level = tier if isinstance(tier, Level) else Level(tier)
        with self.guard.lock:
            level.index, level.guard = len(self.levels), self.guard
            self.levels += [level]  # no call in between
            self.copying += [level] if level.keeps_copies else []
            self.names += [level.tier.name]

    def spare_bytes(self, name: str) -> int:
        """Return the bytes free for new homes in a tier, with room left for the largest page from deeper tiers to pass.

        Valid while the caller holds `encoding`."""
        level = self.levels[self.names.index(name)]
        with self.guard.lock:
            below = (page for page in self.pages.values() if page.home > level.index and page.put is None)
            passing = max((page.nbytes + level.overhead_bytes for page in below if page.passes), default=0)
            return level.free_bytes - passing * level.keeps_copies

    def census(self) -> Census:
        """Return aggregates over all pages, cached per value of `changes`. Needs no lock."""
        census, changes = self._census, self.changes
        if census.changes != changes:
            census = self._census = Census(self.pages, changes)
        return census

    def put(self, page: Page, claim: Claim) -> None:
        """Mark a page as read in place by an owner's kernels, so that it is not moved; call it under the lock."""
        # no call in between
        self.travellers -= page.home > 0 and page.put is None
        page.put = claim

    def release_put(self, page: Page) -> None:
        """Let a put page move again, after the kernels queued so far; call it under the lock."""
        if self.device.type == accelerator.TYPE:
            accelerator.synchronize(self.device)
        # no call in between
        self.travellers += page.home > 0
        page.put = None

    def links(self, home: int) -> dict[str, int]:
        """Return zeroed byte counters for the links between a home and the top tier."""
        names = [level.tier.name for level in self.levels[:home] if level.keeps_copies] + [self.names[home]]
        return {f"{low}>{high}": 0 for high, low in pairwise(names)}

    def check_open(self, key: str) -> None:
        """Raise TierError if the stack is closed."""
        if self.guard.closed:
            raise TierError(
                f"{key}: the model was closed, its pages are gone; wrap it again, or call unwrap() before "
                "close() to keep the weights"
            )

    def after_fork(self) -> None:
        """Reset in a forked child: pages in memory and files stay, threads and their loads are dropped."""
        self.guard.reset()
        self.torn = False
        self.running, self.recording, self.encoding = None, None, threading.RLock()
        for level in self.levels:
            level.after_fork()
