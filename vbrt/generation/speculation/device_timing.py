"""Device timing without synchronization."""

import time

import torch

from vbrt.host import accelerator

__all__ = ["Marks"]


class Marks:
    """Timestamps in a device's stream (CUDA events), or of the CPU clock."""

    def __init__(self, device: torch.device) -> None:
        self._stream = accelerator.current_stream(device) if accelerator.has_streams(device) else None
        self._marks: list[float | torch.Event] = []

    def mark(self) -> None:
        """Record a timestamp after all work launched so far."""
        if self._stream is None:
            self._marks.append(time.perf_counter())
            return
        event = accelerator.Event(enable_timing=True)
        event.record(self._stream)
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Return the intervals between marks, in seconds; synchronizes with the last one."""
        if self._stream is None:
            return [end - start for start, end in zip(self._marks, self._marks[1:], strict=False)]
        self._marks[-1].synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [start.elapsed_time(end) / 1000 for start, end in pairs]
