"""Pinned staging buffers for H2D copies from pageable host memory or files.

A copy from pageable memory runs at a sixth of the link's speed and blocks the calling thread. With two pinned chunks
(double buffering) the host fills one while the link transfers the other. A chunk may be filled straight from a file,
which avoids the page faults of an intermediate host buffer.
"""

import threading
from collections.abc import Callable

import torch

from vbrt.host import accelerator
from vbrt.host.logger import warn

__all__ = ["Read", "Relay"]

_CHUNK_BYTES = 8 << 20

Read = Callable[[torch.Tensor, int], object]
"""Callback (out, offset) that fills uint8 host memory with the bytes from an offset on."""


_Chunk = tuple[torch.Tensor, torch.Event]


class Relay:
    """Two pinned chunks of 8 MiB per copying thread, allocated at its first copy, outside the tiers' budgets.

    `fallbacks` receives the reason if copies have to do without chunks.
    """

    def __init__(self, fallbacks: list[str]) -> None:
        self._fallbacks = fallbacks
        self._mine = threading.local()

    def copy(self, target: torch.Tensor, origin: torch.Tensor, stream: torch.Stream) -> None:
        """Copy uint8 `origin`, in host memory, to `target` on the device of `stream`; returns once `origin` is read."""
        chunks = self._chunks()
        if not chunks:
            with accelerator.stream(stream):
                target.copy_(origin)
            return
        _send(target, lambda part, at: part.copy_(origin[at : at + part.numel()]), stream, chunks)

    def filled(self, nbytes: int, read: Read, device: torch.device) -> torch.Tensor:
        """Return uint8 [nbytes] on a GPU, filled by `read`, ready for work queued on the current stream. Propagates
        exceptions of `read`."""
        target = torch.empty(nbytes, dtype=torch.uint8, device=device)
        chunks = self._chunks()
        if chunks:
            _send(target, read, accelerator.current_stream(device), chunks)
        else:
            whole = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            read(whole, 0)
            target.copy_(whole)
        return target

    @torch.inference_mode(False)  # the next copy may be outside inference mode
    def _chunks(self) -> list[_Chunk]:
        if not hasattr(self._mine, "chunks"):
            try:
                self._mine.chunks = [
                    (torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True), accelerator.Event())
                    for _ in range(2)
                ]
            except RuntimeError as error:
                self._mine.chunks = []
                self._announce(error)
        return self._mine.chunks

    def _announce(self, error: RuntimeError) -> None:
        reason = (
            f"cpu tier: not even {2 * _CHUNK_BYTES} bytes can be page-locked ({error}); copies to the GPU are "
            "slow and hold up the thread that asks for them"
        )
        if reason not in self._fallbacks:
            self._fallbacks.append(reason)
            warn(reason, stacklevel=2)


def _send(target: torch.Tensor, read: Read, stream: torch.Stream, chunks: list[_Chunk]) -> None:
    """Copy the bytes of `read` to `target`, chunk by chunk."""
    for at in range(0, target.numel(), _CHUNK_BYTES):
        chunk, sent = chunks[at // _CHUNK_BYTES % 2]
        part = target[at : at + _CHUNK_BYTES]
        sent.synchronize()
        read(chunk[: part.numel()], at)
        with accelerator.stream(stream):
            part.copy_(chunk[: part.numel()], non_blocking=True)
            sent.record()
