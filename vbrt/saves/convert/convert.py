"""Checkpoint-to-save conversion without the model: read, encode and write weight by weight.

The output equals `vb.save` of the model that `vbrt.load` makes of the same files, in smaller shards. Peak memory is one
dense weight and the planes of one shard; for routed experts, one batch of `Source.experts_of`.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from vbrt.config import VBConfig
from vbrt.errors import CheckpointError, ConfigError, describe_os_error
from vbrt.host.safe_files import expanded, sync_directory, write_file
from vbrt.model.machine_memory import release_host_memory
from vbrt.report.progress import Progress
from vbrt.saves.common.companion_files import copy_companions
from vbrt.saves.common.manifest import Manifest, SavedTensor, text_of, to_json
from vbrt.saves.convert.conversion_journal import Journal, open_journal
from vbrt.saves.files.checkpoint_paths import MANIFEST, shard_paths
from vbrt.saves.files.safetensors_file import TensorInfo, TensorWriter, in_order
from vbrt.saves.load.save_units import Piece, Pieces
from vbrt.saves.load.sources import Source
from vbrt.saves.saved.save import remove_files, sync_in_place

__all__ = ["convert"]

#: dense bytes per shard; its planes stay in memory until it is written
_FILE_BYTES = 128 << 20
_MAX_FILES = 256
_WEIGHT_FILES = (".safetensors", ".gguf", ".bin")

Complete = Callable[[Path], object]


def convert(
    source: Source,
    model: nn.Module,
    config: VBConfig,
    directory: str | PathLike,
    *,
    progress: bool | None = None,
    overwrite: bool = False,
    complete: Complete = lambda directory: None,
) -> Path:
    """Convert a source into a save; an interrupted conversion resumes at its first unfinished shard.

    Args:
        source: see `open_source`; `config` is what it makes of the user's.
        model: the architecture, on the meta device; it is consumed.
        directory: new, empty, or holding an interrupted conversion of the same files under the same config.
        progress: as for `VBModelWrapper.materialize`.
        overwrite: start anew in any other directory; an existing save stays until the new one is complete.
        complete: called after all weights are written, to add companion files that the source does not have as files.

    Raises:
        CheckpointError: files are missing, damaged or of another model; the directory holds something else or cannot be
            written. Finished shards stay for the next call.
        ConfigError: `mode = "train"`.
        FormatError: a weight holds NaN or Inf.
    """
    if config.mode == "train":
        raise ConfigError(f'{config.source}: mode = "train"; a conversion writes the planes of an inference model')
    directory = _target(directory, source)
    pieces = Pieces(source, model, config)
    files = _divided(list(pieces))
    head = {"vbrt": sys.modules["vbrt"].__version__, "source": _fingerprint(source.path), "config": config.to_dict()}
    _make(directory)
    head["dtypes"] = sorted({str(parameter.dtype) for parameter in model.parameters()})
    try:
        journal = open_journal(directory, {**head, "files": len(files)}, overwrite=overwrite)
        remove_files(directory, lambda name: name.endswith(".tmp") or _is_foreign(name, journal.token))
        with Progress("converting", sum(piece.nbytes for file in files for piece in file), show=progress) as work:
            tensors = _write_files(files, journal, work)
        copy_companions(source.path, directory)
        complete(directory)
        layers = tuple(layer.as_written(tensors) for layer in pieces.layers)
        manifest = Manifest(config.to_dict(), layers, tuple(pieces.kept), tensors)
        write_file(directory / MANIFEST, to_json(manifest))
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or directory}: the conversion cannot continue: {describe_os_error(error)}; finished "
            f"shards stay in {directory}, and the same call resumes there"
        ) from error
    sync_in_place(directory)
    remove_files(directory, lambda name: _is_foreign(name, journal.token))
    journal.remove()
    return directory


def _is_foreign(name: str, token: str) -> bool:
    """True for files of another save or conversion."""
    return token not in name and name != MANIFEST


def _target(directory: str | PathLike, source: Source) -> Path:
    try:
        directory = expanded(directory)
        is_own = directory.exists() and directory.resolve() == source.path.resolve()
    except OSError as error:
        raise CheckpointError(f"{error.filename}: nothing can be written there: {describe_os_error(error)}") from error
    if is_own:
        raise CheckpointError(f"{directory}: is the source of the conversion; name another directory")
    return directory


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "a file is there" if directory.is_file() else describe_os_error(error)
        raise CheckpointError(
            f"{directory}: cannot be created: {why}; name a new directory, on a writable drive"
        ) from error


def _fingerprint(path: Path) -> list[list[Any]]:
    """Return the path, and name, bytes and mtime of each weight, config and manifest file: changes if the source
    does."""
    files = sorted(path.iterdir()) if path.is_dir() else shard_paths(path)
    counted = [file for file in files if file.suffix in _WEIGHT_FILES or file.name in ("config.json", MANIFEST)]
    found = [(file.name, file.stat()) for file in counted]
    return [[str(path.resolve())], *([name, stat.st_size, stat.st_mtime_ns] for name, stat in found)]


def _divided(pieces: list[Piece]) -> list[list[Piece]]:
    """Group pieces into shards, in order."""
    return in_order(pieces, max(_FILE_BYTES, sum(piece.nbytes for piece in pieces) // _MAX_FILES))


def _write_files(files: list[list[Piece]], journal: Journal, work: Progress) -> dict[str, SavedTensor]:
    """Write the unfinished shards; return where each tensor is."""
    tensors: dict[str, SavedTensor] = {}
    for number, pieces in enumerate(files, 1):
        name = f"vbrt-{journal.token}-{number:05d}-of-{len(files):05d}.safetensors"
        if name not in journal.done:
            made = {}
            for piece in pieces:
                work.at(piece.name)
                made |= piece.tensors()
                work.done(piece.nbytes)
            journal.add(name, _write_file(journal.path.with_name(name), made))
            del made
            release_host_memory()
        else:
            work.skip(sum(piece.nbytes for piece in pieces))
        _check_new(tensors, journal.done[name])
        tensors |= journal.done[name]
    sync_directory(journal.path.parent)
    return tensors


def _write_file(path: Path, made: Mapping[str, Any]) -> dict[str, SavedTensor]:
    infos = [TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in made.items()]
    with TensorWriter(path, infos) as writer:
        return {
            info.name: SavedTensor(path.name, writer.write(info.name, made[info.name]), text_of(info.dtype), info.shape)
            for info in infos
        }


def _check_new(tensors: Mapping[str, SavedTensor], names: Iterable[str]) -> None:
    twice = next((name for name in names if name in tensors), None)
    if twice is not None:
        raise CheckpointError(f"{twice}: a parameter or buffer has the name of a plane's tensor; rename it")
