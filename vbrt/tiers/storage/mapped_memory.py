"""Host memory shared by the processes of one machine: each page once, as a file in memory that all of them map.

    <path>/<XXH3-128 of the page's bytes, in hex>-<number of bytes>.page

A page is filled in memory of this process, as in any tier. If its bytes stay as they are (planes of a weight; not a KV
cache), `share` then replaces that memory by a mapping of the file with this content, written now unless another process
has done so. Names are contents: it does not matter which model or file the bytes came from, and the bytes of a file
that is found are verified against its name.

Only a tmpfs is taken: it has no I/O errors, which would end a process that maps a file, and CUDA can pin its memory.
Every process holds a shared lock on the directory; the last one to leave removes the files, or, after a crash, the
first one to come. Whoever has mapped a removed file keeps its memory.
"""

import errno
import mmap
import os
import re
import secrets
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch
import xxhash

from vbrt.errors import TierError, describe_os_error
from vbrt.host import system_calls
from vbrt.host.host_memory import bytes_view
from vbrt.host.mapped_weights import populate
from vbrt.host.safe_files import open_regular, write_at
from vbrt.host.system_calls import NO_FOLLOW, Directory, file_system
from vbrt.tiers.storage.memory_tiers import Buffer, MemoryTier

__all__ = ["MappedTier", "mapped_bytes"]

_FILE = re.compile(r"[0-9a-f]{32}-\d+\.page(\.[0-9a-f]{8}\.tmp)?")
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_OTHERS_WRITE = 0o022


class MappedTier(MemoryTier):
    """Memory tier "cpu" whose lasting pages are mapped files of `path`. While a page is shared, it is in memory twice.

    Args:
        path: directory on a tmpfs, created if missing; of this user only.
        capacity_bytes: the budget; shared pages count in full in each process.
        pinned: pin buffers and mappings.

    Raises:
        TierError: the directory cannot be used.
    """

    def __init__(self, path: Path, capacity_bytes: int, *, pinned: bool = False) -> None:
        super().__init__("cpu", torch.device("cpu"), capacity_bytes, pinned=pinned)
        self._path, self._fd = path, _opened(path)
        self._leave = weakref.finalize(self, _leave, self._fd, os.getpid())
        self._files = Directory(path, follow=True)
        weakref.finalize(self, self._files.close)
        try:
            system_calls.lock(self._fd, wait=False)
        except BlockingIOError:
            pass
        else:
            _remove_files(self._fd)  # of processes that were killed
        system_calls.share_lock(self._fd)

    @torch.inference_mode(False)  # a page made in inference mode is also used outside of it
    def share(self, buffer: Buffer, *, key: str) -> None:
        """Replace the memory of a filled buffer by a mapping of the file with the same content.

        Raises:
            TierError: the file cannot be written or mapped, or holds other bytes than its name says.
        """
        try:
            buffer.tensor = self._mapped(buffer.tensor, key)
        except (OSError, ValueError) as error:  # ValueError: from mmap, of a truncated file
            what = describe_os_error(error) if isinstance(error, OSError) else error
            raise TierError(
                f"{key}: {buffer.nbytes} bytes cannot be shared in tiers.cpu.path = {self._path}: {what}; give that "
                "tmpfs a larger size, or leave tiers.cpu.path out"
            ) from error
        if self.pinned:
            self._pin(buffer)

    def _mapped(self, page: torch.Tensor, key: str) -> torch.Tensor:
        digest, nbytes = xxhash.xxh3_128_hexdigest(bytes_view(page)), page.numel()
        name = f"{digest}-{nbytes}.page"
        try:
            fd = self._open(name)
        except FileNotFoundError:
            self._write(name, page)
            fd = self._open(name)
        try:
            # CUDA pins for writing, which would copy pages of a private mapping; without it a stray write stays here
            flags = mmap.MAP_SHARED if self.pinned else mmap.MAP_PRIVATE
            mapped = torch.frombuffer(mmap.mmap(fd, nbytes, flags=flags), dtype=torch.uint8)
        finally:
            os.close(fd)
        populate(mapped)
        if xxhash.xxh3_128_hexdigest(bytes_view(mapped)) != digest:
            raise TierError(
                f"{key}: {self._path / name} does not hold the bytes that its name says; its memory is damaged, end "
                "the processes that share it and start them again"
            )
        return mapped

    def _open(self, name: str) -> int:
        return open_regular(name, os.O_RDWR | NO_FOLLOW, inside=self._files)

    def _write(self, name: str, page: torch.Tensor) -> None:
        """Write a file, unless another process is first: then theirs stays, so that there is one."""
        temporary = f"{name}.{secrets.token_hex(4)}.tmp"
        fd = open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW, mode=0o600, inside=self._files)
        try:
            try:
                write_at(fd, bytes_view(page), 0)
            finally:
                os.close(fd)
            self._files.link(temporary, name)
        except FileExistsError:
            pass
        finally:
            self._files.unlink(temporary)

    def close(self) -> None:
        """Leave the directory; the last process removes its files. Idempotent."""
        self._leave()


def mapped_bytes(path: Path) -> int:
    """Return the bytes of the pages in a directory of shared memory; 0 if there is none."""
    try:
        with os.scandir(path) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in _ours(entries))
    except OSError:  # nothing is there, or a file has just been removed: nothing to count on
        return 0


def _opened(path: Path) -> int:
    """Return a descriptor of the directory, created if missing. Raises TierError: pages cannot be shared there."""
    try:
        if sys.platform != "linux":
            raise OSError(errno.ENOTSUP, "only Linux shares pages by files in memory")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(path, describe_os_error(error)) from error
    try:
        status, kind = os.fstat(fd), file_system(fd)
        if kind not in _IN_MEMORY:
            raise _refused(path, f"it is on {kind or 'an unknown file system'}, not in memory")
        if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
            raise _refused(path, "other users could change the pages there")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refused(path: Path, why: str) -> TierError:
    return TierError(
        f"tiers.cpu.path = {path}: {why}; expected a directory of your own on a tmpfs, such as /dev/shm/vbrt"
    )


def _leave(fd: int, pid: int) -> None:
    try:
        if os.getpid() == pid:  # the lock is one with that of a forked child
            system_calls.lock(fd, wait=False)
            _remove_files(fd)
    except OSError:  # others are there still; or the directory is gone
        pass
    finally:
        os.close(fd)


def _remove_files(fd: int) -> None:
    with os.scandir(fd) as entries:
        names = [entry.name for entry in _ours(entries)]
    for name in names:
        os.unlink(name, dir_fd=fd)


def _ours(entries: Iterator[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
    return (entry for entry in entries if _FILE.fullmatch(entry.name))
