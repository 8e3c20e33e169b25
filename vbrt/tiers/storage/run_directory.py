"""Run directory: created and locked by one run, removed by it or, after a crash, by the next run.

Only the holder of the lock on its file `lock` removes files, and only files named by vbrt's own patterns. All
operations go through directories held open (`system_calls.Directory`) without following symlinks, so nothing else can
be removed, whatever is put in place of a run directory or into it; on Windows they go through paths.
"""

import contextlib
import errno
import os
import re
import secrets
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

from vbrt.host import system_calls
from vbrt.host.safe_files import open_regular
from vbrt.host.system_calls import Directory

__all__ = ["RunDirectory"]

_NAME = re.compile(r"run-\d+-[a-z0-9_]{8}")
_FILE = re.compile(r"\d+-\d{5,}-[A-Za-z0-9._-]*\.(page|tmp)")
_LOCK = "lock"
_TRIES = 100


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
                _remove_dead(root, self._held.files.owner())
        except BaseException:
            self.remove()
            raise

    @property
    def files(self) -> Directory:
        """The directory, held open. Raises OSError once it is removed."""
        if self._held.files is None:
            raise OSError(errno.ENOENT, "the tier is closed", str(self.path))
        return self._held.files

    def remove(self) -> None:
        """Remove the directory with its pages; idempotent. A forked child does not remove its parent's."""
        _remove_own(self._held, self._pid)  # again, if Ctrl-C came the first time
        self._finalizer.detach()


class _Held:
    """A run directory and its lock, held open; None and -1 where they are not."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.files: Directory | None = None
        self.lock_fd = -1
        self.listing: Iterator[os.DirEntry[str]] | None = None  # opened, not read yet

    def lock(self, flags: int) -> None:
        """Open the lock file, created if missing, and lock it. Raises OSError: another process holds it."""
        flags |= os.O_RDWR | os.O_CREAT | system_calls.NO_FOLLOW
        self.lock_fd = open_regular(_LOCK, flags, mode=0o600, inside=self.files)
        system_calls.lock(self.lock_fd, wait=False)
        if os.fstat(self.lock_fd).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "removed by another process", _LOCK)

    def empty(self) -> None:
        """Remove the pages, and last the lock: if killed half way, the next run removes the rest."""
        stays = False
        for name in filter(_FILE.fullmatch, self.list_files()):
            try:
                self.files.unlink(name)
            except FileNotFoundError:
                pass
            except OSError:
                stays = True
        if not stays:
            if sys.platform == "win32":  # which removes no open file
                self._close_lock()
            with contextlib.suppress(FileNotFoundError):
                self.files.unlink(_LOCK)

    def list_files(self) -> list[str]:
        """Return the names in the directory, by the listing opened in advance: a new one needs a descriptor, which the
        process may have run out of. Returns no names then: freed pages are removed already."""
        listing, self.listing = self.listing, None
        try:
            with self.files.scan() if listing is None else listing as entries:
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
        self._close_lock()
        files, self.files = self.files, None
        if files is not None:
            files.close()

    def _close_lock(self) -> None:
        fd, self.lock_fd = self.lock_fd, -1  # never closed twice: its number may have been reused
        if fd >= 0:
            os.close(fd)


def _make(held: _Held, root: Path) -> None:
    for left in reversed(range(_TRIES)):
        held.path = root / f"run-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            held.path.mkdir(mode=0o700)
            held.files = Directory(held.path)
            held.lock(os.O_EXCL)
            if sys.platform != "win32":  # where a listing has its first names from when it was opened
                held.listing = held.files.scan()
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
        if held.files is not None:
            held.empty()
    held.close()
    with contextlib.suppress(OSError):  # it holds a foreign file, or is gone
        held.path.rmdir()


def _remove_dead(root: Path, owner: int) -> None:
    runs = Directory(root, follow=True)
    try:
        with runs.scan() as entries:
            names = [entry.name for entry in entries if _NAME.fullmatch(entry.name)]
        for name in names:
            held = _Held()
            try:
                _take(held, runs, name, owner)
                held.empty()
                runs.rmdir(name)
            except OSError:  # alive, being removed by another process, or with foreign files
                continue
            finally:
                held.close()
    finally:
        runs.close()


def _take(held: _Held, runs: Directory, name: str, owner: int) -> None:
    """Lock the directory of a dead run; create the lock file if the run was killed before that."""
    held.files = Directory(name, inside=runs)
    if held.files.owner() != owner:
        raise PermissionError(errno.EPERM, "another user's directory", name)
    held.lock(0)
