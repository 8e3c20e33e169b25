"""Planes of weights that ranks hold parts of: joined to those of the whole weight, and cut for other ranks.

Codes and scales of a block are columns of their own, so parts that are cut between blocks are put together, and cut
anew, as they are: no block is encoded again. The lists of a fine plane follow the order of the whole weight's elements;
they are made again, from the weight that the parts restore.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vbrt.config import FORMATS
from vbrt.formats import WeightPlanes, get_format
from vbrt.kernels import EXACT, resolve
from vbrt.residency.weight_site import Shard

__all__ = ["Held", "Matrix", "cut_between_blocks", "join_parts", "planes_of_part"]

Fields = Mapping[str, torch.Tensor]
Spans = Sequence[tuple[int, int]]
_BY_PLACE = ("codes", "scales")  # fields of a coarse plane that have places for weights; others are of the whole weight


@dataclass(frozen=True, slots=True)
class Matrix:
    """The whole matrix (N, K) that parts are of, and how it is held; `turned`: files of dense weights have (K, N)."""

    shape: tuple[int, int]
    dtype: torch.dtype
    format: str
    fine: bool
    turned: bool = False

    @property
    def dense(self) -> bool:
        """True if files have the weight's own numbers."""
        return FORMATS[self.format].lossless


@dataclass(frozen=True, slots=True)
class Held:
    """Which part of a matrix is held: ranges (begin, end) along `dim` of (N, K)."""

    dim: int
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, shard: Shard | None, index: int | None = None) -> "Held | None":
        """Return that of a rank; None for the whole."""
        return None if shard is None else cls(shard.dim, tuple(shard.spans(0, index)))

    @property
    def size(self) -> int:
        """Rows or columns in all."""
        return sum(end - begin for begin, end in self.spans)


def cut_between_blocks(matrix: Matrix, held: Held | None) -> bool:
    """True if no block of codes is cut in two."""
    if held is None or held.dim == 0 or matrix.dense:
        return True
    block, k = FORMATS[matrix.format].block, matrix.shape[1]
    return all(begin % block == 0 and (end % block == 0 or end == k) for begin, end in held.spans)


# -- whole and part ---------------------------------------------------------------------------------------------------


def join_parts(matrix: Matrix, parts: Sequence[tuple[Held | None, Mapping[str, Fields]]]) -> dict[str, Fields]:
    """Return the planes of a whole matrix: "coarse" or "dense", and "weight" with the restored numbers [N, K] in the
    place of "fine".

    Args:
        parts: what each holds, and its planes; they cover the matrix, and are cut between blocks.
    """
    if parts[0][0] is None:
        _, planes = parts[0]
        return _with_weight(matrix, planes, matrix.shape)
    opened = [(held, _with_weight(matrix, planes, _shape_of(matrix, held))) for held, planes in parts]
    return {plane: _joined(matrix, plane, opened) for plane in opened[0][1]}


def planes_of_part(matrix: Matrix, whole: Mapping[str, Fields], held: Held | None) -> dict[str, Fields]:
    """Return the planes of a part of a matrix, as the format encodes them, of what `join_parts` gave."""
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
        merge = resolve("decode_weight", "auto", fine["low"].device, EXACT)
        made["weight"] = {"weight": merge(WeightPlanes(matrix.format, shape, matrix.dtype, coarse, fine))}
    return made


class _Axis(NamedTuple):
    """A dimension of a field along which a matrix is cut: places of `per` weights, in whole blocks."""

    dim: int
    per: int
    block: int

    def range_of(self, begin: int, end: int) -> tuple[int, int]:
        """Return the first place of a range of weights, and how many there are."""
        last = -(-end // self.block) * self.block // self.per
        return begin // self.per, last - begin // self.per

    def count(self, spans: Spans) -> int:
        """Return how many places ranges of weights have."""
        return sum(self.range_of(begin, end)[1] for begin, end in spans)


def _axis(matrix: Matrix, plane: str, name: str, held: Held) -> _Axis | None:
    """Return the axis of a field; None for one that a matrix has once, the same on all ranks."""
    if plane != "coarse":
        return _Axis(1 - held.dim if matrix.turned and plane == "dense" else held.dim, 1, 1)
    if name not in _BY_PLACE:
        return None
    block, per_byte = FORMATS[matrix.format].block, 8 // FORMATS[matrix.format].bits
    return _Axis(0, 1, 1) if held.dim == 0 else _Axis(1, per_byte if name == "codes" else block, block)


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
    """Copy a part into its ranges of the whole (`join`), or out of them."""
    at = 0
    for begin, end in spans:
        first, count = axis.range_of(begin, end)
        of_whole, of_part = whole.narrow(axis.dim, first, count), part.narrow(axis.dim, at, count)
        of_whole.copy_(of_part) if join else of_part.copy_(of_whole)
        at += count
