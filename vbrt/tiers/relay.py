"""From pageable host memory to a GPU through a little that is page-locked.

A copy out of pageable memory runs at a sixth of the link's speed and holds up the thread that asks for it. Through a
relay the host fills one chunk while the link carries the other.
"""

import threading
import warnings

import torch

__all__ = ["Relay"]

_CHUNK_BYTES = 8 << 20


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
        for at in range(0, origin.numel(), _CHUNK_BYTES):
            chunk, sent = chunks[at // _CHUNK_BYTES % 2]
            part = origin[at : at + _CHUNK_BYTES]
            sent.synchronize()
            chunk[: part.numel()].copy_(part)
            with torch.cuda.stream(stream):
                target[at : at + part.numel()].copy_(chunk[: part.numel()], non_blocking=True)
                sent.record()

    @torch.inference_mode(False)  # the next copy may come outside of it
    def _chunks(self) -> list[tuple[torch.Tensor, torch.cuda.Event]]:
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
