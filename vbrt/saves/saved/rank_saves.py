"""Rank-sharded saves: each rank writes its shard; loading re-shards for any number of ranks.

    vbrt-ranks.json                      folders, and how tensors are sharded over them
    ranks-3f9c01ab-00000-of-00002/       rank 0's save: `save.py`
    ranks-3f9c01ab-00001-of-00002/

Each rank writes its folder; rank 0 commits the save by renaming vbrt-ranks.json into place last. A reader joins the
shards of one weight at a time and slices its own out of it (`rank_slices.py`); a rank whose shard equals a saved one
reads only that.
"""

import contextlib
import json
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from vbrt.config import VBConfig
from vbrt.errors import CheckpointError, VBError, WrapError, describe_os_error
from vbrt.host.safe_files import expanded, sync_directory, write_file
from vbrt.layers import KINDS, SwappedLayer, Weight
from vbrt.layers.experts import ExpertsHandle
from vbrt.layers.experts.expert_encoding import ExpertsOnDemand
from vbrt.layers.weights.weight_encoding import Planes
from vbrt.layers.weights.weight_shards import Sharding, is_sharded, matrix_shard
from vbrt.model.attachment import Attachment
from vbrt.model.planner import make_plan
from vbrt.residency.plan import Beside, Plan, Swap
from vbrt.residency.weight_site import EXPERTS, ROOT, Shard, WeightSite
from vbrt.saves.common.assign import assign_, on_meta, with_values
from vbrt.saves.common.companion_files import write_companions
from vbrt.saves.common.compatibility import check_names
from vbrt.saves.common.manifest import KeptTensor, SavedLayer, content_digest, read_manifest_bytes
from vbrt.saves.files.checkpoint_paths import MANIFEST
from vbrt.saves.files.json_file import read_json
from vbrt.saves.files.read_target import Landing
from vbrt.saves.files.safetensors_file import TensorFile
from vbrt.saves.saved.rank_slices import Held, Matrix, cut_between_blocks, join_parts, planes_of_part
from vbrt.saves.saved.save import remove_files, save_attached, save_model
from vbrt.saves.saved.saved_planes import SavedModel, saved_swaps

__all__ = ["RANKS", "RankedSave", "for_ranks", "open_ranked", "save_on_ranks"]

RANKS = "vbrt-ranks.json"
_KIND, _VERSION, _MAX_BYTES = "vbrt save of ranks", 1, 64 << 20
_FOLDER = re.compile(r"ranks-[0-9a-f]{8}-\d{5}-of-\d{5}")


class Cut(NamedTuple):
    """Sharding of a tensor over folders: dimension, whole size there, and number of fused parts, each sharded alike."""

    dim: int
    whole: int
    parts: int

    def shard(self, index: int, count: int, site: WeightSite | None = None) -> Shard:
        """Return a folder's shard: of the matrices at a site, or of a tensor's dimensions."""
        dim = self.dim
        if site is not None:
            dim -= site.stacked
            dim = EXPERTS if dim < 0 else 1 - dim if site.transposed else dim
        return Shard(dim, index, count, self.whole, self.parts)


# -- writing ----------------------------------------------------------------------------------------------------------


def save_on_ranks(attachment: Attachment, directory: str | PathLike, *, progress: bool | None = None) -> Path:
    """Save a model; if it is sharded, every rank of the group must call this. See `VBModelWrapper.save`."""
    shardings = _shardings(attachment.model)
    cut = {name: of for name, of in shardings.items() if of.dim is not None}
    if not cut:
        path = save_attached(attachment, directory, progress=progress)
        _remove_ranked(path, but="")
        write_companions(attachment.model, path)
        return path
    return _save_parts(attachment, expanded(directory), cut, progress=progress)


def _shardings(model: nn.Module) -> dict[str, Sharding]:
    """Return the shardings of weights in planes and of kept parameters, by name."""
    found = {}
    for path, module in model.named_modules():
        held = module.__dict__.get("_vb_shardings", {}) if isinstance(module, SwappedLayer) else {}
        held = held | {name: Sharding.of(p) for name, p in module._parameters.items() if is_sharded(p)}
        found |= {f"{path}.{name}" if path else name: sharding for name, sharding in held.items()}
    return found


def _save_parts(attachment: Attachment, directory: Path, cut: Mapping[str, Sharding], *, progress: bool | None) -> Path:
    group = _one_group(cut)
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    config, tokens = attachment.ready_to_save(), _told_all(secrets.token_hex(4), group)
    folder = directory / f"ranks-{tokens[0]}-{rank:05d}-of-{count:05d}"
    error = None
    try:
        save_model(attachment.model, config, folder, progress=progress)
        held = xxhash.xxh3_64_hexdigest(read_manifest_bytes(folder))
    except (VBError, OSError) as raised:
        error, held = raised, ""
    _agree(error, group, folder)
    digests = _told_all(held, group)
    if rank == 0:
        error = _write_ranks(directory, tokens[0], digests, cut)
    _agree(error, group, folder)
    if rank == 0:
        write_companions(attachment.model, directory)
    return directory


def _write_ranks(
    directory: Path, token: str, digests: Sequence[str], cut: Mapping[str, Sharding]
) -> CheckpointError | None:
    """Commit the folders and remove the previous save; return the error on failure."""
    names = [f"ranks-{token}-{rank:05d}-of-{len(digests):05d}" for rank in range(len(digests))]
    content: dict[str, Any] = {"kind": _KIND, "version": _VERSION, "ranks": dict(zip(names, digests, strict=True))}
    content["cuts"] = {name: list(_cut_of(sharding)) for name, sharding in cut.items()}
    content["digest"] = content_digest(content)
    try:
        write_file(directory / RANKS, json.dumps(content, indent=1).encode())
        sync_directory(directory)
    except OSError as raised:
        return CheckpointError(f"{directory / RANKS}: cannot be written: {describe_os_error(raised)}")
    with contextlib.suppress(OSError):  # the previous plain save is superseded
        (directory / MANIFEST).unlink(missing_ok=True)
    remove_files(directory, lambda name: True)
    _remove_ranked(directory, but=token)
    return None


def _cut_of(sharding: Sharding) -> Cut:
    placement = next(p for p in sharding.placements if not p.is_replicate())
    return Cut(sharding.dim, sharding.shape[sharding.dim], getattr(placement, "split_factor", 1))


def _one_group(cut: Mapping[str, Sharding]) -> Any:
    """Return the process group of the shards. Raises WrapError: several groups."""
    groups = {}
    for sharding in cut.values():
        at = next(dim for dim, placement in enumerate(sharding.placements) if not placement.is_replicate())
        group = sharding.mesh.get_group(at)
        groups[group.group_name] = group
    if len(groups) > 1:
        raise WrapError(f"save: weights are sharded over {len(groups)} process groups; expected one")
    return next(iter(groups.values()))


def _told_all(value: Any, group: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def _agree(error: Exception | None, group: Any, folder: Path) -> None:
    """Raise CheckpointError on all ranks if any rank failed; each removes its folder."""
    errors = _told_all(None if error is None else str(error), group)
    wrong = next((rank for rank, text in enumerate(errors) if text is not None), None)
    if wrong is not None:
        shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointError(f"rank {wrong}: {errors[wrong]}; a previous save is intact") from error


def _remove_ranked(directory: Path, *, but: str) -> None:
    """Remove rank folders, except those with the token `but`; if it is empty, also vbrt-ranks.json."""
    with contextlib.suppress(OSError):
        if not but:
            (directory / RANKS).unlink(missing_ok=True)
        for path in directory.glob("ranks-*"):
            if _FOLDER.fullmatch(path.name) and not (but and path.name.startswith(f"ranks-{but}-")):
                shutil.rmtree(path, ignore_errors=True)


# -- reading ----------------------------------------------------------------------------------------------------------


def open_ranked(path: Path) -> "RankedSave":
    """Open the rank-sharded save in a directory. Raises CheckpointError."""
    where = path / RANKS
    content = read_json(where, _MAX_BYTES)
    if not isinstance(content, dict) or (content.get("kind"), content.get("version")) != (_KIND, _VERSION):
        raise CheckpointError(f'{where}: expected "kind": "{_KIND}", "version": {_VERSION}, as vb.save() writes them')
    if content.get("digest") != content_digest(content):
        raise CheckpointError(f"{where}: damaged: its digest is not that of its content; save the model again")
    pieces = [_opened(path / name, held) for name, held in content["ranks"].items()]
    return RankedSave(path, pieces, {name: Cut(*cut) for name, cut in content["cuts"].items()})


def _opened(folder: Path, held: str) -> SavedModel:
    try:
        here = xxhash.xxh3_64_hexdigest(read_manifest_bytes(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {describe_os_error(error)}; copy all folders") from error
    if here != held:
        raise CheckpointError(f"{folder / MANIFEST}: damaged, or of another save; copy the whole directory again")
    return SavedModel(folder)


def for_ranks(source: Any, model: nn.Module) -> Any:
    """Return a source that serves this rank's shards of `source`, if the model is sharded; else `source`."""
    if not isinstance(source, SavedModel) or not any(map(is_sharded, model.parameters())):
        return source
    return RankedSave(source.path, [source], {})


class RankedSave:
    """`Source` of sharded planes, for models that may themselves be sharded.

    Args:
        pieces: the folders' saves, in rank order; a single one for a save of a whole model.
        cuts: sharding by model tensor name; other tensors are replicated in every folder.
    """

    def __init__(self, path: Path, pieces: Sequence[SavedModel], cuts: Mapping[str, Cut]) -> None:
        self.path, self._pieces, self._cuts = path, pieces, cuts
        self._first = pieces[0]
        self._of = [{site.name: layer for layer in piece.layers for site in layer.sites} for piece in pieces]
        self._layers = self._of[0]

    @property
    def files(self) -> list[TensorFile]:
        """Files of all folders."""
        return [file for piece in self._pieces for file in piece.files]

    def config(self, config: Any, overrides: Mapping[str, Any]) -> VBConfig:
        """See `Source`."""
        return self._first.config(config, overrides)

    def has(self, name: str) -> bool:
        """See `Source`."""
        return self._first.has(name)

    def outline_(self, model: nn.Module) -> None:
        """See `Source`."""
        kept = self._first.kept
        known = {name for entry in kept for name in entry.names}
        known |= {site.tensor for layer in self._first.layers for site in layer.sites}
        passing = {name for entry in kept if entry.kind == "non-persistent buffer" for name in entry.names}
        check_names(self.path, model, known, optional=passing)
        modules = _modules(model)
        for layer in self._first.layers:
            self._check_shape(layer, modules[layer.site.module])
            old = modules[layer.site.module]._parameters[layer.site.parameter]
            weight = _outlined(old, dtype=getattr(torch, layer.stored_dtype), trains=layer.trainable)
            for site in layer.sites:
                modules[site.module]._parameters[site.parameter] = weight
        for entry in kept:
            if entry.kind == "parameter":
                dtype = self._first.info(entry.name).dtype
                assign_(model, entry.names, lambda old, e=entry, d=dtype: _outlined(old, dtype=d, trains=e.trainable))

    def _check_shape(self, layer: SavedLayer, module: nn.Module) -> None:
        here = tuple(module._parameters[layer.site.parameter].shape)
        saved = self._whole_shape(layer.site.tensor, layer.site.kept_shape)
        if here != saved:
            raise CheckpointError(f"{self.path}: not of this model: {layer.site.tensor} is {here}, saved as {saved}")

    def _whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        cut = self._cuts.get(name)
        return tuple(cut.whole if cut is not None and dim == cut.dim else size for dim, size in enumerate(shape))

    def plan(self, model: nn.Module, config: VBConfig, beside: Beside | None) -> Plan:
        """See `Source`: with this rank's shards."""
        modules = _modules(model)
        local = [
            replace(layer, sites=tuple(_here(site, modules) for site in layer.sites)) for layer in self._first.layers
        ]
        return make_plan(model, config, saved=saved_swaps(local, model), beside=beside)

    def computes_in(self, swap: Swap, handle: Weight | ExpertsHandle) -> torch.dtype:
        """See `Source`."""
        return self._first.computes_in(swap, handle)

    # -- planes -------------------------------------------------------------------------------------------------------

    def planes_of(self, swap: Swap, handle: Weight) -> Planes:
        """See `Source`."""
        layer, site = self._layers[swap.name], handle.spec.site
        matrix = _matrix(layer, site)
        held = Held.of(site.shard)
        parts = self._parts(layer, None, matrix, held)
        return handle.encoder.from_encoded(self._cut(parts, matrix, held, layer))

    def experts_of(self, swap: Swap, handle: ExpertsHandle) -> Iterable[Planes]:
        """See `Source`."""
        sites = dict(zip(handle.spec.parts, handle.spec.sites, strict=True))

        def make(expert: int) -> Planes:
            planes = {part: self._planes_of_expert(site, expert) for part, site in sites.items()}
            return handle.coder.from_encoded({part: found for part, found in planes.items() if found is not None})

        return ExpertsOnDemand(make, swap.experts)

    def _planes_of_expert(self, site: WeightSite, expert: int) -> dict[str, Any] | None:
        layer = self._layers[site.name]
        if expert >= site.matrices:
            return None
        spread = site.shard is not None and site.shard.dim == EXPERTS
        number = _nth(site.shard.spans(site.matrices), expert) if spread else expert
        matrix, held = _matrix(layer, site), None if spread else Held.of(site.shard)
        return self._cut(self._parts(layer, number, matrix, held), matrix, held, layer)

    def _parts(
        self, layer: SavedLayer, number: int | None, matrix: Matrix, wanted: Held | None
    ) -> list[tuple[Held | None, dict[str, Any]]]:
        """Read the shards of a matrix (of expert `number`): all, or only the one equal to `wanted`."""
        cut, count = self._cuts.get(layer.site.tensor), len(self._pieces)
        shards = [None if cut is None else cut.shard(index, count, layer.site) for index in range(count)]
        if cut is None:
            return [(None, self._read(0, layer, number))]
        if shards[0].dim == EXPERTS:
            for index, shard in enumerate(shards):
                first = shard.spans(0)[0][0] if shard.spans(0) else 0
                if any(begin <= number < end for begin, end in shard.spans(0)):
                    return [(None, self._read(index, layer, number - first))]
        helds = [Held.of(shard) for shard in shards]
        if wanted in helds:
            return [(wanted, self._read(helds.index(wanted), layer, number))]
        return [(held, self._read(index, layer, number)) for index, held in enumerate(helds) if held.spans]

    def _read(self, index: int, layer: SavedLayer, number: int | None) -> dict[str, Any]:
        """Read a folder's shard of a matrix."""
        return self._pieces[index].encoded(self._of[index][layer.site.name], number)

    def _cut(
        self, parts: list[tuple[Held | None, dict[str, Any]]], matrix: Matrix, held: Held | None, layer: SavedLayer
    ) -> dict[str, Any]:
        if len(parts) == 1 and parts[0][0] == held:
            return parts[0][1]
        if not all(cut_between_blocks(matrix, of) for of in (held, *(of for of, _ in parts))):
            raise CheckpointError(
                f"{self.path}: {layer.site.name} is, or would be, sharded within blocks of {layer.format}: load it on "
                f"{len(self._pieces)} ranks, sharded as it was saved, or the checkpoint of the dense model"
            )
        return planes_of_part(matrix, join_parts(matrix, parts), held)

    # -- kept tensors -------------------------------------------------------------------------------------------------

    def fill_kept_(self, model: nn.Module, landing: Landing) -> None:
        """See `Source`."""
        known = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        for entry in self._first.kept:
            names = entry.names if entry.kind == "parameter" else known.intersection(entry.names)
            if names:
                value = self._kept(entry).to(landing.device)
                assign_(model, names, lambda old, value=value: _filled(old, value))

    def _kept(self, entry: KeptTensor) -> torch.Tensor:
        cut = self._cuts.get(entry.name)
        if cut is None:
            return self._first.read(entry.name)
        parts = [piece.read(entry.name) for piece in self._pieces]
        whole = parts[0].new_empty(self._whole_shape(entry.name, tuple(parts[0].shape)))
        for index, part in enumerate(parts):
            at = 0
            for begin, end in cut.shard(index, len(parts)).spans(0):
                whole.narrow(cut.dim, begin, end - begin).copy_(part.narrow(cut.dim, at, end - begin))
                at += end - begin
        return whole


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return {name or ROOT: module for name, module in model.named_modules(remove_duplicate=False)}


def _here(site: WeightSite, modules: Mapping[str, nn.Module]) -> WeightSite:
    """Return a saved site with this rank's shape and shard."""
    sites = KINDS[site.kind].sites(site.module, modules[site.module])
    return next(own for own in sites if own.parameter == site.parameter)


def _matrix(layer: SavedLayer, site: WeightSite) -> Matrix:
    dtype = getattr(torch, layer.stored_dtype)
    return Matrix(site.whole_shape, dtype, layer.format, layer.fine, turned=site.transposed)


def _nth(spans: Sequence[tuple[int, int]], place: int) -> int:
    """Return the index of the matrix at a position among those that a rank holds."""
    return [number for begin, end in spans for number in range(begin, end)][place]


def _outlined(old: torch.Tensor, *, dtype: torch.dtype, trains: bool) -> nn.Parameter:
    if not is_sharded(old):
        return on_meta(old, dtype, trains)
    local = torch.empty(old._local_tensor.shape, dtype=dtype, device="meta")
    return nn.Parameter(Sharding.of(old).whole(local), requires_grad=trains)


def _filled(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a parameter or buffer with a whole tensor's values; a DTensor takes its shard."""
    if not is_sharded(old):
        return with_values(old, value)
    sharding = Sharding.of(old)
    shard = matrix_shard(old, stacked=False, transposed=False)
    if shard is not None:
        spans = shard.spans(0)
        value = torch.cat([value.narrow(sharding.dim, begin, end - begin) for begin, end in spans], dim=sharding.dim)
    return nn.Parameter(sharding.whole(value.contiguous()), requires_grad=old.requires_grad)
