"""Saved planes as a `Source`: directories of `vb.save`, and planes embedded in another library's files."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vbrt.config import VBConfig, load_config
from vbrt.errors import CheckpointError, ConfigError, FormatError
from vbrt.formats import get_format
from vbrt.formats.fine_plane import check_fine
from vbrt.host import accelerator
from vbrt.host.worker_threads import Crew
from vbrt.layers import KINDS, Weight
from vbrt.layers.experts import ExpertsHandle
from vbrt.layers.experts.expert_encoding import ExpertsOnDemand
from vbrt.layers.experts.touched_experts import top_k_of
from vbrt.layers.weights.weight_encoding import Planes
from vbrt.model.planner import make_plan
from vbrt.residency.plan import Beside, Plan, Swap
from vbrt.residency.weight_site import ROOT, WeightSite
from vbrt.saves.common.assign import assign_, on_meta, with_values
from vbrt.saves.common.compatibility import check_names, has_fraction, misfit, other_kinds, other_shapes, refuse_any
from vbrt.saves.common.manifest import KeptTensor, Manifest, SavedLayer, read_manifest, text_of
from vbrt.saves.files.checkpoint_paths import MANIFEST
from vbrt.saves.files.read_target import Fill, Landing, fresh, into
from vbrt.saves.files.safetensors_file import TensorFile, TensorInfo, digest

__all__ = ["SavedModel", "for_this_machine", "saved_swaps"]


class SavedModel:
    """Saved planes: a directory of `vb.save`, or planes embedded in another library's files.

    Args:
        manifest: by default the directory's.
        files: by the manifest's file names; they may hold other tensors, too.

    Attributes:
        layers: manifest entries of weights in planes.
        kept: manifest entries of tensors not in planes.
        crew: threads that read parts of a tensor in parallel with the caller.
    """

    def __init__(
        self, path: Path, manifest: Manifest | None = None, files: Mapping[str, TensorFile] | None = None
    ) -> None:
        self.path = path
        self.crew = Crew(min(4, os.cpu_count() or 1) - 1)
        self._manifest: Manifest = read_manifest(path) if manifest is None else manifest
        names = sorted({tensor.file for tensor in self._manifest.tensors.values()})
        own = files is None
        self._said_in = path / MANIFEST if own else next(iter(files.values())).path  # path of the manifest, for errors
        files = {name: TensorFile(path / name) for name in names} if files is None else files
        self.files = list(files.values())
        self._files = {name: files[tensor.file] for name, tensor in self._manifest.tensors.items()}
        self.layers = self._manifest.layers
        self._layers = {site.name: layer for layer in self.layers for site in layer.sites}
        self._keep(self._manifest.kept)
        self._check_files(files)
        if own:
            self._check_no_others(files)
        self._check_entries()

    def _keep(self, entries: Iterable[KeptTensor]) -> None:
        """Set the entries of tensors not in planes."""
        self.kept = entries = list(entries)
        self._kept = {name: entry for entry in entries for name in entry.names}

    def _check_files(self, files: Mapping[str, TensorFile]) -> None:
        """Check that the files have the manifest's tensors, with their dtypes and shapes."""
        for name, saved in self._manifest.tensors.items():
            info = files[saved.file].tensors.get(name)
            if info is None:
                raise _damaged(files[saved.file].path, f"it lacks {name}, which {MANIFEST} lists")
            here = text_of(info.dtype), info.shape
            if saved.dtype is not None and here != (saved.dtype, saved.shape):
                raise _damaged(
                    files[saved.file].path,
                    f"{name} is {_described(*here)}, saved as {_described(saved.dtype, saved.shape)}",
                )

    def _check_no_others(self, files: Mapping[str, TensorFile]) -> None:
        for file in files.values():
            for name in file.tensors:
                if self._files.get(name) is not file:
                    raise _damaged(file.path, f"it has {name}, which {MANIFEST} does not list")

    def _check_entries(self) -> None:
        """Check the planes' dtypes and shapes against their formats, and that only floating-point tensors train."""
        for number, layer in enumerate(self._manifest.layers):
            for plane, expected in layer.expected().items():
                for field, wanted in expected.items():
                    for matrix in layer.matrices:
                        info = self.info(layer.file_tensor(plane, field, matrix))
                        if not _is_like(info, *wanted):
                            raise _damaged(
                                self._said_in,
                                f"layers[{number}] asks for {_described(*wanted)}, and "
                                f"{info.name} is {_described(text_of(info.dtype), info.shape)}",
                            )
        for number, entry in enumerate(self._manifest.kept):
            dtype = self.info(entry.name).dtype
            if entry.trainable and not has_fraction(dtype):
                raise _damaged(self._said_in, f"kept[{number}].trainable = true, and {entry.name} is {text_of(dtype)}")

    def config(self, config: Any, overrides: Mapping[str, Any]) -> VBConfig:
        """See `Source`. Weights keep the formats in which they were saved."""
        saved = for_this_machine(VBConfig.from_save(self._manifest.config, source=str(self._said_in)))
        asked = load_config(saved if config is None else config, **overrides)
        for key in ("format", "fine", "formats"):
            if getattr(asked.weights, key) != getattr(saved.weights, key):
                here, there = (one.to_dict()["weights"][key] for one in (asked, saved))
                raise ConfigError(
                    f"{asked.source}: weights.{key} = {here!r}, and {self.path} was saved with "
                    f"{there!r}; a save keeps its format: pass what should differ as overrides, or "
                    "load a checkpoint of the dense model"
                )
        text = asked.weights.calibrate
        if text not in (None, saved.weights.calibrate):
            raise ConfigError(
                f'{asked.source}: weights.calibrate = "{text}", and {self.path} has planes, which are not '
                "encoded again: load a checkpoint of the dense model"
            )
        return replace(asked, weights=replace(saved.weights, fine_coding=asked.weights.fine_coding))

    def outline_(self, model: nn.Module) -> None:
        """See `Source`."""
        check_names(
            self.path,
            model,
            set(self._kept) | {site.tensor for layer in self._manifest.layers for site in layer.sites},
            optional={n for n, entry in self._kept.items() if entry.kind == "non-persistent buffer"},
        )
        self.check_fit(model)
        modules = {name or ROOT: module for name, module in model.named_modules(remove_duplicate=False)}
        for layer in self._manifest.layers:
            old = modules[layer.site.module]._parameters[layer.site.parameter]
            weight = on_meta(old, getattr(torch, layer.stored_dtype), layer.trainable)
            for site in layer.sites:
                modules[site.module]._parameters[site.parameter] = weight
        for entry in dict.fromkeys(self._kept.values()):
            if entry.kind == "parameter":
                dtype = self.info(entry.name).dtype
                assign_(model, entry.names, partial(on_meta, dtype=dtype, trains=entry.trainable))

    def check_fit(self, model: nn.Module) -> None:
        """Raise CheckpointError for layers or kept tensors of another kind or shape in the model."""
        modules = {name or ROOT: module for name, module in model.named_modules(remove_duplicate=False)}
        sites = [site for layer in self._manifest.layers for site in layer.sites]
        refuse_any(self.path, "layers do not fit", filter(None, (misfit(modules.get(s.module), s) for s in sites)))
        refuse_any(self.path, "kinds do not fit", other_kinds(model, self._kept))
        lasting = {name: entry for name, entry in self._kept.items() if entry.kind != "non-persistent buffer"}
        infos = {name: self.info(entry.name) for name, entry in lasting.items()}
        refuse_any(self.path, "shapes do not fit", other_shapes(model, infos))

    def has(self, name: str) -> bool:
        """See `Source`."""
        return name in self._kept

    def plan(self, model: nn.Module, config: VBConfig, beside: Beside | None) -> Plan:
        """See `Source`: with the saved model's swaps."""
        return make_plan(model, config, saved=saved_swaps(self._manifest.layers, model), beside=beside)

    def planes_of(self, swap: Swap, handle: Weight) -> Planes:
        """See `Source`: as encoded; read straight from the file into the page where possible."""
        layer, encoder = self._layers[swap.name], handle.encoder
        if not encoder.stores_as_encoded or layer.fine:
            return encoder.from_encoded(self.encoded(layer))
        return encoder.from_encoded(
            {
                plane: {field: _InFile(self, layer.file_tensor(plane, field, None)) for field in names}
                for plane, names in layer.planes.items()
            }
        )

    def experts_of(self, swap: Swap, handle: ExpertsHandle) -> Iterable[Planes]:
        """See `Source`: as encoded."""
        layers = {part: self._layers[site.name] for part, site in zip(handle.spec.parts, _sites(swap), strict=True)}

        def make(expert: int) -> Planes:
            held = {part: layer for part, layer in layers.items() if expert < layer.site.matrices}
            return handle.coder.from_encoded({part: self.encoded(layer, expert) for part, layer in held.items()})

        return ExpertsOnDemand(make, swap.experts)

    def encoded(self, layer: SavedLayer, matrix: int | None = None) -> dict[str, dict[str, torch.Tensor]]:
        """Read the planes of a weight, or of one of its matrices, as encoded."""
        planes = {
            plane: {field: self.read(layer.file_tensor(plane, field, matrix)) for field in names}
            for plane, names in layer.planes.items()
        }
        if layer.fine:
            try:
                check_fine(
                    planes["coarse"],
                    planes["fine"],
                    get_format(layer.format),
                    layer.site.shape,
                    getattr(torch, layer.stored_dtype),
                )
            except FormatError as error:
                path = self._files[layer.file_tensor("fine", "starts", matrix)].path
                raise _damaged(path, f"{layer.site.name}: {error}") from error
        return planes

    @property
    def plane_names(self) -> frozenset[str]:
        """Names of the planes' tensors."""
        return frozenset(self._manifest.tensors)

    def plane_patterns(self) -> set[str]:
        """Return regular expressions for planes' tensor names that are not parameter names."""
        return {
            rf"(^|\.){re.escape(layer.site.parameter)}{re.escape(name).replace('0', '[0-9]+', 1)}$"
            for layer in self._manifest.layers
            for name in _beyond(layer)
        }

    def computes_in(self, swap: Swap, handle: Weight | ExpertsHandle) -> torch.dtype:
        """See `Source`."""
        return getattr(torch, self._layers[swap.site.name].dtype)

    def fill_kept_(self, model: nn.Module, landing: Landing) -> None:
        """See `Source`."""
        known = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        for entry in dict.fromkeys(self._kept.values()):
            names = entry.names if entry.kind == "parameter" else known.intersection(entry.names)
            if names:
                value = self.read(entry.name).to(landing.device)
                assign_(model, names, partial(with_values, value=value))

    def info(self, name: str) -> TensorInfo:
        """Return a tensor's entry in its file."""
        return self._files[name].tensors[name]

    def read(self, name: str, fill: Fill = fresh) -> torch.Tensor:
        """Read a tensor. Raises CheckpointError: its digest differs."""
        tensor, saved = self._files[name].read(name, fill), self._manifest.tensors.get(name)
        if saved is not None and digest(tensor) != saved.digest:
            raise _damaged(self._files[name].path, f"the bytes of {name} do not match their digest")
        return tensor


@dataclass(frozen=True, slots=True)
class _InFile:
    """Plane field in a file; an `Incoming`."""

    source: SavedModel
    name: str

    @property
    def dtype(self) -> torch.dtype:
        return self.source.info(self.name).dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.info(self.name).shape

    def read(self) -> torch.Tensor:
        """See `Incoming`. Raises CheckpointError: its digest differs."""
        return self.source.read(self.name)

    def read_into(self, out: torch.Tensor) -> None:
        """See `Incoming`. Raises CheckpointError: its digest differs."""
        if out.device.type == "cpu":
            self.source.read(self.name, into(out, self.source.crew))
        else:
            out.copy_(self.read())


def saved_swaps(layers: Sequence[SavedLayer], model: nn.Module) -> list[Swap]:
    """Return the swaps of saved layers, without pages, in model order."""
    modules = {name or ROOT: module for name, module in model.named_modules()}
    plain = [layer for layer in layers if not KINDS[layer.site.kind].routed]
    swaps = [_swap(layer, modules) for layer in plain] + list(_routed_swaps(layers, modules))
    places = {name: place for place, name in enumerate(modules)}
    return sorted(swaps, key=lambda swap: places[swap.site.module])


def for_this_machine(saved: VBConfig) -> VBConfig:
    """Return a save's config without requirements on the machine where it was made: `tiers.gpu.enabled = true`, and a
    share of a GPU where none computes."""
    gpu = saved.tiers.gpu
    if not accelerator.is_used(gpu.enabled and "auto"):
        saved = replace(saved, gpu_memory=None, context=None)
    return replace(saved, tiers=replace(saved.tiers, gpu=replace(gpu, enabled=gpu.enabled and "auto")))


def _swap(layer: SavedLayer, modules: Mapping[str, nn.Module]) -> Swap:
    """Return the swap of a saved layer, without pages; a module with several names counts once."""
    sites = [site for site in layer.sites if site.module in modules]
    return Swap(
        site=sites[0],
        tied=tuple(sites[1:]),
        dtype=layer.stored_dtype,
        dense_bytes=sites[0].parameters * getattr(torch, layer.stored_dtype).itemsize,
        format=layer.format,
        fine="exact" if layer.fine else "none",
        fine_coding="plain" if layer.fine and not layer.coded else "",
    )


def _beyond(layer: SavedLayer) -> set[str]:
    """Return the suffixes that a layer's tensor names (of its first matrix) have after the weight's name."""
    names = (
        layer.file_tensor(plane, field, layer.matrices[0]) for plane in layer.planes for field in layer.planes[plane]
    )
    return {name.removeprefix(layer.site.tensor) for name in names} - {""}


def _routed_swaps(layers: Iterable[SavedLayer], modules: Mapping[str, nn.Module]) -> Iterator[Swap]:
    """Yield one swap per saved module of routed experts, joining the entries of its parameters."""
    held: dict[str, dict[str, SavedLayer]] = {}
    for layer in layers:
        if KINDS[layer.site.kind].routed:
            held.setdefault(layer.site.module, {})[layer.site.parameter] = layer
    for by_parameter in held.values():
        kind = KINDS[next(iter(by_parameter.values())).site.kind]
        first, *others = (by_parameter[parameter] for parameter in kind.parameters)
        yield replace(
            _swap(first, modules).in_formats([layer.format for layer in (first, *others)]),
            parts=tuple(layer.site for layer in others),
            dense_bytes=sum(x.site.parameters for x in (first, *others)) * getattr(torch, first.stored_dtype).itemsize,
            experts=first.site.matrices,
            top_k=top_k_of(first.site, modules),
        )


def _sites(swap: Swap) -> tuple[WeightSite, ...]:
    return (swap.site, *swap.parts)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: damaged: {what}; copy it again, or save the model again")


def _is_like(info: TensorInfo, dtype: str, shape: tuple[int | None, ...]) -> bool:
    return (
        text_of(info.dtype) == dtype
        and len(info.shape) == len(shape)
        and all(wanted in (None, have) for have, wanted in zip(info.shape, shape, strict=True))
    )


def _described(dtype: str, shape: tuple[int | None, ...]) -> str:
    return f"{dtype} [{', '.join('any' if n is None else str(n) for n in shape)}]"
