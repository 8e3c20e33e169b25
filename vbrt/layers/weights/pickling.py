"""Tensors of bytes in pickles."""

from multiprocessing.context import get_spawning_popen

import torch

from vbrt.host.host_memory import bytes_view

__all__ = ["from_pickle", "to_pickle"]


def to_pickle(made: torch.Tensor) -> torch.Tensor | bytes:
    """A uint8 tensor that was made for a pickle, as it goes into it.

    A process that is being spawned gets bytes: tensors reach it as files, which are closed with a tensor that nobody
    holds before the process has begun.
    """
    if get_spawning_popen() is None:
        return made
    page = made.cpu()  # outlives the view
    return bytes(bytes_view(page))


def from_pickle(made: torch.Tensor | bytes) -> torch.Tensor:
    """The tensor that `to_pickle` was given."""
    return torch.frombuffer(bytearray(made), dtype=torch.uint8) if isinstance(made, bytes) else made
