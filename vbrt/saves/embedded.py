"""Planes among the tensors of another library's safetensors files, with the manifest in their metadata.

A file that `save_pretrained` of transformers writes for a wrapped model holds what `vb.save` writes: planes under the
same names, and a manifest of the layers. Where a plane does not have the weight's own name, a marker has: one byte,
whose shape no weight has, so that a reader that knows nothing of planes stops there instead of drawing a new weight.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from vbrt.errors import CheckpointError
from vbrt.model.attachment import Attachment
from vbrt.saves.manifest import Manifest, SavedTensor, parse_manifest, text_of, to_json
from vbrt.saves.save import find_kept, find_layers, layer_parts
from vbrt.saves.sources import SavedModel
from vbrt.saves.tensorfile import TensorFile, digest

__all__ = ["METADATA_KEY", "embedded_tensors", "open_embedded"]

METADATA_KEY = "vbrt"
_ANY_FILE = "vbrt-00000000-00001-of-00001.safetensors"  # the other library chooses the files


class _Collector:
    """Takes the place of a TensorWriter: keeps the tensors.

    Attributes:
        tensors: in CPU memory, by name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def write(self, name: str, tensor: torch.Tensor) -> str:
        """Keep a copy; return its digest."""
        kept = self.tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        return digest(kept)


def embedded_tensors(attachment: Attachment) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return what files of an attached model hold, in CPU memory, and their metadata; every layer is encoded.

    Tied tensors are there once, under the first of their names.

    Raises:
        FormatError, TierError: a weight cannot be encoded, or a page cannot be read.
        WrapError: the planes are gone.
    """
    config, model = attachment.ready_to_save(), attachment.model
    layers, collector, saved = find_layers(model), _Collector(), {}
    for layer, handle in layers:
        for part in layer_parts(layer, handle):
            digests = part.write(collector)
            for info in part.tensors:
                saved[info.name] = SavedTensor(_ANY_FILE, digests[info.name], text_of(info.dtype), info.shape)
    tensors = collector.tensors
    for layer, _ in layers:
        tensors.setdefault(layer.site.tensor, torch.zeros(1, dtype=torch.uint8, device="cpu"))
    kept = ((entry, tensor) for entry, tensor in find_kept(model) if entry.kind != "non-persistent buffer")
    tensors |= {entry.name: tensor.detach() for entry, tensor in kept}
    manifest = Manifest(config.to_dict(), tuple(layer for layer, _ in layers), (), saved)
    return tensors, {METADATA_KEY: to_json(manifest).decode()}


def open_embedded(paths: Iterable[Path]) -> SavedModel:
    """Return the planes in the files of a model, checked as those of a save are.

    Raises CheckpointError: no manifest in them, tensors missing, or anything damaged.
    """
    files = {path.name: TensorFile(path) for path in paths}
    first = next(iter(files.values()))
    content = first.metadata.get(METADATA_KEY)
    if content is None:
        raise CheckpointError(
            f"{first.path}: no {METADATA_KEY!r} in its metadata, which says what the planes in it are; copy the file "
            "again, or save the model again"
        )
    manifest = parse_manifest(first.path, content.encode())
    where = {name: file for file, opened in files.items() for name in opened.tensors}
    return SavedModel(first.path.parent, _in_files(manifest, where, first.path), files)


def _in_files(manifest: Manifest, where: Mapping[str, str], path: Path) -> Manifest:
    missing = next((name for name in manifest.tensors if name not in where), None)
    if missing is not None:
        raise CheckpointError(f"{path}: damaged: no file has {missing}; copy the model again, or save it again")
    tensors = {name: replace(saved, file=where[name]) for name, saved in manifest.tensors.items()}
    return replace(manifest, tensors=tensors)
