"""File pages read by the computing (OpenMP) threads; see reading.c."""

import ctypes
import os
from collections.abc import Callable

import torch

from vbrt.kernels.cpu.build import library, refusal

__all__ = ["page_reader", "read_page"]

_DIGEST_BYTES = 8


def page_reader(backend: str) -> Callable[[int, torch.Tensor, int, int], bytes] | None:
    """Return `read_page` for a configured backend; None for plain torch, or if the library cannot be built, which is
    reported with the first weight that is computed with."""
    cpu = torch.device("cpu")
    return None if backend == "reference" or refusal(cpu, "reading") is not None else read_page


def read_page(fd: int, out: torch.Tensor, offset: int, segment_bytes: int) -> bytes:
    """Fill `out` (uint8, contiguous, CPU, more than 240 bytes) from a file offset, with torch's threads; return the
    concatenated XXH3-64 digests of its segments. The last segment must also have more than 240 bytes.

    Raises:
        OSError: the file cannot be read; EOFError: it is too short.
        KernelError: there is no library, see `build.refusal`.
    """
    nbytes = out.numel()
    digests = bytearray(-(-nbytes // segment_bytes) * _DIGEST_BYTES)
    room = (ctypes.c_char * len(digests)).from_buffer(digests)
    threads = max(1, min(torch.get_num_threads(), len(digests) // _DIGEST_BYTES))
    code = library("reading").vbrt_read(fd, out.data_ptr(), nbytes, offset, segment_bytes, room, threads)
    if code < 0:
        raise EOFError(f"it ends before byte {offset + nbytes}")
    if code:
        raise OSError(code, os.strerror(code))
    return bytes(digests)
