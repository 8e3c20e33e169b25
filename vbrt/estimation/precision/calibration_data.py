"""Calibration data: a file of text or token ids, or samples from the model itself."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.config import SAMPLES, VBConfig
from vbrt.errors import ConfigError, describe_os_error
from vbrt.host.safe_files import read_bounded

__all__ = ["Text", "text_of"]

_WINDOWS, _LENGTH = 16, 512
_MAX_BYTES = 64 << 20
_MAX_CHARACTERS = 1 << 20  # characters of a text; tokenizers take about a second per megabyte


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids to run a model on.

    Attributes:
        name: file and amount, for messages.
        where: config key, for errors.
        ids: batches [N, S] of windows of equal length; None: the model's own samples.
    """

    name: str
    where: str
    ids: tuple[Tensor, ...] | None = None


def text_of(model: nn.Module, config: VBConfig, directory: str | None = None) -> Text:
    """Return the data of `weights.calibrate`, as at most 16 evenly spread windows of up to 512 tokens.

    Args:
        directory: of the tokenizer; by default the origin in the model's config.

    Raises:
        ConfigError: the file cannot be read, has the wrong form, or does not match the model.
    """
    asked = config.weights.calibrate
    where = f'{config.source}: weights.calibrate = "{asked}"'
    if asked == SAMPLES:
        return Text("samples of the model", where)
    content = _content(Path(asked), where)
    rows = _ids(content, where) if asked.endswith(".json") else [_tokens(content, model, directory, where)]
    length = min(_LENGTH, getattr(getattr(model, "config", None), "max_position_embeddings", None) or _LENGTH)
    windows = [window for row in rows for window in _windows(row, length)]
    windows = [windows[at * len(windows) // _WINDOWS] for at in range(_WINDOWS)] if windows[_WINDOWS:] else windows
    if not windows:
        raise ConfigError(f"{where}: it has no tokens; expected some hundred or more")
    _check_vocabulary(model, windows, where)
    tokens = sum(map(len, windows))
    return Text(f"{tokens:,} tokens of {asked}", where, tuple(_joined(windows)))


def _content(path: Path, where: str) -> str:
    try:
        return read_bounded(path, _MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"{where}: cannot be read: {reason}; expected a text, a .json with token ids, or "
            f'"{SAMPLES}" for samples of the model'
        ) from error


def _ids(content: str, where: str) -> list[list[int]]:
    """Parse a JSON file of token ids: one list, or a list of lists."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON ({error}); expected lists of token ids") from error
    rows = [data] if isinstance(data, list) and all(type(one) is int for one in data) else data
    good = isinstance(rows, list) and all(isinstance(row, list) and all(type(i) is int for i in row) for row in rows)
    if not good:
        raise ConfigError(f"{where}: expected a list of token ids, or a list of such lists")
    return rows


def _tokens(content: str, model: nn.Module, directory: str | None, where: str) -> list[int]:
    """Tokenize a text with the tokenizer in the model's directory."""
    place = directory or getattr(getattr(model, "config", None), "_name_or_path", "")
    wanted = f'expected token ids in a .json file, or "{SAMPLES}"'
    if not place:
        raise ConfigError(f"{where}: a text needs a tokenizer, and {type(model).__name__} came from no files; {wanted}")
    try:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
        return tokenizer(content[:_MAX_CHARACTERS], verbose=False)["input_ids"]
    except (ImportError, OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}: no tokenizer in {place} ({type(error).__name__}: {error}); {wanted}") from error


def _windows(row: list[int], length: int) -> list[list[int]]:
    """Return up to `_WINDOWS` windows, evenly spread over a row; the last of a short one may be shorter."""
    if len(row) <= _WINDOWS * length:
        return [row[at : at + length] for at in range(0, len(row), length)]
    step = (len(row) - length) / (_WINDOWS - 1)
    return [row[int(at * step) :][:length] for at in range(_WINDOWS)]


def _joined(windows: list[list[int]]) -> list[Tensor]:
    """Stack windows of equal length into [N, S]."""
    by_length: dict[int, list[list[int]]] = {}
    for window in windows:
        by_length.setdefault(len(window), []).append(window)
    return [torch.tensor(rows, dtype=torch.long, device="cpu") for rows in by_length.values()]


def _check_vocabulary(model: nn.Module, windows: list[list[int]], where: str) -> None:
    """Raise ConfigError for ids beyond the embedding table, which would be a device-side assert on a GPU."""
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    tables = model.modules() if table is None else [table]
    sizes = [module.num_embeddings for module in tables if isinstance(module, nn.Embedding)]
    low, high = min(map(min, windows)), max(map(max, windows))
    if low < 0 or (sizes and high >= max(sizes)):
        limit = max(sizes) - 1 if sizes else "the model's largest"
        raise ConfigError(f"{where}: token ids from {low} to {high}; expected 0 to {limit}")
