"""The directory of one run: made and locked, and removed by the run itself or, if that was killed, by the next one.

Only the holder of the lock on its file `lock` removes files, and only files that have names of vbrt's own. All of
it goes through descriptors of directories, opened without following a link: whatever is put in the place of a run, or
into it, nothing else is removed.
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
    """A new directory below `root`, which is made if missing; directories of dead runs are removed on the way.

    Attributes:
        path: the directory; it goes with this object at the latest.

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
            with contextlib.suppress(OSError):  # what others left behind is no reason not to begin
                _remove_dead(root, os.fstat(self._held.fd).st_uid)
        except BaseException:
            self.remove()
            raise

    @property
    def fd(self) -> int:
        """A descriptor of the directory. Raises OSError once it is removed."""
        if self._held.fd < 0:
            raise OSError(errno.ENOENT, "the tier is closed", str(self.path))
        return self._held.fd

    def remove(self) -> None:
        """Remove the directory with its pages; idempotent. A forked child does not remove its parent's."""
        _remove_own(self._held, self._pid)  # again, if Ctrl-C came the first time
        self._finalizer.detach()


class _Held:
    """A run's directory and descriptors of it and of its lock, as far as there are any."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.fd = self.lock_fd = -1
        self.listing: Iterator[os.DirEntry[str]] | None = None  # begun, but not read yet

    def lock(self, flags: int) -> None:
        """Open the lock file, which is made if missing, and hold it. Raises OSError: somebody else holds it."""
        flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self.lock_fd = open_regular(_LOCK, flags, mode=0o600, dir_fd=self.fd)
        fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(self.lock_fd).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "removed by another process", _LOCK)

    def empty(self) -> None:
        """Remove the pages, and the lock as the last: what is killed half way is removed by the next run."""
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
        """Return the names in the directory, by the listing that was kept for it: a new one takes a descriptor, of
        which the process may have none left. Then there are no names: pages that were freed are gone."""
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
        fd, self.lock_fd = self.lock_fd, -1  # never closed twice: its number may be another file's by then
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
            # another run, which begins now, found this one without its lock and removes it
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
    with contextlib.suppress(OSError):  # a file in it that is not ours, or it is gone
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
            except OSError:  # alive, being removed by another process, or with files that are not ours
                continue
            finally:
                held.close()
    finally:
        os.close(root_fd)


def _take(held: _Held, root_fd: int, name: str, owner: int) -> None:
    """Hold the lock of a dead run; one that was killed before it had a lock gets one."""
    held.fd = os.open(name, _DIRECTORY, dir_fd=root_fd)
    if os.fstat(held.fd).st_uid != owner:
        raise PermissionError(errno.EPERM, "another user's directory", name)
    held.lock(0)
