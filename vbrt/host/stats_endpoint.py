"""What a process answers when it is asked for, through a socket in a directory of its user.

    offer = Offer(lambda: b"...")            # in one process; nothing is computed until somebody asks
    pids()                                   # in another
    ask(pid)                                 # b"..."

Why a socket and not a file that is written now and then: as long as nobody asks it costs nothing, the answer is of the
moment, and whether anybody listens says whether the process is there: a file of a killed process would go on telling
what was. The directory and the socket are the user's alone; a socket that nobody listens at is removed by who finds it.
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

__all__ = ["Offer", "ask", "directories", "pids"]

_SUFFIX = ".top"
_SEND_S = 1.0  # for an answer to be read, while others wait
_TIMEOUT_S = 2.5  # for an answer to come
_MAX_BYTES = 64 << 20
_END = b"\0"  # an answer without it is one whose process has ended meanwhile


def directories() -> list[Path]:
    """Return where sockets may be, the best place first: XDG_RUNTIME_DIR, what systems call so where it is not set, and
    the directory for temporary files."""
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
    """Answers everyone who asks for this process, from a thread of its own.

    Args:
        answer: makes the bytes of an answer; it is called in that thread.

    Attributes:
        path: of the socket; it goes with `stop`, and with the process unless that is killed.

    Raises OSError: no directory can be used.
    """

    def __init__(self, answer: Callable[[], bytes]) -> None:
        pid = os.getpid()
        self._socket, self.path = _listening(f"{pid}{_SUFFIX}")
        self._finalizer = weakref.finalize(self, _end, self._socket, self.path, pid)
        _offers.add(self)
        start_new_thread(_serve, (self._socket, answer))  # in one call into C, for the sake of Ctrl-C

    def stop(self) -> None:
        """Answer nobody any more; idempotent."""
        self._finalizer()

    def _after_fork(self) -> None:
        self._finalizer.detach()  # the path is the parent's
        self._socket.close()  # or the child would keep those waiting who ask for a parent that has ended


_offers: "weakref.WeakSet[Offer]" = weakref.WeakSet()


def _in_child() -> None:
    for offer in list(_offers):
        offer._after_fork()
    _offers.clear()


os.register_at_fork(after_in_child=_in_child)


def _listening(name: str) -> tuple[socket.socket, Path]:
    """Return a socket that is bound in the first directory that can be used. Raises OSError."""
    failed: list[str] = []
    for directory in directories():
        try:
            fd = _own_directory(directory)
            try:
                return _bound(fd, name), directory / name
            finally:
                os.close(fd)
        except OSError as error:
            failed.append(f"{directory}: {error.strerror or error}")
    raise OSError(errno.EACCES, "; ".join(failed))


def _bound(directory: int, name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)  # of a process that had this number before
        listener.bind(_short(directory, name))
        os.chmod(name, 0o600, dir_fd=directory)
        listener.listen(8)
    except BaseException:
        listener.close()
        raise
    return listener


def _short(directory: int, name: str) -> str:
    """Return a path of a socket that is short enough for the system, however long that of the directory is."""
    return f"/proc/self/fd/{directory}/{name}"


def _own_directory(path: Path) -> int:
    """Return a descriptor of a directory that nobody else can write to, made if missing. Raises OSError."""
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
        except OSError:  # it was stopped
            return
        with connection, contextlib.suppress(OSError):  # who asked has gone, or does not read
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


# -- asking -----------------------------------------------------------------------------------------------------------


def pids() -> list[int]:
    """Return the processes that have a socket, oldest first; what cannot be read is left out."""
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
    """Return what a process answers now.

    Raises:
        ProcessLookupError: nobody listens: it has ended, or offers nothing. Its socket is removed.
        ConnectionError: it has ended meanwhile.
        TimeoutError: it is there and does not answer.
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
            connection.connect(_short(fd, path.name))
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
