"""From pageable host memory to a GPU through a little that is page-locked.

A copy out of pageable memory runs at a sixth of the link's speed and holds up the thread that asks for it. Through a
relay the host fills one chunk while the link carries the other. What fills a chunk may be a file: then its bytes are in
no other host memory, where each would take a page fault first.
"""

import threading
import warnings
from collections.abc import Callable

import torch

__all__ = ["Read", "Relay"]

_CHUNK_BYTES = 8 << 20

Read = Callable[[torch.Tensor, int], object]
"""Fills uint8 host memory with the bytes from a place on."""


_Chunk = tuple[torch.Tensor, torch.cuda.Event]


class Relay:
    """Two page-locked chunks of 8 MiB for each thread that copies, made at its first copy; no tier counts them.

    `fallbacks` gets the reason why copies go without chunks, if they do.
    """

    def __init__(self, fallbacks: list[str]) -> None:
        self._fallbacks = fallbacks
        self._mine = threading.local()

    def copy(self, target: torch.Tensor, origin: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Copy uint8 `origin`, in host memory, to `target` on the device of `stream`; `origin` is free on return."""
        chunks = self._chunks()
        if not chunks:
            with torch.cuda.stream(stream):
                target.copy_(origin)
            return
        _send(target, lambda part, at: part.copy_(origin[at : at + part.numel()]), stream, chunks)

    def filled(self, nbytes: int, read: Read, device: torch.device) -> torch.Tensor:
        """Return uint8 [nbytes] on a GPU with the bytes that `read` gives, for what the current stream does from now
        on. What `read` raises is raised."""
        target = torch.empty(nbytes, dtype=torch.uint8, device=device)
        chunks = self._chunks()
        if chunks:
            _send(target, read, torch.cuda.current_stream(device), chunks)
        else:
            whole = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            read(whole, 0)
            target.copy_(whole)
        return target

    @torch.inference_mode(False)  # the next copy may come outside of it
    def _chunks(self) -> list[_Chunk]:
        if not hasattr(self._mine, "chunks"):
            try:
                self._mine.chunks = [
                    (torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True), torch.cuda.Event())
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
            warnings.warn(reason, stacklevel=2)


def _send(target: torch.Tensor, read: Read, stream: torch.cuda.Stream, chunks: list[_Chunk]) -> None:
    """Send what `read` gives, chunk by chunk."""
    for at in range(0, target.numel(), _CHUNK_BYTES):
        chunk, sent = chunks[at // _CHUNK_BYTES % 2]
        part = target[at : at + _CHUNK_BYTES]
        sent.synchronize()
        read(chunk[: part.numel()], at)
        with torch.cuda.stream(stream):
            part.copy_(chunk[: part.numel()], non_blocking=True)
            sent.record()
