"""Training checkpoint format: one manifest and safetensors shards, readable with any tiers and by plain torch.

    vbrt-checkpoint.json                         manifest: names, groups, steps, `extra`, digests
    vbrt-3f9c01ab-00001-of-00002.safetensors     tensors: fp32 weights, moments, buffers, tensors in `extra`

Weights are written one at a time, straight from host memory. Writing is atomic: shard names carry a random
token, and renaming the manifest into place comes last, so that a kill or a full disk leaves the previous checkpoint
intact. The next checkpoint removes shards that no manifest names.

Reads are verified against digests. `read_checkpoint` returns what `load_state_dict` of the plain model and of a plain
optimizer of the same class take.
"""

import json
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vbrt.errors import CheckpointError, MissingCheckpointError, describe_os_error
from vbrt.host.safe_files import expanded, read_bounded, sync_directory, write_file
from vbrt.report.progress import Progress
from vbrt.saves.common.manifest import SHARD, content_digest, text_of
from vbrt.saves.files.nested_tensors import taken_apart, together
from vbrt.saves.files.safetensors_file import TensorFile, TensorInfo, TensorWriter, digest, in_order
from vbrt.training.full.resident_params import take_master

__all__ = ["CHECKPOINT", "Piece", "SavedCheckpoint", "TrainingCheckpoint", "read_checkpoint", "write_checkpoint"]

CHECKPOINT = "vbrt-checkpoint.json"
_KIND, _VERSION = "vbrt checkpoint", 1
_MAX_BYTES = 256 << 20
_FILE_BYTES = 1 << 30
_OURS = re.compile(rf"({SHARD.pattern}|{re.escape(CHECKPOINT)})((\.[0-9a-f]{{8}})?\.tmp)?")


@dataclass(frozen=True, slots=True)
class Piece:
    """Tensors written together (of one weight, say), and the call that makes them."""

    tensors: tuple[TensorInfo, ...]
    make: Callable[[], Mapping[str, Tensor]]

    @property
    def nbytes(self) -> int:
        """Total bytes of the tensors."""
        return sum(info.nbytes for info in self.tensors)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Piece":
        """Return a piece of tensors that already exist."""
        infos = tuple(TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
        return cls(infos, lambda: tensors)


@dataclass(frozen=True, slots=True)
class TrainingCheckpoint:
    """Training checkpoint for plain torch, in CPU memory.

    Attributes:
        model: state dict with fp32 weights; tied tensors under all their names.
        optimizer: state dict for a plain optimizer of the class that trained.
        extra: the `extra` argument of `save_checkpoint`.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    extra: Any


# -- writing ----------------------------------------------------------------------------------------------------------


def write_checkpoint(
    directory: str | PathLike, state: Mapping[str, Any], pieces: Iterable[Piece], *, progress: bool | None = None
) -> Path:
    """Write a checkpoint, replacing the one in the directory atomically.

    Args:
        state: plain data with tensors; tensors that `pieces` make stand there as `TensorInfo`.

    Raises:
        CheckpointError: it cannot be written, or `state` holds something that cannot be saved; the previous checkpoint
            is intact.
    """
    tensors: dict[str, Tensor] = {}
    plain = {key: taken_apart(value, key, tensors) for key, value in state.items()}
    pieces = [*pieces, *(Piece.of({name: tensor}) for name, tensor in tensors.items())]
    token, folder = secrets.token_hex(4), _folder_of(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Progress("saving", sum(piece.nbytes for piece in pieces), show=progress) as work:
            entries = _write_files(folder, token, pieces, work)
        content = {"kind": _KIND, "version": _VERSION, "vbrt": sys.modules["vbrt"].__version__}
        content |= {"state": plain, "tensors": entries}
        write_file(folder / CHECKPOINT, json.dumps(content | {"digest": content_digest(content)}).encode())
        sync_directory(folder)
    except OSError as error:
        _remove(folder, lambda name: token in name)
        raise CheckpointError(
            f"{error.filename or directory}: the checkpoint cannot be written: {describe_os_error(error)}; "
            "a previous checkpoint is intact, and training can continue"
        ) from error
    except BaseException:
        _remove(folder, lambda name: token in name)
        raise
    _remove(folder, lambda name: token not in name and name != CHECKPOINT)
    return folder


def _write_files(folder: Path, token: str, pieces: list[Piece], work: Progress) -> dict[str, list]:
    """Write all shards; return each tensor's file, dtype, shape and digest."""
    files, entries = in_order(pieces, _FILE_BYTES), {}
    for number, held in enumerate(files, 1):
        name = f"vbrt-{token}-{number:05d}-of-{len(files):05d}.safetensors"
        entries |= _write_one(folder / name, held, work)
    sync_directory(folder)
    return entries


def _write_one(path: Path, pieces: list[Piece], work: Progress) -> dict[str, list]:
    entries = {}
    with TensorWriter(path, [info for piece in pieces for info in piece.tensors]) as writer:
        for piece in pieces:
            work.at(piece.tensors[0].name)
            made = piece.make()
            for info in piece.tensors:
                known = writer.write(info.name, made[info.name])
                entries[info.name] = [path.name, text_of(info.dtype), list(info.shape), known]
            work.done(piece.nbytes)
    return entries


def _remove(folder: Path, unwanted: Callable[[str], bool]) -> None:
    """Remove checkpoint files that match `unwanted`, except the shards of the manifest in place."""
    try:
        manifest = folder / CHECKPOINT
        in_place = read_bounded(manifest, _MAX_BYTES) if manifest.exists() else b""
        for path in folder.iterdir():
            if _OURS.fullmatch(path.name) and unwanted(path.name) and f'"{path.name}"'.encode() not in in_place:
                path.unlink(missing_ok=True)
    except OSError:  # leftover files cost disk space, nothing else
        return


# -- reading ----------------------------------------------------------------------------------------------------------


def _folder_of(directory: str | PathLike) -> Path:
    try:
        return expanded(directory)
    except OSError as error:
        what = f"{error.filename}: {describe_os_error(error)}"
        raise CheckpointError(f"{what}; expected the path of a checkpoint's directory") from error


class SavedCheckpoint:
    """Checkpoint in a directory; its tensors are read lazily, one at a time.

    Attributes:
        directory: the checkpoint's directory.
        state: the written state, with a `TensorInfo` for each tensor.

    Raises:
        CheckpointError: missing or damaged; names the file and the defect.
    """

    def __init__(self, directory: str | PathLike) -> None:
        self.directory = _folder_of(directory)
        path = self.directory / CHECKPOINT
        try:
            content = json.loads(read_bounded(path, _MAX_BYTES))
        except FileNotFoundError as error:
            raise MissingCheckpointError(
                f"{path}: no such file; expected a directory of vb.save_checkpoint()"
            ) from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {describe_os_error(error)}") from error
        except (ValueError, RecursionError) as error:
            raise self.damaged(f"not valid JSON ({error})") from error
        if not isinstance(content, dict) or content.get("kind") != _KIND or content.get("version") != _VERSION:
            raise CheckpointError(f'{path}: expected "kind": "{_KIND}" of version {_VERSION} in it')
        if content.get("digest") != content_digest(content):
            raise self.damaged("its digest does not match its content")
        self._entries, self._files = content["tensors"], dict[str, TensorFile]()
        try:
            self.state = {key: together(value, self.info) for key, value in content["state"].items()}
        except (ValueError, KeyError) as error:
            raise self.damaged(str(error)) from error

    def damaged(self, what: str) -> CheckpointError:
        """Return the error for a damaged manifest."""
        return CheckpointError(f"{self.directory / CHECKPOINT}: damaged: {what}; use another checkpoint")

    def info(self, name: str) -> TensorInfo:
        """Return a tensor's dtype and shape."""
        _, dtype, shape, _ = self._entries[name]
        return TensorInfo(name, getattr(torch, dtype), tuple(shape))

    def read(self, info: TensorInfo) -> Tensor:
        """Read a tensor into CPU memory. Raises CheckpointError: it cannot be read, or its digest differs."""
        name, _, _, known = self._entries[info.name]
        if SHARD.fullmatch(name) is None:
            raise self.damaged(f"{info.name} in a file named {name!r:.80}")
        file = self._files.setdefault(name, TensorFile(self.directory / name))
        here = file.tensors.get(info.name)
        if here is None or (here.dtype, here.shape) != (info.dtype, info.shape):
            raise self.damaged(f"{info.name} in {name} does not match the manifest")
        tensor = file.read(info.name)
        if digest(tensor) != known:
            raise CheckpointError(
                f"{self.directory / name}: damaged: the bytes of {info.name} do not match their digest; use another "
                "checkpoint"
            )
        return tensor

    def filled(self, value: Any) -> Any:
        """Return a part of the state with its tensors read."""
        if isinstance(value, TensorInfo):
            return self.read(value)
        if isinstance(value, dict):
            return {key: self.filled(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.filled(item) for item in value)
        return value


def read_checkpoint(directory: str | PathLike) -> TrainingCheckpoint:
    """Read a checkpoint of `vb.save_checkpoint` into CPU memory, for plain torch.

        saved = vbrt.read_checkpoint("run")
        model.load_state_dict(saved.model)
        optimizer.load_state_dict(saved.optimizer)

    Raises:
        CheckpointError: missing or damaged; names the file and the defect.
    """
    saved = SavedCheckpoint(directory)
    model, optimizer = dict[str, Tensor](), saved.filled(saved.state["optimizer"])
    for entry in saved.state["model"]:
        tensor = saved.read(entry["value"])
        own = optimizer["state"].get(entry.get("number"), {})
        model |= dict.fromkeys(entry["names"], take_master(tensor, own))
    return TrainingCheckpoint(model, optimizer, saved.filled(saved.state["extra"]))
