"""Checkpoint paths: tell a save, safetensors files and a GGUF file apart, without reading any file."""

import re
from os import PathLike
from pathlib import Path

from vbrt.errors import CheckpointError, MissingCheckpointError, describe_os_error
from vbrt.host.safe_files import expanded

__all__ = [
    "GGUF_PART",
    "GGUF_SUFFIX",
    "INDEX",
    "MANIFEST",
    "PICKLED",
    "SINGLE",
    "gguf_file",
    "looked_at",
    "shard_paths",
]

MANIFEST = "vbrt.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")  # read by transformers only
GGUF_SUFFIX = ".gguf"
GGUF_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")  # of a split file: number and count


def gguf_file(path: str | PathLike) -> Path | None:
    """Return the GGUF file of a path (the first part of a split one): the path itself, or the only GGUF file of a
    directory without other weights. None for other checkpoints.

    Raises CheckpointError: the path cannot be read, or the directory has several GGUF files.
    """
    path = looked_at(path)
    if not path.is_dir():
        return shard_paths(path)[0] if path.suffix == GGUF_SUFFIX else None
    if any((path / name).exists() for name in (MANIFEST, INDEX, SINGLE, *PICKLED)):
        return None
    firsts = sorted({shard_paths(file)[0] for file in path.glob(f"*{GGUF_SUFFIX}")})
    if len(firsts) > 1:
        shown = ", ".join(file.name for file in firsts[:3])
        raise CheckpointError(f"{path}: {len(firsts)} GGUF files, such as {shown}; name one")
    return firsts[0] if firsts else None


def looked_at(path: str | PathLike) -> Path:
    """Return the path with "~" expanded. Raises CheckpointError: missing, no access, or not a checkpoint's path."""
    try:
        path = expanded(path)
        for name in (MANIFEST, INDEX, SINGLE):
            (path / name).exists()
        is_file, is_directory = path.is_file(), path.is_dir()
    except OSError as error:
        raise CheckpointError(
            f"{error.filename}: cannot be read: {describe_os_error(error)}; expected a directory "
            f"that vb.save() wrote, a checkpoint with {SINGLE}, or a GGUF file"
        ) from error
    if not is_directory and not (is_file and path.suffix in (".safetensors", GGUF_SUFFIX)):
        raise (CheckpointError if is_file else MissingCheckpointError)(
            f"{path}: no such directory; expected one that vb.save() wrote, a checkpoint with {SINGLE}, or a GGUF file"
        )
    return path


def shard_paths(path: Path) -> list[Path]:
    """Return the paths of all parts of a GGUF file, by its name."""
    named = GGUF_PART.search(path.name)
    count = 0 if named is None else int(named[2])
    if count == 0:
        return [path]
    stem = path.name[: named.start()]
    return [path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
