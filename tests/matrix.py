"""Parametrization over whole matrices, of which the default run tries a sample that meets each value."""

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import pytest

__all__ = ["matrix"]


def matrix(*, indirect: tuple[str, ...] = (), **axes: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrize a test over the product of `axes`, argument name -> values or id -> value; all but a diagonal is
    exhaustive. The diagonal has as many cells as the longest axis has values, and each value of each axis.
    """
    axes = {
        name: axis if isinstance(axis, Mapping) else {_id(value): value for value in axis}
        for name, axis in axes.items()
    }
    values = [tuple(axis.items()) for axis in axes.values()]
    diagonal = {tuple(i % len(axis) for axis in values) for i in range(max(map(len, values)))}
    cells = []
    for place in itertools.product(*(range(len(axis)) for axis in values)):
        cell = [axis[i] for axis, i in zip(values, place, strict=True)]
        marks = () if place in diagonal else pytest.mark.exhaustive
        cells.append(pytest.param(*(value for _, value in cell), marks=marks, id="-".join(name for name, _ in cell)))
    return pytest.mark.parametrize(tuple(axes), cells, indirect=indirect)


def _id(value: Any) -> str:
    return str(getattr(value, "__name__", value)).removeprefix("torch.")
