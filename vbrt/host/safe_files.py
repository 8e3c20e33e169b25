"""Files of unknown origin, and files that are replaced as a whole.

Only regular files are read: opening never waits for the other end of a FIFO, and what is read whole is bounded before
memory is taken. A file is written under a new name that nobody can have prepared, synced, and renamed into place: it
is there as a whole, or as it was before, and nothing is written through a link.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

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
    """A path that a person wrote, without `~`. Raises OSError: no path at all, no such user, or a name that no file
    can have."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise OSError(errno.EINVAL, f"{type(path).__name__}, and not a path; expected a str or Path", repr(path)[:80])
    try:
        if b"\0" in os.fsencode(path):
            raise ValueError("it has a NUL")
        return Path(path).expanduser()
    except (RuntimeError, ValueError) as error:  # RuntimeError: no such user; ValueError: half a surrogate pair
        raise OSError(errno.EINVAL, f"no file can have this name ({error})", repr(os.fspath(path))) from error


def home_folder() -> Path:
    """Return the user's home; /dev/null, below which nothing is read or written, for a user who has none."""
    try:
        return Path.home()
    except RuntimeError:  # no HOME, and a number that is nobody's, as in a container
        return Path(os.devnull)


def cache_folder() -> Path:
    """Return the folder that keeps what vbrt has measured: below $XDG_CACHE_HOME or ~/.cache; it need not exist."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():  # unset, or to be ignored, says the XDG base directory specification
        root = home_folder() / ".cache"
    return root / "vbrt"


def open_regular(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, mode: int = 0o666, dir_fd: int | None = None
) -> int:
    """A descriptor of a regular file. In directories of vbrt's own, pass O_NOFOLLOW in `flags`.

    Raises OSError, also for what is no regular file and for a name that the system cannot have.
    """
    try:
        fd = os.open(path, os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | flags, mode, dir_fd=dir_fd)
    except ValueError as error:  # a NUL, or half a surrogate pair
        raise OSError(errno.EINVAL, f"no file can have this name ({error})", repr(path)) from error
    try:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        if kind != stat.S_IFREG:
            code = errno.EISDIR if kind == stat.S_IFDIR else errno.ENXIO
            raise OSError(code, f"{_KINDS.get(kind, 'not a file')}; expected a regular file", os.fspath(path))
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise OSError if a file cannot be written; what is there stays as it is, and nothing new is left behind."""
    is_new = not os.path.lexists(path)
    os.close(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    if is_new:
        os.unlink(path)


def read_bounded(path: str | os.PathLike[str], limit_bytes: int) -> bytes:
    """The bytes of a regular file that is read whole. Raises OSError, also for one of more than `limit_bytes`."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit_bytes:
            raise OSError(errno.EFBIG, f"{size} bytes; expected at most {limit_bytes}", os.fspath(path))
        data = file.read(size + 1)
        if len(data) > size:
            raise OSError(errno.EBUSY, "it grew while it was read", os.fspath(path))
        return data


def read_into(fd: int, views: list[memoryview], offset: int) -> None:
    """Read from `offset` until the views are full. Raises OSError; EOFError, with the place, where the file ends."""
    views = [view for view in views if view]
    while views:
        room = views if sum(map(len, views)) <= _MAX_IO_BYTES else [views[0][:_MAX_IO_BYTES]]
        got = os.preadv(fd, room, offset)
        if got == 0:
            raise EOFError(f"it ends at byte {offset}")
        offset += got
        while views and got >= len(views[0]):
            got -= len(views.pop(0))
        if got:
            views[0] = views[0][got:]


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of it. Raises OSError."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view[:_MAX_IO_BYTES], offset)
        view, offset = view[done:], offset + done


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o666, dir_fd: int | None = None) -> Iterator[int]:
    """A descriptor for the new content of a file, which takes the place of the old one at the end of the block.

    Leaving by an exception removes what was written. To make the renaming last, `sync_directory` the parent.

    Args:
        path: where; below `dir_fd`, if that is given.
        mode: permissions, less the umask.

    Raises OSError.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    try:
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=dir_fd)
        raise


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Make a directory, and hold off whoever enters it by this call, in any process, until the `with` block ends. On
    file systems without locks nobody is held off. Raises OSError: there can be no such directory."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replace a file by these bytes. Raises OSError."""
    with replacing(path, mode=mode) as fd:
        write_at(fd, data, 0)


def sync_directory(path: Path) -> None:
    """Make renames in a directory last. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
