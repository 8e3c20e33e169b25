"""File prefetch: threads read files into the page cache ahead of their use.

A loader that computes with what it reads (encoding, H2D) leaves the drive idle meanwhile, and mmap faults in a few
pages at a time. Prefetching large pieces, several at a time, keeps the drive busy. It is advisory: where it is wrong or
late the loader reads by itself, and only the loader reports unreadable files.
"""

import contextlib
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from vbrt.host.safe_files import open_regular, read_into
from vbrt.host.worker_threads import Crew

__all__ = ["ReadAhead", "Span"]

_THREADS = 4
_PIECE_BYTES = 8 << 20  # one read; four in parallel saturate a drive
_SCRATCH_BYTES = 256 << 10  # scratch buffer, overwritten by all parts of a piece: stays in cache
_WINDOW_BYTES = (256 << 20, 4 << 30)  # minimum, maximum
_WINDOW_SHARE = 8  # fraction of available memory


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file that are used at once; `name` identifies them in `used`."""

    name: str
    path: Path
    begin: int
    nbytes: int


class ReadAhead:
    """Prefetches spans in order, up to a window of an eighth of the available memory, at most 4 GiB, ahead of their
    use.

    A context manager, or `close` it. It holds no files open and hardly any memory.

    Args:
        share: (index, count) of this process, where several on a machine prefetch a part of the same files each.
    """

    def __init__(self, spans: Iterable[Span], share: tuple[int, int] = (0, 1)) -> None:
        spans = list(spans)
        self._starts: dict[str, int] = {}
        at = 0
        for span in spans:
            self._starts[span.name] = at
            at += span.nbytes
        self._pieces = enumerate(_pieces(spans))
        self._share = share
        self._window = _window_bytes()
        self._used = self._asked = 0
        self._crew = Crew(_THREADS)
        self._go_on()

    def used(self, name: str, nbytes: int) -> None:
        """Note that a span's first `nbytes` are used; with an unknown name, that many bytes after the last use."""
        self._used = max(self._used, self._starts.get(name, self._used) + nbytes)
        self._go_on()

    def _go_on(self) -> None:
        own, count = self._share
        while self._asked < self._used + self._window and (numbered := next(self._pieces, None)) is not None:
            number, piece = numbered
            self._asked += piece.nbytes
            if self._asked > self._used and number % count == own:  # skips pieces already used
                self._crew.give(_read, piece)

    def close(self) -> None:
        """Stop prefetching. Idempotent."""
        self._pieces = iter(())
        self._crew.stop()

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _window_bytes() -> int:
    least, most = _WINDOW_BYTES
    try:
        return min(most, max(least, psutil.virtual_memory().available // _WINDOW_SHARE))
    except OSError:  # out of descriptors; the loader reports that
        return least


def _pieces(spans: Iterable[Span]) -> Iterator[Span]:
    for span in _joined(spans):
        for at in range(0, span.nbytes, _PIECE_BYTES):
            yield Span(span.name, span.path, span.begin + at, min(_PIECE_BYTES, span.nbytes - at))


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Merge contiguous spans: a read costs as much as a hundred kilobytes."""
    run: Span | None = None
    for span in spans:
        if run is not None and (run.path, run.begin + run.nbytes) == (span.path, span.begin):
            run = replace(run, nbytes=run.nbytes + span.nbytes)
            continue
        if run is not None:
            yield run
        run = span
    if run is not None:
        yield run


_own = threading.local()


def _read(piece: Span) -> None:
    if not hasattr(_own, "memory"):
        _own.memory = mmap.mmap(-1, _SCRATCH_BYTES)
    with contextlib.suppress(OSError, EOFError):  # reported by the loader
        fd = open_regular(piece.path)
        try:
            full, rest = divmod(piece.nbytes, _SCRATCH_BYTES)
            scratch = memoryview(_own.memory)
            read_into(fd, [*[scratch] * full, scratch[:rest]], piece.begin)
        finally:
            os.close(fd)
