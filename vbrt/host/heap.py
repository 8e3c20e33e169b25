"""The C library's heap."""

import ctypes
import sys

__all__ = ["trim_heap"]


def trim_heap() -> None:
    """Give freed chunks of the heap back to the operating system; glibc keeps them otherwise."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        if trim is not None:
            trim(0)
