"""Pages of files, read by the threads that compute; see reading.c."""

import ctypes
import os
from collections.abc import Callable

import torch

from vbrt.kernels.cpu.build import library, refusal

__all__ = ["page_reader", "read_page"]

_DIGEST_BYTES = 8


def page_reader(backend: str) -> Callable[[int, torch.Tensor, int, int], bytes] | None:
    """Return `read_page` for a backend of config; None where plain torch is asked for, or the library cannot be built,
    which is said where the first weight is computed with."""
    cpu = torch.device("cpu")
    return None if backend == "reference" or refusal(cpu, "reading") is not None else read_page


def read_page(fd: int, out: torch.Tensor, offset: int, segment_bytes: int) -> bytes:
    """Fill `out` (uint8, contiguous, CPU, more than 240 bytes) from an offset of a file, by torch's threads; return the
    XXH3-64 digests of its segments, one behind the other. The last segment has more than 240 bytes, too.

    Raises:
        OSError: the file cannot be read; EOFError: it ends too early.
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
