"""Tensor assignment into a model: meta placeholders, file values, and recomputed non-persistent buffers."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from vbrt.errors import CheckpointError
from vbrt.saves.common.compatibility import first_names, non_persistent

__all__ = ["assign_", "compute_buffers_", "on_meta", "with_values"]


def assign_(model: nn.Module, names: Iterable[str], make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Assign one tensor to all these names (tied weights), made from the current one."""
    value = None
    for name in names:
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        tensors = module._parameters if own in module._parameters else module._buffers
        if tensors.get(own) is None:
            continue  # weight of a VB layer: held in pages
        value = make(tensors[own]) if value is None else value
        tensors[own] = value


def on_meta(old: torch.Tensor, dtype: torch.dtype, trains: bool) -> nn.Parameter:
    new = nn.Parameter(torch.empty(old.shape, dtype=dtype, device="meta"), requires_grad=trains)
    new.__dict__.update(old.__dict__)  # attributes that optimizers and libraries set on parameters
    return new


def with_values(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(old, nn.Parameter):
        return value
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


def compute_buffers_(model: nn.Module, files: Path, has: Callable[[str], bool]) -> None:
    """Compute meta buffers that no file holds, with the model's own `_init_weights` (transformers).

    Args:
        files: path, for errors.
        has: True for the name of a parameter or buffer that is in the files.

    Raises CheckpointError, with names, for meta tensors that remain.
    """
    lost = [
        name
        for name in non_persistent(model)
        if not has(name) and _buffer_at(model, name) is not None and _buffer_at(model, name).is_meta
    ]
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in lost):
        _recompute_(model, owner)
    lost = [name for name in lost if _buffer_at(model, name).is_meta]
    lost += [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]
    if lost:
        raise CheckpointError(
            f"{files}: does not hold {first_names(lost)}, which is on the meta device in this "
            "model; assign its values before loading, or build the model on the CPU"
        )


def _buffer_at(model: nn.Module, name: str) -> torch.Tensor | None:
    path, _, own = name.rpartition(".")
    return model.get_submodule(path)._buffers.get(own)


def _recompute_(model: nn.Module, path: str) -> None:
    """Run transformers' `_init_weights` on one module, whose parameters are on meta; keep the buffers that it fills."""
    owners = [model.get_submodule(".".join(path.split(".")[:n])) for n in range(path.count(".") + 2)]
    init = next((m._init_weights for m in reversed(owners) if hasattr(m, "_init_weights")), None)
    module = model.get_submodule(path)
    names = [n for n in module._non_persistent_buffers_set if module._buffers.get(n) is not None]
    if init is None:
        return
    tries, templates = [], {name: module._buffers[name] for name in names}
    for fill in (torch.zeros_like, torch.ones_like):  # a buffer that still differs afterwards was not filled
        module._buffers.update((name, fill(templates[name], device="cpu")) for name in names)
        with torch.random.fork_rng(devices=[]):
            init(module)
        tries.append({name: module._buffers[name] for name in names})
    for name in names:
        if not torch.equal(tries[0][name], tries[1][name]) and tries[0][name].numel():
            module._buffers[name] = templates[name]
