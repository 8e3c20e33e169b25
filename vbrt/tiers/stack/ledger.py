"""The books that all parts of a stack share: its levels, its pages, and the guard of both."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from vbrt.errors import TierError
from vbrt.residency.policy import Policy
from vbrt.tiers.protocols.tier import Tier
from vbrt.tiers.stack.page_census import Census
from vbrt.tiers.stack.scheduling import Borrowing, GraphRecording, Run, Schedule
from vbrt.tiers.stack.slots import Claim, Level, Page
from vbrt.tiers.stack.stack_lock import Guard

__all__ = ["Ledger"]


class Writing:
    """Block in which the books of one ledger are written; under the lock, in no other such block.

        with guard.lock, ledger.writing:
            ...

    The books are torn inside of it, and stay torn if it is left early: then the next block resets them first.
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
    """`Writing`, for decisions about pages: the policies decide, so a programme's run ends first."""

    __slots__ = ()

    def __enter__(self) -> None:
        ledger = self._ledger
        if ledger.torn:
            ledger.recover()
        ledger.torn = True
        if ledger.running is not None:
            ledger.programmes.end()


class Ledger:
    """The books of a stack, written under its guard.

    Attributes:
        levels, names: the tiers from the computing one down, and their names.
        copying: those that keep copies.
        pages: by key, those that are stored.
        travellers: how many of them have their home below the top tier and come up from there: all but those that
            are put.
        changes: how often a page was added, rehomed or retired.
        retired: claims of owners that were retired or collected; pages lose them at the next access.
        lost: leases that were collected before they were released.
        rewrites: True if pages are rewritten where they live: leases are decided one by one, and pages stay at home.
        captured: True once a CUDA graph knows where pages lie.
        writing, deciding: see `Writing` and `Deciding`.
        torn: True while the books are written, and after a block that was left early.
        recording: of a pass as a CUDA graph, while it is captured; None without one.
        running: the run that serves leases, or None.
        programmes: begins and ends it; a stack sets it.
        catch_up: `Decider.catch_up`; a stack sets it.
        encoding: one weight is encoded, and one page is given a home, at a time.
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
        self.programmes: Schedule | None = None
        self.catch_up: Callable[[], None] | None = None
        self.encoding = threading.RLock()

    @property
    def device(self) -> torch.device:
        """Where leased pages live and kernels compute."""
        return self.levels[0].tier.device

    def end_run(self) -> None:
        """End a programme's run, if one is at work; under the lock."""
        with self.deciding:
            pass

    def recover(self) -> None:
        """Reset torn books: the policies begin again, and every copy is evicted as soon as it is not in use."""
        if self.running is not None:
            self.programmes.drop()
        for level in self.levels:
            level.evict_copies()
        self.torn = False
        self.guard.ring()

    def replace_policy(self, level: Level, policy: Policy) -> None:
        """Have another policy decide on a tier's copies; those that are there are evicted, once nobody uses them."""
        with self.guard.lock, self.deciding:
            level.policy = policy
            level.evict_copies()
            self.guard.ring()

    def attach(self, tier: Level | Tier) -> None:
        """Add a tier below the others; a bare one keeps no copies."""
        level = tier if isinstance(tier, Level) else Level(tier)
        with self.guard.lock:
            level.index, level.guard = len(self.levels), self.guard
            self.levels += [level]  # no call in between
            self.copying += [level] if level.keeps_copies else []
            self.names += [level.tier.name]

    def spare_bytes(self, name: str) -> int:
        """Return the bytes in which new pages can live in a tier, and the largest page from further down still pass.
        They hold while the caller has `encoding`."""
        level = self.levels[self.names.index(name)]
        with self.guard.lock:
            below = (page for page in self.pages.values() if page.home > level.index and page.put is None)
            passing = max((page.nbytes + level.overhead_bytes for page in below if page.passes), default=0)
            return level.free_bytes - passing * level.keeps_copies

    def census(self) -> Census:
        """Return what pages there are; walks them only if they have changed. Needs no lock."""
        census, changes = self._census, self.changes
        if census.changes != changes:
            census = self._census = Census(self.pages, changes)
        return census

    def put(self, page: Page, claim: Claim) -> None:
        """Note that kernels of an owner of the page read it where it lies; call it under the lock."""
        # no call in between
        self.travellers -= page.home > 0 and page.put is None
        page.put = claim

    def release_put(self, page: Page) -> None:
        """Note that the page may be rehomed again, after what the computing device has been given; under the lock."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        # no call in between
        self.travellers += page.home > 0
        page.put = None

    def links(self, home: int) -> dict[str, int]:
        """Return 0 bytes for each link that a page takes on its way up from a home."""
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
        """Keep, in a forked child, what is there: pages in memory and files, without threads and what they moved."""
        self.guard.reset()
        self.torn = False
        self.running, self.recording, self.encoding = None, None, threading.RLock()
        for level in self.levels:
            level.after_fork()
