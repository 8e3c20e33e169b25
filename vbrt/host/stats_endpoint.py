"""Per-process stats endpoint on a user-only Unix socket.

    offer = Offer(lambda: b"...")            # in one process; nothing is computed until a request
    pids()                                   # in another
    ask(pid)                                 # b"..."

A socket instead of a periodically written file: it costs nothing without requests, answers are current, and liveness is
visible, whereas a killed process's file would go stale. Directory and socket are private to the user; a client removes
a socket without a listener.
"""

import contextlib
import errno
import os
import socket
import stat
import tempfile
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["Offer", "ask", "directories", "pids", "refusal"]

_SUFFIX = ".top"
_SEND_S = 1.0  # limit for a client to read an answer, while others wait
_TIMEOUT_S = 2.5  # limit for an answer to arrive
_MAX_BYTES = 64 << 20
_END = b"\0"  # end marker; an answer without it was cut off


def refusal() -> str | None:
    """Return why no process of this system has an endpoint, or None."""
    return None if hasattr(socket, "AF_UNIX") else "Python has no Unix sockets on Windows; in WSL2 it has"


def directories() -> list[Path]:
    """Return the candidate directories of sockets, best first: XDG_RUNTIME_DIR, its usual value where unset, and the
    temporary directory. Empty where Python has no Unix sockets."""
    if refusal():
        return []
    user = os.getuid()
    given = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    usual, found = Path(f"/run/user/{user}"), []
    if given.is_absolute():
        found.append(given / "vbrt")
    if usual.is_dir():
        found.append(usual / "vbrt")
    found.append(Path(tempfile.gettempdir()) / f"vbrt-{user}")
    return list(dict.fromkeys(found))


class Offer:
    """Endpoint of this process: answers requests from its own thread.

    Args:
        answer: makes the bytes of an answer, in that thread.

    Attributes:
        path: of the socket; removed by `stop`, and at exit unless the process is killed.

    Raises OSError: no directory can be used.
    """

    def __init__(self, answer: Callable[[], bytes]) -> None:
        pid = os.getpid()
        self._socket, self.path = _listening(f"{pid}{_SUFFIX}")
        self._finalizer = weakref.finalize(self, _end, self._socket, self.path, pid)
        _offers.add(self)
        start_new_thread(_serve, (self._socket, answer))  # one C call, safe against Ctrl-C

    def stop(self) -> None:
        """Stop answering. Idempotent."""
        self._finalizer()

    def _after_fork(self) -> None:
        self._finalizer.detach()  # the path is the parent's
        self._socket.close()  # otherwise the child would keep clients of a dead parent waiting


_offers: "weakref.WeakSet[Offer]" = weakref.WeakSet()


def _in_child() -> None:
    for offer in list(_offers):
        offer._after_fork()
    _offers.clear()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_in_child)


def _listening(name: str) -> tuple[socket.socket, Path]:
    """Return a socket bound in the first usable directory. Raises OSError."""
    failed: list[str] = []
    if why := refusal():
        raise OSError(errno.ENOTSUP, why)
    for directory in directories():
        try:
            fd = _own_directory(directory)
            try:
                return _bound(fd, directory / name), directory / name
            finally:
                os.close(fd)
        except OSError as error:
            failed.append(f"{directory}: {error.strerror or error}")
    raise OSError(errno.EACCES, "; ".join(failed))


def _bound(directory: int, path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=directory)  # left by an earlier process with this pid
        listener.bind(_address(directory, path))
        os.chmod(path.name, 0o600, dir_fd=directory)
        listener.listen(8)
    except BaseException:
        listener.close()
        raise
    return listener


def _address(directory: int, path: Path) -> str:
    """Return a socket path within the system's length limit, however long the directory's path is; the path itself
    without /proc (macOS)."""
    short = Path(f"/proc/self/fd/{directory}")
    return str(short / path.name) if short.exists() else str(path)


def _own_directory(path: Path) -> int:
    """Open a directory that only this user can access, created if missing. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(fd)
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(fd)
        raise PermissionError(errno.EPERM, "not a directory of this user alone (mode 0700)", str(path))
    return fd


def _serve(listener: socket.socket, answer: Callable[[], bytes]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # stopped
            return
        with connection, contextlib.suppress(OSError):  # the client left, or does not read
            connection.settimeout(_SEND_S)
            connection.sendall(answer() + _END)


def _end(listener: socket.socket, path: Path, pid: int) -> None:
    if os.getpid() != pid:
        return
    with contextlib.suppress(OSError):
        path.unlink()
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
    listener.close()


# -- client -----------------------------------------------------------------------------------------------------------


def pids() -> list[int]:
    """Return the pids with a socket, oldest first; unreadable entries are skipped."""
    found: dict[int, float] = {}
    for path in _sockets():
        with contextlib.suppress(OSError):
            found.setdefault(int(path.stem), path.stat().st_mtime)
    return sorted(found, key=found.__getitem__)


def _sockets() -> Iterator[Path]:
    for directory in directories():
        with contextlib.suppress(OSError):
            yield from (path for path in directory.iterdir() if path.suffix == _SUFFIX and path.stem.isdigit())


def ask(pid: int) -> bytes:
    """Request a process's answer.

    Raises:
        ProcessLookupError: no listener: it has ended, or has no endpoint. Its socket is removed.
        ConnectionError: it ended meanwhile.
        TimeoutError: it is alive but does not answer.
        OSError: the socket cannot be used, such as another user's.
    """
    for path in (directory / f"{pid}{_SUFFIX}" for directory in directories()):
        if not os.path.lexists(path):
            continue
        try:
            return _asked(path)
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):
                path.unlink()
        except FileNotFoundError:
            continue
    raise ProcessLookupError(errno.ESRCH, "nobody listens", str(pid))


def _asked(path: Path) -> bytes:
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(_address(fd, path))
            answer = bytearray()
            while more := connection.recv(1 << 16):
                answer += more
                if len(answer) > _MAX_BYTES:
                    raise OSError(errno.EFBIG, f"more than {_MAX_BYTES} bytes", str(path))
            if not answer.endswith(_END):
                raise ConnectionResetError(errno.ECONNRESET, "it hung up", str(path))
            return bytes(answer[: -len(_END)])
    finally:
        os.close(fd)
