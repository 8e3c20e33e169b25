"""Quantized checkpoint files, presented as dense ones: a weight has its dense name, shape and dtype, and is decoded on
read. Its planes are available under the same name."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vbrt.errors import CheckpointError, FormatError
from vbrt.saves.files.json_file import read_json
from vbrt.saves.files.read_target import Fill, fresh
from vbrt.saves.files.safetensors_file import TensorFile, TensorInfo
from vbrt.saves.published.layouts import LAYOUTS, UNUSED, Facts, Layout, Outline, decoded

__all__ = ["MODELOPT_FILE", "PackedFiles", "PackedWeight", "read_scheme", "scheme_entries"]

MODELOPT_FILE = "hf_quant_config.json"  # beside config.json
_SCHEME_KEYS = ("quantization_config", "compression_config", "quantization")  # of config.json; the last one: MLX's
_MAX_CONFIG_BYTES = 16 << 20
#: errors from malformed configs or tensors that no check refuses earlier
_ODD = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
_HALVES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class PackedWeight:
    """Quantized weight in another library's layout.

    Attributes:
        layout: the layout that it matched.
        outline: shape, dtype and format.
        files: field -> file and tensor name.
    """

    name: str
    layout: Layout
    outline: Outline
    files: Mapping[str, tuple[TensorFile, str]]

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return sum(file.tensors[name].nbytes for file, name in self.files.values())

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the model."""
        outline = self.outline
        one = outline.shape[::-1] if outline.transposed else outline.shape
        return (outline.matrices, *one) if outline.matrices else one

    def plane(self, matrix: int | None = None, fill: Fill = fresh) -> dict[str, Tensor]:
        """Return the coarse plane (of one matrix of a stack). Codes and scales are read into the memory of `fill` if
        the layout keeps bytes unchanged. Raises CheckpointError."""
        try:
            return self.layout.plane(self._fields(matrix, fill if self.layout.as_it_is else fresh), self.outline)
        except (FormatError, *_ODD) as error:
            raise self._damaged(error) from error

    def decoded(self) -> Tensor:
        """Return the decoded weight in the model's shape. Raises CheckpointError."""
        if not self.outline.matrices:
            return self._decoded(None)
        out = torch.empty(self.shape, dtype=self.outline.dtype, device="cpu")
        for matrix in range(self.outline.matrices):
            out[matrix] = self._decoded(matrix)
        return out

    def matrix(self, index: int) -> Tensor:
        """Return one decoded matrix of a stack. Raises CheckpointError."""
        return self._decoded(index) if self.outline.matrices else self._decoded(None)[index]

    def _decoded(self, matrix: int | None) -> Tensor:
        try:
            made = decoded(self.layout, self._fields(matrix, fresh), self.outline)
        except (FormatError, *_ODD) as error:
            raise self._damaged(error) from error
        return made.t().contiguous() if self.outline.transposed else made

    def _fields(self, matrix: int | None, fill: Fill) -> dict[str, Tensor]:
        def read(file: TensorFile, name: str) -> Tensor:
            to = fill if len(file.tensors[name].shape) > 1 else fresh  # scalars are inspected on the host
            return file.read(name, to) if matrix is None else file.read_matrix(name, matrix, to)

        return {field: read(file, name) for field, (file, name) in self.files.items()}

    def _damaged(self, error: Exception) -> CheckpointError:
        (file, name), *_ = self.files.values()
        return CheckpointError(f"{file.path}: {name} ({self.layout.name}): {error}; copy the checkpoint again")


class PackedFiles:
    """Tensors of a checkpoint with quantized weights.

    Attributes:
        files: the files of the tensors.
        weights: the quantized ones, by the model's names, or by the names that its conversions start from.
        unused: names of tensors without a use.

    Raises:
        CheckpointError: damaged, or of a layout that vbrt does not read.
    """

    def __init__(self, path: Path, files: Iterable[TensorFile], scheme: Mapping[str, Any], dtype: Any) -> None:
        self.path, self._scheme = path, scheme
        self.files = list(files)
        self._found: dict[str, TensorFile] = {}
        for file in self.files:
            for name in file.tensors:
                if name in self._found:
                    raise CheckpointError(
                        f"{path}: {name} is in {self._found[name].path.name} and in {file.path.name}; remove "
                        "the one that does not belong to this checkpoint"
                    )
                self._found[name] = file
        self._dtype, self._named = dtype or self._usual_dtype(), dtype
        self.weights: dict[str, PackedWeight] = {}
        self._taken: set[str] = set()
        for layout in LAYOUTS:
            self._find(layout)
        spare = (name for name in self._found if name not in self._taken and name.endswith(UNUSED))
        self.unused = tuple(spare) if self.weights else ()
        self._check_rest()

    def raw(self) -> dict[str, Tensor]:
        """Return all tensors as they are in the files, under their names there, memory-mapped where possible. Raises
        CheckpointError: they cannot be read."""
        return {name: file.map(name) for name, file in self._found.items()}

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of the files."""
        return {key: text for file in self.files for key, text in file.metadata.items()}

    @property
    def remarks(self) -> tuple[str, ...]:
        """User-facing remarks on tensors that are not quantized."""
        plain = [name for name in self.tensors if name not in self.weights]
        cast = [name for name in plain if self._found[name].tensors[name].dtype is not self.tensors[name].dtype]
        kinds = (
            (self.unused, "scales of activations and caches are not used"),
            (cast, f"tensors become {self._named}, the dtype of the config"),
        )
        return tuple(f"{len(names)} {what}, such as {names[0]}" for names, what in kinds if names)

    def _usual_dtype(self) -> torch.dtype:
        counts = Counter(file.tensors[name].dtype for name, file in self._found.items())
        return max(_HALVES, key=lambda dtype: counts[dtype])

    def _find(self, layout: Layout) -> None:
        lead = next(iter(layout.fields.values()))
        for name in [name for name in self._found if name.endswith(lead) and name not in self._taken]:
            base = name.removesuffix(lead)
            names = {field: base + suffix for field, suffix in layout.fields.items() if base + suffix in self._found}
            if set(layout.fields) - set(layout.optional) <= set(names):
                self._take(layout, base, names)

    def _take(self, layout: Layout, base: str, names: Mapping[str, str]) -> None:
        files = {field: (self._found[name], name) for field, name in names.items()}
        infos = {field: file.tensors[name] for field, (file, name) in files.items()}
        facts = Facts(
            infos, self._scheme, self._dtype, lambda field: files[field][0].read(files[field][1]), self._metadata(base)
        )
        if not layout.fits(facts):
            return
        first = next(iter(names.values()))
        try:
            outline = layout.outline(facts)
        except (FormatError, *_ODD) as error:
            raise CheckpointError(f"{self._found[first].path}: {first} ({layout.name}): {error}") from error
        weight = base + layout.weight
        if weight in self.weights or (weight in self._found and weight not in names.values()):
            raise CheckpointError(f"{self.path}: {weight} appears twice, also as {first}; expected one of them")
        self.weights[weight] = PackedWeight(weight, layout, outline, files)
        self._taken.update(names.values())

    def _metadata(self, base: str) -> Mapping[str, Any]:
        """Return a weight's metadata from a file's header, as JSON (torchao)."""
        for file in dict.fromkeys(self._found.values()):
            text = file.metadata.get(f"{base}.weight")
            if text is not None:
                try:
                    made = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise CheckpointError(f"{file.path}: metadata of {base}.weight: not JSON ({error})") from error
                return made if isinstance(made, dict) else {}
        return {}

    def _check_rest(self) -> None:
        """Refuse quantized tensors that match no layout."""
        rest = [name for name in self._found if name not in self._taken and name.endswith(_SIGNS)]
        if rest:
            method = self._scheme.get("quant_method", "unknown")
            kind = self._metadata(min(rest).partition("._weight_")[0]).get("_type")
            raise CheckpointError(
                f"{self.path}: {len(rest)} tensors of quantized weights are of no layout that vbrt reads "
                f"(quant_method {method!r}{f', {kind}' if kind else ''}): {', '.join(sorted(rest)[:3])}; known are "
                f"{', '.join(layout.name for layout in LAYOUTS)}"
            )

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors; quantized weights with their decoded shape and dtype."""
        out = {name: TensorInfo(name, w.outline.dtype, w.shape) for name, w in self.weights.items()}
        dropped = self._taken.union(self.unused)
        others = {name: file.tensors[name] for name, file in self._found.items() if name not in dropped}
        return out | {name: replace(info, dtype=self._dtype_of(info)) for name, info in others.items()}

    def _dtype_of(self, info: TensorInfo) -> torch.dtype:
        """Return the dtype of an unquantized tensor: the config's for 16-bit floats, which a library may have stored in
        another dtype than the compute dtype of the quantized weights."""
        cast = self.weights and self._named is not None and info.dtype in (torch.bfloat16, torch.float16)
        return self._named if cast else info.dtype

    def read(self, name: str, fill: Fill = fresh) -> Tensor:
        """Read a tensor, decoded if quantized, else into the memory of `fill`. Raises CheckpointError."""
        if name in self.weights:
            return self.weights[name].decoded()
        return self._found[name].read(name, fill).to(self.tensors[name].dtype)

    def read_matrix(self, name: str, index: int) -> Tensor:
        """Read one matrix of a stack, decoded. Raises CheckpointError."""
        if name in self.weights:
            return self.weights[name].matrix(index)
        return self._found[name].read_matrix(name, index).to(self.tensors[name].dtype)

    def map(self, name: str) -> Tensor:
        """Return a tensor, decoded or memory-mapped. Raises CheckpointError."""
        if name in self.weights:
            return self.weights[name].decoded()
        return self._found[name].map(name).to(self.tensors[name].dtype)


#: suffixes of quantized weights; such a tensor without a layout would be lost
_SIGNS = (
    ".qweight",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight.absmax",
    ".SCB",
    "_blocks",
    "._weight_qdata",
    "._weight_zero_point",
    "._weight_scale_and_zero",
    "._weight_act_pre_scale",
    ".W_q",
)


def read_scheme(directory: Path) -> tuple[dict[str, Any], torch.dtype | None]:
    """Return a checkpoint's quantization config (empty for a dense one), and the dtype in its config.

    Raises:
        CheckpointError: a config is not valid JSON.
    """
    config = _json(directory / "config.json")
    scheme = next((config[key] for key in _SCHEME_KEYS if config.get(key)), None)
    if not isinstance(scheme, dict):
        modelopt = _json(directory / MODELOPT_FILE).get("quantization")
        scheme = {"quant_method": "modelopt", **modelopt} if isinstance(modelopt, dict) else {}
    text = config.get("dtype") or config.get("torch_dtype")
    dtype = getattr(torch, text, None) if isinstance(text, str) else None
    return scheme, dtype if dtype in _HALVES else None


def scheme_entries(directory: Path) -> dict[str, Any]:
    """Return the entries of config.json that say how weights are quantized. Raises CheckpointError: not valid JSON."""
    config = _json(directory / "config.json")
    return {key: config[key] for key in _SCHEME_KEYS if key in config}


def _json(file: Path) -> dict[str, Any]:
    data = read_json(file, _MAX_CONFIG_BYTES, missing={})
    return data if isinstance(data, dict) else {}
