"""Files that a model is loaded from: planes that `vb.save` or `save_pretrained` wrote, a checkpoint, a GGUF file."""

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from vbrt.config import VBConfig
from vbrt.errors import CheckpointError
from vbrt.layers import Weight
from vbrt.layers.experts import ExpertsHandle
from vbrt.layers.weights.weight_encoding import Planes
from vbrt.residency.plan import Beside, Plan, Swap
from vbrt.saves.files.checkpoint_paths import INDEX, MANIFEST, SINGLE, gguf_file, looked_at
from vbrt.saves.files.gguf_file import GGUFFile
from vbrt.saves.files.json_file import read_json
from vbrt.saves.files.read_target import Landing
from vbrt.saves.files.safetensors_file import TensorFile
from vbrt.saves.published.gguf_checkpoint import GGUFTensors, describe_gguf, gguf_checkpoint
from vbrt.saves.published.published_checkpoint import Description, checkpoint_of, describe_files
from vbrt.saves.saved.embedded_planes import embedded_model, has_planes
from vbrt.saves.saved.rank_saves import RANKS, open_ranked
from vbrt.saves.saved.saved_planes import SavedModel

__all__ = ["Source", "describe", "open_source"]

_MAX_INDEX_BYTES = 64 << 20


class Source(Protocol):
    """Files that know a model.

    Attributes:
        files: to be read ahead.
    """

    path: Path
    files: Sequence[TensorFile | GGUFFile]

    def config(self, config: Any, overrides: Mapping[str, Any]) -> VBConfig:
        """Return the config that the user asked for, checked against the files."""

    def outline_(self, model: nn.Module) -> None:
        """Make every parameter a meta tensor of the files' dtype, or raise CheckpointError for another model."""

    def has(self, name: str) -> bool:
        """True if a parameter or buffer of this name is in the files."""

    def plan(self, model: nn.Module, config: VBConfig, beside: Beside | None) -> Plan:
        """Return the plan for the outlined model, beside the models on the runtime that it will share."""

    def planes_of(self, swap: Swap, handle: Weight) -> Planes:
        """Return the planes of a weight, to be stored by its handle."""

    def experts_of(self, swap: Swap, handle: ExpertsHandle) -> Iterable[Planes]:
        """Yield the joint planes of each of a layer's routed experts, to be stored by their handle."""

    def computes_in(self, swap: Swap, handle: Weight | ExpertsHandle) -> torch.dtype:
        """Return the dtype that the layers of a weight compute in."""

    def fill_kept_(self, model: nn.Module, landing: Landing) -> None:
        """Assign all other parameters and buffers, on the landing's device."""


def open_source(path: str | PathLike) -> Source:
    """Return what a path is the files of. Raises CheckpointError."""
    path = looked_at(path)
    if path.is_dir() and (path / MANIFEST).exists():
        return SavedModel(path)
    if path.is_dir() and (path / RANKS).exists():
        return open_ranked(path)
    file = gguf_file(path)
    if file is not None:
        return gguf_checkpoint(GGUFTensors(file))
    files = list(map(TensorFile, _files_of(path)))
    return embedded_model(files) if has_planes(files) else checkpoint_of(path, files)


def describe(path: str | PathLike) -> Description:
    """Say what a checkpoint is and what it will become, from the headers of its files; nothing is loaded.

    Args:
        path: a directory with safetensors files or a GGUF file, or one such file. What `vb.save` wrote is described by
            its manifest.

    Raises:
        CheckpointError: files missing, damaged, or of a layout that vbrt does not read.
    """
    path = looked_at(path)
    if path.is_dir() and (path / MANIFEST).exists():
        raise CheckpointError(f"{path}: a save of vbrt, whose {MANIFEST} says what it is")
    file = gguf_file(path)
    return describe_files(path, map(TensorFile, _files_of(path))) if file is None else describe_gguf(file)


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if (path / INDEX).exists():
        return [path / name for name in _shard_names(path / INDEX)]
    if (path / SINGLE).exists():
        return [path / SINGLE]
    raise CheckpointError(
        f"{path}: neither {MANIFEST}, as vb.save() writes it, nor {SINGLE} or {INDEX} in it; "
        "expected a save, a safetensors checkpoint or a GGUF file"
    )


def _shard_names(index: Path) -> list[str]:
    data = read_json(index, _MAX_INDEX_BYTES)
    files = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f'{index}: damaged: expected "weight_map" in it, with a file for each name')
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file or not file:
            raise CheckpointError(
                f"{index}: weight_map.{name} = {file!r}; expected a file of its directory, and none "
                "outside of its directory"
            )
    return sorted(set(files.values()))
