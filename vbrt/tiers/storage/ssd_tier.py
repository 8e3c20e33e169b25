"""SSD tier: one file per page, written once, verified on each read.

A file is a header of 4096 bytes and the page. The header holds magic, version, sizes and two XXH3-64 digests (of the
page's segments' digests, and of the header itself), followed by the key and the page's layout as JSON, for readers of
a hex dump. Segments are 512 KiB, so that several threads can read and verify one page.

Files are written to a temporary name, synced and renamed, inside the directory of this run (`run_directory.py`).
Reads are `preadv` into buffers that the caller owns, never a file mapping: an I/O error is an exception with the file's
name, not a SIGBUS. Digests are computed while the bytes just read are in the CPU cache.
"""

import contextlib
import errno
import json
import os
import re
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import xxhash

from vbrt.config.tier_records import TIERS
from vbrt.errors import TierError, describe_os_error
from vbrt.host.host_memory import aligned, bytes_view
from vbrt.host.logger import warn
from vbrt.host.safe_files import open_regular, read_into, replacing, write_at
from vbrt.host.system_calls import DIRECT, NO_FOLLOW, Directory
from vbrt.host.worker_threads import Crew
from vbrt.tiers.protocols.tier import Holder
from vbrt.tiers.storage.run_directory import RunDirectory
from vbrt.tiers.storage.verified_blocks import BlockDigests, read_items

__all__ = ["HEADER_BYTES", "PageFile", "ReadPage", "SsdTier"]

HEADER_BYTES = TIERS["ssd"].overhead_bytes
_MAGIC = b"VBPAGE\x00\x01"
_VERSION = 2
_HEAD = struct.Struct("<8sIIQQ")  # magic, version, header bytes, page bytes, XXH3-64 over the segments' XXH3-64
_SEGMENT_BYTES = 512 << 10  # unit of hashing: stays in L2
_DIRECT_SEGMENTS = 8  # per read with O_DIRECT: drives need large reads
_ALONE_BYTES = 1 << 20  # smaller pages are read before a helper would wake up
_PAGE_CACHE_SHARE = 0.5  # share of available memory that page files may fill before reads turn direct
_DIRECT_READS = 16  # after a read that missed the page cache; the next one goes through it, so that it fills again

ReadPage = Callable[[int, torch.Tensor, int, int], bytes]
"""Callback (fd, out, offset, segment_bytes) that fills a tensor from a file and returns the digests of its segments.
Raises OSError; EOFError where the file ends."""


@dataclass(slots=True, eq=False)
class PageFile:
    """Room for a page: charged with its header when reserved; the file exists once it was put."""

    nbytes: int  # charged to the budget; 0 once freed
    page_bytes: int
    pid: int
    path: Path | None = None
    digest: int = 0
    blocks: BlockDigests | None = None  # for pages whose items are read


class SsdTier:
    """Store of pages as files below `root`, within a budget of bytes on disk.

    Several threads may `get` concurrently, while one puts a page and others reserve and free, one at a time.

    Args:
        root: directory for page files; created if missing. Each run works in its own locked directory inside.
        capacity_bytes: bytes of files, headers included, that the tier may hold.
        io: "direct" (O_DIRECT), "buffered" (page cache), or "auto": through the page cache as long as the files fit
            into half of the available memory, direct beyond that, where the cache would evict them before reuse, and
            for some reads after one whose page it had evicted: large direct reads are faster than its readahead.
        helpers: additional threads that read parts of one large page.
        read_page: reader of pages from the page cache, replaces the helpers.

    Raises:
        TierError: the directory cannot be created or written.
    """

    name, device, memory = "ssd", torch.device("cpu"), False
    overhead_bytes = HEADER_BYTES

    def __init__(
        self, root: Path, capacity_bytes: int, *, io: str = "auto", helpers: int = 0, read_page: ReadPage | None = None
    ) -> None:
        self.capacity_bytes, self.held_bytes, self.peak_bytes = capacity_bytes, 0, 0
        self.root, self.io = Path(root), io
        self.fallbacks: list[str] = []
        self.stuck_bytes = 0
        self._serial = 0
        self._direct: bool | None = None
        self._direct_reads = 0  # left of those after a miss of the page cache
        self._crew, self._read_page = Crew(helpers), read_page
        try:
            self._run = RunDirectory(self.root)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise TierError(
                f"tier ssd: cannot write in {self.root} ({getattr(error, 'strerror', None) or error}); "
                "point tiers.ssd.path at a directory on a local disk that you can write"
            ) from error

    @property
    def directory(self) -> Path:
        """Directory of this run."""
        return self._run.path

    @property
    def used_bytes(self) -> int:
        """Bytes of all page files, headers included."""
        return self.held_bytes

    @property
    def reads_ahead(self) -> bool:
        """True if pages can be prefetched into the page cache."""
        return not self._use_direct()

    @property
    def mode(self) -> str:
        """Present read mode: "direct" or "buffered"."""
        return "direct" if self._use_direct() else "buffered"

    def reserve(self, nbytes: int, holder: Holder, *, reserved_bytes: int = 0) -> bool:
        """Reserve room for a page of `nbytes`, its header included, in `holder.room`; False if the budget has none."""
        if self.held_bytes + reserved_bytes + nbytes > self.capacity_bytes:
            return False
        room = PageFile(nbytes, nbytes - HEADER_BYTES, os.getpid())
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + nbytes)
        holder.room = room  # no call in between
        self.held_bytes += nbytes
        return True

    def put(self, room: PageFile, page: torch.Tensor, *, key: str, layout: dict | None = None) -> None:
        """Store a page (uint8, contiguous, CPU, a multiple of 4096 bytes) as a file.

        Raises:
            TierError: a full or failing disk; no file is left behind.
        """
        view = bytes_view(page)
        digest = _digest(
            [xxhash.xxh3_64_digest(view[at : at + _SEGMENT_BYTES]) for at in range(0, page.numel(), _SEGMENT_BYTES)]
        )
        # a forked child writes into the same directory: its pid keeps names distinct
        path = self.directory / f"{os.getpid()}-{self._serial:05d}-{re.sub(r'[^A-Za-z0-9._-]', '_', key)[-96:]}.page"
        self._serial += 1
        room.path, room.digest = path, digest  # before the file exists, so that freeing the room always removes it
        try:
            _write_file(path, self._run.files, _header(key, page.numel(), digest, layout), view)
        except OSError as error:
            what = describe_os_error(error)
            raise TierError(
                f"{key}: cannot write {path}: {what}; free {room.nbytes} bytes there or move tiers.ssd.path"
            ) from error
        self._direct = None

    def get(self, room: PageFile, out: torch.Tensor, *, key: str) -> None:
        """Fill `out` (uint8, CPU, the page's bytes, 4096-aligned) with the page and verify it.

        Raises:
            TierError: the file is missing, short, of another page, or its bytes changed.
        """
        if out.numel() != room.page_bytes:
            raise TierError(f"{key}: the page has {room.page_bytes} bytes, the buffer {out.numel()}")

        def read(fd: int, segments: int) -> int:
            if segments == 1 and self.io == "auto" and _is_evicted(room, fd):
                self._direct_reads = _DIRECT_READS
            if self._read_page is not None and segments == 1:
                return _read_by(self._read_page, key, room, fd, out)
            return self._shared(_Read(key, room, fd, bytes_view(out), segments))

        _check_digest(key, room, self._opened(key, room, read))

    def read_items(self, room: PageFile, offsets: torch.Tensor, nbytes: int, *, key: str) -> torch.Tensor:
        """Return items of a page, verified: uint8 [n, nbytes] from offsets int64 [n] in the page.

        The first call for a page reads all of it once, to compute the digests of its blocks.

        Raises:
            TierError: the file is missing, short, of another page, or its bytes changed.
        """

        def read(fd: int, segments: int) -> torch.Tensor:
            if room.blocks is None:
                room.blocks = _digest_blocks(key, room, fd)
            return read_items(fd, HEADER_BYTES, room.blocks, (offsets, nbytes), f"{key}: {room.path}")

        none = torch.empty(0, nbytes, dtype=torch.uint8, device="cpu")
        return self._opened(key, room, read) if len(offsets) else none

    def _opened(self, key: str, room: PageFile, read: Callable[[int, int], Any]) -> Any:
        """Return read(descriptor, segments to read at a time); raises TierError where the file cannot be read."""
        try:
            if self._use_direct():
                self._direct_reads = max(0, self._direct_reads - 1)
                try:
                    if DIRECT:
                        return self._open_and(read, key, room, DIRECT)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                self._announce_buffered()
            return self._open_and(read, key, room, 0)
        except FileNotFoundError as error:
            raise TierError(
                f"{key}: {room.path} is missing; the page is lost, load the weight again (load_state_dict) "
                "or wrap the model again"
            ) from error
        except OSError as error:
            raise TierError(f"{key}: cannot read {room.path}: {error.strerror or error}") from error

    def _open_and(self, read: Callable[[int, int], Any], key: str, file: PageFile, flags: int) -> Any:
        fd = open_regular(file.path.name, NO_FOLLOW | flags, inside=self._run.files)
        try:
            size = os.fstat(fd).st_size
            if size != HEADER_BYTES + file.page_bytes:
                raise TierError(
                    f"{key}: {file.path} has {size} bytes, expected {HEADER_BYTES + file.page_bytes}: "
                    f"it {'is truncated' if size < HEADER_BYTES + file.page_bytes else 'has grown'}"
                )
            return read(fd, _DIRECT_SEGMENTS if flags else 1)
        finally:
            os.close(fd)

    def _shared(self, read: "_Read") -> int:
        """Read a page, with idle helpers if it is large; return its digest."""
        if read.file.page_bytes > _ALONE_BYTES:
            self._crew.share(read.parts, read.do)
        else:
            for part in range(read.parts):
                read.do(part)
        return read.digest()

    def is_cached(self, room: PageFile) -> bool:
        """True if a page seems to be in the page cache, by its first, middle and last byte. Never blocks or raises."""
        if not hasattr(os, "RWF_NOWAIT"):
            return False
        places, byte = (0, room.page_bytes // 2, HEADER_BYTES + room.page_bytes - 1), [bytearray(1)]
        with (
            contextlib.suppress(OSError),
            _advising(room, self._run.files) as fd,
        ):  # BlockingIOError where it would have to wait
            return all(os.preadv(fd, byte, place, os.RWF_NOWAIT) for place in places)
        return False

    def read_ahead(self, room: PageFile) -> None:
        """Prefetch a page into the page cache (`posix_fadvise`), in buffered mode. Never raises."""
        if self._use_direct() or not hasattr(os, "posix_fadvise"):
            return
        with contextlib.suppress(OSError), _advising(room, self._run.files) as fd:  # the read reports errors
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)

    def _announce_buffered(self) -> None:
        why = f"the file system of {self.root} refuses" if DIRECT else "this system, other than Linux, does not have"
        reason = f"tier ssd: {why} O_DIRECT; reads go through the page cache"
        self.io, self._direct = "buffered", False
        if reason not in self.fallbacks:
            self.fallbacks.append(reason)
            warn(reason, stacklevel=2)

    def free(self, room: PageFile, *, reuse: bool = False) -> None:
        """Remove a page and its file. Idempotent; a file that cannot be removed stays charged until the run ends."""
        if room.path is not None and room.pid == os.getpid():  # a forked child must not remove its parent's pages
            try:
                _unlink(room.path, self._run.files)
            except FileNotFoundError:  # the run is gone
                pass
            except OSError as error:  # no error: the caller does not need the page any more
                self.fallbacks.append(
                    f"tier ssd: cannot remove {room.path} ({error.strerror or error}); its bytes "
                    "count until the run ends"
                )
                self.stuck_bytes += room.nbytes
                room.nbytes = 0
        self.held_bytes -= room.nbytes  # no call in between
        room.nbytes = 0

    def trim(self, held_bytes: int = 0) -> None:
        """Do nothing: files are removed as they are freed."""

    def after_fork(self, rooms: Collection[PageFile]) -> None:
        """Reset the accounting in a forked child to these files; drop `read_page`, whose threads are the parent's."""
        self._read_page = None
        self.held_bytes = self.stuck_bytes + sum(room.nbytes for room in rooms)

    def close(self) -> None:
        """Remove the run's directory. Idempotent."""
        self._crew.stop()
        self._run.remove()

    def _use_direct(self) -> bool:
        direct = self._direct  # a put in another thread resets it
        if direct is None:
            try:
                fits_cache = self.held_bytes <= _PAGE_CACHE_SHARE * psutil.virtual_memory().available
            except OSError:  # out of descriptors; the next read tries again
                return self.io == "direct"
            self._direct = direct = self.io == "direct" or (self.io == "auto" and not fits_cache)
        return direct or self._direct_reads > 0


def _header(key: str, nbytes: int, digest: int, layout: dict | None) -> bytes:
    head = _HEAD.pack(_MAGIC, _VERSION, HEADER_BYTES, nbytes, digest)
    note = json.dumps({"key": key, "layout": layout}).encode()[: HEADER_BYTES - len(head) - 8]
    body = head + note.ljust(HEADER_BYTES - len(head) - 8, b"\0")
    return body + xxhash.xxh3_64_digest(body)


def _write_file(path: Path, files: Directory, header: bytes, view: memoryview) -> None:
    try:
        with replacing(Path(path.name), mode=0o600, inside=files) as fd:
            write_at(fd, header, 0)
            write_at(fd, view, len(header))
    except BaseException:
        _unlink(path, files)  # a late interrupt leaves it under its final name
        raise


def _is_evicted(room: PageFile, fd: int) -> bool:
    """True if a read of the page's middle would have to wait for the drive."""
    if not DIRECT or not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        os.preadv(fd, [bytearray(1)], HEADER_BYTES + room.page_bytes // 2, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except OSError:  # a file system that cannot say
        return False
    return False


@contextlib.contextmanager
def _advising(room: PageFile, files: Directory) -> Iterator[int]:
    fd = open_regular(room.path.name, NO_FOLLOW, inside=files)
    try:
        yield fd
    finally:
        os.close(fd)


def _unlink(path: Path, files: Directory) -> None:
    with contextlib.suppress(FileNotFoundError):
        files.unlink(path.name)


class _Read:
    """Parallel read of one page, in parts for any thread."""

    def __init__(self, key: str, file: PageFile, fd: int, view: memoryview, segments: int) -> None:
        self.key, self.file, self.fd, self.view = key, file, fd, view
        self.step = segments * _SEGMENT_BYTES
        self.parts = -(-file.page_bytes // self.step)
        self.digests: list[list[bytes]] = [[] for _ in range(self.parts)]

    def digest(self) -> int:
        """Return the digest of the page, once all parts are read."""
        return _digest([digest for part in self.digests for digest in part])

    def do(self, part: int) -> None:
        """Read a part."""
        at = part * self.step
        chunk = self.view[at : at + self.step]
        if part:
            _fill(self.fd, self.key, self.file, [chunk], HEADER_BYTES + at)
        else:
            header = aligned(HEADER_BYTES)
            head = bytes_view(header)
            _fill(self.fd, self.key, self.file, [head, chunk], 0)
            _check_header(self.key, self.file, bytes(head))
        self.digests[part] = [
            xxhash.xxh3_64_digest(chunk[i : i + _SEGMENT_BYTES]) for i in range(0, len(chunk), _SEGMENT_BYTES)
        ]


def _read_by(read_page: ReadPage, key: str, file: PageFile, fd: int, out: torch.Tensor) -> int:
    """Read a page into `out` by `read_page`; return its digest."""
    header = bytearray(HEADER_BYTES)
    _fill(fd, key, file, [memoryview(header)], 0)
    _check_header(key, file, bytes(header))
    try:
        return xxhash.xxh3_64_intdigest(read_page(fd, out, HEADER_BYTES, _SEGMENT_BYTES))
    except EOFError as error:
        raise _truncated(key, file, error) from error


def _digest_blocks(key: str, file: PageFile, fd: int) -> BlockDigests:
    """Read a page in order, verify it, and return the digests of its blocks."""
    step = _DIRECT_SEGMENTS * _SEGMENT_BYTES
    memory, blocks, segments = aligned(HEADER_BYTES + min(step, file.page_bytes)), BlockDigests(), []
    head, view = (bytes_view(memory)[part] for part in (slice(HEADER_BYTES), slice(HEADER_BYTES, None)))
    _fill(fd, key, file, [head], 0)
    _check_header(key, file, bytes(head))
    for at in range(0, file.page_bytes, step):
        chunk = view[: file.page_bytes - at]
        _fill(fd, key, file, [chunk], HEADER_BYTES + at)
        segments += [xxhash.xxh3_64_digest(chunk[i : i + _SEGMENT_BYTES]) for i in range(0, len(chunk), _SEGMENT_BYTES)]
        blocks.extend(chunk)
    _check_digest(key, file, _digest(segments))
    return blocks


def _check_digest(key: str, file: PageFile, digest: int) -> None:
    if digest != file.digest:
        raise TierError(
            f"{key}: {file.path} does not hold the bytes that were written (XXH3 {digest:016x}, "
            f"expected {file.digest:016x}); the disk or the file is damaged"
        )


def _digest(segments: list[bytes]) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(segments))


def _fill(fd: int, key: str, file: PageFile, views: list[memoryview], offset: int) -> None:
    try:
        read_into(fd, views, offset)
    except EOFError as error:
        raise _truncated(key, file, error) from error


def _truncated(key: str, file: PageFile, error: EOFError) -> TierError:
    return TierError(f"{key}: {file.path} is truncated: {error}")


def _check_header(key: str, file: PageFile, header: bytes) -> None:
    magic, version, header_bytes, nbytes, digest = _HEAD.unpack_from(header)
    if magic != _MAGIC or header[-8:] != xxhash.xxh3_64_digest(header[:-8]):
        raise TierError(f"{key}: {file.path} is not a page file, or its header is damaged")
    if (version, header_bytes) != (_VERSION, HEADER_BYTES):
        raise TierError(f"{key}: {file.path} has page-file version {version}; this vbrt reads version {_VERSION}")
    if (nbytes, digest) != (file.page_bytes, file.digest):
        raise TierError(f"{key}: {file.path} holds another page than the one that was written there")
