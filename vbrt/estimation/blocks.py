"""Repeated blocks of a model: a few of each kind stand for all.

A transformer's blocks of one kind allocate alike, so that two and three of them tell what fifty take. Blocks are of one
kind if their class, their parameters' shapes and dtypes, and what their config says of each layer are equal.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Stack", "cut", "meta_copy", "stacks_of"]

_LEAST = 4  # fewer blocks of a list are traced as they are


@dataclass(frozen=True, slots=True)
class Stack:
    """A list of blocks: its name in the model, and the kind of each block as a number."""

    name: str
    kinds: tuple[int, ...]

    @property
    def count(self) -> dict[int, int]:
        """How many blocks there are of each kind."""
        return {kind: self.kinds.count(kind) for kind in dict.fromkeys(self.kinds)}

    def chosen(self, count: dict[int, int]) -> list[int]:
        """Return the first `count[kind]` indices of each kind, in order."""
        left, chosen = dict(count), []
        for index, kind in enumerate(self.kinds):
            if left.get(kind, 0):
                left[kind] -= 1
                chosen.append(index)
        return chosen


def stacks_of(model: nn.Module) -> list[Stack]:
    """Return the outermost lists of at least four blocks, with parameters, some of which are of one kind."""
    found: list[Stack] = []
    for name, module in model.named_modules():
        inner = any(name.startswith(f"{stack.name}.") for stack in found)
        if isinstance(module, nn.ModuleList) and len(module) >= _LEAST and not inner:
            kinds = _kinds(model.get_submodule(name.rpartition(".")[0]), module)
            if len(set(kinds)) < len(kinds) and any(True for _ in module.parameters()):
                found.append(Stack(name, kinds))
    return found


def cut(model: nn.Module, chosen: dict[str, Sequence[int]]) -> nn.Module:
    """Return the model with the chosen blocks of each stack only, in place: configs and numbers of layers follow."""
    for name, indices in chosen.items():
        blocks = model.get_submodule(name)
        whole, kept = len(blocks), [blocks[index] for index in indices]
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, nn.ModuleList(kept))
        for number, block in enumerate(kept):
            for module in block.modules():
                if isinstance(getattr(module, "layer_idx", None), int):
                    module.layer_idx = number
        for config in _configs(model.get_submodule(parent)):
            _cut_config(config, whole, indices)
    return model


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy on the meta device: no weight is copied, ties stay ties, configs are the copy's own."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def _kinds(owner: nn.Module, blocks: nn.ModuleList) -> tuple[int, ...]:
    """Return a number for the kind of each block that a module holds."""
    lists = [
        value
        for config in _configs(owner)
        for value in vars(config).values()
        if isinstance(value, list | tuple) and len(value) == len(blocks)
    ]
    numbers: dict[Any, int] = {}
    kinds = []
    for index, block in enumerate(blocks):
        parts = tuple((name, type(module).__name__) for name, module in block.named_modules())
        shapes = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters())
        said = tuple(repr(value[index]) for value in lists)
        kinds.append(numbers.setdefault((parts, shapes, said), len(numbers)))
    return tuple(kinds)


def _configs(owner: nn.Module) -> Iterator[Any]:
    """Yield the config of a module that holds blocks, if it has one."""
    config = getattr(owner, "config", None)
    if hasattr(config, "to_dict") and hasattr(config, "__dict__"):
        yield config


def _cut_config(config: Any, whole: int, indices: Sequence[int]) -> None:
    """Make what a config says of each layer, and of their number, true of the chosen ones."""
    for key, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == whole:
            setattr(config, key, type(value)(value[index] for index in indices))
        elif type(value) is int and value == whole and "layer" in key:
            setattr(config, key, len(indices))
