"""Cache of C kernels built on this machine, below $XDG_CACHE_HOME/vbrt/kernels or ~/.cache/vbrt/kernels.

The key of a file is its inputs: sources, the compiler with its version and flags, and relevant environment variables. A
file ends with a digest of key and content, and is read whole and verified before it is loaded: a file that is damaged,
owned by another user or writable by others is rebuilt. Concurrent builds replace each other's file by an equal one.
"""

import contextlib
import functools
import hashlib
import os
import shutil
import stat
import subprocess
from pathlib import Path

from vbrt.host.safe_files import cache_folder, open_regular, replacing, write_at
from vbrt.kernels.cpu import compiler
from vbrt.kernels.cpu.compiler import InstructionSet

__all__ = ["fetch", "folder", "identity", "keep"]

_LARGEST = 64 << 20
_KEPT = 8  # per source and instruction set: for several checkouts and compilers
_DIGEST = hashlib.sha256().digest_size
#: environment variables that gcc and clang read
_ENVIRONMENT = (
    "CPATH",
    "C_INCLUDE_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
    "LIBRARY_PATH",
    "SOURCE_DATE_EPOCH",
    "CCC_OVERRIDE_OPTIONS",
)


def folder() -> Path:
    """Return the cache folder, which may not exist."""
    return cache_folder() / "kernels"


def identity(command: list[str], source: str, wanted: InstructionSet) -> str | None:
    """Return the cache key of a source compiled for an instruction set; None if unknown.

    Only for the wheel's instruction sets: others compile for the native CPU.
    """
    known = _compiler_identity(tuple(command)) if wanted in compiler.INSTRUCTION_SETS else None
    if known is None:
        return None
    flags = compiler.options_of(source, wanted)
    environment = [os.environ.get(name) for name in _ENVIRONMENT]
    whole = repr((source, flags, command, known, environment, _sources_digest()))
    return hashlib.sha256(whole.encode("utf-8", "surrogateescape")).hexdigest()


def fetch(name: str, source: str, wanted: InstructionSet) -> bytes | None:
    """Return a cached library; None if missing or not trustworthy."""
    try:
        with open(open_regular(_path(name, source, wanted), os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            status = os.fstat(file.fileno())
            if not _is_own(status) or status.st_size > _LARGEST:
                return None
            data = file.read(_LARGEST)
    except OSError:
        return None
    library, digest = data[:-_DIGEST], data[-_DIGEST:]
    return library if _digest(name, library) == digest else None


def keep(name: str, source: str, wanted: InstructionSet, library: bytes) -> None:
    """Cache a library, and drop the oldest ones. Failures to write are ignored: each process then builds its own."""
    path = _path(name, source, wanted)
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_own(path.parent.lstat()):
            return
        with replacing(path, mode=0o600) as fd:
            write_at(fd, library + _digest(name, library), 0)
        alike = path.parent.glob(f"{source}.{wanted.name}.*.so")
        for old in sorted(alike, key=lambda file: file.stat().st_mtime_ns)[:-_KEPT]:
            old.unlink(missing_ok=True)


def _path(name: str, source: str, wanted: InstructionSet) -> Path:
    return folder() / f"{source}.{wanted.name}.{name[:32]}.so"


def _is_own(status: os.stat_result) -> bool:
    """True if only this user may write it."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _digest(name: str, library: bytes) -> bytes:
    return hashlib.sha256(name.encode() + library).digest()


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted((*compiler.HERE.glob("*.c"), *compiler.HERE.glob("*.h"))):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


@functools.cache
def _compiler_identity(command: tuple[str, ...]) -> tuple[str, int, int, str] | None:
    """Return a compiler's path, size, modification time and version text."""
    try:
        path = Path(shutil.which(command[0]) or command[0]).resolve()
        status = path.stat()
        done = compiler.run([*command, "--version"], output=subprocess.PIPE)
    except (OSError, compiler.CompileError):
        return None
    return (str(path), status.st_size, status.st_mtime_ns, done.stdout) if done.returncode == 0 else None
