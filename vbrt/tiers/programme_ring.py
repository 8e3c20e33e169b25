"""The ring of a programme: buffers that pages pass through, and the copies into them.

Ctrl-C finds each buffer in the ring, in a slot of the level, or free: it changes hands without a call in between.

On a GPU copies run on a stream of their own. Before the first copy that follows a lease, that stream waits for what the
computing stream has been given up to then; a lease waits for the copies of its pages. Under the capture of a CUDA graph
the same calls make the copies a part of the graph.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from vbrt.formats.page import unpack
from vbrt.residency.programme import Load
from vbrt.tiers.ledger import Ledger
from vbrt.tiers.memory import Buffer
from vbrt.tiers.slots import Page, Slot, State, slot_below

# none of these functions are there without CUDA; leases ask them each time
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_set_stream = getattr(torch._C, "_cuda_setStream", None)

__all__ = ["Copy", "Ring"]


class HostLink:
    """Copies on the host, at once."""

    def follows(self) -> bool:
        """True if the caller computes where the link has been told; always here."""
        return True

    def follow(self) -> None:
        """Have copies wait for what the caller's stream computes, and that for the copies."""

    def wait(self, slot: int) -> None:
        """Have the computing stream wait for the page in a slot."""

    def take(self, slot: int, event: torch.cuda.Event | None) -> None:
        """Take over a slot whose page arrives with an event."""

    def wait_for(self, buffer: Buffer) -> None:
        """Have copies and kernels wait for whoever used a buffer before."""

    def wait_for_copies(self) -> None:
        """Have kernels wait for all copies so far: those of pages that stay."""

    def computed(self) -> None:
        """Have the next copies wait for what the computing stream has been given."""

    def copy(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a page into a slot."""
        target.copy_(source)

    def arrived(self, slot: int) -> None:
        """Return the event of the last copy into a slot, if there was one."""

    def fence(self, ring: Sequence[Buffer | None], read: Iterable[Buffer], sources: Iterable[Buffer]) -> None:
        """Keep buffers from being overwritten before what uses them now is done.

        Args:
            ring: by slot; None for one that somebody else has by now.
            read: that kernels read.
            sources: that copies read.
        """

    def synchronize(self) -> None:
        """Wait for copies and kernels."""

    def begin_capture(self) -> None:
        """Have the calls that follow be recorded by the capture of the current stream, until `end_capture`."""

    def join(self) -> None:
        """Make the end of the last copy a part of what is captured."""

    def end_capture(self) -> None:
        """Go on as before the capture, if there is one."""

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay a graph on the current stream, which takes the pages in all slots and leaves others there."""
        graph.replay()


class StreamLink(HostLink):
    """Copies on a stream, in order.

    Attributes:
        compute: the stream that kernels run on.
    """

    def __init__(self, stream: torch.cuda.Stream, slots: int) -> None:
        self._stream, self._device = stream, stream.device
        self._index, self._on_link = stream.device_index, _name(stream)
        self._arrived: list[torch.cuda.Event | None] = [None] * slots
        self._own = [torch.cuda.Event() for _ in range(slots)]
        self._done = torch.cuda.Event()
        self._outside: tuple | None = None
        self.follow()

    def follows(self) -> bool:
        return _raw_stream(self._index) == self._raw and _is_capturing() is self._capturing

    def follow(self) -> None:
        self.compute = torch.cuda.current_stream(self._device)
        self._on_compute = _name(self.compute)
        self._raw = self.compute.cuda_stream
        self._capturing = torch.cuda.is_current_stream_capturing()

    def wait(self, slot: int) -> None:
        event = self._arrived[slot]
        if event is not None:
            event.wait(self.compute)

    def take(self, slot: int, event: torch.cuda.Event | None) -> None:
        self._arrived[slot] = event

    def wait_for(self, buffer: Buffer) -> None:
        for fence in buffer.fences.values():
            self._stream.wait_event(fence)
            self.compute.wait_event(fence)

    def wait_for_copies(self) -> None:
        self.compute.wait_stream(self._stream)

    def computed(self) -> None:
        self._done.record(self.compute)
        self._done.wait(self._stream)

    def copy(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> None:
        event = self._arrived[slot] = self._own[slot]
        _set_stream(*self._on_link)
        try:
            target.copy_(source, True)  # without blocking
        finally:
            _set_stream(*self._on_compute)
        event.record(self._stream)

    def arrived(self, slot: int) -> torch.cuda.Event | None:
        return self._arrived[slot]

    def fence(self, ring: Sequence[Buffer | None], read: Iterable[Buffer], sources: Iterable[Buffer]) -> None:
        computed, copied = self.compute.record_event(), self._stream.record_event()
        on, copies = self.compute.cuda_stream, self._stream.cuda_stream
        for buffer in ring:
            if buffer is not None:
                buffer.fences[on], buffer.fences[copies] = computed, copied
        for buffer in read:
            buffer.fences[on] = computed
        for buffer in sources:
            buffer.fences[copies] = copied

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    # -- CUDA graphs --------------------------------------------------------------------------------------------------

    def begin_capture(self) -> None:
        self._outside = self.compute, self._on_compute, self._raw, self._arrived, self._own, self._done
        self._own, self._done = [torch.cuda.Event() for _ in self._own], torch.cuda.Event()
        self._arrived = [None] * len(self._own)
        self.follow()

    def join(self) -> None:
        if any(event is not None for event in self._arrived):
            self.compute.wait_stream(self._stream)

    def end_capture(self) -> None:
        if self._outside is not None:
            self.compute, self._on_compute, self._raw, self._arrived, self._own, self._done = self._outside
            self._capturing, self._outside = False, None

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        if not self.follows():
            before = self.compute
            self.follow()
            self.compute.wait_stream(before)
        for slot in range(len(self._arrived)):
            self.wait(slot)
        graph.replay()
        self._arrived = [self.compute.record_event()] * len(self._arrived)


def _name(stream: torch.cuda.Stream) -> tuple[int, int, int]:
    """Return what torch tells a stream by."""
    return stream.stream_id, stream.device_index, stream.device_type


class Copy(NamedTuple):
    """A load with what it takes: the page, its bytes here and there, and the name of the link between."""

    load: Load
    page: Page
    target: torch.Tensor
    source: torch.Tensor
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
        self.keys = [""] * slots
        stream = self._level.stream
        self.link = HostLink() if stream is None else StreamLink(stream, slots)

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
        tier = self._level.tier
        for at, buffer in enumerate(self.buffers):
            if buffer is None:
                self.buffers[at] = tier.reserve(self._slot_bytes)
                while self.buffers[at] is None and others:
                    self._level.evict(others.pop())
                    self.buffers[at] = tier.reserve(self._slot_bytes)
                if self.buffers[at] is None:
                    return False
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
        return Copy(load, page, target, source.view, f"{source.level.tier.name}>{self._level.tier.name}")

    def start(self, copies: Sequence[Copy], *, counted: bool = True) -> None:
        """Start copies, once what computes now is done."""
        if not copies:
            return
        self.link.computed()
        for (key, at), page, target, source, link in copies:
            self.link.copy(at, target, source)
            self.keys[at] = key
            if counted:
                page.bytes_moved[link] += page.nbytes

    def fence(self, pages: Iterable[Page]) -> None:
        """Keep what pages lie in, here and below, from being overwritten before what uses it now is done."""
        slots, own = self._level.slots, [page for page in pages if self._ledger.pages.get(page.key) is page]
        read = [slots[page.key].room for page in own if page.key in slots]
        sources = [slot_below(self._ledger, page).room for page in own if page.home]
        self.link.fence(self.buffers, [room for room in read if room is not None], sources)
