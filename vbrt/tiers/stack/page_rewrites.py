"""Rewrites pages where they live, and brings the copies above up to date.

A weight that trains is a page like any other: forwards lease it, policies keep and stage copies of it. After a step its
bytes are others. So a page that is expected to be rewritten is *due*: from then on no lease of it begins, and no copy
of it either, until it has been rewritten; what has begun before is waited for. Copies above the home are refreshed in
their slots: policies notice nothing, and what `simulate` counts is what the stack counts.

    rewriter.expect(keys, step)                 # for all pages of a step; forgo(keys, step) ends that
    with rewriter.rewriting(key) as page:       # uint8 on the CPU: the page's bytes as they are, to be changed in place
        ...

Why waiting ends: whoever rewrites waits for leases and copies that have begun, and those wait for no page that is due:
what a lease needs that began before goes on.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator

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
    """Rewrites pages of one stack. Any thread may call it; one page is rewritten at a time.

    Attributes:
        refreshed_bytes: copied into slots above the homes because a page was rewritten.
    """

    def __init__(self, ledger: Ledger, mover: Mover) -> None:
        self._ledger, self._mover, self._guard = ledger, mover, ledger.guard
        self.refreshed_bytes = 0

    def prepare(self) -> None:
        """Note that pages of this stack are going to be rewritten, before the first pass: no programme is made, and
        pages do not make the computing tier their home."""
        with self._guard.lock, self._ledger.deciding:
            self._ledger.rewrites = True

    def expect(self, keys: Collection[str], token: object, *, unless: Callable[[], bool] = bool) -> None:
        """Have leases and copies of these pages wait until `forgo` is called with the same token.

        Args:
            token: any hashable object, of whoever is going to rewrite the pages.
            unless: asked under the lock; nothing is expected if it returns True.
        """
        with self._guard.lock:
            pages = [] if unless() else [self._page(key) for key in keys]
            with self._ledger.deciding:
                for page in pages:
                    page.due.add(token)

    def forgo(self, keys: Collection[str], token: object) -> None:
        """Expect no rewrite of these pages any more for a token. Idempotent."""
        with self._guard.lock:
            for key in keys:
                page = self._ledger.pages.get(key)
                if page is not None:
                    page.due.discard(token)
            self._guard.ring()

    @contextlib.contextmanager
    def rewriting(self, key: str, *, fresh: bool = False) -> Iterator[torch.Tensor]:
        """Yield the page's bytes (uint8, CPU) as they are at home; what they are at the end of the block is the page.

        Several threads may rewrite pages at a time, each one of its own.

        Args:
            fresh: all bytes are about to be written: those of a store are not read, and are anything.

        In a memory they are the page itself, so that a block that raises leaves what it has written. A store gets a new
        page at the end, in the place of the old one, which stays if the block raises or the new one cannot be written.

        Raises:
            TierError: the page is gone, or cannot be read or written.
        """
        token, page = object(), None
        self.expect((key,), token)
        try:
            page = self._begin(key)
            home = self._ledger.levels[page.home].slots[key]
            if home.level.tier.memory:
                yield from self._in_place(home)
            else:
                yield from self._anew(home, fresh=fresh)
        finally:
            if page is not None:
                page.writer = 0
            self.forgo((key,), token)

    def _begin(self, key: str) -> Page:
        """Wait until nobody uses the page: who begins later waits for its rewriting."""
        waiting = None
        while True:
            with self._guard.lock:
                page = self._page(key)
                if not (page.borrowers or self._is_busy(page)):
                    page.writer = threading.get_ident()
                    return page
                bell = self._guard.listen()
            waiting = waiting or Waiting(self._ledger, key, "leases and copies of it that began before")
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
        return copied or page.writer not in (0, threading.get_ident())  # its own: Ctrl-C came at the end of a block

    def _in_place(self, home: Slot) -> Iterator[torch.Tensor]:
        home.room.synchronize()  # copies that have begun have left
        try:
            yield home.view
        finally:
            self._refresh(home, home.view, home.room)

    def _anew(self, home: Slot, *, fresh: bool) -> Iterator[torch.Tensor]:
        tier, page = home.level.tier, home.page
        staging = aligned(page.nbytes)
        if not fresh:
            tier.get(home.room, staging, key=page.key)
        yield staging
        other = Reservation()  # the new page's room, then the old one's
        try:
            self._reserve(home, other)
            tier.put(other.room, staging, key=page.key, layout=page.layout.to_dict())
            with self._guard.lock:
                if home.room is not None:  # else the page was retired meanwhile
                    home.room, other.room = other.room, home.room  # no call in between
        finally:
            with self._guard.lock:
                if other.room is not None:
                    tier.free(other.room, reuse=False)
        self._refresh(home, staging, Buffer(staging))

    def _reserve(self, home: Slot, holder: Reservation) -> None:
        with self._guard.lock:
            tier = home.level.tier
            if not tier.reserve(home.charge, holder):
                raise TierError(
                    f"{home.page.key}: {home.charge} bytes do not fit into tiers.{tier.name}.budget = "
                    f"{tier.capacity_bytes} beside the page that they replace; raise the budget by that"
                )

    # -- copies -------------------------------------------------------------------------------------------------------

    def _refresh(self, home: Slot, source: torch.Tensor, room: Buffer) -> None:
        """Copy the new bytes into the copies above the home, the lowest first."""
        holder = Borrower()
        try:
            for copy in self._held(home, holder):
                self._mover.copy_bytes(copy, source, room)
                self.refreshed_bytes += home.page.nbytes
                if copy.level.stream is None:
                    source, room = copy.view, copy.room
        except BaseException:
            self._evict_copies(home)  # nobody may read what is left of the old bytes
            raise
        finally:
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
        """Hold the copies of a page that have bytes in them, the lowest first. One that was evicted is among them while
        it is the source of another that is still to be filled."""
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
