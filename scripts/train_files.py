"""What a training run leaves on disk: checkpoints that are whole or absent, and logs that a killed run can go on with.

A checkpoint is one safetensors file: every tensor of a nested state under its path, and one more, `state`, with the
rest as JSON: the nesting, numbers and texts, dtype, shape and digest of each tensor, and a digest of itself. It is
written under a temporary name, synced and renamed, so that at any moment the checkpoint before or the new one is there.
"""

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vbrt.errors import CheckpointError, describe_os_error
from vbrt.host.safe_files import open_regular, sync_directory
from vbrt.saves.common.manifest import content_digest, text_of
from vbrt.saves.files.safetensors_file import TensorFile, TensorInfo, TensorWriter, digest

_STATE = "state"
_VERSION = 2  # 1 had digests of the bytes of tensors, and none of the rest
_MAX_STATE_BYTES = 64 << 20
_TAIL_BYTES = 64 << 10
_LEFTOVER = re.compile(r"(checkpoint|model)\.safetensors\.[0-9a-f]{8}\.tmp")


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file, atomically. Raises CheckpointError: it cannot be written; what was there stays."""
    try:
        with TensorWriter(path, [TensorInfo(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written: {describe_os_error(error)}; what was there is as it was, "
            "and the same command goes on from it"
        ) from error
    try:
        sync_directory(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path}: written, but the system cannot sync its directory "
            f"({describe_os_error(error)}); the same command goes on from it"
        ) from error


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """A nested dict of tensors, numbers and texts, atomically. Raises CheckpointError."""
    tensors: dict[str, Tensor] = {}
    nesting = _take_tensors(state, "", tensors)
    entries = {
        name: [text_of(tensor.dtype), list(tensor.shape), digest(tensor.detach().cpu().contiguous())]
        for name, tensor in tensors.items()
    }
    head = {"version": _VERSION, "state": nesting, "tensors": entries}
    text = json.dumps(head | {"digest": content_digest(head)}).encode()
    write_tensors(path, tensors | {_STATE: torch.frombuffer(bytearray(text), dtype=torch.uint8)})


class Checkpoint:
    """What write_checkpoint wrote, its tensors not yet read: nothing that is large, until it is known to fit.

    Attributes:
        state: what was written, with a `TensorInfo` in the place of each tensor.

    Raises:
        CheckpointError: the file is missing, damaged, of another kind or version; names file and entry.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = TensorFile(path)
        try:
            head = self._head()
            self._digests = self._checked_digests(head)
            self.state = _without_tensors(head["state"], self._file.tensors)
            names = self._file.tensors.keys() - {_STATE}
            _expect(self._digests.keys() == names, "tensors", "others than those of the file")
            _expect(sorted(_tensor_names(head["state"])) == sorted(names), "state", "not with each tensor once")
        except (_Damaged, RecursionError) as error:
            raise self.damaged(error) from error

    def read(self) -> dict[str, Any]:
        """What was written, on the CPU. Raises CheckpointError: it cannot be read, or is not what was written."""
        tensors = {}
        for name, known in self._digests.items():
            tensors[name] = self._file.read(name)
            if digest(tensors[name]) != known:
                raise self.damaged(f"the bytes of {name} are not those that were written")
        return _with_tensors(self.state, tensors)

    def damaged(self, what: object) -> CheckpointError:
        """The error that says so."""
        return CheckpointError(f"{self.path}: damaged: {what}; remove it to start over")

    def _head(self) -> dict[str, Any]:
        info = self._file.tensors.get(_STATE)
        if info is None or info.dtype is not torch.uint8 or info.nbytes > _MAX_STATE_BYTES:
            raise CheckpointError(
                f"{self.path}: not a checkpoint of scripts/train; remove it to start over, or train into another --out"
            )
        try:
            head = json.loads(self._file.read(_STATE).numpy().tobytes())
        except ValueError as error:
            raise _Damaged(f"{_STATE}: {error}") from error
        _expect(isinstance(head, dict), _STATE, "no table")
        version = head.get("version")
        if type(version) is not int or version not in (1, _VERSION):
            raise CheckpointError(
                f"{self.path}: a checkpoint of version {version!r}; this reads 1 and {_VERSION}; "
                "remove it to start over"
            )
        keys = {"version", "state", "tensors", "digest"} if version > 1 else {"version", "state", "digests"}
        _expect(head.keys() == keys, _STATE, f"with the keys {', '.join(map(str, head))}")
        _expect(version == 1 or head["digest"] == content_digest(head), f"{_STATE}.digest", "not that of the content")
        return head

    def _checked_digests(self, head: dict[str, Any]) -> dict[str, str]:
        if head["version"] == 1:
            entries = {name: [None, None, known] for name, known in _table(head["digests"]).items()}
        else:
            entries = _table(head["tensors"])
        for name, entry in entries.items():
            _expect(isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], str), f"tensors.{name}", entry)
            info = self._file.tensors.get(name)
            here = None if info is None else [text_of(info.dtype), list(info.shape)]
            _expect(here == entry[:2] or (here and head["version"] == 1), name, f"{here}; saved was {entry[:2]}")
        return {name: known for name, (_, _, known) in entries.items()}


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


class _Damaged(Exception):
    """What is wrong, and where."""


def _expect(holds: object, where: str, what: object) -> None:
    if not holds:
        raise _Damaged(f"{where} is {str(what)[:80]}")


def _table(value: Any) -> dict[str, Any]:
    _expect(isinstance(value, dict), "tensors", value)
    return value


def _without_tensors(nesting: Any, infos: Mapping[str, TensorInfo], where: str = _STATE) -> Any:
    """The state of a nesting, with what the header says in the place of tensors."""
    _expect(isinstance(nesting, list) and len(nesting) == 2, where, nesting)
    kind, value = nesting
    if kind == "tensor":
        _expect(isinstance(value, str) and value in infos and value != _STATE, where, f"a tensor {value!r}")
        return infos[value]
    if kind == "value":
        _expect(value is None or isinstance(value, bool | int | float | str), where, value)
        return value
    _expect(kind in ("dict", "list") and isinstance(value, list), where, nesting)
    if kind == "list":
        return [_without_tensors(item, infos, f"{where}.{index}") for index, item in enumerate(value)]
    out = {}
    for pair in value:
        _expect(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int | str), where, pair)
        _expect(pair[0] not in out, f"{where}.{pair[0]}", "there twice")
        out[pair[0]] = _without_tensors(pair[1], infos, f"{where}.{pair[0]}")
    return out


def _tensor_names(nesting: Any) -> Iterator[str]:
    kind, value = nesting
    if kind == "tensor":
        yield value
    elif kind != "value":
        for item in value:
            yield from _tensor_names(item[1] if kind == "dict" else item)


def _with_tensors(state: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(state, TensorInfo):
        return tensors[state.name]
    if isinstance(state, dict):
        return {key: _with_tensors(item, tensors) for key, item in state.items()}
    return [_with_tensors(item, tensors) for item in state] if isinstance(state, list) else state


def difference(saved: Any, ours: Any, where: str) -> str | None:
    """Where a state is of another kind than ours: its nesting, types of values, dtypes and shapes of tensors."""
    if isinstance(ours, Tensor):
        ours = TensorInfo("", ours.dtype, tuple(ours.shape))
    if isinstance(ours, TensorInfo):
        here = (saved.dtype, saved.shape) if isinstance(saved, TensorInfo) else saved
        return None if here == (ours.dtype, ours.shape) else f"{where} is {here!r}; expected {(ours.dtype, ours.shape)}"
    if isinstance(ours, dict):
        if not isinstance(saved, dict) or saved.keys() != ours.keys():
            keys = ", ".join(map(str, saved)) if isinstance(saved, dict) else repr(saved)
            return f"{where} has {keys[:200]}; expected {', '.join(map(str, ours))[:200]}"
        return next(filter(None, (difference(saved[key], item, f"{where}.{key}") for key, item in ours.items())), None)
    if isinstance(ours, list | tuple):
        if not isinstance(saved, list) or len(saved) != len(ours):
            return f"{where} is {saved!r:.80}; expected a list of {len(ours)}"
        pairs = enumerate(zip(saved, ours, strict=True))
        return next(filter(None, (difference(here, item, f"{where}.{i}") for i, (here, item) in pairs)), None)
    fits = type(saved) is type(ours) or (type(ours) is float and type(saved) is int)
    return None if fits else f"{where} is {saved!r:.80}; expected {type(ours).__name__}"


class JsonLines:
    """A log of one JSON object a line, taken up again after `nbytes` (None: after the last whole line); a context.

    Raises:
        CheckpointError: it cannot be written, or is shorter than that.
    """

    def __init__(self, path: Path, nbytes: int | None) -> None:
        self.path = path
        try:
            self._file = open(open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW), "a+b")
            size = os.fstat(self._file.fileno()).st_size
            if nbytes is None:
                nbytes = self._whole_lines(size)
            if nbytes <= size:
                self._file.truncate(nbytes)
        except OSError as error:
            raise self._failed(error) from error
        if nbytes > size:
            self._file.close()
            raise CheckpointError(
                f"{path}: {size} bytes, and the checkpoint beside it was written when it had "
                f"{nbytes}; put it back, or remove the run"
            )

    def _whole_lines(self, size: int) -> int:
        """Bytes up to the end of the last whole line; lines are short, and the file may be long."""
        for start in range((size - 1) // _TAIL_BYTES * _TAIL_BYTES, -1, -_TAIL_BYTES):
            self._file.seek(start)
            end = self._file.read(_TAIL_BYTES).rfind(b"\n")
            if end >= 0:
                return start + end + 1
        return 0

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
        lock = open(open_regular(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW), "r+b")
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or directory}: cannot be written: {describe_os_error(error)}; choose another --out"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{directory}: another process is training into it; wait for it, or take another --out"
            ) from error
        for leftover in filter(_LEFTOVER.fullmatch, os.listdir(directory)):  # of a process that was killed
            with contextlib.suppress(OSError):
                (directory / leftover).unlink()
        yield
