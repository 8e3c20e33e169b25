"""GGUF files as checkpoints: quantized rows of matching formats go into pages unchanged, others are decoded.

A GGUF file names no compute dtype: weights are decoded to the dtypes of the model's parameters, by `gguf.dequantize` a
few rows at a time, rounded once.
"""

import importlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.errors import CheckpointError, FormatError
from vbrt.formats.ggml import GGML_PLANES, repack_gguf
from vbrt.saves.common.renaming import Entry
from vbrt.saves.files.gguf_file import GGUFTensor, gguf_library, open_shards
from vbrt.saves.files.read_target import Fill, fresh
from vbrt.saves.files.safetensors_file import TensorInfo
from vbrt.saves.published.dense_checkpoint import DenseCheckpoint
from vbrt.saves.published.gguf_rules import Recipe, RowOrder, recipes_for, rows_of
from vbrt.saves.published.layouts import Outline
from vbrt.saves.published.published_checkpoint import Description, PublishedCheckpoint, WeightKind, without_kernels

__all__ = ["GGUFTensors", "describe_gguf", "gguf_checkpoint"]

#: types that are torch dtypes
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_UNKNOWN = "no format of vbrt has such blocks"
_NUMBER = re.compile(r"\d+")
_CHUNK = 1 << 22  # weights decoded at a time
#: tensors that a transformers model takes from its config or computes
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight", ".attn_rot_embd.weight")


def gguf_checkpoint(tensors: "GGUFTensors") -> DenseCheckpoint:
    """Return the source of a GGUF file."""
    if not tensors.is_quantized:
        return DenseCheckpoint(tensors.path, tensors.files, tensors.entries)
    return PublishedCheckpoint(tensors.path, tensors, tensors.files, tensors.entries)


def describe_gguf(path: Path) -> Description:
    """Describe a GGUF file from its header. Raises CheckpointError."""
    tensors = GGUFTensors(path)
    counts: Counter[str] = Counter(info.type for info in tensors.infos.values())
    nbytes: Counter[str] = Counter()
    for info in tensors.infos.values():
        nbytes[info.type] += info.nbytes
    kinds = tuple(_kind_of(type, counts[type], n) for type, n in nbytes.most_common())
    return Description("", kinds, container=f"GGUF ({tensors.architecture})")


def _kind_of(type: str, count: int, nbytes: int) -> WeightKind:
    if type in _PLAIN:
        return WeightKind(f"GGUF {type}", "dense", count, nbytes)
    plane = GGML_PLANES.get(type)
    becomes, why = (plane.format, without_kernels(plane.format)) if plane else ("decoded", _UNKNOWN)
    return WeightKind(f"GGUF {type}", becomes, count, nbytes, why)


@dataclass(frozen=True, slots=True)
class _Named:
    name: str


class GGUFTensors:
    """Tensors of a GGUF file, or of all parts of a split one.

    Attributes:
        path: of the first part.
        architecture: llama.cpp's name of the model family.
        weights: after `entries`, the quantized weights by model name; by file name if transformers does more than
            permute rows.
        unused: after `entries`, names of tensors without a use.

    Raises CheckpointError: as `open_shards`, no architecture, or types that cannot be decoded.
    """

    def __init__(self, path: Path) -> None:
        self.files = open_shards(path)
        self.path = self.files[0].path
        self.architecture = self.files[0].text("general.architecture")
        self._where = {name: file for file in self.files for name in file.tensors}
        self.weights: dict[str, GGUFWeight | _Whole] = {}
        self._orders: dict[Any, RowOrder | None] = {}
        self.unused: tuple[str, ...] = ()
        for type in {info.type for info in self.infos.values()} - {*_PLAIN, *GGML_PLANES}:
            _check_decodes(self.path, type)

    @cached_property
    def infos(self) -> dict[str, GGUFTensor]:
        """Header entries, by file name."""
        return {name: file.tensors[name] for name, file in self._where.items()}

    @property
    def remarks(self) -> tuple[str, ...]:
        """User-facing remarks on tensors that are not quantized."""
        if not self.unused:
            return ()
        return (f"{len(self.unused)} tensors of rotary frequencies are left to the config, such as {self.unused[0]}",)

    @property
    def is_quantized(self) -> bool:
        """True if some tensors are block-quantized."""
        return any(info.type not in _PLAIN for info in self.infos.values())

    @property
    def dtype(self) -> torch.dtype:
        """Default dtype for a config that names none: the file's own without quantized weights, else float32, as in
        transformers."""
        held = {info.type for info in self.infos.values()}
        halves = [_PLAIN[type] for type in ("BF16", "F16") if type in held]
        return halves[0] if halves and not self.is_quantized else torch.float32

    def entries(self, model: nn.Module) -> dict[str, Entry]:
        """Return the tensors by model name, in the model's dtypes. Raises CheckpointError."""
        recipes = recipes_for(self.path, self.architecture, model, self.infos)
        used = {name for recipe in recipes.values() for name in recipe.sources}
        left = [name for name in self.infos if name not in used]
        self.unused = tuple(name for name in left if name.endswith(_COMPUTED))
        if len(left) > len(self.unused):
            others = sorted(set(left).difference(self.unused))
            raise CheckpointError(
                f"{self.path}: {len(others)} tensors of it ({self.architecture}) do not belong to a "
                f"{type(model).__name__}: {', '.join(others[:3])}; expected a file of this model, or its own model's "
                "config.json next to it"
            )
        likes = model.state_dict(keep_vars=True)
        self.weights, self._orders = {}, {}
        return {name: self._entry(recipe, likes[name]) for name, recipe in recipes.items()}

    def _entry(self, recipe: Recipe, like: Tensor) -> Entry:
        infos = {name: self.infos[name] for name in recipe.sources}
        order = self._order_of(recipe)
        if order is None:
            shape = tuple(like.shape) if sum(map(_count, infos.values())) == like.numel() else _only(infos).shape
            read = partial(self._converted, recipe, like.dtype, shape)
            self.weights |= {name: _Whole(info, like) for name, info in infos.items() if info.type not in _PLAIN}
            return Entry(TensorInfo(recipe.name, like.dtype, shape), read, read, None, (), recipe.sources)
        weight = GGUFWeight(self, recipe, order, like.dtype)
        if any(info.type not in _PLAIN for info in infos.values()):
            self.weights[recipe.name] = weight
        info = TensorInfo(recipe.name, like.dtype, weight.shape)
        matrix = weight.matrix if weight.outline.matrices else None
        return Entry(info, weight.decoded, weight.decoded, matrix, ((recipe.name,),), recipe.sources)

    def _order_of(self, recipe: Recipe) -> RowOrder | None:
        """Return a recipe's row permutation, cached for the same weight of other layers; None if it is more than
        one."""
        shapes = {name: self.infos[name].shape for name in recipe.sources}
        key = tuple((_NUMBER.sub("#", name), shapes.get(name)) for name in (recipe.name, *recipe.sources))
        if key not in self._orders:
            self._orders[key] = rows_of(recipe, shapes)
        return self._orders[key]

    def _converted(self, recipe: Recipe, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Decode a tensor's sources whole, and run transformers' operations on them."""
        infos = {name: self.infos[name] for name in recipe.sources}
        values = {name: self.decoded_rows(name, 0, info.rows).view(info.shape) for name, info in infos.items()}
        try:
            made = recipe.run(values)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise CheckpointError(f"{self.path}: {recipe.name} cannot be made of {recipe.sources}: {error}") from error
        if tuple(made.shape) != shape:
            raise CheckpointError(f"{self.path}: {recipe.name} is {tuple(made.shape)} in the file; expected {shape}")
        return made.to(dtype).clone()

    def read_rows(self, name: str, first: int, count: int) -> Tensor:
        """Read rows of a file tensor as bytes. Raises CheckpointError."""
        return self._where[name].rows(name, first, count)

    def decoded_rows(self, name: str, first: int, count: int) -> Tensor:
        """Read and decode rows of a file tensor, float32 [count, K]. Raises CheckpointError."""
        return _decoded(self.read_rows(name, first, count), self.infos[name].type)


def _count(info: GGUFTensor) -> int:
    return prod(info.shape)


def _only(infos: Mapping[str, GGUFTensor]) -> GGUFTensor:
    return next(iter(infos.values()))


def _check_decodes(path: Path, type: str) -> None:
    library, numpy = gguf_library(), importlib.import_module("numpy")
    kind = library.GGMLQuantizationType[type]
    try:
        library.dequantize(numpy.zeros((1, library.GGML_QUANT_SIZES[kind][1]), numpy.uint8), kind)
    except NotImplementedError as error:
        raise CheckpointError(f"{path}: tensors of type {type}, which the package gguf does not decode") from error


def _decoded(rows: Tensor, type: str) -> Tensor:
    """Decode rows' bytes [R, nbytes] to float32 [R, K]."""
    if type in _PLAIN:
        return rows.view(_PLAIN[type]).float()
    library: ModuleType = gguf_library()
    with importlib.import_module("numpy").errstate(all="ignore"):
        return torch.from_numpy(library.dequantize(rows.numpy(), library.GGMLQuantizationType[type]))


class _Whole:
    """Quantized weight that transformers does not merely permute by rows: it is decoded whole."""

    def __init__(self, info: GGUFTensor, like: Tensor) -> None:
        self.layout = _Named(f"GGUF {info.type}")
        self.outline = Outline(
            info.shape, like.dtype, why=f"{self.layout.name}: transformers does more than permute its rows"
        )


class GGUFWeight:
    """Model weight made of rows of GGUF tensors: the counterpart of `PackedWeight` for safetensors.

    Attributes:
        layout: its `name` is shown to users.
        outline: shape, dtype and format.
    """

    def __init__(self, tensors: GGUFTensors, recipe: Recipe, order: RowOrder, dtype: torch.dtype) -> None:
        self._tensors, self._order, self.name = tensors, order, recipe.name
        infos = [tensors.infos[name] for name in recipe.sources]
        ends = list(accumulate(info.rows for info in infos))
        self._parts = [(info, end - info.rows, end) for info, end in zip(infos, ends, strict=True)]
        types = list(dict.fromkeys(info.type for info in infos))
        numbers = order.numbers
        self.layout = _Named(f"GGUF {' and '.join(types)}")
        plane = GGML_PLANES.get(types[0]) if len(types) == 1 else None
        self.outline = Outline(
            (numbers.shape[-1], infos[0].shape[-1]),
            dtype,
            plane.format if plane else "",
            matrices=len(numbers) if numbers.ndim == 2 else 0,
            transposed=order.transposed,
            why="" if plane else f"{self.layout.name}: {_UNKNOWN}",
        )

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return sum(info.nbytes for info, _, _ in self._parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the model."""
        one = self.outline.shape[::-1] if self.outline.transposed else self.outline.shape
        return (self.outline.matrices, *one) if self.outline.matrices else one

    def plane(self, matrix: int | None = None, fill: Fill = fresh) -> dict[str, Tensor]:
        """Return the coarse plane (of one matrix of a stack) with its rows in the model's order. Raises
        CheckpointError."""
        numbers = self._order.numbers if matrix is None else self._order.numbers[matrix]
        info = self._parts[0][0]
        parts = [(places, rows) for _, places, rows in self._gathered(numbers)]
        if len(parts) == 1:
            ((_, out),) = parts
        else:
            out = torch.empty(len(numbers), info.row_nbytes, dtype=torch.uint8, device="cpu")
            for places, rows in parts:
                out[places] = rows
        try:
            return repack_gguf(out, self.outline.shape, info.type).coarse
        except FormatError as error:
            raise CheckpointError(f"{self._tensors.path}: {info.name}: {error}; copy the file again") from error

    def decoded(self) -> Tensor:
        """Return the decoded weight in the model's shape. Raises CheckpointError."""
        if not self.outline.matrices:
            return self._decoded(self._order.numbers)
        out = torch.empty(self.shape, dtype=self.outline.dtype, device="cpu")
        for matrix, numbers in enumerate(self._order.numbers):
            out[matrix] = self._decoded(numbers)
        return out

    def matrix(self, index: int) -> Tensor:
        """Return one decoded matrix of a stack. Raises CheckpointError."""
        return self._decoded(self._order.numbers[index])

    def _decoded(self, numbers: Tensor) -> Tensor:
        out = torch.empty(self.outline.shape, dtype=self.outline.dtype, device="cpu")
        step = max(1, _CHUNK // out.shape[1])
        for begin in range(0, len(numbers), step):
            part = out[begin : begin + step]
            for info, places, rows in self._gathered(numbers[begin : begin + step]):
                values = _decoded(rows, info.type)
                if len(places) == len(part):  # all rows, in order: no scatter
                    part.copy_(values)
                else:
                    part[places] = values.to(out.dtype)
        return out.t().contiguous() if self.outline.transposed else out

    def _gathered(self, numbers: Tensor) -> Iterator[tuple[GGUFTensor, Tensor, Tensor]]:
        """Yield, for each source tensor of these rows, its rows' positions among them and their bytes."""
        for info, begin, end in self._parts:
            places = ((numbers >= begin) & (numbers < end)).nonzero().squeeze(1)
            if not len(places):
                continue
            own = numbers[places] - begin
            first, last = int(own.min()), int(own.max())
            rows = self._tensors.read_rows(info.name, first, last + 1 - first)
            in_order = len(own) == len(rows) and bool((own.diff() == 1).all())
            yield info, places, rows if in_order else rows[own - first]
