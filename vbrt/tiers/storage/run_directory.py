"""Run directory: created and locked by one run, removed by it or, after a crash, by the next run.

Only the holder of the lock on its file `lock` removes files, and only files named by vbrt's own patterns. All
operations go through directory descriptors opened without following symlinks, so nothing else can be removed, whatever
is put in place of a run directory or into it.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import weakref
from collections.abc import Iterator
from pathlib import Path

from vbrt.host.safe_files import open_regular

__all__ = ["RunDirectory"]

_NAME = re.compile(r"run-\d+-[a-z0-9_]{8}")
_FILE = re.compile(r"\d+-\d{5,}-[A-Za-z0-9._-]*\.(page|tmp)")
_LOCK = "lock"
_TRIES = 100
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class RunDirectory:
    """New run directory below `root`, which is created if missing; directories of dead runs are removed first.

    Attributes:
        path: the directory; removed with this object at the latest.

    Raises OSError.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._held = _Held()
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _remove_own, self._held, self._pid)
        try:
            _make(self._held, root)
            self.path = self._held.path
            with contextlib.suppress(OSError):  # leftovers of other runs do not stop this one
                _remove_dead(root, os.fstat(self._held.fd).st_uid)
        except BaseException:
            self.remove()
            raise

    @property
    def fd(self) -> int:
        """Descriptor of the directory. Raises OSError once it is removed."""
        if self._held.fd < 0:
            raise OSError(errno.ENOENT, "the tier is closed", str(self.path))
        return self._held.fd

    def remove(self) -> None:
        """Remove the directory with its pages; idempotent. A forked child does not remove its parent's."""
        _remove_own(self._held, self._pid)  # again, if Ctrl-C came the first time
        self._finalizer.detach()


class _Held:
    """Path and descriptors of a run directory and its lock; -1 for one that is not open."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.fd = self.lock_fd = -1
        self.listing: Iterator[os.DirEntry[str]] | None = None  # opened, not read yet

    def lock(self, flags: int) -> None:
        """Open the lock file, created if missing, and lock it. Raises OSError: another process holds it."""
        flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self.lock_fd = open_regular(_LOCK, flags, mode=0o600, dir_fd=self.fd)
        fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(self.lock_fd).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "removed by another process", _LOCK)

    def empty(self) -> None:
        """Remove the pages, and last the lock: if killed half way, the next run removes the rest."""
        stays = False
        for name in filter(_FILE.fullmatch, self.list_files()):
            try:
                os.unlink(name, dir_fd=self.fd)
            except FileNotFoundError:
                pass
            except OSError:
                stays = True
        if not stays:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_LOCK, dir_fd=self.fd)

    def list_files(self) -> list[str]:
        """Return the names in the directory, by the listing opened in advance: a new one needs a descriptor, which the
        process may have run out of. Returns no names then: freed pages are removed already."""
        listing, self.listing = self.listing, None
        try:
            with os.scandir(self.fd) if listing is None else listing as entries:
                return [entry.name for entry in entries]
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            return []

    def close(self) -> None:
        """Close all descriptors, which releases the lock."""
        listing, self.listing = self.listing, None
        if listing is not None:
            listing.close()
        fd, self.lock_fd = self.lock_fd, -1  # never closed twice: its number may have been reused
        if fd >= 0:
            os.close(fd)
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _make(held: _Held, root: Path) -> None:
    for left in reversed(range(_TRIES)):
        held.path = root / f"run-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            held.path.mkdir(mode=0o700)
            held.fd = os.open(held.path, _DIRECTORY)
            held.lock(os.O_EXCL)
            held.listing = os.scandir(held.fd)
            return
        except (FileNotFoundError, FileExistsError, BlockingIOError):
            # race: another starting run saw this directory without a lock and removes it
            held.close()
            if not left:
                raise


def _remove_own(held: _Held, pid: int) -> None:
    if os.getpid() != pid or held.path is None:  # a forked child must not remove its parent's pages
        return
    with contextlib.suppress(OSError):
        if held.fd >= 0:
            held.empty()
    held.close()
    with contextlib.suppress(OSError):  # it holds a foreign file, or is gone
        held.path.rmdir()


def _remove_dead(root: Path, owner: int) -> None:
    root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in filter(_NAME.fullmatch, os.listdir(root_fd)):
            held = _Held()
            try:
                _take(held, root_fd, name, owner)
                held.empty()
                os.rmdir(name, dir_fd=root_fd)
            except OSError:  # alive, being removed by another process, or with foreign files
                continue
            finally:
                held.close()
    finally:
        os.close(root_fd)


def _take(held: _Held, root_fd: int, name: str, owner: int) -> None:
    """Lock the directory of a dead run; create the lock file if the run was killed before that."""
    held.fd = os.open(name, _DIRECTORY, dir_fd=root_fd)
    if os.fstat(held.fd).st_uid != owner:
        raise PermissionError(errno.EPERM, "another user's directory", name)
    held.lock(0)
