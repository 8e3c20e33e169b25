"""Pages from host memory over the links of several GPUs at once.

A GPU's own link is one of several in a host. A large page is copied in as many parts as there are lanes: the computing
GPU's own, and one of each neighbour, which copies its part into a small chunk of its memory over its own link, and on
to the computing GPU over NVLink, while the next chunk comes.

A page arrives with the event that the *joining* stream records after it has waited for all lanes; that stream is the
tier's copy stream, and does nothing else for such pages. So a lane begins with the next page as soon as it is done with
its part. Under the capture of a CUDA graph the same calls are recorded, with events of their own.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from vbrt.tiers.protocols.carrier import Source
from vbrt.tiers.storage.device_copy import Signal, checked, copying, cuda_runtime, reach, wait_for

__all__ = ["Lanes", "Parts", "open_lanes"]

_LEAST_BYTES = 2 << 20  # of a page that is copied in parts: smaller ones are not worth the calls
_CHUNK_BYTES = 8 << 20  # a link's full speed, nearly
_CHUNKS = 4
_ALIGN = 4096


class _Hop(NamedTuple):
    """A chunk's way: over a neighbour's link into its memory, and on to the computing GPU."""

    chunk: int
    fetch: Callable[[], int]
    send: Callable[[], int]


class Parts(NamedTuple):
    """The copies that a page takes. tensors: its source and its target, which the copies need."""

    own: Callable[[], int]
    hops: "tuple[tuple[_Lane, list[_Hop]], ...]"
    tensors: tuple[torch.Tensor, torch.Tensor]


class _Marks:
    """The events of a lane: of eager copies, or of a capture's. filled, freed: by chunk; used: chunks that have been
    sent since these marks began."""

    def __init__(self, runtime: ctypes.CDLL, device: torch.device) -> None:
        self.filled = [Signal(runtime, device) for _ in range(_CHUNKS)]
        self.freed = [Signal(runtime, device) for _ in range(_CHUNKS)]
        self.done = Signal(runtime, device)
        self.used: set[int] = set()
        self.forked = False


class _Lane:
    """The link of one neighbour: its chunks, and two streams of its device."""

    def __init__(self, runtime: ctypes.CDLL, device: torch.device) -> None:
        self._runtime, self.device = runtime, device
        self.chunks = [torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device=device) for _ in range(_CHUNKS)]
        self.fetching, self.sending = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.fetching.wait_stream(torch.cuda.current_stream(device))
        self.marks, self._eager = _Marks(runtime, device), None
        self._next = 0

    def hops(self, target: torch.Tensor, source: torch.Tensor) -> list[_Hop]:
        """Return the way of each chunk of a part."""
        found = []
        for at in range(0, target.numel(), _CHUNK_BYTES):
            chunk, self._next = self._next, (self._next + 1) % _CHUNKS
            there, here = target[at : at + _CHUNK_BYTES], source[at : at + _CHUNK_BYTES]
            staged = self.chunks[chunk][: here.numel()]
            fetch = copying(self._runtime, staged, here, self.fetching)
            found.append(_Hop(chunk, fetch, copying(self._runtime, there, staged, self.sending)))
        return found

    def copy(self, hops: list[_Hop], joining: torch.cuda.Stream) -> None:
        """Queue a part's copies, and have a stream wait for their end."""
        marks, fetching, sending = self.marks, self.fetching, self.sending
        for chunk, fetch, send in hops:
            if chunk in marks.used:
                marks.freed[chunk].wait(fetching)
            checked(fetch())
            marks.filled[chunk].pass_on(fetching, sending)
            checked(send())
            marks.freed[chunk].note(sending)
            marks.used.add(chunk)
        marks.done.pass_on(sending, joining)

    def begin_capture(self) -> None:
        self._eager, self.marks = self.marks, _Marks(self._runtime, self.device)

    def end_capture(self) -> None:
        if self._eager is not None:
            self.marks, self._eager = self._eager, None

    def wait(self, event: torch.cuda.Event) -> None:
        """Have what is sent on from now on wait; under a capture the first call makes both streams a part of it."""
        wait_for(self._runtime, event, self.sending)
        if self._eager is not None and not self.marks.forked:
            wait_for(self._runtime, event, self.fetching)
            self.marks.forked = True


class Lanes:
    """The lanes into one GPU.

    Attributes:
        devices: whose links are used, the computing one first.
    """

    together = False

    def __init__(self, runtime: ctypes.CDLL, joining: torch.cuda.Stream, neighbours: Sequence[torch.device]) -> None:
        self._runtime, self._joining = runtime, joining
        self._own, self._done = torch.cuda.Stream(joining.device), Signal(runtime, joining.device)
        self._eager: Signal | None = None
        self._lanes = [_Lane(runtime, device) for device in neighbours]
        self.devices = (joining.device, *neighbours)

    def take(self, source: Source) -> bool:
        """True if the page of a slot is copied in parts: a large one in page-locked host memory."""
        return source.tier.memory and source.room.pinned and source.page.nbytes >= _LEAST_BYTES

    def parts(self, target: torch.Tensor, slot: Source) -> Parts:
        """Return the copies of a page from its slot, equal parts for all lanes."""
        nbytes, source = target.numel(), slot.view
        part = -(-nbytes // (len(self.devices) * _ALIGN)) * _ALIGN
        hops = [
            (lane, lane.hops(target[at : at + part], source[at : at + part]))
            for lane, at in zip(self._lanes, range(part, nbytes, part), strict=False)
        ]
        return Parts(copying(self._runtime, target[:part], source[:part], self._own), tuple(hops), (target, source))

    def wait(self, event: torch.cuda.Event) -> None:
        """Have copies from now on wait for an event."""
        wait_for(self._runtime, event, self._own)
        for lane in self._lanes:
            lane.wait(event)

    def copy(self, parts: Parts) -> None:
        """Queue a page's copies, and have the joining stream wait for them."""
        checked(parts.own())
        for lane, hops in parts.hops:
            lane.copy(hops, self._joining)
        self._done.pass_on(self._own, self._joining)

    # -- CUDA graphs --------------------------------------------------------------------------------------------------

    def begin_capture(self) -> None:
        """Have the copies that follow be recorded by a capture, until `end_capture`."""
        self._eager, self._done = self._done, Signal(self._runtime, self._joining.device)
        for lane in self._lanes:
            lane.begin_capture()

    def join(self) -> None:
        """Have the joining stream wait for all that the lanes were given."""
        self._joining.wait_stream(self._own)
        for lane in self._lanes:
            self._joining.wait_stream(lane.fetching)
            self._joining.wait_stream(lane.sending)

    def end_capture(self) -> Sequence:
        """Go on as before the capture, if there is one; return what `follow` is told of its replays: nothing."""
        if self._eager is not None:
            self._done, self._eager = self._eager, None
        for lane in self._lanes:
            lane.end_capture()
        return ()

    def follow(self, event: torch.cuda.Event, recorded: Sequence = ()) -> None:
        """Have chunks be filled after an event: the end of a graph that uses them too."""
        wait_for(self._runtime, event, *(lane.fetching for lane in self._lanes))

    def check(self) -> None:
        """Do nothing: one process has all lanes."""


def open_lanes(joining: torch.cuda.Stream, neighbours: Sequence[int], fallbacks: list[str]) -> Lanes | None:
    """Return the lanes into the GPU of a stream, its own and those of neighbours; None, with the reason added to
    `fallbacks`, where pages come over its own link alone."""
    runtime, own, found = cuda_runtime(), joining.device, []
    if not neighbours:
        return None
    if runtime is None:
        fallbacks.append("tiers.gpu.links: the CUDA runtime cannot be called, pages come over the own link alone")
        return None
    for device in (torch.device("cuda", index) for index in neighbours):
        reason = reach(own, device)
        if reason:
            fallbacks.append(f"tiers.gpu.links: the link of {device} is not used: {reason}")
        else:
            found.append(device)
    try:
        return Lanes(runtime, joining, found) if found else None
    except torch.OutOfMemoryError as error:
        fallbacks.append(
            f"tiers.gpu.links: no neighbour's link is used: one has not {_CHUNKS * _CHUNK_BYTES} bytes left ({error})"
        )
        return None
