"""Repeated blocks of a model: module lists such as its decoder layers.

Blocks are of one kind if their class, the shapes and dtypes of their parameters, and the per-layer entries of their
config are equal.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from vbrt.layers import SwappedLayer

__all__ = ["Stack", "configs_of", "stacks_of"]


@dataclass(frozen=True, slots=True)
class Stack:
    """List of blocks: its name in the model, and a kind number per block."""

    name: str
    kinds: tuple[int, ...]

    @property
    def count(self) -> dict[int, int]:
        """Return the number of blocks of each kind."""
        return {kind: self.kinds.count(kind) for kind in dict.fromkeys(self.kinds)}

    def chosen(self, count: dict[int, int]) -> list[int]:
        """Return the first `count[kind]` indices of each kind, in order."""
        left, chosen = dict(count), []
        for index, kind in enumerate(self.kinds):
            if left.get(kind, 0):
                left[kind] -= 1
                chosen.append(index)
        return chosen


def stacks_of(model: nn.Module, *, least: int = 4) -> list[Stack]:
    """Return the outermost lists of at least `least` blocks with parameters, some of them of one kind."""
    found: list[Stack] = []
    for name, module in model.named_modules():
        inner = any(name.startswith(f"{stack.name}.") for stack in found)
        if isinstance(module, nn.ModuleList) and len(module) >= least and not inner:
            kinds = _kinds(model.get_submodule(name.rpartition(".")[0]), module)
            if len(set(kinds)) < len(kinds) and any(True for _ in (*module.parameters(), *_in_tiers(module))):
                found.append(Stack(name, kinds))
    return found


def _kinds(owner: nn.Module, blocks: nn.ModuleList) -> tuple[int, ...]:
    """Return the kind number of each block of a module."""
    lists = [
        value
        for config in configs_of(owner)
        for value in vars(config).values()
        if isinstance(value, list | tuple) and len(value) == len(blocks)
    ]
    numbers: dict[Any, int] = {}
    kinds = []
    for index, block in enumerate(blocks):
        parts = tuple((name, type(module).__name__) for name, module in block.named_modules())
        shapes = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters())
        shapes += tuple(_in_tiers(block))
        said = tuple(repr(value[index]) for value in lists)
        kinds.append(numbers.setdefault((parts, shapes, said), len(numbers)))
    return tuple(kinds)


def _in_tiers(module: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yield name, shapes and dtype of weights in the tiers, which are no parameters of their module."""
    for name, layer in module.named_modules():
        if isinstance(layer, SwappedLayer):
            spec = layer.handle.spec
            yield name, *(site.kept_shape for site in getattr(spec, "sites", (spec.site,))), spec.dtype


def configs_of(owner: nn.Module) -> Iterator[Any]:
    """Yield the config of a module with blocks, if any."""
    config = getattr(owner, "config", None)
    if hasattr(config, "to_dict") and hasattr(config, "__dict__"):
        yield config
