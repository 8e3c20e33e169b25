"""Planes embedded in another library's safetensors files, with the manifest in their metadata.

Files that transformers' `save_pretrained` writes for a wrapped model hold what `vb.save` writes: planes under the same
names, and a manifest of the layers. Where no plane has the weight's own name, a marker does: one byte, in a shape that
no weight has, so that a reader without vbrt fails there instead of initializing a new weight.
"""

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from vbrt.config import VBConfig
from vbrt.errors import CheckpointError, describe_os_error
from vbrt.layers import Weight
from vbrt.layers.experts import ExpertsHandle
from vbrt.model.attachment import Attachment
from vbrt.model.machine_memory import passing_directory, ssd_directory
from vbrt.report.progress import Progress
from vbrt.saves.common.compatibility import ignored_names
from vbrt.saves.common.manifest import KeptTensor, Manifest, SavedLayer, SavedTensor, parse_manifest, text_of, to_json
from vbrt.saves.files.safetensors_file import TensorFile, TensorInfo, TensorWriter, digest
from vbrt.saves.saved.save import Part, find_kept, find_layers, layer_parts, write_parts
from vbrt.saves.saved.saved_planes import SavedModel

__all__ = [
    "METADATA_KEY",
    "EmbeddedModel",
    "dense_tensors",
    "embedded_model",
    "embedded_tensors",
    "has_planes",
    "open_embedded",
]

METADATA_KEY = "vbrt"
_ANY_FILE = "vbrt-00000000-00001-of-00001.safetensors"  # the other library names the files


class _Collector:
    """Stand-in for TensorWriter that collects copies of tensors.

    Attributes:
        tensors: in CPU memory, by name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def write(self, name: str, tensor: torch.Tensor) -> str:
        """Keep a CPU copy; return its digest."""
        kept = self.tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        return digest(kept)


def embedded_tensors(attachment: Attachment) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return an attached model's tensors for another library's files, as planes, and their metadata; every layer is
    encoded.

    Tied tensors appear once, under their first name. With an ssd tier, planes are mapped from an unlinked file in its
    directory, since host memory may not hold them; otherwise they are copies.

    Raises:
        FormatError, TierError: a weight cannot be encoded, or a page cannot be read.
        WrapError: the planes are gone.
    """
    config, model = attachment.ready_to_save(), attachment.model
    layers = find_layers(model)
    parts = [part for layer, handle in layers for part in layer_parts(layer, handle)]
    with Progress("saving", sum(part.nbytes for part in parts)) as work:
        tensors, digests = _collected(parts, config, work)
    saved = {
        info.name: SavedTensor(_ANY_FILE, digests[info.name], text_of(info.dtype), info.shape)
        for part in parts
        for info in part.tensors
    }
    for layer, _ in layers:
        tensors.setdefault(layer.site.tensor, torch.zeros(1, dtype=torch.uint8, device="cpu"))
    manifest = Manifest(config.to_dict(), tuple(layer for layer, _ in layers), (), saved)
    return tensors | _kept(model), {METADATA_KEY: to_json(manifest).decode()}


def dense_tensors(attachment: Attachment) -> dict[str, torch.Tensor]:
    """Return the model's state dict, decoded weight by weight; otherwise as `embedded_tensors`."""
    config, model = attachment.ready_to_save(), attachment.model
    parts = [_decoded(layer, handle) for layer, handle in find_layers(model)]
    with Progress("decoding", sum(part.nbytes for part in parts)) as work:
        return _collected(parts, config, work)[0] | _kept(model)


def _decoded(layer: SavedLayer, handle: Weight | ExpertsHandle) -> Part:
    site, name = layer.site, layer.site.tensor
    read = partial(handle.weight, site.parameter) if isinstance(handle, ExpertsHandle) else handle.weight
    info = TensorInfo(name, handle.dtype, site.kept_shape)
    return Part([info], lambda writer: {name: writer.write(name, read())})


def _kept(model: nn.Module) -> dict[str, torch.Tensor]:
    kept = ((entry, tensor) for entry, tensor in find_kept(model) if entry.kind != "non-persistent buffer")
    return {entry.name: tensor.detach() for entry, tensor in kept}


def _collected(
    parts: Iterable[Part], config: VBConfig, work: Progress
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the parts' tensors and digests."""
    if not config.tiers.ssd.enabled:
        collector = _Collector()
        return collector.tensors, write_parts(parts, collector, work)
    try:
        with passing_directory(ssd_directory(config)) as pages:
            pages.mkdir(parents=True, exist_ok=True)  # absent if all pages fit into memory
            with tempfile.TemporaryDirectory(prefix="vbrt-save-", dir=pages) as directory:
                path = Path(directory) / "planes.safetensors"
                with TensorWriter(path, [info for part in parts for info in part.tensors]) as writer:
                    digests = write_parts(parts, writer, work)
                file = TensorFile(path)
                return {name: file.map(name) for name in file.tensors}, digests
    except OSError as error:
        raise CheckpointError(
            f"{ssd_directory(config)}: planes cannot be staged there for saving: {describe_os_error(error)}"
        ) from error


class EmbeddedModel(SavedModel):
    """`save_pretrained` files of a wrapped model: planes, and all other tensors under the model's names."""

    def __init__(self, path: Path, manifest: Manifest, files: Mapping[str, TensorFile]) -> None:
        super().__init__(path, manifest, files)
        planes = {*manifest.tensors, *(site.tensor for layer in manifest.layers for site in layer.sites)}
        self._rest = {name: file for file in self.files for name in file.tensors if name not in planes}
        self._files |= self._rest

    def outline_(self, model: nn.Module) -> None:
        """See `Source`. The model decides which tensors are parameters, and which are tied."""
        found: dict[int, tuple[list[str], str, bool]] = {}
        parameters, buffers = (get(remove_duplicate=False) for get in (model.named_parameters, model.named_buffers))
        for kind, named in (("parameter", parameters), ("buffer", buffers)):
            for name, tensor in named:
                found.setdefault(id(tensor), ([], kind, tensor.requires_grad))[0].append(name)
        kept = [_kept_entry(*group, self._rest) for group in found.values() if self._rest.keys() & set(group[0])]
        known = {name for entry in kept for name in entry.names}
        others = self._rest.keys() - known - ignored_names(model, self._rest)
        self._keep([*kept, *(KeptTensor(name, (), "buffer") for name in sorted(others))])  # refused by name
        super().outline_(model)


def _kept_entry(names: list[str], kind: str, trainable: bool, files: Mapping[str, TensorFile]) -> KeptTensor:
    first = next(name for name in names if name in files)
    return KeptTensor(first, tuple(name for name in names if name != first), kind, trainable)


def has_planes(files: Iterable[TensorFile]) -> bool:
    """True if these files embed planes."""
    return any(METADATA_KEY in file.metadata for file in files)


def open_embedded(paths: Iterable[Path]) -> EmbeddedModel:
    """Open the planes embedded in a model's files, validated like a save.

    Raises CheckpointError: no manifest, missing tensors, or damage.
    """
    return embedded_model(map(TensorFile, paths))


def embedded_model(opened: Iterable[TensorFile]) -> EmbeddedModel:
    """`open_embedded` for files that are already open."""
    files = {file.path.name: file for file in opened}
    first = next(iter(files.values()))
    content = first.metadata.get(METADATA_KEY)
    if content is None:
        raise CheckpointError(
            f"{first.path}: no {METADATA_KEY!r} in its metadata, the manifest of its planes; copy the file "
            "again, or save the model again"
        )
    manifest = parse_manifest(first.path, content.encode())
    where = {name: file for file, opened in files.items() for name in opened.tensors}
    return EmbeddedModel(first.path.parent, _in_files(manifest, where, first.path), files)


def _in_files(manifest: Manifest, where: Mapping[str, str], path: Path) -> Manifest:
    missing = next((name for name in manifest.tensors if name not in where), None)
    if missing is not None:
        raise CheckpointError(f"{path}: damaged: no file has {missing}; copy the model again, or save it again")
    tensors = {name: replace(saved, file=where[name]) for name, saved in manifest.tensors.items()}
    return replace(manifest, tensors=tensors)
