"""Parametrization over whole matrices, of which the default run tries a sample that meets each value."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["matrix"]


def matrix(*, indirect: tuple[str, ...] = (), **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test over the product of `axes`, argument name -> values; all but a diagonal is exhaustive.

    The diagonal has as many cells as the longest axis has values, and each value of each axis.
    """
    values = [tuple(axis) for axis in axes.values()]
    diagonal = {tuple(i % len(axis) for axis in values) for i in range(max(map(len, values)))}
    cells = []
    for place in itertools.product(*(range(len(axis)) for axis in values)):
        cell = [axis[i] for axis, i in zip(values, place, strict=True)]
        marks = () if place in diagonal else pytest.mark.exhaustive
        cells.append(pytest.param(*cell, marks=marks, id="-".join(map(_id, cell))))
    return pytest.mark.parametrize(tuple(axes), cells, indirect=indirect)


def _id(value: Any) -> str:
    return str(getattr(value, "__name__", value)).removeprefix("torch.")
