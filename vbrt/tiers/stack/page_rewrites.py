"""In-place rewrites of pages in their homes, with a refresh of the cached copies above.

A trainable weight is a page like any other: forwards lease it, policies cache and prefetch copies of it. An optimizer
step changes its bytes. A page whose rewrite is expected is *due*: no lease and no copy of it begins until it has been
rewritten, and the rewrite waits for leases and copies that have begun. Copies above the home are refreshed in their
slots: policies are not involved, so `simulate` and the stack count the same.

    rewriter.expect(keys, step)                 # for all pages of a step; forgo(keys, step) ends that
    with rewriter.rewriting(key) as page:       # uint8 on the CPU: the page's present bytes, to be changed in place
        ...

Deadlock freedom: a rewrite waits for leases and copies that have begun, and those never wait for a due page: loads for
a lease that began earlier proceed.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from vbrt.errors import TierError
from vbrt.host.host_memory import aligned
from vbrt.tiers.protocols.tier import Reservation
from vbrt.tiers.stack.bounded_waits import Waiting
from vbrt.tiers.stack.ledger import Ledger
from vbrt.tiers.stack.mover import Mover
from vbrt.tiers.stack.slots import Borrower, Page, Slot, State
from vbrt.tiers.storage.memory_tiers import Buffer

__all__ = ["Rewriter"]


class Rewriter:
    """Rewriter of one stack's pages. Thread-safe; each page is rewritten by one thread at a time.

    Attributes:
        refreshed_bytes: bytes copied into slots above the homes because a page was rewritten.
    """

    def __init__(self, ledger: Ledger, mover: Mover) -> None:
        self._ledger, self._mover, self._guard = ledger, mover, ledger.guard
        self.refreshed_bytes = 0

    def prepare(self) -> None:
        """Announce rewrites, before the first pass: no programme runs then, and no page is rehomed in the computing
        tier."""
        with self._guard.lock, self._ledger.deciding:
            self._ledger.rewrites = True

    def expect(self, keys: Collection[str], token: object, *, unless: Callable[[], bool] = bool) -> None:
        """Make leases and copies of these pages wait until `forgo` is called with the same token.

        Args:
            token: any hashable object that identifies the rewriting step.
            unless: called under the lock; if it returns True, nothing is marked due.
        """
        with self._guard.lock:
            pages = [] if unless() else [self._page(key) for key in keys]
            with self._ledger.deciding:
                for page in pages:
                    page.due.add(token)

    def forgo(self, keys: Collection[str], token: object) -> None:
        """Withdraw a token from these pages, so that they are due for it no more. Idempotent."""
        with self._guard.lock:
            for key in keys:
                page = self._ledger.pages.get(key)
                if page is not None:
                    page.due.discard(token)
            self._guard.ring()

    @contextlib.contextmanager
    def rewriting(self, key: str, *, fresh: bool = False) -> Iterator[torch.Tensor]:
        """Yield the page's bytes (uint8, CPU) from its home; their values at the end of the block become the page.

        Several threads may rewrite pages concurrently, each a different one.

        Args:
            fresh: True if the block writes all bytes: then a store is not read, and the yielded bytes are undefined.

        A memory yields the page itself: a block that raises leaves it partly written. A store is written at the end and
        replaces the old page, which stays if the block raises or the write fails.

        Raises:
            TierError: the page is gone, or cannot be read or written.
        """
        token, page = object(), None
        self.expect((key,), token)
        try:
            (page,) = self._begin((key,))
            home = self._ledger.levels[page.home].slots[key]
            if home.level.tier.memory:
                yield from self._in_place(home)
            else:
                yield from self._anew(home, fresh=fresh)
        finally:
            if page is not None:
                page.writer = 0
            self.forgo((key,), token)

    @contextlib.contextmanager
    def in_memory(self, keys: Sequence[str]) -> Iterator[list[dict[str, torch.Tensor] | None]]:
        """Yield the fields of pages without copies above their homes, to be changed in place, as `rewriting` each of
        them; None for one whose home is no memory.

        The lock is taken three times however many pages there are, and no tensor is made: a thread that launches
        kernels waits for both, since torch releases the GIL in each call.

        Raises TierError: a page is gone.
        """
        token, begun = object(), list[Page]()
        self.expect(keys, token)
        try:
            begun += self._begin(keys)
            homes = [self._ledger.levels[page.home].slots[page.key] for page in begun]
            for home in homes:
                if home.level.tier.memory:
                    home.room.synchronize()
            yield [home.tensors if home.level.tier.memory else None for home in homes]
        finally:
            for page in begun:
                page.writer = 0
            self.forgo(keys, token)

    def fields(self, key: str) -> dict[str, torch.Tensor] | None:
        """Return the page's fields in host memory, valid until the next rewrite, as `peek`."""
        with self._guard.lock:
            home = self._ledger.levels[self._page(key).home].slots[key]
            tier = home.level.tier
            return home.tensors if tier.memory and tier.device.type == "cpu" else None

    def peek(self, key: str) -> torch.Tensor | None:
        """Return the page's bytes (uint8) in host memory, valid until the next rewrite; None if its home is no host
        memory. Blocks no lease. Raises TierError: the page is gone."""
        with self._guard.lock:
            home = self._ledger.levels[self._page(key).home].slots[key]
            tier = home.level.tier
            return home.view if tier.memory and tier.device.type == "cpu" else None

    def exchange(self, key: str, other: str, done: Callable[[], object]) -> bool:
        """Rewrite a page with another one's bytes, without copying them: the pages exchange their memory.

        Args:
            other: a page of the same layout; no other thread uses it.
            done: called once they have exchanged, under the lock, before copies above are refreshed; it must not fail.

        Returns:
            False if they are not in one memory; nothing was changed.

        Raises:
            TierError: a page is gone; or (after the exchange) a copy above could not be refreshed.
        """
        token, begun = object(), list[Page]()
        self.expect((key, other), token)
        try:
            begun += self._begin((key, other))
            with self._guard.lock:
                one, two = (self._ledger.levels[page.home].slots[page.key] for page in begun)
                if one.level is not two.level or not one.level.tier.memory or one.charge != two.charge:
                    return False
                # no call in between
                one.room, two.room = two.room, one.room
                one.tensors, two.tensors = two.tensors, one.tensors
                done()
            self._refresh(one, one.room)
            return True
        finally:
            for page in begun:
                page.writer = 0
            self.forgo((key, other), token)

    def _begin(self, keys: Sequence[str]) -> list[Page]:
        """Wait for all leases and copies of the pages; those that begin later wait for the rewrite."""
        waiting = None
        while True:
            with self._guard.lock:
                pages = [self._page(key) for key in keys]
                busy = next((page for page in pages if page.borrowers or self._is_busy(page)), None)
                if busy is None:
                    for page in pages:
                        page.writer = threading.get_ident()
                        page.rewrites += 1
                    return pages
                bell = self._guard.listen()
            waiting = waiting or Waiting(self._ledger, busy.key, "leases and copies of it that began before")
            waiting.look(bell)

    def _page(self, key: str) -> Page:
        self._ledger.check_open(key)
        page = self._ledger.pages.get(key)
        if page is None:
            raise TierError(f"{key}: the page was retired; its weight was loaded anew, or the model closed")
        return page

    @staticmethod
    def _is_busy(page: Page) -> bool:
        copied = any(slot.state is State.LOADING for slot in page.readers)
        return copied or page.writer not in (0, threading.get_ident())  # own id: Ctrl-C came at the end of a block

    def _in_place(self, home: Slot) -> Iterator[torch.Tensor]:
        home.room.synchronize()  # wait for copies that read the old bytes
        try:
            yield home.view
        finally:
            self._refresh(home, home.room)

    def _anew(self, home: Slot, *, fresh: bool) -> Iterator[torch.Tensor]:
        tier, page = home.level.tier, home.page
        staging = aligned(page.nbytes)
        if not fresh:
            tier.get(home.room, staging, key=page.key)
        yield staging
        other = Reservation()  # holds the new page's room, after the swap the old one's
        try:
            self._reserve(home, other)
            tier.put(other.room, staging, key=page.key, layout=page.layout.to_dict())
            with self._guard.lock:
                if home.room is not None:  # None: the page was retired meanwhile
                    home.room, other.room = other.room, home.room  # no call in between
        finally:
            with self._guard.lock:
                if other.room is not None:
                    tier.free(other.room, reuse=False)
        self._refresh(home, Buffer(staging))

    def _reserve(self, home: Slot, holder: Reservation) -> None:
        with self._guard.lock:
            tier = home.level.tier
            if not tier.reserve(home.charge, holder):
                raise TierError(
                    f"{home.page.key}: {home.charge} bytes do not fit into tiers.{tier.name}.budget = "
                    f"{tier.capacity_bytes} beside the page that they replace; raise the budget by that"
                )

    # -- copies -------------------------------------------------------------------------------------------------------

    def _refresh(self, home: Slot, room: Buffer) -> None:
        """Refresh the copies above the home, lowest first, from the new bytes, which begin `room`."""
        holder = Borrower()
        try:
            for copy in self._held(home, holder):
                self._mover.copy_bytes(copy, room.tensor[: home.page.nbytes], room)
                self.refreshed_bytes += home.page.nbytes
                if copy.level.stream is None:
                    room = copy.room
        except BaseException:
            self._evict_copies(home)  # stale bytes must not be read
            raise
        finally:
            if home.page.refreshed:
                self._release(home, holder)

    def _evict_copies(self, home: Slot) -> None:
        key = home.page.key
        with self._guard.lock, self._ledger.deciding:
            for level in self._ledger.levels[: home.level.index]:
                if key in level.slots:
                    level.policy.remove(key)
                    level.evict(key)

    def _release(self, home: Slot, holder: Borrower) -> None:
        with self._guard.lock:
            for copy in home.page.refreshed:
                copy.level.release(copy, holder)
            home.page.refreshed = []

    def _held(self, home: Slot, holder: Borrower) -> list[Slot]:
        """Hold all filled copies of a page, lowest first, including an evicted copy that is still the source of an
        unfilled slot."""
        with self._guard.lock:
            found: dict[Slot, None] = {}
            for level in self._ledger.levels[: home.level.index]:
                copy = level.slots.get(home.page.key)
                while copy is not None and copy is not home:
                    found[copy] = None
                    copy = copy.source
            copies = [copy for copy in found if copy.state is State.READY]
            home.page.refreshed = copies
            for copy in copies:
                copy.holders.add(holder)
            return sorted(copies, key=lambda copy: -copy.level.index)
