"""Re-sharding of planes: join shards into the whole weight's planes, and slice them for other ranks.

Codes and scales are independent per block, so shards cut at block boundaries are joined and sliced without re-encoding.
A fine plane's lists follow the whole weight's element order; they are rebuilt from the restored weight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from vbrt.config import FORMATS
from vbrt.formats import WeightPlanes, get_format
from vbrt.kernels import EXACT, resolve
from vbrt.residency.weight_site import Shard

__all__ = ["Held", "Matrix", "cut_between_blocks", "join_parts", "planes_of_part"]

Fields = Mapping[str, torch.Tensor]
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Whole matrix (N, K) and its format; `turned`: files of dense weights have (K, N)."""

    shape: tuple[int, int]
    dtype: torch.dtype
    format: str
    fine: bool
    turned: bool = False

    @property
    def dense(self) -> bool:
        """True if the files hold the values themselves."""
        return FORMATS[self.format].lossless


@dataclass(frozen=True, slots=True)
class Held:
    """Shard of a matrix: ranges (begin, end) along `dim` of (N, K)."""

    dim: int
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, shard: Shard | None, index: int | None = None) -> "Held | None":
        """Return a rank's shard; None for the whole matrix."""
        return None if shard is None else cls(shard.dim, tuple(shard.spans(0, index)))

    @property
    def size(self) -> int:
        """Total rows or columns."""
        return sum(end - begin for begin, end in self.spans)


def cut_between_blocks(matrix: Matrix, held: Held | None) -> bool:
    """True if the shard cuts at block boundaries."""
    if held is None or held.dim == 0 or matrix.dense:
        return True
    if FORMATS[matrix.format].base:  # its columns are not next to each other
        return False
    block, k = max(_weights_per_column(matrix.format).values()), matrix.shape[1]
    return all(begin % block == 0 and (end % block == 0 or end == k) for begin, end in held.spans)


@lru_cache
def _weights_per_column(format: str) -> dict[str, int]:
    """Weights along K that share an element of a field, by name of the fields that grow with rows and columns."""
    k = 16 * FORMATS[format].block
    one, four = (get_format(format).layout((n, n * k), torch.bfloat16).fields for n in (1, 2))
    return {
        field.name: k // field.shape[1]
        for field, larger in zip(one, four, strict=True)
        if len(field.shape) == 2 and larger.shape == (2 * field.shape[0], 2 * field.shape[1])
    }


# -- joining and slicing ----------------------------------------------------------------------------------------------


def join_parts(matrix: Matrix, parts: Sequence[tuple[Held | None, Mapping[str, Fields]]]) -> dict[str, Fields]:
    """Return the planes of a whole matrix: "coarse" or "dense", and in place of "fine" the restored "weight" [N, K].

    Args:
        parts: shards and their planes; they cover the matrix and are cut at block boundaries.
    """
    if parts[0][0] is None:
        _, planes = parts[0]
        return _with_weight(matrix, planes, matrix.shape)
    opened = [(held, _with_weight(matrix, planes, _shape_of(matrix, held))) for held, planes in parts]
    return {plane: _joined(matrix, plane, opened) for plane in opened[0][1]}


def planes_of_part(matrix: Matrix, whole: Mapping[str, Fields], held: Held | None) -> dict[str, Fields]:
    """Return the planes of a shard, sliced from the result of `join_parts`."""
    made = {plane: _cut(matrix, plane, fields, held) for plane, fields in whole.items()}
    if matrix.fine:
        weight = made.pop("weight")["weight"]
        split = resolve("split_fine", "auto", weight.device, matrix.format)
        made["fine"] = split(weight, dict(made["coarse"]), get_format(matrix.format))
    return made


def _shape_of(matrix: Matrix, held: Held) -> tuple[int, int]:
    n, k = (held.size if dim == held.dim else size for dim, size in enumerate(matrix.shape))
    return n, k


def _with_weight(matrix: Matrix, planes: Mapping[str, Fields], shape: tuple[int, int]) -> dict[str, Fields]:
    made = dict(planes)
    if matrix.fine:
        coarse, fine = dict(made["coarse"]), dict(made.pop("fine"))
        merge = resolve("decode_weight", "auto", fine["starts"].device, EXACT)
        made["weight"] = {"weight": merge(WeightPlanes(matrix.format, shape, matrix.dtype, coarse, fine))}
    return made


class _Axis(NamedTuple):
    """Sharded dimension of a field: `per` weights per element, in whole blocks."""

    dim: int
    per: int
    block: int

    def range_of(self, begin: int, end: int) -> tuple[int, int]:
        """Return a weight range's first element, and the number of elements."""
        last = -(-end // self.block) * self.block // self.per
        return begin // self.per, last - begin // self.per

    def count(self, spans: Spans) -> int:
        """Return the number of elements for weight ranges."""
        return sum(self.range_of(begin, end)[1] for begin, end in spans)


def _axis(matrix: Matrix, plane: str, name: str, held: Held) -> _Axis | None:
    """Return a field's sharded axis; None for a per-weight field, which all ranks share."""
    if plane != "coarse":
        return _Axis(1 - held.dim if matrix.turned and plane == "dense" else held.dim, 1, 1)
    per = _weights_per_column(matrix.format).get(name)
    if per is None:
        return None
    return _Axis(0, 1, 1) if held.dim == 0 else _Axis(1, per, max(per, FORMATS[matrix.format].block))


def _joined(matrix: Matrix, plane: str, parts: Sequence[tuple[Held, Mapping[str, Fields]]]) -> Fields:
    made, cut = {}, parts[0][0]
    for name, first in parts[0][1][plane].items():
        axis = _axis(matrix, plane, name, cut)
        if axis is None:
            made[name] = first
            continue
        shape = list(first.shape)
        shape[axis.dim] = axis.count([(0, matrix.shape[cut.dim])])
        made[name] = whole = first.new_empty(shape)
        for held, planes in parts:
            _move(whole, planes[plane][name], held.spans, axis, join=True)
    return made


def _cut(matrix: Matrix, plane: str, fields: Fields, held: Held | None) -> Fields:
    if held is None:
        return fields
    made = {}
    for name, whole in fields.items():
        axis = _axis(matrix, plane, name, held)
        if axis is None:
            made[name] = whole
            continue
        shape = list(whole.shape)
        shape[axis.dim] = axis.count(held.spans)
        made[name] = whole.new_empty(shape)
        _move(whole, made[name], held.spans, axis, join=False)
    return made


def _move(whole: torch.Tensor, part: torch.Tensor, spans: Spans, axis: _Axis, *, join: bool) -> None:
    """Copy a shard into its ranges of the whole (`join`), or out of them."""
    at = 0
    for begin, end in spans:
        first, count = axis.range_of(begin, end)
        of_whole, of_part = whole.narrow(axis.dim, first, count), part.narrow(axis.dim, at, count)
        of_whole.copy_(of_part) if join else of_part.copy_(of_whole)
        at += count
