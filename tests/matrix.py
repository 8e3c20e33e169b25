"""Parametrization over whole matrices, of which the default run tries a sample that meets each value."""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import pytest

__all__ = ["matrix"]


def matrix(
    *, turns: int = 1, at_most: int | None = None, indirect: tuple[str, ...] = (), **axes: Collection[Any]
) -> pytest.MarkDecorator:
    """Parametrize a test over the product of `axes`, argument name -> values or id -> value; most of it is exhaustive.

    The default run tries each value of the longest axis `turns` times, and each other value at least once; of those
    cells the first `at_most`, where one costs seconds.
    """
    axes = {name: axis if isinstance(axis, Mapping) else {_id(v): v for v in axis} for name, axis in axes.items()}
    values = [tuple(axis.items()) for axis in axes.values()]
    sample = _sample([len(axis) for axis in values], turns)[:at_most]
    cells = []
    for place in itertools.product(*(range(len(axis)) for axis in values)):
        cell = [axis[i] for axis, i in zip(values, place, strict=True)]
        marks = () if place in sample else pytest.mark.exhaustive
        cells.append(pytest.param(*(value for _, value in cell), marks=marks, id="-".join(name for name, _ in cell)))
    return pytest.mark.parametrize(tuple(axes), cells, indirect=indirect)


def _sample(lengths: list[int], turns: int) -> list[tuple[int, ...]]:
    """Choose cells, each of pairs of values that as few cells as possible have already."""
    first, *others = sorted(range(len(lengths)), key=lambda axis: -lengths[axis])
    met: Counter[Any] = Counter()
    sample = []
    for start in range(turns * lengths[first]):
        cell = {first: start % lengths[first]}
        for axis in others:
            pairs = {v: [(there, (axis, v)) for there in cell.items()] for v in range(lengths[axis])}
            cell[axis] = min(pairs, key=lambda v, a=axis, p=pairs: (sum(met[pair] for pair in p[v]), met[a, v]))
            met.update([*pairs[cell[axis]], (axis, cell[axis])])
        sample.append(tuple(cell[axis] for axis in range(len(lengths))))
    return sample


def _id(value: Any) -> str:
    return str(getattr(value, "__name__", value)).removeprefix("torch.")
