"""The copies of a programme's ring on a GPU's copy stream.

Before the first copy that follows a lease, the copy stream waits for what the computing stream has been given up to
then; a lease waits for the copies of its pages. Under the capture of a CUDA graph the same calls make the copies a part
of the graph.

A page costs five calls: the copy, and each stream notes where it is and waits for the other. `DirectLink` makes them by
the CUDA runtime's own functions, with arguments that were put together when the programme began, which saves a tenth of
a lease: most of what is left is the driver's time for the copy.
"""

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from vbrt.libraries.torch_api import current_device, is_capturing, raw_stream, set_stream
from vbrt.tiers.protocols.carrier import Carrier, Source
from vbrt.tiers.storage.device_copy import checked, copying, cuda_runtime
from vbrt.tiers.storage.memory_tiers import Buffer

__all__ = ["HostLink", "StreamLink", "link_of"]

Started = Callable[[], object]


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

    def copying(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> Started:
        """Return what copies a page into a slot, each time that it is called."""
        return functools.partial(target.copy_, source)

    def bringing(self, slot: int, target: torch.Tensor, source: Source) -> Started:
        """Return what brings the page of a slot below into a slot, each time that it is called."""
        return self.copying(slot, target, source.view)

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
        return raw_stream(self._index) == self._raw and is_capturing() is self._capturing

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

    def copying(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> Started:
        return functools.partial(self._copy, slot, target, source)

    def _copy(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> None:
        event = self._arrived[slot] = self._own[slot]
        set_stream(*self._on_link)
        try:
            target.copy_(source, True)  # without blocking
        finally:
            set_stream(*self._on_compute)
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


class DirectLink(StreamLink):
    """A `StreamLink` that calls the CUDA runtime itself; torch does it for what a capture records, and where another
    device is the current one, whose default stream would be meant."""

    def __init__(self, stream: torch.cuda.Stream, slots: int, runtime: ctypes.CDLL) -> None:
        self._runtime, self._direct, self._waits = runtime, False, None
        super().__init__(stream, slots)
        for event in (*self._own, self._done):
            event.record(stream)  # which makes it: torch's events begin with nothing
        self._events = [ctypes.c_void_p(event.cuda_event) for event in self._own]
        self._done_event, self._copies = ctypes.c_void_p(self._done.cuda_event), ctypes.c_void_p(stream.cuda_stream)
        record, wait = runtime.cudaEventRecord, runtime.cudaStreamWaitEvent
        self._note = [functools.partial(record, event, self._copies) for event in self._events]
        self._hold = functools.partial(wait, self._copies, self._done_event, _NO_FLAGS)
        self._prepare()

    def follow(self) -> None:
        super().follow()
        self._direct = False  # until somebody asks whether it `follows`
        if self._outside is None and self._waits is not None:
            self._prepare()

    def _prepare(self) -> None:
        """Put the arguments of the computing stream's calls together."""
        compute, runtime = ctypes.c_void_p(self._raw), self._runtime
        waits = [functools.partial(runtime.cudaStreamWaitEvent, compute, event, _NO_FLAGS) for event in self._events]
        self._note_done, self._waits = functools.partial(runtime.cudaEventRecord, self._done_event, compute), waits

    def follows(self) -> bool:
        self._direct = self._outside is None and current_device() == self._index
        return raw_stream(self._index) == self._raw and is_capturing() is self._capturing

    def wait(self, slot: int) -> None:
        event = self._arrived[slot]
        if self._direct and event is self._own[slot]:
            code = self._waits[slot]()
            if code:
                torch.cuda.check_error(code)
        elif event is not None:
            event.wait(self.compute)

    def computed(self) -> None:
        self._direct = self._outside is None and current_device() == self._index
        if not self._direct:
            super().computed()
            return
        code = self._note_done() or self._hold()
        if code:
            torch.cuda.check_error(code)

    def copying(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> Started:
        start = copying(self._runtime, target, source, self._stream)
        if source.is_cuda:
            return functools.partial(self._copy_from_peer, slot, start, (target, source))
        return functools.partial(self._copy_directly, slot, start, (target, source))

    def _copy_directly(self, slot: int, start: Callable[[], int], tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
        if not self._direct:
            self._copy(slot, *tensors)
            return
        self._arrived[slot] = self._own[slot]
        code = start() or self._note[slot]()
        if code:
            torch.cuda.check_error(code)

    def _copy_from_peer(self, slot: int, start: Callable[[], int], tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Copy from another GPU's memory, also under a capture; `tensors` are kept as long as the copy may be made."""
        checked(start())
        self._note_arrival(slot)

    def _note_arrival(self, slot: int) -> None:
        """Have a slot's page arrive with what the copy stream has been given."""
        event = self._arrived[slot] = self._own[slot]
        if self._direct:
            checked(self._note[slot]())
        else:
            event.record(self._stream)


_NO_FLAGS = ctypes.c_uint(0)


class LaneLink(DirectLink):
    """A `DirectLink` some of whose pages come over lanes: in parts, over the links of several GPUs."""

    def __init__(self, stream: torch.cuda.Stream, slots: int, runtime: ctypes.CDLL, lanes: Carrier) -> None:
        self._lanes, self._recorded = lanes, ()
        super().__init__(stream, slots, runtime)

    def wait_for(self, buffer: Buffer) -> None:
        super().wait_for(buffer)
        for fence in buffer.fences.values():
            self._lanes.wait(fence)

    def computed(self) -> None:
        super().computed()
        self._lanes.wait(self._done)

    def bringing(self, slot: int, target: torch.Tensor, source: Source) -> Started:
        if not self._lanes.take(source):
            return super().bringing(slot, target, source)
        return functools.partial(self._bring, slot, self._lanes.parts(target, source))

    def _bring(self, slot: int, parts: Any) -> None:
        self._lanes.copy(parts)
        self._note_arrival(slot)

    def begin_capture(self) -> None:
        super().begin_capture()
        self._lanes.begin_capture()

    def join(self) -> None:
        self._lanes.join()
        super().join()

    def end_capture(self) -> None:
        super().end_capture()
        self._recorded = self._lanes.end_capture() or self._recorded

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        super().replay(graph)
        self._lanes.follow(self._arrived[0], self._recorded)


class HostLaneLink(HostLink):
    """A `HostLink` some of whose pages come over lanes."""

    def __init__(self, lanes: Carrier) -> None:
        self._lanes = lanes

    def bringing(self, slot: int, target: torch.Tensor, source: Source) -> Started:
        if not self._lanes.take(source):
            return super().bringing(slot, target, source)
        return functools.partial(self._lanes.copy, self._lanes.parts(target, source))


def link_of(stream: torch.cuda.Stream | None, slots: int, lanes: Carrier | None = None) -> HostLink:
    """Return the link of a ring of so many slots into a tier whose copies run on a stream; None: on the host.

    lanes: where pages come over the links of several GPUs.
    """
    if stream is None:
        return HostLink() if lanes is None else HostLaneLink(lanes)
    runtime = cuda_runtime()
    if runtime is None:
        return StreamLink(stream, slots)
    return DirectLink(stream, slots, runtime) if lanes is None else LaneLink(stream, slots, runtime, lanes)


def _name(stream: torch.cuda.Stream) -> tuple[int, int, int]:
    """Return what torch tells a stream by."""
    return stream.stream_id, stream.device_index, stream.device_type
