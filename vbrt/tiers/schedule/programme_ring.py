"""Ring buffer of a programme: device buffers that streamed pages pass through, and the copies into them.

A buffer belongs to the ring, to a slot of the level, or to the free list; it changes owner without a call in between,
so that Ctrl-C cannot lose it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

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
    """Load of a page, prepared: the page, the call that starts its copy, and the name of its link."""

    load: Load
    page: Page
    start: Callable[[], object]
    link: str


class Ring:
    """Ring on the top level of a stack, owned by one run.

    Attributes:
        buffers: by slot; None where the ring does not own the buffer.
        keys: of the pages in the slots; "" for an empty slot.
        link: issues the copies into the ring.
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
        """Move a buffer, with its page, from a slot of the level into the ring."""
        self.link.take(at, slot.arrived)
        self.keys[at] = slot.page.key
        # no call in between
        self.buffers[at] = slot.room
        slot.room = None
        del self._level.slots[slot.page.key]

    def reserve(self, others: list[str]) -> bool:
        """Reserve the missing buffers, evicting pages in `others` as needed; False if that frees too little.

        Raises:
            TierError: the device is out of memory although the budget has room.
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
        """Take the missing ones of these buffers, by slot, from the tier's free list."""
        for at, buffer in enumerate(buffers):
            if self.buffers[at] is None:
                self.buffers[at] = buffer
                self._level.tier.take(buffer)

    def give(self, at: int) -> Slot:
        """Move a page, with its buffer, from the ring into a new slot of the level."""
        level, page = self._level, self._ledger.pages[self.keys[at]]
        slot = Slot(page, level, self._slot_bytes)
        slot.arrived, slot.tensors, slot.state = self.link.arrived(at), self.tensors(at, page), State.READY
        level.slots[page.key] = slot
        # no call in between
        slot.room = self.buffers[at]
        self.buffers[at] = None
        return slot

    def free(self) -> None:
        """Free the buffers that the ring still owns."""
        for at, buffer in enumerate(self.buffers):
            if buffer is not None:
                self._level.tier.free(buffer, reuse=True)
                self.buffers[at] = None
        if self._arriving.room is not None:
            self._level.tier.free(self._arriving.room, reuse=True)
            self._arriving.room = None

    def tensors(self, at: int, page: Page) -> dict[str, torch.Tensor]:
        """Return views of the fields of a page in a slot."""
        return unpack(self.buffers[at].tensor[: page.nbytes], page.layout)

    # -- copies -------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Make copies and kernels wait for earlier users of the buffers, and kernels for copies of resident pages."""
        for buffer in self.buffers:
            self.link.wait_for(buffer)
        self.link.wait_for_copies()

    def copies(self, loads: Iterable[Load]) -> list[Copy]:
        """Return the prepared copies of loads."""
        return [self._copy(load) for load in loads]

    def _copy(self, load: Load) -> Copy:
        page = self._ledger.pages[load.key]
        source, target = slot_below(self._ledger, page), self.buffers[load.slot].tensor[: page.nbytes]
        start = self.link.bringing(load.slot, target, source)
        return Copy(load, page, start, f"{source.level.tier.name}>{self._level.tier.name}")

    def start(self, copies: Sequence[Copy], *, counted: bool = True, freed: Any = None) -> None:
        """Start copies after the kernels queued so far, or where a replayed graph has recorded the event `freed`."""
        if not copies:
            return
        if freed is None:
            self.link.computed()
        else:
            self.link.after(freed)
        for (key, at), page, start, link in copies:
            start()
            self.keys[at] = key
            if counted:
                page.bytes_moved[link] += page.nbytes

    def fence(self, pages: Iterable[Page]) -> None:
        """Fence the buffers of pages, here and below, against reuse before current kernels and copies end."""
        slots, own = self._level.slots, [page for page in pages if self._ledger.pages.get(page.key) is page]
        read = [slots[page.key].room for page in own if page.key in slots]
        sources = [slot_below(self._ledger, page).room for page in own if page.home]
        self.link.fence(self.buffers, [room for room in read if room is not None], sources)
