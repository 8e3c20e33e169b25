"""Multi-link H2D copies: a page is split over the host links of several GPUs, and joined over NVLink.

A GPU's own link is one of several in a host. A large page is split into one part per lane: the computing GPU's own
link, and the link of each neighbour GPU, which stages its part chunk by chunk in its memory: H2D over its own link,
then P2P to the computing GPU over NVLink, overlapped with the next chunk's H2D.

The *joining* stream, the tier's copy stream, waits for all lanes and then records the page's arrival event; it does
nothing else for such pages. So a lane starts with the next page as soon as its part is done. CUDA graph capture records
the same calls, with a separate set of events.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from vbrt.host import accelerator
from vbrt.tiers.protocols.carrier import Source
from vbrt.tiers.storage.device_copy import Signal, checked, copying, cuda_runtime, reach, wait_for

__all__ = ["Lanes", "Parts", "open_lanes"]

_LEAST_BYTES = 2 << 20  # smallest page to split: below, the calls cost more than they save
_CHUNK_BYTES = 8 << 20  # nearly full link speed
_CHUNKS = 4
_ALIGN = 4096


class _Hop(NamedTuple):
    """Two copies of a chunk: H2D into a neighbour's memory, then P2P to the computing GPU."""

    chunk: int
    fetch: Callable[[], int]
    send: Callable[[], int]


class Parts(NamedTuple):
    """Prepared copies of a page. tensors: source and target, kept alive for the copies."""

    own: Callable[[], int]
    hops: "tuple[tuple[_Lane, list[_Hop]], ...]"
    tensors: tuple[torch.Tensor, torch.Tensor]


class _Marks:
    """Events of a lane, one set for eager copies and one per capture. filled, freed: by chunk; used: chunks sent since
    this set was created."""

    def __init__(self, runtime: ctypes.CDLL, device: torch.device) -> None:
        self.filled = [Signal(runtime, device) for _ in range(_CHUNKS)]
        self.freed = [Signal(runtime, device) for _ in range(_CHUNKS)]
        self.done = Signal(runtime, device)
        self.used: set[int] = set()
        self.forked = False


class _Lane:
    """Lane over one neighbour's link: staging chunks, and two streams of its device."""

    def __init__(self, runtime: ctypes.CDLL, device: torch.device) -> None:
        self._runtime, self.device = runtime, device
        self.chunks = [torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device=device) for _ in range(_CHUNKS)]
        self.fetching, self.sending = accelerator.Stream(device), accelerator.Stream(device)
        self.fetching.wait_stream(accelerator.current_stream(device))
        self.marks, self._eager = _Marks(runtime, device), None
        self._next = 0

    def hops(self, target: torch.Tensor, source: torch.Tensor) -> list[_Hop]:
        """Return the copies of each chunk of a part."""
        found = []
        for at in range(0, target.numel(), _CHUNK_BYTES):
            chunk, self._next = self._next, (self._next + 1) % _CHUNKS
            there, here = target[at : at + _CHUNK_BYTES], source[at : at + _CHUNK_BYTES]
            staged = self.chunks[chunk][: here.numel()]
            fetch = copying(self._runtime, staged, here, self.fetching)
            found.append(_Hop(chunk, fetch, copying(self._runtime, there, staged, self.sending)))
        return found

    def copy(self, hops: list[_Hop], joining: torch.Stream) -> None:
        """Queue a part's copies, and make a stream wait for their end."""
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

    def wait(self, event: torch.Event) -> None:
        """Make later P2P copies wait; under capture the first call joins both streams to it."""
        wait_for(self._runtime, event, self.sending)
        if self._eager is not None and not self.marks.forked:
            wait_for(self._runtime, event, self.fetching)
            self.marks.forked = True


class Lanes:
    """Carrier with lanes over several links into one GPU.

    Attributes:
        devices: GPUs whose links are used, the computing one first.
    """

    together = False

    def __init__(self, runtime: ctypes.CDLL, joining: torch.Stream, neighbours: Sequence[torch.device]) -> None:
        self._runtime, self._joining = runtime, joining
        self._own, self._done = accelerator.Stream(joining.device), Signal(runtime, joining.device)
        self._eager: Signal | None = None
        self._lanes = [_Lane(runtime, device) for device in neighbours]
        self.devices = (joining.device, *neighbours)

    def take(self, source: Source) -> bool:
        """True if the page of a slot is split: a large page in pinned host memory."""
        return source.tier.memory and source.room.pinned and source.page.nbytes >= _LEAST_BYTES

    def parts(self, target: torch.Tensor, slot: Source) -> Parts:
        """Return the prepared copies of a page from its slot, in equal parts per lane."""
        nbytes, source = target.numel(), slot.view
        part = -(-nbytes // (len(self.devices) * _ALIGN)) * _ALIGN
        hops = [
            (lane, lane.hops(target[at : at + part], source[at : at + part]))
            for lane, at in zip(self._lanes, range(part, nbytes, part), strict=False)
        ]
        return Parts(copying(self._runtime, target[:part], source[:part], self._own), tuple(hops), (target, source))

    def wait(self, event: torch.Event) -> None:
        """Make all later copies wait for an event."""
        wait_for(self._runtime, event, self._own)
        for lane in self._lanes:
            lane.wait(event)

    def copy(self, parts: Parts) -> None:
        """Queue a page's copies, and make the joining stream wait for them."""
        checked(parts.own())
        for lane, hops in parts.hops:
            lane.copy(hops, self._joining)
        self._done.pass_on(self._own, self._joining)

    # -- CUDA graphs --------------------------------------------------------------------------------------------------

    def begin_capture(self) -> None:
        """Record the copies that follow into the CUDA graph under capture, until `end_capture`."""
        self._eager, self._done = self._done, Signal(self._runtime, self._joining.device)
        for lane in self._lanes:
            lane.begin_capture()

    def join(self) -> None:
        """Make the joining stream wait for all queued copies of the lanes."""
        self._joining.wait_stream(self._own)
        for lane in self._lanes:
            self._joining.wait_stream(lane.fetching)
            self._joining.wait_stream(lane.sending)

    def end_capture(self) -> Sequence:
        """Return to eager copies, if a capture is open; return the argument of `follow`: empty."""
        if self._eager is not None:
            self._done, self._eager = self._eager, None
        for lane in self._lanes:
            lane.end_capture()
        return ()

    def follow(self, event: torch.Event, recorded: Sequence = ()) -> None:
        """Make later chunk fills wait for an event: the end of a graph that uses the same chunks."""
        wait_for(self._runtime, event, *(lane.fetching for lane in self._lanes))

    def check(self) -> None:
        """Do nothing: with one process there is no other order to verify."""


def open_lanes(joining: torch.Stream, neighbours: Sequence[int], fallbacks: list[str]) -> Lanes | None:
    """Return the lanes into the GPU of a stream, over its own link and its neighbours'; None, with the reason added to
    `fallbacks`, if only its own link can be used."""
    if not neighbours:
        return None
    runtime, own, found = cuda_runtime(), joining.device, []
    if runtime is None:
        fallbacks.append("tiers.gpu.links: the CUDA runtime cannot be called, pages come over the own link alone")
        return None
    for device in (torch.device(accelerator.TYPE, index) for index in neighbours):
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
