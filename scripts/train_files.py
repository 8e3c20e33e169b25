"""What a training run leaves on disk: checkpoints that are whole or absent, and logs that a killed run can go on with.

A checkpoint is one safetensors file: every tensor of a nested state under its path, and one more, `state`, with the
rest as JSON: the nesting, numbers and texts, and a digest of each tensor. It is written under a temporary name, synced
and renamed, so that at any moment the checkpoint before or the new one is there.
"""

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vbrt.errors import CheckpointError, describe_os_error
from vbrt.files import sync_directory
from vbrt.tensorfile import TensorFile, TensorInfo, TensorWriter, digest

_STATE = "state"
_VERSION = 1
_LEFTOVER = re.compile(r"(checkpoint|model)\.safetensors\.[0-9a-f]{8}\.tmp")


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file, atomically. Raises CheckpointError: it cannot be written; what was there stays."""
    try:
        with TensorWriter(path, [TensorInfo(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {describe_os_error(error)}; what was there is as it was, "
                              "and the same command goes on from it") from error
    try:
        sync_directory(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path}: written, but the system cannot sync its directory "
                              f"({describe_os_error(error)}); the same command goes on from it") from error


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """A nested dict of tensors, numbers and texts, atomically. Raises CheckpointError."""
    tensors: dict[str, Tensor] = {}
    nesting = _take_tensors(state, "", tensors)
    digests = {name: digest(tensor.detach().cpu().contiguous()) for name, tensor in tensors.items()}
    head = json.dumps({"version": _VERSION, "state": nesting, "digests": digests}).encode()
    write_tensors(path, tensors | {_STATE: torch.frombuffer(bytearray(head), dtype=torch.uint8)})


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    """What write_checkpoint was given, on the CPU; None where there is no file.

    Raises:
        CheckpointError: the file is damaged, of another kind or version; names it.
    """
    if not path.exists():
        return None
    file = TensorFile(path)
    again = "remove it to start over"
    if _STATE not in file.tensors:
        raise CheckpointError(f"{path}: not a checkpoint of scripts/train; {again}, or train into another --out")
    tensors = {name: file.read(name) for name in file.tensors}
    try:
        head = json.loads(tensors.pop(_STATE).numpy().tobytes())
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged: {error}; {again}") from error
    if head["version"] != _VERSION:
        raise CheckpointError(f"{path}: a checkpoint of version {head['version']}; this reads {_VERSION}; {again}")
    for name, tensor in tensors.items():
        if digest(tensor) != head["digests"].get(name):
            raise CheckpointError(f"{path}: damaged: the bytes of {name} are not those that were written; {again}")
    return _give_tensors(head["state"], tensors)


def _take_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The nesting in JSON: ["tensor", path], ["dict", pairs], ["list", items] or ["value", v]."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return ["tensor", path]
    below = f"{path}." if path else ""
    if isinstance(value, dict):
        return ["dict", [[key, _take_tensors(item, f"{below}{key}", tensors)] for key, item in value.items()]]
    if isinstance(value, list | tuple):
        return ["list", [_take_tensors(item, f"{below}{index}", tensors) for index, item in enumerate(value)]]
    return ["value", value]


def _give_tensors(nesting: Any, tensors: dict[str, Tensor]) -> Any:
    kind, value = nesting
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _give_tensors(item, tensors) for key, item in value}
    return [_give_tensors(item, tensors) for item in value] if kind == "list" else value


class JsonLines:
    """A log of one JSON object a line, taken up again after `nbytes` (None: after the last whole line); a context.

    Raises:
        CheckpointError: it cannot be written, or is shorter than that.
    """

    def __init__(self, path: Path, nbytes: int | None) -> None:
        self.path = path
        try:
            self._file = open(path, "a+b")
            size = os.fstat(self._file.fileno()).st_size
            if nbytes is None:
                self._file.seek(0)
                nbytes = self._file.read().rfind(b"\n") + 1
            if nbytes <= size:
                self._file.truncate(nbytes)
        except OSError as error:
            raise self._failed(error) from error
        if nbytes > size:
            self._file.close()
            raise CheckpointError(f"{path}: {size} bytes, and the checkpoint beside it was written when it had "
                                  f"{nbytes}; put it back, or remove the run")

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """Append a line; it is in the file when this returns, and on the drive after `sync`."""
        try:
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise self._failed(error) from error

    def sync(self) -> int:
        """Bytes of the log, all of them on the drive."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from error
        return os.fstat(self._file.fileno()).st_size

    def _failed(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self.path}: cannot be written: {describe_os_error(error)}")


@contextlib.contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Make a run's directory and hold it for this process; the lock goes with the process, however it ends.

    Raises:
        CheckpointError: it cannot be made, or another process trains into it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / "lock", "wb")
    except OSError as error:
        raise CheckpointError(f"{error.filename or directory}: cannot be written: {describe_os_error(error)}; choose "
                              "another --out") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(f"{directory}: another process is training into it; wait for it, or take another "
                                  "--out") from error
        for leftover in filter(_LEFTOVER.fullmatch, os.listdir(directory)):  # of a process that was killed
            with contextlib.suppress(OSError):
                (directory / leftover).unlink()
        yield
