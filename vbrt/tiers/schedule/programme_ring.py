"""The ring of a programme: buffers that pages pass through, and the copies into them.

Each buffer is in the ring, in a slot of the level, or free: it changes hands without a call in between.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from vbrt.formats.page import unpack
from vbrt.residency.programme import Load
from vbrt.tiers.protocols.tier import Reservation
from vbrt.tiers.schedule.stream_link import link_of
from vbrt.tiers.stack.ledger import Ledger
from vbrt.tiers.stack.slots import Page, Slot, State, slot_below
from vbrt.tiers.storage.memory_tiers import Buffer

__all__ = ["Copy", "Ring"]


class Copy(NamedTuple):
    """A load with what it takes: the page, what starts the copy, and the name of the link that it takes."""

    load: Load
    page: Page
    start: Callable[[], object]
    link: str


class Ring:
    """The ring on the top level of a stack, while a programme has it.

    Attributes:
        buffers: by slot; None for one that is not the ring's, or not any more.
        keys: of the pages in the slots; "" for none.
        link: into the ring.
    """

    def __init__(self, ledger: Ledger, slots: int, slot_bytes: int) -> None:
        self._ledger, self._level, self._slot_bytes = ledger, ledger.levels[0], slot_bytes
        self.buffers: list[Buffer | None] = [None] * slots
        self._arriving = Reservation()  # a buffer that has no slot yet
        self.keys = [""] * slots
        stream = self._level.stream
        self.link = link_of(stream, slots, self._level.lanes)

    # -- buffers ------------------------------------------------------------------------------------------------------

    def take(self, slot: Slot, at: int) -> None:
        """Take the buffer of a slot of the level, with the page in it."""
        self.link.take(at, slot.arrived)
        self.keys[at] = slot.page.key
        # no call in between
        self.buffers[at] = slot.room
        slot.room = None
        del self._level.slots[slot.page.key]

    def reserve(self, others: list[str]) -> bool:
        """Reserve the buffers that are missing; pages in `others` are evicted for them. False if that is not enough.

        Raises:
            TierError: the device has no memory although the budget has room.
        """
        tier, arriving = self._level.tier, self._arriving
        for at, buffer in enumerate(self.buffers):
            if buffer is None:
                while not tier.reserve(self._slot_bytes, arriving):
                    if not others:
                        return False
                    self._level.evict(others.pop())
                # no call in between
                self.buffers[at] = arriving.room
                arriving.room = None
        return True

    def take_cached(self, buffers: Sequence[Buffer]) -> None:
        """Take these buffers, by slot, those that are missing; the tier has them cached."""
        for at, buffer in enumerate(buffers):
            if self.buffers[at] is None:
                self.buffers[at] = buffer
                self._level.tier.take(buffer)

    def give(self, at: int) -> Slot:
        """Give the page in a slot of the ring, with its buffer, a slot of the level."""
        level, page = self._level, self._ledger.pages[self.keys[at]]
        slot = Slot(page, level, self._slot_bytes)
        slot.arrived, slot.tensors, slot.state = self.link.arrived(at), self.tensors(at, page), State.READY
        level.slots[page.key] = slot
        # no call in between
        slot.room = self.buffers[at]
        self.buffers[at] = None
        return slot

    def free(self) -> None:
        """Free the buffers that the ring still has."""
        for at, buffer in enumerate(self.buffers):
            if buffer is not None:
                self._level.tier.free(buffer, reuse=True)
                self.buffers[at] = None
        if self._arriving.room is not None:
            self._level.tier.free(self._arriving.room, reuse=True)
            self._arriving.room = None

    def tensors(self, at: int, page: Page) -> dict[str, torch.Tensor]:
        """Return the fields of a page in a slot."""
        return unpack(self.buffers[at].tensor[: page.nbytes], page.layout)

    # -- copies -------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Have copies and kernels wait for whoever used the buffers before, and kernels for the pages that stay."""
        for buffer in self.buffers:
            self.link.wait_for(buffer)
        self.link.wait_for_copies()

    def copies(self, loads: Iterable[Load]) -> list[Copy]:
        """Return what loads take."""
        return [self._copy(load) for load in loads]

    def _copy(self, load: Load) -> Copy:
        page = self._ledger.pages[load.key]
        source, target = slot_below(self._ledger, page), self.buffers[load.slot].tensor[: page.nbytes]
        start = self.link.bringing(load.slot, target, source)
        return Copy(load, page, start, f"{source.level.tier.name}>{self._level.tier.name}")

    def start(self, copies: Sequence[Copy], *, counted: bool = True) -> None:
        """Start copies, once what computes now is done."""
        if not copies:
            return
        self.link.computed()
        for (key, at), page, start, link in copies:
            start()
            self.keys[at] = key
            if counted:
                page.bytes_moved[link] += page.nbytes

    def fence(self, pages: Iterable[Page]) -> None:
        """Keep what pages lie in, here and below, from being overwritten before what uses it now is done."""
        slots, own = self._level.slots, [page for page in pages if self._ledger.pages.get(page.key) is page]
        read = [slots[page.key].room for page in own if page.key in slots]
        sources = [slot_below(self._ledger, page).room for page in own if page.home]
        self.link.fence(self.buffers, [room for room in read if room is not None], sources)
