"""Conversion journal, for resuming: an append-only file in the output directory, one line per finished shard.

    {"kind": "vbrt conversion", "source": ..., "config": ..., "token": "3f9c01ab", "files": 12}
    {"file": "vbrt-3f9c01ab-00001-of-00012.safetensors", "tensors": {"layers.0.up.weight.codes": ["uint8", ...]}}

Lines truncated by a crash are ignored; listed shards are verified by digest before they are reused.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vbrt.errors import CheckpointError, describe_os_error
from vbrt.host.safe_files import open_regular, read_bounded, sync_directory, write_at
from vbrt.host.system_calls import NO_FOLLOW
from vbrt.saves.common.manifest import SHARD, SavedTensor, text_of
from vbrt.saves.files.checkpoint_paths import MANIFEST
from vbrt.saves.files.safetensors_file import TensorFile, digest

__all__ = ["JOURNAL", "Journal", "open_journal"]

JOURNAL = "vbrt-convert.jsonl"
_KIND = "vbrt conversion"
_MAX_BYTES = 256 << 20
_SAYS = {
    "vbrt": "another version of vbrt",
    "source": "files that have changed since, or are others",
    "config": "another config",
    "files": "another division into files",
}


@dataclass(slots=True)
class Journal:
    """Finished shards of a conversion.

    Attributes:
        token: hex token in its file names.
        done: tensors of each finished shard, by file name; verified.
    """

    path: Path
    token: str
    done: dict[str, dict[str, SavedTensor]] = field(default_factory=dict)

    def add(self, name: str, tensors: Mapping[str, SavedTensor]) -> None:
        """Append a finished shard and fsync. Raises OSError."""
        entries = {key: [t.dtype, list(t.shape or ()), t.digest] for key, t in tensors.items()}
        _append(self.path, {"file": name, "tensors": entries})
        self.done[name] = dict(tensors)

    def remove(self) -> None:
        """Delete the journal of a finished conversion."""
        self.path.unlink(missing_ok=True)


def open_journal(directory: Path, head: Mapping[str, Any], *, overwrite: bool) -> Journal:
    """Return the journal of an interrupted conversion in the directory, or start a new one.

    Args:
        head: fields in which an interrupted conversion must agree to be resumed.
        overwrite: start anew over another conversion or a save; the save stays until the new one is complete.

    Raises:
        CheckpointError: the directory holds another conversion, a save or other files.
        OSError: it cannot be created or written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / JOURNAL
    lines = _lines(path)
    if lines and not overwrite:
        other = [says for key, says in _SAYS.items() if lines[0].get(key) != head[key]]
        if other:
            raise CheckpointError(
                f"{path}: an interrupted conversion of {' and '.join(other)}; name another directory, or start over "
                "with --overwrite"
            )
        return Journal(path, lines[0]["token"], _checked(directory, lines[1:]))
    if not overwrite:
        _refuse_others(directory)
    token = secrets.token_hex(4)
    path.unlink(missing_ok=True)
    _append(path, {"kind": _KIND, **head, "token": token})
    sync_directory(directory)
    return Journal(path, token)


def _refuse_others(directory: Path) -> None:
    names = sorted(entry.name for entry in directory.iterdir() if entry.name != JOURNAL)
    if MANIFEST in names:
        raise CheckpointError(f"{directory}: is a save already; name another directory, or replace it with --overwrite")
    if names:
        raise CheckpointError(
            f"{directory}: not empty ({', '.join(names[:3])}); name a new directory, or write into it with --overwrite"
        )


def _append(path: Path, line: Mapping[str, Any]) -> None:
    fd = open_regular(path, os.O_WRONLY | os.O_CREAT | NO_FOLLOW)
    try:
        end = os.fstat(fd).st_size
        lead = b"\n" if end else b""  # ends a truncated line
        write_at(fd, lead + json.dumps(line).encode(), end)
        os.fsync(fd)
    finally:
        os.close(fd)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the valid lines of a journal; empty without a journal of this kind."""
    try:
        texts = read_bounded(path, _MAX_BYTES).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {describe_os_error(error)}") from error
    lines = []
    for text in texts:
        with contextlib.suppress(ValueError, RecursionError):
            lines.append(json.loads(text))
    lines = [line for line in lines if isinstance(line, dict)]
    is_ours = bool(lines) and lines[0].get("kind") == _KIND and SHARD.fullmatch(_shard(lines[0].get("token")))
    return lines if is_ours else []


def _shard(token: Any) -> str:
    return f"vbrt-{token}-00001-of-00001.safetensors"


def _checked(directory: Path, lines: list[dict[str, Any]]) -> dict[str, dict[str, SavedTensor]]:
    """Return the finished shards whose digests match."""
    done = {}
    for line in lines:
        name, entries = line.get("file"), line.get("tensors")
        if isinstance(name, str) and SHARD.fullmatch(name) and isinstance(entries, dict):
            with contextlib.suppress(CheckpointError, ValueError, TypeError):  # it is written again
                tensors = {key: SavedTensor(name, d, t, tuple(shape)) for key, (t, shape, d) in entries.items()}
                if _holds(directory / name, tensors):
                    done[name] = tensors
    return done


def _holds(path: Path, tensors: Mapping[str, SavedTensor]) -> bool:
    file = TensorFile(path)
    found = {name: (text_of(info.dtype), info.shape) for name, info in file.tensors.items()}
    if found != {name: (saved.dtype, saved.shape) for name, saved in tensors.items()}:
        return False
    return all(digest(file.read(name)) == saved.digest for name, saved in tensors.items())
