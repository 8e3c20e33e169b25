"""Paths of models, checked without torch and transformers, which take seconds to import."""

from os import PathLike
from pathlib import Path

from vbrt.errors import MissingFileError, VBError, describe_os_error
from vbrt.host.safe_files import expanded

__all__ = ["EXPECTED", "looked_at", "model_path"]

EXPECTED = "a model directory, a GGUF file or, where no weights are needed, a config.json"


def looked_at(path: str | PathLike[str]) -> tuple[Path, bool]:
    """Return the path with "~" expanded, and True if it is a directory. Raises VBError: it cannot be read."""
    try:
        path = expanded(path)
        is_directory = path.is_dir()
        (path / "config.json" if is_directory else path).exists()  # raises without access
        return path, is_directory
    except OSError as error:
        raise VBError(f"{error.filename}: cannot be read: {describe_os_error(error)}; expected {EXPECTED}") from error


def model_path(path: str | PathLike[str]) -> Path:
    """Return the path with "~" expanded. Raises MissingFileError: there is nothing; VBError: it cannot be read."""
    path, is_directory = looked_at(path)
    if is_directory or path.exists():
        return path
    raise MissingFileError(f"{path}: no such file or directory; expected {EXPECTED}, or ORG/NAME of a model of the Hub")
