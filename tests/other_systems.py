"""Windows and macOS, simulated in this process: names that their Python lacks are removed before vbrt is imported.

torch, transformers and the standard library are imported first and stay this system's: what is simulated is what vbrt
itself finds. Windows' files are simulated as well: no descriptors of directories, and neither removal nor replacement
of a file that this process has open. Its `msvcrt` is a stand-in that locks the whole file.
"""

import builtins
import fcntl
import importlib.abc
import io
import mmap
import os
import signal
import socket
import sys
import types
from typing import Any

import psutil

__all__ = ["become_macos", "become_windows", "import_libraries"]

_LINUX = (
    *("O_DIRECT", "RWF_NOWAIT", "memfd_create", "posix_fadvise", "posix_fallocate"),
    *("sched_getaffinity", "sched_setaffinity", "POSIX_FADV_DONTNEED", "POSIX_FADV_WILLNEED"),
)
_POSIX = (
    *("O_CLOEXEC", "O_DIRECTORY", "O_NOCTTY", "O_NOFOLLOW", "O_NONBLOCK", "O_SYNC", "set_blocking", "get_blocking"),
    *("fork", "forkpty", "register_at_fork", "getuid", "geteuid", "getgid", "getegid", "killpg", "setsid", "uname"),
    *("pread", "preadv", "pwrite", "pwritev", "sendfile", "mkfifo", "sysconf", "fchmod"),
)
_MMAP = ("MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_ANON", "MAP_SHARED", "MADV_HUGEPAGE", "MADV_DONTNEED", "PROT_READ")
_SIGNAL = ("SIGKILL", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGCHLD", "pthread_kill", "setitimer")
_MODULES = ("fcntl", "pwd", "grp", "termios", "tty", "resource", "posix")


def become_macos() -> None:
    """Make this process look like Python on macOS to modules that are imported from now on."""
    import_libraries()
    _remove(os, _LINUX)
    _hide("/proc", "/sys")
    os.environ["CC"] = "no-such-compiler"  # what this system's would build says nothing of Apple's
    sys.platform = "darwin"


def become_windows() -> None:
    """Make this process look like Python on Windows to modules that are imported from now on."""
    import_libraries()
    _simulate_locks()
    _refuse_modules()
    _forbid_what_windows_forbids()
    _hide("/proc", "/sys", "/dev")
    for module, names in ((os, _LINUX + _POSIX), (mmap, _MMAP), (signal, _SIGNAL), (socket, ("AF_UNIX",))):
        _remove(module, names)
    os.O_BINARY, os.O_NOINHERIT = 0, 0
    mmap.mmap = _WindowsMapping
    sys.platform = "win32"


def import_libraries() -> None:
    assert not any(name.startswith("vbrt.") for name in sys.modules), "vbrt was imported before"
    import torch._dynamo
    import torch._inductor
    from transformers import LlamaForCausalLM  # what generation needs comes with it

    assert torch and LlamaForCausalLM
    psutil._common.open = psutil._pslinux.open = open  # it reads /proc in the other system's stead


def _remove(module: types.ModuleType, names: tuple[str, ...]) -> None:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def _hide(*roots: str) -> None:
    """Make files below these directories missing to Python's own functions."""

    def hidden(real: Any) -> Any:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(roots):
                raise FileNotFoundError(2, "No such file or directory", str(path))
            return real(path, *args, **kwargs)

        return call

    builtins.open = io.open = hidden(io.open)
    os.open, os.stat = hidden(os.open), hidden(os.stat)


def _simulate_locks() -> None:
    flock, exclusive = fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB

    def locking(fd: int, mode: int, nbytes: int) -> None:
        try:
            flock(fd, exclusive)
        except BlockingIOError as error:
            raise PermissionError(13, "Permission denied") from error

    msvcrt = types.ModuleType("msvcrt")
    msvcrt.LK_NBLCK, msvcrt.locking = 2, locking
    sys.modules["msvcrt"] = msvcrt


def _refuse_modules() -> None:
    class Refusing(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name in _MODULES:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in _MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Refusing())


class _WindowsMapping(mmap.mmap):
    """A mapping with the arguments and methods that Windows has."""

    def __new__(cls, fileno: int, length: int, tagname: str | None = None, *, access: int = mmap.ACCESS_DEFAULT):
        return super().__new__(cls, fileno, length, access=access)

    madvise = property()


def _forbid_what_windows_forbids() -> None:
    descriptors, is_open = os.listdir, os.path.realpath

    def check(path: Any, given: dict[str, Any], *, opened: bool = False) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            raise TypeError(f"path should be string, bytes or os.PathLike, not {type(path).__name__}")
        if any(given.pop(name, None) is not None for name in ("dir_fd", "src_dir_fd", "dst_dir_fd")):
            raise NotImplementedError("dir_fd unavailable on this platform")
        links = (f"/proc/self/fd/{fd}" for fd in descriptors("/proc/self/fd"))
        if opened and is_open(path) in map(is_open, links):
            raise PermissionError(13, "The process cannot access the file: it is being used", str(path))

    real_open, real_replace, real_scandir = os.open, os.replace, os.scandir

    def open_file(path: Any, flags: int, mode: int = 0o777, **given: Any) -> int:
        check(path, given)
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, flags, mode)

    def replace(old: Any, new: Any, **given: Any) -> None:
        check(old, given, opened=True)
        check(new, given, opened=True)
        real_replace(old, new)

    def scandir(path: Any = ".") -> Any:
        check(path, {})
        return real_scandir(path)

    def removing(real: Any, *, opened: bool) -> Any:
        def remove(path: Any, **given: Any) -> None:
            check(path, given, opened=opened)
            real(path)

        return remove

    os.open, os.replace, os.scandir = open_file, replace, scandir
    os.unlink = os.remove = removing(os.unlink, opened=True)
    os.rmdir = removing(os.rmdir, opened=False)
