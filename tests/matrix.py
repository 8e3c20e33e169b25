"""Parametrization over whole matrices, of which the default run tries a sample that meets each value."""

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import pytest

__all__ = ["matrix"]


def matrix(*, turns: int = 1, indirect: tuple[str, ...] = (), **axes: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrize a test over the product of `axes`, argument name -> values or id -> value; most of it is exhaustive.

    By default run the cells along a diagonal, which meets each value; more `turns` meet each value of the longest axis
    as often, beside others.
    """
    axes = {name: axis if isinstance(axis, Mapping) else {_id(v): v for v in axis} for name, axis in axes.items()}
    values = [tuple(axis.items()) for axis in axes.values()]
    longest = max(map(len, values))
    diagonal = {
        tuple((i + number * (i // longest)) % len(axis) for number, axis in enumerate(values))
        for i in range(turns * longest)
    }
    cells = []
    for place in itertools.product(*(range(len(axis)) for axis in values)):
        cell = [axis[i] for axis, i in zip(values, place, strict=True)]
        marks = () if place in diagonal else pytest.mark.exhaustive
        cells.append(pytest.param(*(value for _, value in cell), marks=marks, id="-".join(name for name, _ in cell)))
    return pytest.mark.parametrize(tuple(axes), cells, indirect=indirect)


def _id(value: Any) -> str:
    return str(getattr(value, "__name__", value)).removeprefix("torch.")
