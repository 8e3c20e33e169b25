"""Safe file access: files of unknown origin, and atomic replacement.

Only regular files are opened, so that opening never blocks on a FIFO, and whole-file reads are bounded before memory is
allocated. A file is written under an unpredictable new name, synced, and renamed into place: it is complete or
unchanged, and nothing is written through a link.
"""

import contextlib
import errno
import hashlib
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from vbrt.host import system_calls
from vbrt.host.system_calls import NO_FOLLOW, OPEN_FLAGS, Directory, sync_directory

__all__ = [
    "alone_in",
    "cache_folder",
    "check_writable",
    "expanded",
    "home_folder",
    "open_regular",
    "read_bounded",
    "read_into",
    "replacing",
    "sync_directory",
    "write_at",
    "write_file",
]

_MAX_IO_BYTES = 1 << 30  # Linux caps one call at 2 GiB - 4096
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a link",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a user-given path with `~` expanded. Raises OSError: not a path, no such user, or an impossible file
    name."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise OSError(errno.EINVAL, f"{type(path).__name__}, and not a path; expected a str or Path", repr(path)[:80])
    try:
        if b"\0" in os.fsencode(path):
            raise ValueError("it has a NUL")
        return Path(path).expanduser()
    except (RuntimeError, ValueError) as error:  # RuntimeError: no such user; ValueError: half a surrogate pair
        raise OSError(errno.EINVAL, f"no file can have this name ({error})", repr(os.fspath(path))) from error


def home_folder() -> Path:
    """Return the user's home; /dev/null, below which nothing is read or written, for a user without one."""
    try:
        return Path.home()
    except RuntimeError:  # no HOME, and a uid without an entry, as in a container
        return Path(os.devnull)


def cache_folder() -> Path:
    """Return the folder of vbrt's stored measurements: below $XDG_CACHE_HOME or ~/.cache; it need not exist."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():  # unset, or invalid and so ignored, per the XDG base directory specification
        root = home_folder() / ".cache"
    return root / "vbrt"


def open_regular(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, mode: int = 0o666, inside: Directory | None = None
) -> int:
    """Open a regular file; return its descriptor. In vbrt's own directories, pass `system_calls.NO_FOLLOW` in `flags`.

    Raises OSError, also for other kinds of files and for impossible names.
    """
    try:
        fd = (os.open if inside is None else inside.open)(path, OPEN_FLAGS | flags, mode)
    except ValueError as error:  # a NUL, or half a surrogate pair
        raise OSError(errno.EINVAL, f"no file can have this name ({error})", repr(path)) from error
    try:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        if kind != stat.S_IFREG:
            code = errno.EISDIR if kind == stat.S_IFDIR else errno.ENXIO
            raise OSError(code, f"{_KINDS.get(kind, 'not a file')}; expected a regular file", os.fspath(path))
        if hasattr(os, "O_NONBLOCK"):
            os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise OSError if a file cannot be written; an existing one is unchanged, and no new one is left."""
    is_new = not os.path.lexists(path)
    os.close(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    if is_new:
        os.unlink(path)


def read_bounded(path: str | os.PathLike[str], limit_bytes: int) -> bytes:
    """Read a whole regular file. Raises OSError, also for more than `limit_bytes`."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit_bytes:
            raise OSError(errno.EFBIG, f"{size} bytes; expected at most {limit_bytes}", os.fspath(path))
        data = file.read(size + 1)
        if len(data) > size:
            raise OSError(errno.EBUSY, "it grew while it was read", os.fspath(path))
        return data


def read_into(fd: int, views: list[memoryview], offset: int) -> None:
    """Read from `offset` until the views are full. Raises OSError; EOFError, with the place, at the file's end."""
    views = [view for view in views if view]
    while views:
        room = views if sum(map(len, views)) <= _MAX_IO_BYTES else [views[0][:_MAX_IO_BYTES]]
        got = system_calls.read_at(fd, room, offset)
        if got == 0:
            raise EOFError(f"it ends at byte {offset}")
        offset += got
        while views and got >= len(views[0]):
            got -= len(views.pop(0))
        if got:
            views[0] = views[0][got:]


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`. Raises OSError."""
    view = memoryview(data)
    while view:
        done = system_calls.write_at(fd, view[:_MAX_IO_BYTES], offset)
        view, offset = view[done:], offset + done


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o666, inside: Directory | None = None) -> Iterator[int]:
    """Yield a descriptor for a file's new content, which replaces the old atomically at the end of the block.

    An exception removes what was written. To make the rename durable, `sync_directory` the parent.

    Args:
        path: the file; relative to `inside`, if given.
        mode: permissions, less the umask.

    Raises OSError.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    at = os if inside is None else inside
    fd = at.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW | OPEN_FLAGS, mode)
    try:
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
        at.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            at.unlink(temporary)
        raise


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Create a directory and lock it against other callers, in any process, during the `with` block. Without locking
    on file systems that lack it. Raises OSError: the directory cannot exist."""
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            descriptor = _lock_place(directory)
            stack.callback(os.close, descriptor)
            system_calls.lock(descriptor, wait=True)
        yield


def _lock_place(directory: Path) -> int:
    """Open what is locked for a directory: itself; on Windows a file of this user, named by a hash of its path."""
    if sys.platform != "win32":
        return os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    locks = cache_folder() / "locks"
    locks.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = hashlib.sha256(os.path.normcase(directory.resolve()).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return open_regular(locks / name, os.O_RDWR | os.O_CREAT, mode=0o600)


def write_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replace a file's content atomically. Raises OSError."""
    with replacing(path, mode=mode) as fd:
        write_at(fd, data, 0)
