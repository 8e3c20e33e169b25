"""Byte tensors in pickles."""

from multiprocessing.context import get_spawning_popen

import torch

from vbrt.host.host_memory import bytes_view

__all__ = ["from_pickle", "to_pickle"]


def to_pickle(made: torch.Tensor) -> torch.Tensor | bytes:
    """Return a uint8 tensor made for a pickle in picklable form.

    A spawned process gets bytes: tensors would be passed as shared files, closed with the last reference to the tensor
    before the process has started.
    """
    if get_spawning_popen() is None:
        return made
    page = made.cpu()  # outlives the view
    return bytes(bytes_view(page))


def from_pickle(made: torch.Tensor | bytes) -> torch.Tensor:
    """Inverse of `to_pickle`."""
    return torch.frombuffer(bytearray(made), dtype=torch.uint8) if isinstance(made, bytes) else made
