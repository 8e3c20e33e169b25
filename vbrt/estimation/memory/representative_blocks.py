"""Representative blocks: a few of each kind stand for all.

Blocks of one kind allocate alike, so two and three of them determine the bytes of fifty.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vbrt.model.repeated_blocks import configs_of

__all__ = ["cut", "meta_copy"]


def cut(model: nn.Module, chosen: dict[str, Sequence[int]]) -> nn.Module:
    """Cut a model's stacks to the chosen blocks, in place, with configs and layer indices adapted."""
    for name, indices in chosen.items():
        blocks = model.get_submodule(name)
        whole, kept = len(blocks), [blocks[index] for index in indices]
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, nn.ModuleList(kept))
        for number, block in enumerate(kept):
            for module in block.modules():
                if isinstance(getattr(module, "layer_idx", None), int):
                    module.layer_idx = number
        for config in configs_of(model.get_submodule(parent)):
            _cut_config(config, whole, indices)
    return model


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy on the meta device; ties stay ties, configs are copied."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def _cut_config(config: Any, whole: int, indices: Sequence[int]) -> None:
    """Cut a config's per-layer lists, and set its number of layers, to the chosen ones."""
    for key, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == whole:
            setattr(config, key, type(value)(value[index] for index in indices))
        elif type(value) is int and value == whole and "layer" in key:
            setattr(config, key, len(indices))
