"""Ring of slots that a prompt's experts pass through.

    passage = ring.schedule(layer, [3, 5, 8, 9], following)
    for number, experts in enumerate(passage.parts):
        with passage.read(number):  # the next parts are copied meanwhile
            compute(experts, passage.places)

A copy engine brings the pages of one segment while kernels read another's: copies wait for the readers of their
segment, and kernels for their copies. The last copies of a layer are the first pages that the next layer will need, so
the link does not rest while attention is computed.

A prompt that is broken off leaves nothing behind; copies that are ahead may still run: `stop`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.host import accelerator
from vbrt.layers.experts.drive_pages import DrivePages
from vbrt.tiers.storage.device_copy import Span, copy_pages, span

__all__ = ["Passage", "PromptRing", "chunks", "ring_room"]

#: bytes of a part that keep the link busy for longer than the host takes to launch a part's kernels
_PART_BYTES = 192 << 20
_PARTS = 2  # of a layer, at least: the last one's kernels run while nothing of the layer is copied
_SEGMENTS = 3  # if there is room: one is read, one copied, one queued
_SHARE = 2  # at most this part of the cache's room, whose pages are gone when a prompt has passed


def ring_room(experts: int, page_bytes: int, room_bytes: int) -> tuple[int, int]:
    """Return segments of a ring for layers of so many experts, and pages of each; (0, 0): the room is too small. Where
    there is room the ring takes a layer and a part more: the link has work while the host launches what is between the
    experts of two layers, however long that takes."""
    most = room_bytes // (_SHARE * page_bytes)
    if not experts or most < 2:
        return 0, 0
    pages = min(-(-experts // _PARTS), -(-_PART_BYTES // page_bytes), max(1, most // _SEGMENTS))
    return min(-(-experts // pages) + 1, most // pages), pages


def chunks(experts: Sequence[int], most: int) -> list[Sequence[int]]:
    """Cut experts into parts of at most so many."""
    return [experts[at : at + most] for at in range(0, len(experts), most)]


class _Segment:
    """Slots of a part.

    Attributes:
        slots: of a page each.
        arrived: event of the last copy; read: of the last kernels that read them.
    """

    def __init__(self, slots: Sequence[Tensor]) -> None:
        self.slots = [span(slot) for slot in slots]
        self.arrived: torch.Event | None = None
        self.read: torch.Event | None = None


class _Load(NamedTuple):
    """Experts of a layer whose pages a segment has, or gets."""

    layer: int
    experts: Sequence[int]
    segment: _Segment


class Passage(NamedTuple):
    """Experts of a layer on their way through a ring.

    Attributes:
        parts: experts of each part.
        ahead: number of parts that were brought ahead.
        places: address of each expert's page.
        read: makes a context, of a part's number, in which kernels may be launched that read its pages. Parts are read
            in order; then its segment brings another one.
    """

    parts: Sequence[Sequence[int]]
    ahead: int
    places: Mapping[int, int]
    read: Callable[[int], AbstractContextManager[None]]


class PromptRing:
    """Ring of segments.

    Args:
        segments: slots of each, on the computing device, uint8 [bytes of a page] each; at least two segments.
        source: returns the pages of a layer's expert for one slot: in page-locked host memory, uint8 [bytes], where
            they do not move, or their numbers on a drive.
        drive: reads pages on a drive; None if there are none.
    """

    def __init__(
        self,
        segments: Sequence[Sequence[Tensor]],
        source: Callable[[int, int], Sequence[Tensor | int]],
        drive: DrivePages | None = None,
    ) -> None:
        self._segments, self._drive = [_Segment(slots) for slots in segments], drive
        self._pages = functools.cache(
            lambda layer, expert: [page if isinstance(page, int) else span(page) for page in source(layer, expert)]
        )
        self._device = device = segments[0][0].device
        self._stream = accelerator.Stream(device) if accelerator.has_streams(device) else None
        self._ahead: list[_Load] = []  # first parts of a layer to come

    def schedule(
        self, layer: int, experts: Sequence[int], following: Sequence[int] = (), most: int = 1 << 20
    ) -> Passage:
        """Begin to bring experts of a layer.

        Args:
            layer: its number.
            experts: of the layer, ascending.
            following: experts that the next layer will need first; empty: nothing is copied ahead.
            most: experts in a part, at most.
        """
        segments, wanted = self._segments, set(experts)
        most = min(most, len(segments[0].slots))
        ahead, self._ahead = self._ahead, []
        ready = [load for load in ahead if load.layer == layer and wanted.intersection(load.experts)]
        there = {expert for load in ready for expert in load.experts}
        own = [(layer, part) for part in chunks([expert for expert in experts if expert not in there], most)]
        more = [(layer + 1, part) for part in chunks(following[: len(segments) * most], most)]
        taken = [load.segment for load in ready]
        turns = taken + [segment for segment in segments if segment not in taken]
        loads = [*ready, *(_Load(*of, turns[at % len(turns)]) for at, of in enumerate(own + more, len(ready)))]
        self._begin(loads[len(ready) : len(segments)])
        now = loads[: len(ready) + len(own)]
        places = {e: at.address for load in now for e, at in zip(load.experts, load.segment.slots, strict=False)}
        parts = [[expert for expert in load.experts if expert in wanted] for load in now]
        if not now:
            self._ahead = loads
        return Passage(parts, len(ready), places, functools.partial(self._read, loads, len(now)))

    @contextlib.contextmanager
    def _read(self, loads: Sequence[_Load], parts: int, at: int) -> Iterator[None]:
        segment, later = loads[at].segment, at + len(self._segments)
        if self._stream is not None:
            accelerator.current_stream(self._device).wait_event(segment.arrived)
        try:
            yield
        finally:
            if self._stream is not None:
                segment.read = accelerator.current_stream(self._device).record_event()
        self._begin(loads[later : later + 1])
        if at + 1 == parts:
            self._ahead = list(loads[parts:])

    def _begin(self, loads: Iterable[_Load]) -> None:
        """Begin copies, each after the kernels that read what its segment had."""
        for load in loads:
            segment = load.segment
            pages = [self._pages(load.layer, expert) for expert in load.experts]
            if self._stream is not None and segment.read is not None:
                self._stream.wait_event(segment.read)
            if self._drive is None:
                copy_pages(segment.slots, pages, self._stream)
            else:
                self._read_and_copy(segment.slots, pages, self._drive)
            if self._stream is not None:
                segment.arrived = self._stream.record_event()

    def _read_and_copy(self, slots: Sequence[Span], pages: Sequence[Sequence[Span | int]], drive: DrivePages) -> None:
        """Copy pages, of which numbers are read from the drive first, a batch while the copies of the last one run.
        Raises TierError: a page cannot be read."""
        at = 0
        for numbers, some in _batches(pages, drive.batch):
            with drive.lent(numbers) if numbers else contextlib.nullcontext() as lent:
                spans = [[span(lent.pages[page]) if isinstance(page, int) else page for page in of] for of in some]
                copy_pages(slots[at : at + len(some)], spans, self._stream)
                if lent is not None and self._stream is not None:
                    lent.copied = self._stream.record_event()
            at += len(some)

    def stop(self) -> None:
        """Have the current stream wait for all copies; what is ahead is forgotten."""
        self._ahead = []
        if self._stream is not None:
            accelerator.current_stream(self._device).wait_stream(self._stream)


def _batches(
    pages: Sequence[Sequence[Span | int]], most: int
) -> Iterator[tuple[list[int], Sequence[Sequence[Span | int]]]]:
    """Cut experts into parts with so many pages on the drive at most; yield their numbers, and the pages of a part."""
    numbers, first = list[int](), 0
    for at, of in enumerate(pages):
        own = [page for page in of if isinstance(page, int)]
        if numbers and len(numbers) + len(own) > most:
            yield numbers, pages[first:at]
            numbers, first = [], at
        numbers += own
    yield numbers, pages[first:]
