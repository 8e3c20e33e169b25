"""Bounded reader for small JSON files: configs, indices."""

import json
from pathlib import Path
from typing import Any

from vbrt.errors import CheckpointError, describe_os_error
from vbrt.host.safe_files import read_bounded

__all__ = ["read_json"]


def read_json(path: Path, limit: int, *, missing: Any = None) -> Any:
    """Parse a JSON file of at most `limit` bytes; return `missing`, if given, where there is no such file.

    Raises CheckpointError: the file cannot be read, or is not valid JSON.
    """
    try:
        return json.loads(read_bounded(path, limit).decode())
    except OSError as error:
        if missing is not None and isinstance(error, FileNotFoundError):
            return missing
        raise CheckpointError(f"{path}: cannot be read: {describe_os_error(error)}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged: not valid JSON ({error})") from error
