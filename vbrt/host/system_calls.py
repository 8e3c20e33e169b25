"""System calls on files that POSIX and Windows offer in different forms; each form is chosen when this is imported.

| | POSIX | Windows |
| --- | --- | --- |
| read or write at an offset | `preadv`, `pwrite` | seek, then read or write: one thread at a time per file |
| lock of a file | `flock`, freed with the last descriptor | `msvcrt.locking` of its first byte |
| directory held open | a descriptor | its path: a directory has no descriptor, and a link takes a privilege |
| rename made durable | `fsync` of the directory | by the journal of NTFS |
"""

import errno
import io
import os
import sys
import threading
import time
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

__all__ = [
    "DIRECT",
    "NO_FOLLOW",
    "OPEN_FLAGS",
    "Directory",
    "file_system",
    "lock",
    "read_at",
    "share_lock",
    "sync_directory",
    "write_at",
]

_WINDOWS = sys.platform == "win32"
#: for every file: not inherited by other programs, bytes as they are; opening a FIFO or a terminal has no effect
OPEN_FLAGS = os.O_BINARY | os.O_NOINHERIT if _WINDOWS else os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
#: refuse a symlink as the last part of the path
NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
#: past the page cache; 0 where the system has no such flag (Windows, macOS)
DIRECT: int = getattr(os, "O_DIRECT", 0)


# -- at an offset -----------------------------------------------------------------------------------------------------

_positions = [threading.Lock() for _ in range(64)]  # a descriptor has one position, whichever thread moves it


def _preadv(fd: int, views: list[memoryview], offset: int) -> int:
    return os.preadv(fd, views, offset)


def _seek_and_read(fd: int, views: list[memoryview], offset: int) -> int:
    with _positions[fd % len(_positions)], io.FileIO(fd, closefd=False) as file:
        file.seek(offset)
        return file.readinto(views[0])


def _pwrite(fd: int, view: memoryview, offset: int) -> int:
    return os.pwrite(fd, view, offset)


def _seek_and_write(fd: int, view: memoryview, offset: int) -> int:
    with _positions[fd % len(_positions)]:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, view)


#: (fd, views, offset) -> bytes read, at least into the first view; 0 at the end of the file
read_at = _seek_and_read if _WINDOWS else _preadv
#: (fd, view, offset) -> bytes written
write_at = _seek_and_write if _WINDOWS else _pwrite


# -- locks ------------------------------------------------------------------------------------------------------------

_RETRY_S = 0.05  # Windows wakes nobody: its own LK_LOCK asks once a second, ten times


def _flock(fd: int, *, wait: bool) -> None:
    fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def share_lock(fd: int) -> None:
    """Lock a file together with other processes that do so, in place of this descriptor's lock; POSIX only."""
    fcntl.flock(fd, fcntl.LOCK_SH)


def _lock_first_byte(fd: int, *, wait: bool) -> None:
    while True:
        os.lseek(fd, 0, os.SEEK_SET)
        try:
            return msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError as error:  # EACCES: it is locked
            if error.errno != errno.EACCES:
                raise
            if not wait:
                raise BlockingIOError(errno.EAGAIN, "another process holds the lock") from error
        time.sleep(_RETRY_S)


#: (fd, wait=) -> None: lock a file against other processes until it is closed. Raises BlockingIOError without `wait`
lock = _lock_first_byte if _WINDOWS else _flock


# -- directories ------------------------------------------------------------------------------------------------------


class _DescribedDirectory:
    """Directory held open: its files are reached through a descriptor, whatever its path leads to meanwhile.

    Args:
        path: the directory; a name in `inside`, if given.
        follow: True if the path may be a symlink.

    Raises OSError.
    """

    def __init__(self, path: Path | str, *, inside: "_DescribedDirectory | None" = None, follow: bool = False) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        self._fd = os.open(path, flags, dir_fd=None if inside is None else inside._fd)

    def owner(self) -> int:
        """Return the user's number."""
        return os.fstat(self._fd).st_uid

    def open(self, name: str | Path, flags: int, mode: int = 0o666) -> int:
        """Return a descriptor of a file in it."""
        return os.open(name, flags, mode, dir_fd=self._fd)

    def replace(self, old: str | Path, new: str | Path) -> None:
        """Rename a file in it, over another if there is one."""
        os.replace(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def link(self, old: str | Path, new: str | Path) -> None:
        """Give a file in it a further name. Raises FileExistsError."""
        os.link(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd, follow_symlinks=False)

    def unlink(self, name: str | Path) -> None:
        """Remove a file in it."""
        os.unlink(name, dir_fd=self._fd)

    def rmdir(self, name: str | Path) -> None:
        """Remove an empty directory in it."""
        os.rmdir(name, dir_fd=self._fd)

    def scan(self) -> "os._ScandirIterator[str]":
        """Open a listing."""
        return os.scandir(self._fd)

    def close(self) -> None:
        """Close it. Not idempotent: the descriptor's number may be another's by then."""
        os.close(self._fd)


class _NamedDirectory:
    """Directory by its path, with the methods of `_DescribedDirectory`."""

    def __init__(self, path: Path | str, *, inside: "_NamedDirectory | None" = None, follow: bool = False) -> None:
        self._path = Path(path) if inside is None else inside._path / path
        if not self._path.is_dir() or (not follow and self._path.is_symlink()):
            raise NotADirectoryError(errno.ENOTDIR, "not a directory, or a link to one", str(self._path))

    def owner(self) -> int:
        return os.stat(self._path).st_uid  # 0 for all, as the system has no such numbers

    def open(self, name: str | Path, flags: int, mode: int = 0o666) -> int:
        return os.open(self._path / name, flags, mode)

    def replace(self, old: str | Path, new: str | Path) -> None:
        os.replace(self._path / old, self._path / new)

    def link(self, old: str | Path, new: str | Path) -> None:
        os.link(self._path / old, self._path / new)

    def unlink(self, name: str | Path) -> None:
        os.unlink(self._path / name)

    def rmdir(self, name: str | Path) -> None:
        os.rmdir(self._path / name)

    def scan(self) -> "os._ScandirIterator[str]":
        return os.scandir(self._path)

    def close(self) -> None:
        pass


Directory = _NamedDirectory if _WINDOWS else _DescribedDirectory


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable. Raises OSError."""
    if _WINDOWS:
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def file_system(fd: int) -> str:
    """Return the kind of file system that an open file is on, as Linux names it ("tmpfs", "ext4"); "" if unknown."""
    device = os.fstat(fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            place, _, kind = line.partition(" - ")
            if place.split()[2] == number:
                return kind.split()[0]
    return ""
