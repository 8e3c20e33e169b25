"""H2D copies into a programme's ring, on a GPU's copy stream, overlapped with compute.

Before the first copy after a lease, the copy stream waits for the kernels queued so far; a lease makes the compute
stream wait for the copies of its pages. Under CUDA graph capture the same calls record the copies into the graph.

A page costs five calls: the copy, and an event record and a wait on each of the two streams. `DirectLink` calls the
CUDA runtime directly, with arguments prepared when the programme starts, which saves a tenth of a lease: most of the
rest is the driver's time for the copy.
"""

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from vbrt.host import accelerator
from vbrt.libraries.torch_api import current_device, is_capturing, raw_stream, set_stream
from vbrt.tiers.protocols.carrier import Carrier, Source
from vbrt.tiers.storage.device_copy import checked, copying, cuda_runtime
from vbrt.tiers.storage.memory_tiers import Buffer

__all__ = ["HostLink", "StreamLink", "link_of"]

Started = Callable[[], object]


class HostLink:
    """Synchronous copies on the host; the interface of all links."""

    def follows(self) -> bool:
        """True if the caller's current stream is the link's compute stream; always on the host."""
        return True

    def follow(self) -> None:
        """Adopt the caller's current stream as the compute stream."""

    def wait(self, slot: int) -> None:
        """Make the compute stream wait for the page in a slot."""

    def take(self, slot: int, event: torch.Event | None) -> None:
        """Take over a slot whose page is complete at `event`."""

    def wait_for(self, buffer: Buffer) -> None:
        """Make copies and kernels wait for earlier users of a buffer."""

    def wait_for_copies(self) -> None:
        """Make kernels wait for all copies so far, those of resident pages included."""

    def computed(self) -> None:
        """Make the next copies wait for the kernels queued so far."""

    def copying(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> Started:
        """Return a callable that copies `source` into a slot at each call."""
        return functools.partial(target.copy_, source)

    def bringing(self, slot: int, target: torch.Tensor, source: Source) -> Started:
        """Return a callable that copies the page of a lower tier's slot into a ring slot at each call."""
        return self.copying(slot, target, source.view)

    def arrived(self, slot: int) -> None:
        """Return the event of the last copy into a slot; None without one."""

    def fence(self, ring: Sequence[Buffer | None], read: Iterable[Buffer], sources: Iterable[Buffer]) -> None:
        """Fence buffers against reuse before current kernels and copies end.

        Args:
            ring: by slot; None for a buffer that the ring no longer owns.
            read: buffers that kernels read.
            sources: buffers that copies read.
        """

    def synchronize(self) -> None:
        """Wait for copies and kernels."""

    def freed(self) -> Any:
        """Record into the capture an event for `after`; None where a graph has no such events."""

    def after(self, event: Any) -> None:
        """Make the next copies wait for an event of the last replay."""

    def begin_capture(self) -> None:
        """Record the calls that follow into the capture of the current stream, until `end_capture`."""

    def join(self) -> None:
        """Join the copy stream into the capture."""

    def end_capture(self) -> None:
        """Return to eager copies, if a capture is open."""

    def replay(self, graph: accelerator.Graph) -> None:
        """Replay a graph on the current stream; it reads the pages in all slots and leaves other pages there."""
        graph.replay()


class StreamLink(HostLink):
    """Asynchronous copies, in order, on one copy stream.

    Attributes:
        compute: the stream of the kernels.
    """

    def __init__(self, stream: torch.Stream, slots: int) -> None:
        self._stream, self._device = stream, stream.device
        self._index, self._on_link = stream.device_index, _name(stream)
        self._arrived: list[torch.Event | None] = [None] * slots
        self._own = [accelerator.Event() for _ in range(slots)]
        self._done = accelerator.Event()
        self._outside: tuple | None = None
        self._forked = False  # the copy stream is part of the capture
        self.follow()

    def follows(self) -> bool:
        return raw_stream(self._index) == self._raw and is_capturing() is self._capturing

    def follow(self) -> None:
        self.compute = accelerator.current_stream(self._device)
        self._on_compute = _name(self.compute)
        self._raw = accelerator.stream_key(self.compute)
        self._capturing = accelerator.is_current_stream_capturing()

    def wait(self, slot: int) -> None:
        event = self._arrived[slot]
        if event is not None:
            event.wait(self.compute)

    def take(self, slot: int, event: torch.Event | None) -> None:
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
        self._forked = True

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

    def arrived(self, slot: int) -> torch.Event | None:
        return self._arrived[slot]

    def fence(self, ring: Sequence[Buffer | None], read: Iterable[Buffer], sources: Iterable[Buffer]) -> None:
        computed, copied = self.compute.record_event(), self._stream.record_event()
        on, copies = accelerator.stream_key(self.compute), accelerator.stream_key(self._stream)
        for buffer in ring:
            if buffer is not None:
                buffer.fences[on], buffer.fences[copies] = computed, copied
        for buffer in read:
            buffer.fences[on] = computed
        for buffer in sources:
            buffer.fences[copies] = copied

    def synchronize(self) -> None:
        accelerator.synchronize(self._device)

    # -- CUDA graphs --------------------------------------------------------------------------------------------------

    def freed(self) -> torch.Event | None:
        event = accelerator.graph_event()
        if event is not None:
            self.computed()
            event.record(self._stream)  # after the copies that this pass waits for
        return event

    def after(self, event: torch.Event) -> None:
        self._stream.wait_event(event)

    def begin_capture(self) -> None:
        self._outside = self.compute, self._on_compute, self._raw, self._arrived, self._own, self._done
        self._own, self._done = [accelerator.Event() for _ in self._own], accelerator.Event()
        self._arrived, self._forked = [None] * len(self._own), False
        self.follow()

    def join(self) -> None:
        if self._forked:
            self.compute.wait_stream(self._stream)

    def end_capture(self) -> None:
        if self._outside is not None:
            self.compute, self._on_compute, self._raw, self._arrived, self._own, self._done = self._outside
            self._capturing, self._outside = False, None

    def replay(self, graph: accelerator.Graph) -> None:
        if not self.follows():
            before = self.compute
            self.follow()
            self.compute.wait_stream(before)
        for slot in range(len(self._arrived)):
            self.wait(slot)
        graph.replay()
        self._arrived = [self.compute.record_event()] * len(self._arrived)


class DirectLink(StreamLink):
    """`StreamLink` that calls the CUDA runtime directly. Falls back to torch's calls under capture, and where another
    device is current, whose default stream a null handle would name."""

    def __init__(self, stream: torch.Stream, slots: int, runtime: ctypes.CDLL) -> None:
        self._runtime, self._direct, self._waits = runtime, False, None
        super().__init__(stream, slots)
        for event in (*self._own, self._done):
            event.record(stream)  # torch creates the CUDA event at the first record
        self._events = [ctypes.c_void_p(event.cuda_event) for event in self._own]
        self._done_event, self._copies = ctypes.c_void_p(self._done.cuda_event), ctypes.c_void_p(stream.cuda_stream)
        record, wait = runtime.cudaEventRecord, runtime.cudaStreamWaitEvent
        self._note = [functools.partial(record, event, self._copies) for event in self._events]
        self._hold = functools.partial(wait, self._copies, self._done_event, _NO_FLAGS)
        self._prepare()

    def follow(self) -> None:
        super().follow()
        self._direct = False  # until the next call of `follows`
        if self._outside is None and self._waits is not None:
            self._prepare()

    def _prepare(self) -> None:
        """Prepare the arguments of the calls on the compute stream."""
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
                accelerator.check_error(code)
        elif event is not None:
            event.wait(self.compute)

    def computed(self) -> None:
        self._direct = self._outside is None and current_device() == self._index
        if not self._direct:
            super().computed()
            return
        code = self._note_done() or self._hold()
        if code:
            accelerator.check_error(code)

    def after(self, event: torch.Event) -> None:
        super().after(event)
        self._direct = current_device() == self._index

    def copying(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> Started:
        start = copying(self._runtime, target, source, self._stream)
        if accelerator.is_device(source):
            return functools.partial(self._copy_from_peer, slot, start, (target, source))
        return functools.partial(self._copy_directly, slot, start, (target, source))

    def _copy_directly(self, slot: int, start: Callable[[], int], tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
        if not self._direct:
            self._copy(slot, *tensors)
            return
        self._arrived[slot] = self._own[slot]
        code = start() or self._note[slot]()
        if code:
            accelerator.check_error(code)

    def _copy_from_peer(self, slot: int, start: Callable[[], int], tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Copy from another GPU's memory, also under capture; `tensors` keeps both alive as long as the callable."""
        checked(start())
        self._note_arrival(slot)

    def _note_arrival(self, slot: int) -> None:
        """Record the arrival of a slot's page behind the copies queued so far."""
        event = self._arrived[slot] = self._own[slot]
        if self._direct:
            checked(self._note[slot]())
        else:
            event.record(self._stream)


_NO_FLAGS = ctypes.c_uint(0)


class LaneLink(DirectLink):
    """`DirectLink` with a carrier: some pages arrive in parts, over the links of several GPUs."""

    def __init__(self, stream: torch.Stream, slots: int, runtime: ctypes.CDLL, lanes: Carrier) -> None:
        self._lanes, self._recorded = lanes, ()
        super().__init__(stream, slots, runtime)

    def wait_for(self, buffer: Buffer) -> None:
        super().wait_for(buffer)
        for fence in buffer.fences.values():
            self._lanes.wait(fence)

    def computed(self) -> None:
        super().computed()
        self._lanes.wait(self._done)

    def after(self, event: torch.Event) -> None:
        super().after(event)
        self._lanes.wait(event)

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

    def replay(self, graph: accelerator.Graph) -> None:
        super().replay(graph)
        self._lanes.follow(self._arrived[0], self._recorded)


class HostLaneLink(HostLink):
    """`HostLink` with a carrier for some pages."""

    def __init__(self, lanes: Carrier) -> None:
        self._lanes = lanes

    def bringing(self, slot: int, target: torch.Tensor, source: Source) -> Started:
        if not self._lanes.take(source):
            return super().bringing(slot, target, source)
        return functools.partial(self._lanes.copy, self._lanes.parts(target, source))


def link_of(stream: torch.Stream | None, slots: int, lanes: Carrier | None = None) -> HostLink:
    """Return the link of a ring with `slots` buffers. `stream`: copy stream of the tier; None for copies on the host.

    lanes: carrier of pages that take more than one copy; None without one.
    """
    if stream is None:
        return HostLink() if lanes is None else HostLaneLink(lanes)
    runtime = cuda_runtime()
    if runtime is None:
        return StreamLink(stream, slots)
    return DirectLink(stream, slots, runtime) if lanes is None else LaneLink(stream, slots, runtime, lanes)


def _name(stream: torch.Stream) -> tuple[int, int, int]:
    """Return the arguments by which torch identifies a stream."""
    return stream.stream_id, stream.device_index, stream.device_type
