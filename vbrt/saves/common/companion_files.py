"""Companion files of a transformers model: configs, tokenizer, chat templates, licence."""

import json
from collections.abc import Callable
from pathlib import Path

from torch import nn

from vbrt.errors import CheckpointError, describe_os_error
from vbrt.host.logger import warn
from vbrt.host.safe_files import read_bounded, write_file

__all__ = ["copy_companions", "write_companions"]

_MAX_COPY_BYTES = 256 << 20
_COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_COPIED_NAMES = ("LICENSE", "NOTICE", "USE_POLICY")
_CONFIG, _GENERATION = "config.json", "generation_config.json"


def copy_companions(path: Path, directory: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Copy a model's companion files, not its weights, where `wanted(name)` holds. Raises OSError."""
    for file in sorted(path.iterdir()) if path.is_dir() else ():
        is_known = file.suffix in _COPIED or file.stem.upper() in _COPIED_NAMES
        is_of_weights = file.name.startswith("vbrt") or file.name.endswith(".index.json")
        if is_known and not is_of_weights and file.is_file() and wanted(file.name):
            content = read_bounded(file, _MAX_COPY_BYTES)
            write_file(directory / file.name, _without_method(content) if file.name == _CONFIG else content)


def write_companions(model: nn.Module, directory: Path) -> None:
    """Write a transformers model's configs next to its save, and copy its tokenizer from the directory that it was
    loaded from. Existing files of other names stay. Does nothing for other models.

    Raises CheckpointError: they cannot be written; the save itself is in place.
    """
    config = getattr(model, "config", None)
    if not callable(getattr(config, "to_json_string", None)):
        return
    try:
        made = {_CONFIG: _config_of(model)}
        generation = getattr(model, "generation_config", None)
        if callable(getattr(generation, "to_json_string", None)):
            made[_GENERATION] = generation.to_json_string().encode()
    except (TypeError, ValueError, AttributeError) as error:
        warn(f"{directory}: without {_CONFIG}: the model's config cannot be written: {error}", stacklevel=4)
        return
    origin = Path(getattr(config, "_name_or_path", "") or directory)
    try:
        for name, content in made.items():
            write_file(directory / name, content)
        if origin.is_dir() and origin.resolve() != directory.resolve():
            there = {file.name for file in directory.iterdir()} | {_GENERATION}
            copy_companions(origin, directory, lambda name: name not in there)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or directory}: the planes are saved and in place, but the config and tokenizer files "
            f"cannot be written: {describe_os_error(error)}"
        ) from error


def _config_of(model: nn.Module) -> bytes:
    """Return a config.json with the model's class in `architectures`, as transformers writes it."""
    data = json.loads(model.config.to_json_string())
    data.pop("quantization_config", None)
    return json.dumps(data | {"architectures": [type(model).__name__]}, indent=2).encode()


def _without_method(config: bytes) -> bytes:
    """Return config.json without `quantization_config`: vbrt's planes are in another format."""
    try:
        data = json.loads(config)
    except ValueError:
        return config
    if not isinstance(data, dict) or data.pop("quantization_config", None) is None:
        return config
    return json.dumps(data, indent=2).encode()
