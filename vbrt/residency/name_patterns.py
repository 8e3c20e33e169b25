"""Grouping of module names: layers that differ only in their number share one line of text."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

__all__ = ["common_prefix", "grouped", "label_of", "pattern_of"]

Item = TypeVar("Item")


def grouped(items: Sequence[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Group items by key, in the order of the keys' first appearance."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def pattern_of(name: str) -> str:
    """Return a module name without its numbers: the pattern that layers of one kind share."""
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def label_of(names: Sequence[str]) -> str:
    """Return one name for modules of one pattern: model.layers.0-31.mlp.up_proj."""
    parts = []
    for values in zip(*(name.split(".") for name in names), strict=True):
        numbers = sorted({int(value) for value in values if value.isdigit()})
        if len(numbers) < 2:
            parts.append(values[0])
        elif numbers[-1] - numbers[0] + 1 == len(numbers):
            parts.append(f"{numbers[0]}-{numbers[-1]}")
        else:
            parts.append(",".join(map(str, numbers)) if len(numbers) < 5 else f"{numbers[0]}..{numbers[-1]}")
    return ".".join(parts)


def common_prefix(names: Sequence[str]) -> str:
    """Return the leading parts that all dotted names share, with a dot at the end; "" for fewer than two names."""
    prefix = ""
    for level in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(names) < 2 or len(set(level)) > 1:
            break
        prefix += f"{level[0]}."
    return prefix
