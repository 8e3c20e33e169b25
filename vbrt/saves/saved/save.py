"""Saves of a wrapped model: planes as encoded, everything else unchanged.

    vbrt.json                                    manifest (`manifest.py`): layers, kept tensors, digests
    vbrt-3f9c01ab-00001-of-00002.safetensors     tensors, under the dense model's names

A plane's tensors are named after the weight: `layers.0.up.weight.codes`, `layers.0.up.weight.fine.low`; a dense plane
has the weight's own name. Saving is atomic: shard names carry a random token, and renaming the manifest into place,
last, commits the save; until then the directory holds the previous one.
"""

import contextlib
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

import torch
from torch import nn

from vbrt.config import VBConfig
from vbrt.errors import CheckpointError, describe_os_error
from vbrt.host.safe_files import alone_in, expanded, sync_directory, write_file
from vbrt.layers import SwappedLayer, Weight, site_of
from vbrt.layers.experts import ExpertsHandle
from vbrt.layers.weights.weight_shards import local_of
from vbrt.model.attachment import Attachment
from vbrt.report.progress import Progress
from vbrt.residency.weight_site import ROOT, WeightSite
from vbrt.saves.common.manifest import (
    MANIFEST,
    SHARD,
    KeptTensor,
    Manifest,
    SavedLayer,
    SavedTensor,
    read_manifest_bytes,
    text_of,
    to_json,
)
from vbrt.saves.files.safetensors_file import TensorInfo, TensorWriter, in_order
from vbrt.training import TrainedExpertsWeight, TrainedWeight

__all__ = [
    "find_kept",
    "find_layers",
    "layer_parts",
    "remove_files",
    "save_attached",
    "save_model",
    "sync_in_place",
    "write_parts",
]

Experts = ExpertsHandle | TrainedExpertsWeight
Handle = Weight | TrainedWeight | Experts
_SHARD_BYTES = 1 << 30
_OURS = re.compile(rf"({SHARD.pattern}|{re.escape(MANIFEST)})((\.[0-9a-f]{{8}})?\.tmp)?")


# -- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors written together, and the call that writes them and returns their digests."""

    tensors: list[TensorInfo]
    write: Callable[[TensorWriter], dict[str, str]]

    @property
    def nbytes(self) -> int:
        """Total bytes of the tensors."""
        return sum(info.nbytes for info in self.tensors)


def save_attached(attachment: Attachment, directory: str | PathLike, *, progress: bool | None = None) -> Path:
    """Save a model attached to a runtime. See `VBModelWrapper.save`."""
    config = attachment.ready_to_save()
    return save_model(attachment.model, config, directory, progress=progress)


def save_model(model: nn.Module, config: VBConfig, directory: str | PathLike, *, progress: bool | None) -> Path:
    """Save a model whose VB layers are all encoded."""
    try:
        directory = expanded(directory)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: the model cannot be saved there: {error.strerror}") from error
    with contextlib.ExitStack() as alone:
        try:
            alone.enter_context(alone_in(directory))  # each save removes files that its manifest does not name
        except OSError as error:
            raise _unsaved(directory, error) from error
        _write_model(model, config, directory, progress=progress)
    return directory


def _write_model(model: nn.Module, config: VBConfig, directory: Path, *, progress: bool | None) -> None:
    layers, kept = find_layers(model), find_kept(model)
    parts = [part for layer, handle in layers for part in layer_parts(layer, handle)]
    parts += [_kept_part(entry, tensor) for entry, tensor in kept]
    _check_unique(info.name for part in parts for info in part.tensors)
    token = secrets.token_hex(4)
    try:
        with Progress("saving", sum(part.nbytes for part in parts), show=progress) as work:
            tensors = _write_shards(directory, token, parts, work)
        manifest = Manifest(config.to_dict(), tuple(e for e, _ in layers), tuple(e for e, _ in kept), tensors)
        write_file(directory / MANIFEST, to_json(manifest))
    except OSError as error:
        remove_files(directory, lambda name: token in name or name.endswith(".tmp"))
        raise _unsaved(directory, error) from error
    except BaseException:
        remove_files(directory, lambda name: token in name or name.endswith(".tmp"))
        raise
    sync_in_place(directory)
    remove_files(directory, lambda name: token not in name and name != MANIFEST)


def _unsaved(directory: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{error.filename or directory}: the model cannot be saved: {describe_os_error(error)}; "
        "a previous save is intact"
    )


def _write_shards(directory: Path, token: str, parts: list[Part], work: Progress) -> dict[str, SavedTensor]:
    """Write the shards of a save; return where each tensor is."""
    shards, tensors = in_order(parts, _SHARD_BYTES), {}
    for number, shard in enumerate(shards, 1):
        name = f"vbrt-{token}-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors |= {
            info.name: _saved(name, info, digest) for info, digest in _write_shard(directory / name, shard, work)
        }
    sync_directory(directory)
    return tensors


def sync_in_place(directory: Path) -> None:
    """Sync the manifest's rename to disk. Raises CheckpointError; then the previous save's files stay, because a power
    cut may bring back its manifest."""
    try:
        sync_directory(directory)
    except OSError as error:
        raise CheckpointError(
            f"{directory}: the model is saved and the save is in place, but the system cannot sync "
            f"the directory ({describe_os_error(error)}): until it can, a power cut may bring back "
            "what was there before; save again"
        ) from error


def _check_unique(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise CheckpointError(f"{name}: a parameter or buffer has the name of a plane's tensor; rename it")
        seen.add(name)


def write_parts(parts: Iterable[Part], writer: TensorWriter, work: Progress) -> dict[str, str]:
    """Write parts in order; return the digests of their tensors."""
    digests: dict[str, str] = {}
    for part in parts:
        work.at(part.tensors[0].name)
        digests |= part.write(writer)
        work.done(part.nbytes)
    return digests


def _write_shard(path: Path, parts: list[Part], work: Progress) -> list[tuple[TensorInfo, str]]:
    infos = [info for part in parts for info in part.tensors]
    with TensorWriter(path, infos) as writer:
        digests = write_parts(parts, writer, work)
    return [(info, digests[info.name]) for info in infos]


def _saved(file: str, info: TensorInfo, digest: str) -> SavedTensor:
    return SavedTensor(file, digest, text_of(info.dtype), info.shape)


def remove_files(directory: Path, unwanted: Callable[[str], bool]) -> None:
    """Remove saves' files that match `unwanted`, except those that the manifest in place names."""
    try:
        in_place = read_manifest_bytes(directory)
    except FileNotFoundError:
        in_place = b""
    except OSError:  # unreadable: which files it names is unknown
        return
    try:
        for path in directory.iterdir():
            if _OURS.fullmatch(path.name) and unwanted(path.name) and f'"{path.name}"'.encode() not in in_place:
                path.unlink(missing_ok=True)
    except OSError:  # leftover files cost disk space, nothing else
        return


def layer_parts(layer: SavedLayer, handle: Handle) -> Iterator[Part]:
    """Yield a weight's units of writing: the whole, or one matrix of routed experts."""
    if not isinstance(handle, Experts):
        yield _layer_part(layer, handle)
        return
    for expert in range(layer.site.matrices):
        yield _expert_part(layer, handle, expert)


def _expert_part(layer: SavedLayer, handle: Experts, expert: int) -> Part:
    part = handle.spec.part_of(layer.site.parameter)
    infos = [
        TensorInfo(layer.file_tensor(layout.plane, field.name, expert), getattr(torch, field.dtype), field.shape)
        for layout in handle.encoded_layouts(part, expert)
        for field in layout.fields
    ]

    def write(writer: TensorWriter) -> dict[str, str]:
        with handle.encoded_matrix(part, expert) as planes:
            named = {
                layer.file_tensor(layout.plane, field, expert): tensor
                for layout, fields in planes
                for field, tensor in fields.items()
            }
            return {name: writer.write(name, tensor) for name, tensor in named.items()}

    return Part(infos, write)


def _layer_part(layer: SavedLayer, handle: Weight | TrainedWeight) -> Part:
    infos = [
        TensorInfo(layer.file_tensor(layout.plane, field.name), getattr(torch, field.dtype), field.shape)
        for layout in handle.encoded_layouts()
        for field in layout.fields
    ]

    def write(writer: TensorWriter) -> dict[str, str]:
        with handle.encoded() as planes:
            named = {
                layer.file_tensor(layout.plane, field): tensor
                for layout, plane in planes
                for field, tensor in plane.items()
            }
            return {name: writer.write(name, tensor) for name, tensor in named.items()}

    return Part(infos, write)


def _kept_part(entry: KeptTensor, tensor: torch.Tensor) -> Part:
    info = TensorInfo(entry.name, tensor.dtype, tuple(tensor.shape))
    return Part([info], lambda writer: {entry.name: writer.write(entry.name, tensor)})


# -- content of a model -----------------------------------------------------------------------------------------------


def find_layers(model: nn.Module) -> list[tuple[SavedLayer, Handle]]:
    """Return the weights in planes, in model order, with all names of their modules."""
    sites: dict[Handle, list[WeightSite]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, SwappedLayer):
            sites.setdefault(module.handle, []).append(site_of(name or ROOT, module))
    return [(layer, handle) for handle, held in sites.items() for layer in _saved_layers(handle, tuple(held))]


def _saved_layers(handle: Handle, sites: tuple[WeightSite, ...]) -> Iterable[SavedLayer]:
    if isinstance(handle, Experts):
        return _saved_experts(handle, [site.module for site in sites])
    return [_saved_layer(handle, sites)]


def _saved_experts(handle: Experts, modules: list[str]) -> Iterator[SavedLayer]:
    """Yield an entry for each parameter of a module of routed experts, or of several that share them."""
    for (part, one), site in zip(handle.spec.parts.items(), handle.spec.sites, strict=True):
        layouts = handle.encoded_layouts(part, 0)
        yield SavedLayer(
            sites=tuple(replace(site, module=module) for module in modules),
            stored_dtype=text_of(handle.spec.dtype),
            dtype=text_of(handle.dtype),
            format=one.format,
            fine=handle.spec.fine,
            trainable=handle.trainable,
            planes={layout.plane: tuple(field.name for field in layout.fields) for layout in layouts},
        )


def _saved_layer(handle: Handle, sites: tuple[WeightSite, ...]) -> SavedLayer:
    spec = handle.spec
    planes = {layout.plane: tuple(field.name for field in layout.fields) for layout in handle.encoded_layouts()}
    return SavedLayer(
        sites=sites,
        stored_dtype=text_of(spec.dtype),
        dtype=text_of(handle.dtype),
        format=spec.format,
        fine=spec.fine,
        trainable=handle.trainable,
        planes=planes,
    )


def find_kept(model: nn.Module) -> list[tuple[KeptTensor, torch.Tensor]]:
    """Return the parameters and buffers not in planes, with all their names. Raises CheckpointError: without values."""
    found: dict[int, tuple[list[str], str, torch.Tensor]] = {}
    for name, kind, tensor in _named_tensors(model):
        if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            raise CheckpointError(f"{name}: has no shape before the first call; run the model once, then save it")
        if tensor.is_meta:
            raise CheckpointError(f"{name}: is on the meta device, without data; load it first")
        found.setdefault(id(tensor), ([], kind, tensor))[0].append(name)
    return [
        (KeptTensor(names[0], tuple(names[1:]), kind, tensor.requires_grad), tensor)
        for names, kind, tensor in found.values()
    ]


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (name, kind, tensor) of every parameter and buffer not saved as planes, under each of its names."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            in_planes = isinstance(module, SwappedLayer) and name in module.trained_parameters
            if parameter is not None and not in_planes:
                yield prefix + name, "parameter", local_of(parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                kind = "non-persistent buffer" if name in module._non_persistent_buffers_set else "buffer"
                yield prefix + name, kind, buffer
