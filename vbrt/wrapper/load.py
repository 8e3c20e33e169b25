"""`vbrt.load`: a wrapped model from files, without the dense model in memory.

The files are a save of `vb.save`, whose planes go into pages as they are, or an ordinary safetensors checkpoint of the
dense model, whose weights are encoded one after the other. The model is only the architecture: its parameters become
meta tensors of the files' dtypes first, so that the same plan is made as for the model that was saved, and every value
then comes from a file. If anything fails, the model is given back as it came.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from vbrt.config import VBConfig, load_config
from vbrt.errors import CheckpointError, ConfigError, FormatError, WrapError, describe_os_error
from vbrt.formats import get_format
from vbrt.formats.fine import check_fine
from vbrt.host.files import expanded, read_bounded
from vbrt.layers import SwappedLayer, WeightHandle, kind_of
from vbrt.layers.linear import warn_of_training
from vbrt.model.attach import Original, attach
from vbrt.model.machine import check_ssd_directory, release_host_memory
from vbrt.model.planner import make_plan
from vbrt.residency.plan import Swap
from vbrt.residency.site import ROOT, WeightSite
from vbrt.saves.conversion import Entry, entries_for
from vbrt.saves.manifest import MANIFEST, KeptTensor, Manifest, SavedLayer, read_manifest, text_of
from vbrt.saves.tensorfile import TensorFile, TensorInfo, digest
from vbrt.wrapper.wrap import facade_of, warn_of_plan
from vbrt.wrapper.wrapper import VBModelWrapper

__all__ = ["load"]

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAX_INDEX_BYTES = 64 << 20
_SHOWN = 3  # names in an error
_TRIM_BYTES = 8 << 20


def load(
    directory: str | PathLike,
    model: nn.Module,
    config: VBConfig | Mapping[str, Any] | str | PathLike | None = None,
    **overrides: Any,
) -> VBModelWrapper:
    """Wrap a model with weights from files: what `vb.save` wrote, or a safetensors checkpoint of the dense model.

    Every parameter and buffer comes from the files, in the files' dtypes. Of a save nothing is encoded again; of a
    checkpoint one weight at a time is read and encoded. The model's mode (train, eval) stays.

    Where the CPU computes, large weights of a checkpoint that are not swapped stay mapped from its files, as
    `from_pretrained` leaves them: the system may drop them from memory and read them again, writes stay in this
    process, and files may be replaced or removed, but not cut short or written into. Those of a save are read into
    memory: their digests are checked once, and hold for as long as the model lives.

    Args:
        directory: a save; a directory with model.safetensors, or its shards and index; or one .safetensors file.
        model: the architecture; changed in place. Build it under `torch.device("meta")`, and no dense weight ever is
            in memory. Weights that it does hold are let go when everything is loaded.
        config: as `vbrt.wrap` takes it; by default that of the save, or "fp4" for a checkpoint. A save keeps its
            formats and its choice of layers.
        **overrides: sections of the config, merged key by key: `tiers={"gpu": {"budget": "6GiB"}}`.

    Raises:
        CheckpointError: files missing, damaged, of a newer version or of another model: the model is as it was.
        ConfigError: as from `wrap`; also for another weights.format or weights.fine than that of a save.
        FormatError: a weight of a checkpoint holds NaN or Inf.
        TierError: a page cannot be stored.
        WrapError: the model is wrapped already.
    """
    if isinstance(model, VBModelWrapper) or not isinstance(model, nn.Module):
        raise WrapError(f"load() got {type(model).__name__}; expected a torch.nn.Module that is not wrapped")
    if any(isinstance(module, SwappedLayer) for module in model.modules()):
        raise WrapError('load(): the model is wrapped already; build a new one, under torch.device("meta") for one')
    source = _open(Path(directory))
    config = source.config(config, overrides)
    if config.mode == "train":
        raise ConfigError(
            f'{config.source}: mode = "train"; load() fills the planes of an inference model. Load dense '
            'weights into the model first, then vbrt.wrap(model, mode="train"); to go on with a run, '
            "load_state_dict() what vb.state_dict() gave"
        )
    check_ssd_directory(config)
    before = Original(model)
    vb = None
    try:
        source.outline_(model)
        _settle_buffers_(model, source)
        vb = facade_of(model, attach(model, config, source.plan(model, config)))
        _fill_(vb, source)
        _finish_(vb)
    except BaseException:
        try:
            if vb is not None:
                vb.close()
        finally:
            before.restore_()
        raise
    warn_of_plan(vb.plan, "vbrt.load", stacklevel=3)
    if torch.is_grad_enabled() and any(x.training and x.handle.trainable for x in vb.registry.values()):
        warn_of_training(stacklevel=2)
    return vb


def _fill_(vb: VBModelWrapper, source: "_Source") -> None:
    read = 0
    for swap in vb.plan.swaps:
        handle = vb.registry[swap.name].handle
        handle.store(source.planes(swap.name, handle))
        read += swap.dense_bytes
        if read > _TRIM_BYTES:  # or the C library keeps what weights leave between the pages: as much as all of them
            release_host_memory()
            read = 0
    for swap in vb.plan.swaps:
        for site in swap.sites:
            vb.registry[site.name]._parameters[site.parameter] = None
    source.fill_kept_(vb.model, vb.device)
    for name, layer in vb.registry.items():
        layer.handle.retype(source.dtype(name, layer.handle))


def _finish_(vb: VBModelWrapper) -> None:
    vb.materialize(progress=False)  # nothing is left to encode; what was not swapped goes to the device
    release_host_memory()


# -- where the values come from ---------------------------------------------------------------------------------------


class _Source(Protocol):
    """Files that know a model."""

    path: Path

    def config(self, config: Any, overrides: Mapping[str, Any]) -> VBConfig:
        """What the user asked for, checked against the files."""

    def outline_(self, model: nn.Module) -> None:
        """Make every parameter a meta tensor of the files' dtype, or raise CheckpointError for another model."""

    def has(self, name: str) -> bool:
        """Whether a parameter or buffer of this name is in the files."""

    def plan(self, model: nn.Module, config: VBConfig) -> Any:
        """The plan for the outlined model."""

    def planes(self, name: str, handle: WeightHandle) -> Any:
        """What the handle of a layer stores."""

    def dtype(self, name: str, handle: WeightHandle) -> torch.dtype:
        """What a layer computes in."""

    def fill_kept_(self, model: nn.Module, device: torch.device) -> None:
        """Assign all other parameters and buffers."""


def _open(path: Path) -> "_Saved | _Checkpoint":
    try:
        path = expanded(path)
        kinds = {name: (path / name).exists() for name in (MANIFEST, _INDEX, _SINGLE)}
        is_file, is_directory = path.is_file(), path.is_dir()
    except OSError as error:
        raise CheckpointError(
            f"{error.filename}: cannot be read: {describe_os_error(error)}; expected a directory "
            f"that vb.save() wrote, or a checkpoint with {_SINGLE}"
        ) from error
    if is_file and path.suffix == ".safetensors":
        return _Checkpoint(path, [path])
    if not is_directory:
        raise CheckpointError(
            f"{path}: no such directory; expected one that vb.save() wrote, or a checkpoint with {_SINGLE}"
        )
    if kinds[MANIFEST]:
        return _Saved(path)
    if kinds[_INDEX]:
        return _Checkpoint(path, [path / name for name in _shard_names(path / _INDEX)])
    if kinds[_SINGLE]:
        return _Checkpoint(path, [path / _SINGLE])
    raise CheckpointError(
        f"{path}: neither {MANIFEST}, as vb.save() writes it, nor {_SINGLE} or {_INDEX} in it; "
        "expected a save or a safetensors checkpoint"
    )


def _shard_names(index: Path) -> list[str]:
    try:
        data = json.loads(read_bounded(index, _MAX_INDEX_BYTES).decode())
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read: {describe_os_error(error)}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index}: damaged: not valid JSON ({error})") from error
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


class _Saved:
    """A directory that `vb.save` wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest: Manifest = read_manifest(path)
        names = sorted({tensor.file for tensor in self._manifest.tensors.values()})
        files = {name: TensorFile(path / name) for name in names}
        self._files = {name: files[tensor.file] for name, tensor in self._manifest.tensors.items()}
        self._layers = {site.name: layer for layer in self._manifest.layers for site in layer.sites}
        self._kept = {name: entry for entry in self._manifest.kept for name in entry.names}
        self._check_files(files)
        self._check_entries()

    def _check_files(self, files: Mapping[str, TensorFile]) -> None:
        """The files have the tensors of the manifest and no others, of its dtypes and shapes."""
        for name, saved in self._manifest.tensors.items():
            info = files[saved.file].tensors.get(name)
            if info is None:
                raise _damaged(files[saved.file].path, f"it has no {name}, which {MANIFEST} says is in it")
            here = text_of(info.dtype), info.shape
            if saved.dtype is not None and here != (saved.dtype, saved.shape):
                raise _damaged(
                    files[saved.file].path,
                    f"{name} is {_described(*here)}, saved was {_described(saved.dtype, saved.shape)}",
                )
        for file in files.values():
            for name in file.tensors:
                if self._files.get(name) is not file:
                    raise _damaged(file.path, f"it has {name}, of which {MANIFEST} says nothing")

    def _check_entries(self) -> None:
        """Planes are of dtypes and shapes that their format has, and only numbers with a fraction train."""
        for number, layer in enumerate(self._manifest.layers):
            for plane, expected in layer.expected().items():
                for field, wanted in expected.items():
                    info = self._info(layer.file_tensor(plane, field))
                    if not _is_like(info, *wanted):
                        raise _damaged(
                            self.path / MANIFEST,
                            f"layers[{number}] asks for {_described(*wanted)}, and "
                            f"{info.name} is {_described(text_of(info.dtype), info.shape)}",
                        )
        for number, entry in enumerate(self._manifest.kept):
            dtype = self._info(entry.name).dtype
            if entry.trainable and not _has_fraction(dtype):
                raise _damaged(
                    self.path / MANIFEST, f"kept[{number}].trainable = true, and {entry.name} is {text_of(dtype)}"
                )

    def config(self, config: Any, overrides: Mapping[str, Any]) -> VBConfig:
        """See `_Source`. Weights stay what they were when the model was saved."""
        saved = _anywhere(VBConfig.from_dict(self._manifest.config, source=str(self.path / MANIFEST)))
        asked = load_config(saved if config is None else config, **overrides)
        for key in ("format", "fine"):
            here, there = getattr(asked.weights, key), getattr(saved.weights, key)
            if here != there:
                raise ConfigError(
                    f"{asked.source}: weights.{key} = {here!r}, and {self.path} was saved with "
                    f"{there!r}; a save keeps its format: pass what should differ as overrides, or "
                    "load a checkpoint of the dense model"
                )
        return replace(asked, weights=saved.weights)

    def outline_(self, model: nn.Module) -> None:
        """See `_Source`."""
        _check_names(
            self.path,
            model,
            set(self._kept) | {site.tensor for layer in self._manifest.layers for site in layer.sites},
            optional={n for n, entry in self._kept.items() if entry.kind == "non-persistent buffer"},
        )
        modules = {name or ROOT: module for name, module in model.named_modules(remove_duplicate=False)}
        _refuse_list(
            self.path,
            "layers do not fit",
            filter(
                None,
                (_misfit(modules.get(site.module), site) for layer in self._manifest.layers for site in layer.sites),
            ),
        )
        _refuse_list(self.path, "kinds do not fit", _other_kinds(model, self._kept))
        _refuse_list(
            self.path,
            "shapes do not fit",
            _other_shapes(
                model,
                {
                    name: self._info(entry.name)
                    for name, entry in self._kept.items()
                    if entry.kind != "non-persistent buffer"
                },
            ),
        )
        for layer in self._manifest.layers:
            old = modules[layer.site.module]._parameters[layer.site.parameter]
            weight = _on_meta(old, getattr(torch, layer.stored_dtype), layer.trainable)
            for site in layer.sites:
                modules[site.module]._parameters[site.parameter] = weight
        for entry in self._manifest.kept:
            if entry.kind == "parameter":
                dtype = self._info(entry.name).dtype
                _assign(model, entry.names, partial(_on_meta, dtype=dtype, trains=entry.trainable))

    def has(self, name: str) -> bool:
        """See `_Source`."""
        return name in self._kept

    def plan(self, model: nn.Module, config: VBConfig) -> Any:
        """See `_Source`: with the swaps of the model that was saved."""
        modules = {name or ROOT: module for name, module in model.named_modules()}
        return make_plan(model, config, saved=[_swap(layer, modules) for layer in self._manifest.layers])

    def planes(self, name: str, handle: WeightHandle) -> Any:
        """See `_Source`: as they were encoded."""
        layer = self._layers[name]
        planes = {
            plane: {field: self._read(layer.file_tensor(plane, field)) for field in names}
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
                raise _damaged(self._files[layer.file_tensor("fine", "low")].path, f"{name}: {error}") from error
        return handle.encoder.from_encoded(planes)

    def dtype(self, name: str, handle: WeightHandle) -> torch.dtype:
        """See `_Source`."""
        return getattr(torch, self._layers[name].dtype)

    def fill_kept_(self, model: nn.Module, device: torch.device) -> None:
        """See `_Source`."""
        known = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        for entry in self._manifest.kept:
            names = entry.names if entry.kind == "parameter" else known.intersection(entry.names)
            if names:
                value = self._read(entry.name).to(device)
                _assign(model, names, partial(_with_values, value=value))

    def _info(self, name: str) -> TensorInfo:
        return self._files[name].tensors[name]

    def _read(self, name: str) -> torch.Tensor:
        tensor = self._files[name].read(name)
        if digest(tensor) != self._manifest.tensors[name].digest:
            raise _damaged(self._files[name].path, f"the bytes of {name} are not those that were saved")
        return tensor


def _anywhere(saved: VBConfig) -> VBConfig:
    """The config of a save without what was insisted on where it was made."""
    gpu = saved.tiers.gpu
    return replace(saved, tiers=replace(saved.tiers, gpu=replace(gpu, enabled=gpu.enabled and "auto")))


class _Checkpoint:
    """An ordinary safetensors checkpoint of a dense model."""

    def __init__(self, path: Path, files: Iterable[Path]) -> None:
        self.path = path
        self._files = list(map(TensorFile, files))
        self._found: dict[str, Entry] = {}  # by names of the model
        self._sites: dict[str, WeightSite] = {}  # by the names of swaps
        self._entries: dict[str, str] = {}  # each name that the model has -> the one that was found, where tied

    def config(self, config: Any, overrides: Mapping[str, Any]) -> VBConfig:
        """See `_Source`."""
        return load_config(config, **overrides)

    def outline_(self, model: nn.Module) -> None:
        """See `_Source`."""
        self._found = entries_for(self.path, model, self._files)
        groups: dict[int, list[str]] = {}
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            groups.setdefault(id(tensor), []).append(name)
        for names in groups.values():
            entry = next((name for name in names if name in self._found), None)
            if entry is not None:
                self._entries.update(dict.fromkeys(names, entry))
        _check_names(self.path, model, self._found.keys() | self._entries.keys(), optional=_ignored(model, self._found))
        infos = {name: self._found[entry].info for name, entry in self._entries.items()}
        _refuse_list(self.path, "shapes do not fit", _other_shapes(model, infos))
        _refuse_list(self.path, "dtypes do not fit", _other_dtypes(model, infos))
        done: set[int] = set()
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            if id(parameter) not in done:
                done.add(id(parameter))
                dtype = infos[name].dtype
                _assign(model, groups[id(parameter)], partial(_on_meta, dtype=dtype, trains=parameter.requires_grad))

    def has(self, name: str) -> bool:
        """See `_Source`."""
        return name in self._entries

    def plan(self, model: nn.Module, config: VBConfig) -> Any:
        """See `_Source`."""
        plan = make_plan(model, config)
        self._sites = {swap.name: swap.site for swap in plan.swaps}
        return plan

    def planes(self, name: str, handle: WeightHandle) -> Any:
        """See `_Source`: encoded now."""
        return handle.split(self._read(self._sites[name].tensor))

    def dtype(self, name: str, handle: WeightHandle) -> torch.dtype:
        """See `_Source`."""
        return handle.dtype

    def fill_kept_(self, model: nn.Module, device: torch.device) -> None:
        """See `_Source`. Tied parameters get one value."""
        groups: dict[str, list[str]] = {}
        for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
            if name in self._entries:
                groups.setdefault(self._entries[name], []).append(name)
        for entry, names in groups.items():
            found = self._found[entry]
            value = found.map() if device.type == "cpu" else found.read().to(device)
            _assign(model, names, partial(_with_values, value=value))

    def _read(self, name: str) -> torch.Tensor:
        return self._found[self._entries[name]].read()


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


def _ignored(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Names in a checkpoint that a transformers model says it does not need."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


# -- does it fit ------------------------------------------------------------------------------------------------------


def _check_names(path: Path, model: nn.Module, known: set[str], *, optional: set[str]) -> None:
    """Raise CheckpointError for parameters and buffers that only the model has, or only the files."""
    needed = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = dict.fromkeys(name for name, _ in model.named_buffers(remove_duplicate=False))
    transient = set(_non_persistent(model))
    needed |= buffers.keys() - transient
    missing = sorted(needed - known)
    unexpected = sorted(known - needed - transient - optional)
    parts = [
        f"{len(names)} {what}: {_first(names)}"
        for what, names in (("that the model has are missing", missing), ("that it has not are there", unexpected))
        if names
    ]
    if parts:
        raise CheckpointError(f"{path}: not of this model: of its parameters and buffers {'; '.join(parts)}")


def _non_persistent(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules(remove_duplicate=False):
        for name in module._non_persistent_buffers_set:
            yield f"{path}.{name}" if path else name


def _misfit(module: nn.Module | None, site: WeightSite) -> str | None:
    """Return what keeps a module from taking the weight that was saved at a site."""
    kind = None if module is None else kind_of(module)
    if kind is None or kind.name != site.kind:
        return f"{site.module} is a {type(module).__name__}, saved was a {site.kind}"
    here = tuple(getattr(module, site.parameter).shape)
    return None if here == site.kept_shape else f"{site.tensor} is {here}, saved was {site.kept_shape}"


def _other_kinds(model: nn.Module, kept: Mapping[str, KeptTensor]) -> Iterator[str]:
    """Parameters that are buffers in the files, and the other way round."""
    here = {name: "parameter" for name, _ in model.named_parameters(remove_duplicate=False)}
    here |= {name: "buffer" for name, _ in model.named_buffers(remove_duplicate=False)}
    for name, entry in kept.items():
        if name in here and here[name] != entry.kind.removeprefix("non-persistent "):
            yield f"{name} is a {here[name]}, saved was a {entry.kind}"


def _other_shapes(model: nn.Module, infos: Mapping[str, TensorInfo]) -> Iterator[str]:
    transient = set(_non_persistent(model))
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            yield f"{name} has no shape before the model's first call"
        elif name in infos and name not in transient and tuple(tensor.shape) != infos[name].shape:
            yield f"{name} is {tuple(tensor.shape)}, saved was {infos[name].shape}"


def _other_dtypes(model: nn.Module, infos: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Numbers with a fraction in the place of whole ones, or the other way round; precision is for the files to say."""
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if name in infos and _has_fraction(tensor.dtype) != _has_fraction(infos[name].dtype):
            yield f"{name} is {text_of(tensor.dtype)}, saved was {text_of(infos[name].dtype)}"


def _has_fraction(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _refuse_list(path: Path, what: str, found: Iterable[str]) -> None:
    found = list(found)
    if found:
        raise CheckpointError(f"{path}: not of this model: {len(found)} {what}: {_first(found)}")


def _first(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _swap(layer: SavedLayer, modules: Mapping[str, nn.Module]) -> Swap:
    """The swap of a saved layer, without pages; a module that has several names counts once."""
    sites = [site for site in layer.sites if site.module in modules]
    return Swap(
        site=sites[0],
        tied=tuple(sites[1:]),
        dtype=layer.stored_dtype,
        dense_bytes=sites[0].parameters * getattr(torch, layer.stored_dtype).itemsize,
        format=layer.format,
        fine="exact" if layer.fine else "none",
    )


# -- parameters and buffers -------------------------------------------------------------------------------------------


def _assign(model: nn.Module, names: Iterable[str], make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Give all these names one tensor, made from the one that is there."""
    value = None
    for name in names:
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        tensors = module._parameters if own in module._parameters else module._buffers
        if tensors.get(own) is None:
            continue  # a VB layer's weight, which is in pages
        value = make(tensors[own]) if value is None else value
        tensors[own] = value


def _on_meta(old: torch.Tensor, dtype: torch.dtype, trains: bool) -> nn.Parameter:
    new = nn.Parameter(torch.empty(old.shape, dtype=dtype, device="meta"), requires_grad=trains)
    new.__dict__.update(old.__dict__)  # marks that optimizers and libraries leave on parameters
    return new


def _with_values(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(old, nn.Parameter):
        return value
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


def _settle_buffers_(model: nn.Module, source: _Source) -> None:
    """Compute what is on the meta device and in no file: transformers' models know how.

    Raises CheckpointError, with names, for what nobody knows.
    """
    lost = [
        name
        for name in _non_persistent(model)
        if not source.has(name) and _at(model, name) is not None and _at(model, name).is_meta
    ]
    for path in dict.fromkeys(name.rpartition(".")[0] for name in lost):
        _recompute_(model, path)
    lost = [name for name in lost if _at(model, name).is_meta]
    lost += [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]
    if lost:
        raise CheckpointError(
            f"{source.path}: does not hold {_first(lost)}, which is on the meta device in this "
            "model; assign its values before loading, or build the model on the CPU"
        )


def _at(model: nn.Module, name: str) -> torch.Tensor | None:
    path, _, own = name.rpartition(".")
    return model.get_submodule(path)._buffers.get(own)


def _recompute_(model: nn.Module, path: str) -> None:
    """Fill a module's buffers as transformers does after building a model on meta; its parameters are on meta."""
    owners = [model.get_submodule(".".join(path.split(".")[:n])) for n in range(path.count(".") + 2)]
    init = next((m._init_weights for m in reversed(owners) if hasattr(m, "_init_weights")), None)
    module = model.get_submodule(path)
    names = [n for n in module._non_persistent_buffers_set if module._buffers.get(n) is not None]
    if init is None:
        return
    tries, templates = [], {name: module._buffers[name] for name in names}
    for fill in (torch.zeros_like, torch.ones_like):  # what differs afterwards was not filled
        module._buffers.update((name, fill(templates[name], device="cpu")) for name in names)
        with torch.random.fork_rng(devices=[]):
            init(module)
        tries.append({name: module._buffers[name] for name in names})
    for name in names:
        if not torch.equal(tries[0][name], tries[1][name]) and tries[0][name].numel():
            module._buffers[name] = templates[name]
