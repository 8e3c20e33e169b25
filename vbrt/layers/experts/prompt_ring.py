"""Ring of slots that a prompt's experts pass through, beside those of the device cache.

    for part in ring.schedule(layer, [3, 5, 8, 9], following):  # the next part is copied meanwhile
        compute(part.experts, part.addresses)

A copy engine brings one half's pages while kernels read the other's: copies wait for the readers of their half, and
kernels for their copies. The last copies of a layer are the first pages that the next layer will need, so the link does
not rest while attention is computed.

Slots belong to the ring alone, so nothing that decoding keeps is evicted by a prompt, and a prompt that is broken off
leaves nothing behind.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.host import accelerator

__all__ = ["PromptRing", "RingPart", "ring_pages"]

#: bytes of a part that keep the link busy for longer than the host takes to launch a part's kernels
_PART_BYTES = 24 << 20
_PARTS = 4  # of a layer, at least: the first one's copy is waited for
_SHARE = 8  # at most this part of the cache's room


def ring_pages(experts: int, page_bytes: int, room_bytes: int) -> int:
    """Return the pages of each half of a ring for layers of so many experts; 0: the room is too small for one."""
    wanted = min(-(-experts // _PARTS), -(-_PART_BYTES // page_bytes))
    return min(wanted, room_bytes // (2 * _SHARE * page_bytes))


class RingPart(NamedTuple):
    """Experts whose pages lie in one half, and the address of each."""

    experts: Sequence[int]
    addresses: Sequence[int]


class _Half:
    """Slots of a part.

    Attributes:
        arrived: event of the last copy; read: of the last kernels that read them.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.arrived: torch.Event | None = None
        self.read: torch.Event | None = None


class _Load(NamedTuple):
    """Experts of a layer, copied to a half."""

    layer: int
    experts: Sequence[int]
    half: _Half


class PromptRing:
    """Ring of two halves.

    Args:
        memory: uint8 [slots, bytes of a page], on the computing device; an even number of slots.
        source: returns the page of a layer's expert in page-locked host memory, uint8 [bytes].
    """

    def __init__(self, memory: Tensor, source: Callable[[int, int], Tensor]) -> None:
        self._halves = [_Half(part) for part in memory.chunk(2)]
        self._source, self._device = source, memory.device
        self._stream = accelerator.Stream(memory.device) if accelerator.has_streams(memory.device) else None
        self._ahead: _Load | None = None  # the first part of a layer to come

    @property
    def pages(self) -> int:
        """Pages of a half."""
        return len(self._halves[0].memory)

    def schedule(self, layer: int, experts: Sequence[int], following: Sequence[int] = ()) -> Iterator[RingPart]:
        """Return the parts of a layer, whose first copies have begun; kernels that are launched until the next part is
        asked for may read a part's pages.

        Args:
            layer: its number.
            experts: of the layer, ascending.
            following: experts that the next layer will need first; empty: nothing is copied ahead.
        """
        wanted, ahead, self._ahead = set(experts), self._ahead, None
        there = set() if ahead is None or ahead.layer != layer else wanted.intersection(ahead.experts)
        rest = [expert for expert in experts if expert not in there]
        todo = deque((layer, rest[at : at + self.pages]) for at in range(0, len(rest), self.pages))
        ready = deque([ahead] if there else [])
        parts = len(todo) + len(ready)
        if following:
            todo.append((layer + 1, following[: self.pages]))
        self._fill(ready, todo)
        return self._parts(parts, ready, todo, wanted)

    def _parts(
        self, parts: int, ready: deque[_Load], todo: deque[tuple[int, Sequence[int]]], wanted: set[int]
    ) -> Iterator[RingPart]:
        for _ in range(parts):
            self._fill(ready, todo)
            yield from self._part(ready.popleft(), wanted)
        self._fill(ready, todo)
        self._ahead = ready.popleft() if ready else None

    def _fill(self, ready: deque[_Load], todo: deque[tuple[int, Sequence[int]]]) -> None:
        """Begin copies to the halves that no part to come has."""
        while todo and len(ready) < len(self._halves):
            load = _Load(*todo.popleft(), self._halves[0])
            self._halves.reverse()
            self._copy(load)
            ready.append(load)

    def _copy(self, load: _Load) -> None:
        pages = [self._source(load.layer, expert) for expert in load.experts]
        slots = [slot[: page.numel()] for slot, page in zip(load.half.memory, pages, strict=False)]
        if self._stream is None:
            torch._foreach_copy_(slots, pages)
            return
        if load.half.read is not None:
            self._stream.wait_event(load.half.read)
        with accelerator.stream(self._stream):
            for slot, page in zip(slots, pages, strict=True):
                slot.copy_(page, non_blocking=True)
        load.half.arrived = self._stream.record_event()

    def _part(self, load: _Load, wanted: set[int]) -> Iterator[RingPart]:
        half = load.half
        if self._stream is not None:
            accelerator.current_stream(self._device).wait_event(half.arrived)
        places = zip(load.experts, (slot.data_ptr() for slot in half.memory), strict=False)
        there = {expert: place for expert, place in places if expert in wanted}
        try:
            yield RingPart(list(there), list(there.values()))
        finally:
            if self._stream is not None:
                half.read = accelerator.current_stream(self._device).record_event()

    def close(self) -> None:
        """Have the current stream wait for all copies."""
        if self._stream is not None:
            accelerator.current_stream(self._device).wait_stream(self._stream)
