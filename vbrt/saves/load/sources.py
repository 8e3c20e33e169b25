"""Sources to load from: saves of `vb.save`, `save_pretrained` files with planes, checkpoints, GGUF files."""

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

__all__ = ["Source", "describe", "open_source", "safetensors_paths"]

_MAX_INDEX_BYTES = 64 << 20
#: suffixes of torch.save's files: HQQ's qmodel.pt, pytorch_model.bin
_PICKLES = (".pt", ".pth", ".bin", ".ckpt")


class Source(Protocol):
    """Files of a model, whichever format they have.

    Attributes:
        files: to prefetch.
    """

    path: Path
    files: Sequence[TensorFile | GGUFFile]

    def config(self, config: Any, overrides: Mapping[str, Any]) -> VBConfig:
        """Return the config that the user asked for, validated against the files."""

    def outline_(self, model: nn.Module) -> None:
        """Turn every parameter into a meta tensor of the files' dtype. Raises CheckpointError: of another model."""

    def has(self, name: str) -> bool:
        """True if the files hold a parameter or buffer of this name."""

    def plan(self, model: nn.Module, config: VBConfig, beside: Beside | None) -> Plan:
        """Return the plan for the outlined model, given the other models on a shared runtime."""

    def planes_of(self, swap: Swap, handle: Weight) -> Planes:
        """Return a weight's planes, for its handle to store."""

    def experts_of(self, swap: Swap, handle: ExpertsHandle) -> Iterable[Planes]:
        """Yield the joint planes of each routed expert of a layer, for the handle to store."""

    def computes_in(self, swap: Swap, handle: Weight | ExpertsHandle) -> torch.dtype:
        """Return the compute dtype of a weight's layers."""

    def fill_kept_(self, model: nn.Module, landing: Landing) -> None:
        """Assign all other parameters and buffers, on the landing's device."""


def open_source(path: str | PathLike) -> Source:
    """Open the source that a path stands for. Raises CheckpointError."""
    path = looked_at(path)
    if path.is_dir() and (path / MANIFEST).exists():
        return SavedModel(path)
    if path.is_dir() and (path / RANKS).exists():
        return open_ranked(path)
    file = gguf_file(path)
    if file is not None:
        return gguf_checkpoint(GGUFTensors(file))
    files = list(map(TensorFile, safetensors_paths(path)))
    return embedded_model(files) if has_planes(files) else checkpoint_of(path, files)


def describe(path: str | PathLike) -> Description:
    """Describe a checkpoint and what it will become, from file headers alone.

    Args:
        path: a directory with safetensors files or a GGUF file, or one such file; not a save, whose manifest describes
            it.

    Raises:
        CheckpointError: files missing, damaged, or of a layout that vbrt does not read; or the path is a save.
    """
    path = looked_at(path)
    if path.is_dir() and (path / MANIFEST).exists():
        raise CheckpointError(f"{path}: a save of vbrt, whose {MANIFEST} says what it is")
    file = gguf_file(path)
    return describe_files(path, map(TensorFile, safetensors_paths(path))) if file is None else describe_gguf(file)


def safetensors_paths(path: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: its shards, or the only one. Raises CheckpointError."""
    if not path.is_dir():
        return [path]
    if (path / INDEX).exists():
        return [path / name for name in _shard_names(path / INDEX)]
    if (path / SINGLE).exists():
        return [path / SINGLE]
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLES)
    refused = f" (a pickle, such as {pickles[0]}, may run code when it is read: vbrt reads none)" if pickles else ""
    raise CheckpointError(
        f"{path}: neither {MANIFEST}, as vb.save() writes it, nor {SINGLE} or {INDEX} in it; "
        f"expected a save, a safetensors checkpoint or a GGUF file{refused}"
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
