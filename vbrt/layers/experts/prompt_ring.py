"""Ring of slots that a prompt's experts pass through, beside those of the device cache.

    parts, passage = ring.schedule(layer, [3, 5, 8, 9], following)
    for experts, addresses in zip(parts, passage):  # the next part is copied meanwhile
        compute(experts, addresses)

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

__all__ = ["PromptRing", "chunks", "ring_pages"]

#: bytes of a part that keep the link busy for longer than the host takes to launch a part's kernels
_PART_BYTES = 96 << 20
_PARTS = 4  # of a layer, at least: the first one's copy is waited for
_SHARE = 8  # at most this part of the cache's room


def ring_pages(experts: int, page_bytes: int, room_bytes: int) -> int:
    """Return the pages of each half of a ring for layers of so many experts; 0: the room is too small for one."""
    wanted = min(-(-experts // _PARTS), -(-_PART_BYTES // page_bytes))
    return min(wanted, room_bytes // (2 * _SHARE * page_bytes))


def chunks(experts: Sequence[int], most: int) -> list[Sequence[int]]:
    """Cut experts into parts of at most so many."""
    return [experts[at : at + most] for at in range(0, len(experts), most)]


class _Half:
    """Slots of a part.

    Attributes:
        slots: uint8 [bytes of a page] each; addresses: of the slots.
        arrived: event of the last copy; read: of the last kernels that read them.
    """

    def __init__(self, memory: Tensor) -> None:
        self.slots = list(memory)
        self.addresses = [slot.data_ptr() for slot in self.slots]
        self.arrived: torch.Event | None = None
        self.read: torch.Event | None = None


class _Load(NamedTuple):
    """Experts of a layer whose pages a half has, or gets."""

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
        self._ahead: list[_Load] = []  # first parts of a layer to come

    @property
    def pages(self) -> int:
        """Pages of a half."""
        return len(self._halves[0].slots)

    def schedule(
        self, layer: int, experts: Sequence[int], following: Sequence[int] = (), most: int = 1 << 20
    ) -> tuple[list[Sequence[int]], Iterator[dict[int, int]]]:
        """Begin to bring experts of a layer; return those of each part, in turn, and the addresses of each part's
        pages, by expert. Kernels that are launched until the next part is asked for may read a part's pages.

        Args:
            layer: its number.
            experts: of the layer, ascending.
            following: experts that the next layer will need first; empty: nothing is copied ahead.
            most: experts in a part, at most.
        """
        most = min(most, self.pages)
        ahead, self._ahead = self._ahead, []
        wanted = set(experts)
        ready = deque(load for load in ahead if load.layer == layer and wanted.intersection(load.experts))
        there = {expert for load in ready for expert in load.experts}
        rest = chunks([expert for expert in experts if expert not in there], most)
        parts = [[e for e in load.experts if e in wanted] for load in ready] + rest
        more = chunks(following[: len(self._halves) * most], most)
        todo = deque([*((layer, part) for part in rest), *((layer + 1, part) for part in more)])
        self._fill(ready, todo)
        return parts, self._each(len(parts), ready, todo)

    def _each(
        self, parts: int, ready: deque[_Load], todo: deque[tuple[int, Sequence[int]]]
    ) -> Iterator[dict[int, int]]:
        for _ in range(parts):
            self._fill(ready, todo)
            load = ready.popleft()
            if self._stream is not None:
                accelerator.current_stream(self._device).wait_event(load.half.arrived)
            try:
                yield dict(zip(load.experts, load.half.addresses, strict=False))
            finally:
                if self._stream is not None:
                    load.half.read = accelerator.current_stream(self._device).record_event()
        self._fill(ready, todo)
        self._ahead = list(ready)

    def _fill(self, ready: deque[_Load], todo: deque[tuple[int, Sequence[int]]]) -> None:
        """Begin copies to the halves that no part to come has."""
        while todo and len(ready) < len(self._halves):
            taken = [load.half for load in ready]
            load = _Load(*todo.popleft(), next(half for half in self._halves if half not in taken))
            self._copy(load)
            ready.append(load)

    def _copy(self, load: _Load) -> None:
        half, pages = load.half, [self._source(load.layer, expert) for expert in load.experts]
        slots = [slot[: page.numel()] for slot, page in zip(half.slots, pages, strict=False)]
        if self._stream is None:
            torch._foreach_copy_(slots, pages)
            return
        if half.read is not None:
            self._stream.wait_event(half.read)
        with accelerator.stream(self._stream):
            torch._foreach_copy_(slots, pages, non_blocking=True)
        half.arrived = self._stream.record_event()

    def close(self) -> None:
        """Have the current stream wait for all copies."""
        if self._stream is not None:
            accelerator.current_stream(self._device).wait_stream(self._stream)
