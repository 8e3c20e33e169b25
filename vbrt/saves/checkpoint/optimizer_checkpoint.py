"""Checkpoint and resume of a model trained from the tiers: model, optimizer state and param groups."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.errors import CheckpointError
from vbrt.model.full_training import FullAttachment
from vbrt.report.progress import Progress
from vbrt.saves.checkpoint.training_checkpoint import Piece, SavedCheckpoint, write_checkpoint
from vbrt.saves.files.safetensors_file import TensorInfo
from vbrt.training.full.full_weight import FullWeight
from vbrt.training.full.optimizer_state import StreamedState, numbered, put_moments
from vbrt.training.full.resident_params import load_kept
from vbrt.training.full.streamed_parameter import StreamedParameter

__all__ = ["load_training", "save_training"]


def save_training(attachment: FullAttachment, directory: str | PathLike, extra: Any, *, progress: bool | None) -> Path:
    """Settle pending updates, then write a checkpoint. See `VBFullWrapper.save_checkpoint`."""
    optimizer = attachment.need("save_checkpoint")
    attachment.settle()
    numbers = numbered(optimizer)
    model, moments, pieces = [], dict[int, dict[str, Any]](), list[Piece]()
    for names, tensor in _held(attachment.model):
        if not isinstance(tensor, StreamedParameter):
            model.append({"names": names, "value": tensor.detach(), "number": numbers.get(id(tensor))})
            continue
        own, piece = _weight(tensor.weight, names[0], numbers.get(id(tensor)))
        model.append({"names": names, "value": piece.tensors[0], "number": numbers.get(id(tensor))})
        pieces.append(piece)
        if own is not None:
            moments[numbers[id(tensor)]] = own
    for parameter, own in optimizer.state.items():
        if not isinstance(parameter, StreamedParameter):
            moments[numbers[id(parameter)]] = dict(own)
    state = {
        "class": attachment.updater.rule.optimizer.__name__,
        "model": model,
        "optimizer": {"state": dict(sorted(moments.items())), "param_groups": _groups(optimizer, numbers)},
        "extra": extra,
    }
    return write_checkpoint(directory, state, pieces, progress=progress)


def _groups(optimizer: torch.optim.Optimizer, numbers: Mapping[int, int]) -> list[dict[str, Any]]:
    """Return `param_groups` with indices in place of parameters, as torch's `Optimizer.state_dict` has them."""
    return [{**group, "params": [numbers[id(p)] for p in group["params"]]} for group in optimizer.param_groups]


def _held(model: nn.Module) -> Iterator[tuple[list[str], Tensor]]:
    """Yield each parameter and persistent buffer once, with all its names (tied weights have several)."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        buffers = {k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *buffers.items()):
            if tensor is not None:
                found.setdefault(id(tensor), ([], tensor))[0].append(prefix + name)
    yield from found.values()


def _weight(weight: FullWeight, name: str, number: int | None) -> tuple[dict[str, Any] | None, Piece]:
    """Return a weight's optimizer state entry (None without state), and its piece: fp32 master first, then moments."""
    state = weight.state
    whole = TensorInfo(f"model.{name}", torch.float32, state.shape)
    if number is None or not (state.steps or state.has_moments):
        return None, Piece((whole,), partial(_tensors, weight, whole.name, {}))
    kinds = state.kinds if state.has_moments else ()
    moments = {key: TensorInfo(f"optimizer.{number}.{key}", torch.float32, state.shape) for key in kinds}
    step = torch.tensor(float(state.steps), dtype=torch.float32, device="cpu")
    return {"step": step, **moments}, Piece((whole, *moments.values()), partial(_tensors, weight, whole.name, moments))


def _tensors(weight: FullWeight, name: str, moments: Mapping[str, TensorInfo]) -> Mapping[str, Tensor]:
    held = weight.state.moments if moments else {}
    return {name: weight.master(), **{info.name: held[key] for key, info in moments.items()}}


# -- loading ----------------------------------------------------------------------------------------------------------


def load_training(attachment: FullAttachment, directory: str | PathLike, *, progress: bool | None) -> Any:
    """Resume from a checkpoint. See `VBFullWrapper.load_checkpoint`."""
    optimizer, saved = attachment.need("load_checkpoint"), SavedCheckpoint(directory)
    attachment.settle()
    here = {name: (names, tensor) for names, tensor in _held(attachment.model) for name in names}
    _check(saved, attachment, here)
    numbers = numbered(optimizer)
    state = saved.state["optimizer"]["state"]
    with Progress("loading", sum(entry["value"].nbytes for entry in saved.state["model"]), show=progress) as work:
        for entry in saved.state["model"]:
            work.at(entry["names"][0])
            _, tensor = here[entry["names"][0]]
            if isinstance(tensor, StreamedParameter):
                _fill(tensor.weight, saved, entry["value"], state.get(numbers.get(id(tensor))))
            else:
                tensor.data.copy_(saved.read(entry["value"]))
            work.done(entry["value"].nbytes)
    _fill_optimizer(optimizer, saved, numbers)
    return saved.filled(saved.state["extra"])


def _check(saved: SavedCheckpoint, attachment: FullAttachment, here: Mapping[str, tuple[list[str], Tensor]]) -> None:
    """Raise CheckpointError for a checkpoint of another model or optimizer class, before anything changes."""
    theirs = {name: entry["value"] for entry in saved.state["model"] for name in entry["names"]}
    for name in (*here, *theirs):
        if name not in theirs or name not in here:
            raise _other(saved, f"{name} is only in the {'checkpoint' if name in theirs else 'model'}")
        if tuple(here[name][1].shape) != theirs[name].shape:
            raise _other(saved, f"{name} has shape {theirs[name].shape} there, {tuple(here[name][1].shape)} here")
        kept = not isinstance(here[name][1], StreamedParameter)  # the page's low half there, or rounded to bf16 here
        if kept and here[name][1].dtype is not theirs[name].dtype:
            raise _other(saved, f"{name} is {theirs[name].dtype} in the checkpoint, {here[name][1].dtype} here")
    rule, groups = attachment.updater.rule.optimizer.__name__, attachment.optimizer.param_groups
    if saved.state["class"] != rule:
        raise _other(saved, f"its optimizer is {saved.state['class']}, this one {rule}")
    sizes = [len(group["params"]) for group in saved.state["optimizer"]["param_groups"]]
    if sizes != [len(group["params"]) for group in groups]:
        raise _other(saved, f"its param groups have {sizes} parameters, unlike this optimizer's")
    numbers = numbered(attachment.optimizer)
    for entry in saved.state["model"]:
        name = entry["names"][0]
        if "number" in entry and entry["number"] != numbers.get(id(here[name][1])):
            raise _other(saved, f"{name} has another index in its param groups")


def _other(saved: SavedCheckpoint, what: str) -> CheckpointError:
    return CheckpointError(f"{saved.directory}: a checkpoint of another model or optimizer: {what}; nothing was loaded")


def _fill(weight: FullWeight, saved: SavedCheckpoint, values: TensorInfo, own: Mapping[str, Any] | None) -> None:
    weight.load(saved.read(values))
    put_moments(weight, {} if own is None else saved.filled(dict(own)))


def _fill_optimizer(optimizer: torch.optim.Optimizer, saved: SavedCheckpoint, numbers: Mapping[int, int]) -> None:
    """Load the state of non-streamed parameters and the group settings through torch."""
    streamed = {
        numbers[id(parameter)] for parameter in _parameters(optimizer) if isinstance(parameter, StreamedParameter)
    }
    state = saved.state["optimizer"]["state"]
    kept = {number: saved.filled(own) for number, own in state.items() if number not in streamed}
    groups = saved.filled(saved.state["optimizer"]["param_groups"])
    load_kept(optimizer, {"state": kept, "param_groups": groups})
    optimizer.state = StreamedState(optimizer)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
