"""Files that are read ahead of their use: threads bring them into the page cache, whoever needs them finds them there.

A loader that computes with what it reads (encodes it, sends it to a GPU) leaves the drive idle meanwhile, and what is
read through a mapping comes a few pages at a time. Reading ahead in large pieces, some at a time, keeps the drive busy.
It is advice: where it is wrong or late, the loader reads by itself; where a file cannot be read, the loader says so.
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
_PIECE_BYTES = 8 << 20  # one read; four of them at a time are what fills a drive
_SCRATCH_BYTES = 256 << 10  # where all parts of a piece are read to, one over the other: it stays in cache
_WINDOW_BYTES = (256 << 20, 4 << 30)  # at least, at most
_WINDOW_SHARE = 8  # of the memory that is available


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file that are used at once: `name` is what their use is reported by."""

    name: str
    path: Path
    begin: int
    nbytes: int


class ReadAhead:
    """Reads spans in the order of their use, as far ahead of it as an eighth of the available memory, at most 4 GiB.

    Use it as a context manager, or close it. It holds no files open and hardly any memory.

    Args:
        share: (index, count) of this process, where several of a machine read the same files ahead, each a part.
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
        """Note that `nbytes` of a span are used, from its beginning; of a name that is none, somewhere behind what was
        used last."""
        self._used = max(self._used, self._starts.get(name, self._used) + nbytes)
        self._go_on()

    def _go_on(self) -> None:
        own, count = self._share
        while self._asked < self._used + self._window and (numbered := next(self._pieces, None)) is not None:
            number, piece = numbered
            self._asked += piece.nbytes
            if self._asked > self._used and number % count == own:  # what was used before it was read is not read
                self._crew.give(_read, piece)

    def close(self) -> None:
        """Read nothing any more. Idempotent."""
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
    except OSError:  # no descriptor left to ask with; who needs one says so
        return least


def _pieces(spans: Iterable[Span]) -> Iterator[Span]:
    for span in _joined(spans):
        for at in range(0, span.nbytes, _PIECE_BYTES):
            yield Span(span.name, span.path, span.begin + at, min(_PIECE_BYTES, span.nbytes - at))


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield spans that lie behind each other as one: a read costs as much as a hundred kilobytes."""
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
    with contextlib.suppress(OSError, EOFError):  # of the one who uses the file
        fd = open_regular(piece.path)
        try:
            full, rest = divmod(piece.nbytes, _SCRATCH_BYTES)
            scratch = memoryview(_own.memory)
            read_into(fd, [*[scratch] * full, scratch[:rest]], piece.begin)
        finally:
            os.close(fd)
