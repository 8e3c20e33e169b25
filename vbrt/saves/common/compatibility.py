"""Compatibility of a model with its files: names, kinds, shapes and dtypes, checked before any tensor is read."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from vbrt.errors import CheckpointError
from vbrt.layers import kind_of
from vbrt.libraries.transformers_api import ignored_patterns
from vbrt.residency.weight_site import WeightSite
from vbrt.saves.common.manifest import KeptTensor, text_of
from vbrt.saves.files.safetensors_file import TensorInfo

__all__ = [
    "check_names",
    "first_names",
    "has_fraction",
    "ignored_names",
    "misfit",
    "non_persistent",
    "other_dtypes",
    "other_kinds",
    "other_shapes",
    "refuse_any",
]

_SHOWN = 3  # names listed in an error


def check_names(path: Path, model: nn.Module, known: set[str], *, optional: set[str]) -> None:
    """Raise CheckpointError for parameters and buffers missing from the files, or unexpected in them."""
    needed = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = dict.fromkeys(name for name, _ in model.named_buffers(remove_duplicate=False))
    transient = set(non_persistent(model))
    needed |= buffers.keys() - transient
    missing = sorted(needed - known)
    unexpected = sorted(known - needed - transient - optional)
    parts = [
        f"{len(names)} {what}: {first_names(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if parts:
        raise CheckpointError(f"{path}: not of this model: parameters and buffers: {'; '.join(parts)}")


def misfit(module: nn.Module | None, site: WeightSite) -> str | None:
    """Return why a module cannot take the weight saved for a site; None if it can."""
    kind = None if module is None else kind_of(module)
    if kind is None or kind.name != site.kind:
        return f"{site.module} is a {type(module).__name__}, saved as a {site.kind}"
    here = tuple(getattr(module, site.parameter).shape)
    return None if here == site.kept_shape else f"{site.tensor} is {here}, saved as {site.kept_shape}"


def other_kinds(model: nn.Module, kept: Mapping[str, KeptTensor]) -> Iterator[str]:
    """Yield parameters that the files hold as buffers, and the reverse."""
    here = {name: "parameter" for name, _ in model.named_parameters(remove_duplicate=False)}
    here |= {name: "buffer" for name, _ in model.named_buffers(remove_duplicate=False)}
    for name, entry in kept.items():
        if name in here and here[name] != entry.kind.removeprefix("non-persistent "):
            yield f"{name} is a {here[name]}, saved as a {entry.kind}"


def other_shapes(model: nn.Module, infos: Mapping[str, TensorInfo]) -> Iterator[str]:
    transient = set(non_persistent(model))
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            yield f"{name} has no shape before the model's first call"
        elif name in infos and name not in transient and tuple(tensor.shape) != infos[name].shape:
            yield f"{name} is {tuple(tensor.shape)}, saved as {infos[name].shape}"


def other_dtypes(model: nn.Module, infos: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Yield floating-point tensors stored as integers, and the reverse; precision may differ, the files decide it."""
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if name in infos and has_fraction(tensor.dtype) != has_fraction(infos[name].dtype):
            yield f"{name} is {text_of(tensor.dtype)}, saved as {text_of(infos[name].dtype)}"


def has_fraction(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def refuse_any(path: Path, what: str, found: Iterable[str]) -> None:
    found = list(found)
    if found:
        raise CheckpointError(f"{path}: not of this model: {len(found)} {what}: {first_names(found)}")


def first_names(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def non_persistent(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules(remove_duplicate=False):
        for name in module._non_persistent_buffers_set:
            yield f"{path}.{name}" if path else name


def ignored_names(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return names in a checkpoint that the transformers model declares ignorable."""
    patterns = ignored_patterns(model)
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}
