"""Checkpoint renaming and conversion: a model's names and tensors from a checkpoint's, by transformers' own rules.

The rules and operations are those of `from_pretrained`. Here they run lazily, one model tensor at a time when its value
is needed, and on meta tensors beforehand to find its shape and dtype.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from vbrt.errors import CheckpointError
from vbrt.libraries import transformers_api
from vbrt.saves.files.read_target import Fill, fresh
from vbrt.saves.files.safetensors_file import TensorInfo

__all__ = ["Entry", "TensorSource", "entries_for", "merges_experts", "own_dtypes"]


class TensorSource(Protocol):
    """Tensors in files by name: a `TensorFile`, or quantized weights that are decoded on read."""

    path: Path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors by name."""

    def read(self, name: str, fill: Fill = fresh) -> torch.Tensor:
        """Read a tensor into the memory that `fill` provides, by default fresh CPU memory."""

    def read_matrix(self, name: str, index: int) -> torch.Tensor:
        """Read one index of a tensor's first dimension."""

    def map(self, name: str) -> torch.Tensor:
        """Return a tensor memory-mapped from its file, where possible."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Checkpoint tensor under the model's name. `read` copies it into fresh CPU memory; `map` memory-maps its file
    where possible.

    Attributes:
        land: like `read`, into the memory that a `Fill` provides; None if it must be in CPU memory first.
        matrix: reads one matrix of a stack; None if only the whole stack can be read.
        rows: source names per matrix, in the order in which their rows are concatenated; a single one-name row for a
            tensor taken as it is. Empty for any other conversion.
        sources: all names in the files that a conversion reads.
    """

    info: TensorInfo
    read: Callable[[], torch.Tensor]
    map: Callable[[], torch.Tensor]
    matrix: Callable[[int], torch.Tensor] | None = None
    rows: tuple[tuple[str, ...], ...] = ()
    sources: tuple[str, ...] = ()
    land: Callable[[Fill], torch.Tensor] | None = None


def entries_for(path: Path, model: nn.Module, files: Iterable[TensorSource]) -> dict[str, Entry]:
    """Return entries by model name; tensors that the model lacks are under the names that they would have.

    Raises CheckpointError: duplicate names, or a conversion that fails.
    """
    found: dict[str, TensorSource] = {}
    for file in files:
        for name in file.tensors:
            if name in found:
                raise CheckpointError(
                    f"{path}: {name} is in {found[name].path.name} and in {file.path.name}; remove "
                    "the one that does not belong to this checkpoint"
                )
            found[name] = file
    rules = _rules_for(model)
    if rules is None:
        return {name: _plain(file, name) for name, file in found.items()}
    return _converted(path, model, found, rules)


def _plain(file: TensorSource, name: str) -> Entry:
    matrix = partial(file.read_matrix, name) if len(file.tensors[name].shape) == 3 else None
    read = partial(file.read, name)
    return Entry(file.tensors[name], read, partial(file.map, name), matrix, ((name,),), land=read)


@dataclass(frozen=True, slots=True)
class _Rules:
    """Conversions that transformers applies to names and tensors of a model's checkpoints."""

    rename: Callable[[str], tuple[str, str | None]]
    converters: Mapping[str, Any]  # by source pattern
    order: Callable[[str], Any]


def _rules_for(model: nn.Module) -> _Rules | None:
    """Return a transformers model's rules; None for other models and for versions without rules."""
    if not transformers_api.is_pretrained(model) or not transformers_api.CHECKPOINTS.is_there():
        return None
    mapping = transformers_api.get_model_conversion_mapping(model)
    renamings, converters = transformers_api.rules_of(mapping)
    names = model.state_dict(keep_vars=True)

    def rename(name: str) -> tuple[str, str | None]:
        prefix = model.base_model_prefix
        new, pattern = transformers_api.rename_source_key(name, renamings, converters, prefix, names)
        if new not in names and name in names:
            return transformers_api.rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=names)
        return new, pattern

    return _Rules(
        rename,
        {pattern: rule for rule in converters for pattern in rule.source_patterns},
        transformers_api.dot_natural_key,
    )


class _AsBuilt:
    """A model as conversions see it: with outlines of the parameters that it was built with, which they ask for shapes
    and dtypes, and which layers in the tiers lack until they are filled."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        named = model.named_parameters(remove_duplicate=False)
        self._outlines = {name: torch.empty_like(parameter, device="meta") for name, parameter in named}

    def get_parameter(self, name: str) -> torch.Tensor:
        """Return the outline of a parameter. Raises KeyError: there is none of this name."""
        return self._outlines[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


_STACKED = [("MergeModulelist", 0)]


@dataclass(slots=True)
class _Group:
    """Source tensors of one conversion rule, which makes one or more model tensors; `first` names one of them."""

    path: Path
    model: _AsBuilt
    first: str
    rule: Any
    sources: list[tuple[str, str, TensorSource]] = field(default_factory=list)  # (pattern, name, file)

    def entries(self) -> dict[str, Entry]:
        """Return the model tensors that the conversion makes."""
        out = self._convert(_outline, self.sources)
        return {name: self._entry(name, tensor) for name, tensor in out.items()}

    def _entry(self, name: str, like: torch.Tensor) -> Entry:
        read = partial(self._read, name, like)
        experts = self._experts(name, like)
        return Entry(
            TensorInfo(name, like.dtype, tuple(like.shape)),
            read,
            read,
            partial(self._read_expert, name, experts) if experts else None,
            self._rows(experts),
            tuple(name for _, name, _ in self.sources),
        )

    def _experts(self, name: str, like: torch.Tensor) -> list[list[Any]]:
        """Return the sources of each matrix of a stack; empty if the files do not hold the matrices separately."""
        by_pattern: dict[str, list[Any]] = {}
        for source in self.sources:
            by_pattern.setdefault(source[0], []).append(source)
        counts = {len(sources) for sources in by_pattern.values()}
        if not merges_experts(self.rule.operations) or counts != {like.shape[0]}:
            return []
        experts = [list(sources) for sources in zip(*by_pattern.values(), strict=True)]
        return experts if self._convert(_outline, experts[0])[name].shape == (1, *like.shape[1:]) else []

    def _rows(self, experts: list[list[Any]]) -> tuple[tuple[str, ...], ...]:
        """Return `Entry.rows`, in the rule's order."""
        steps = [(type(step).__name__, getattr(step, "dim", None)) for step in self.rule.operations]
        if steps == [("Concatenate", 0)]:
            experts = [self.sources]
        elif steps not in (_STACKED, [*_STACKED, ("Concatenate", 1)]):
            return ()
        order = {pattern: place for place, pattern in enumerate(self.rule.source_patterns)}
        return tuple(
            tuple(name for _, name, _ in sorted(sources, key=lambda source: order[source[0]])) for sources in experts
        )

    def _read_expert(self, name: str, experts: list[list[Any]], expert: int) -> torch.Tensor:
        return self._convert(_value, experts[expert])[name][0]

    def _read(self, name: str, wanted: torch.Tensor) -> torch.Tensor:
        tensor = self._convert(_value, self.sources)[name]
        if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
            raise self._error(f"{name} is {tuple(tensor.shape)} of {tensor.dtype}")
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor.contiguous()

    @torch.no_grad()
    def _convert(
        self, tensor_of: Callable[[TensorSource, str], torch.Tensor], sources: Iterable[tuple[str, str, TensorSource]]
    ) -> dict[str, torch.Tensor]:
        rule = copy.deepcopy(self.rule)
        for pattern, name, file in sources:
            rule.add_tensor(self.first, name, pattern, tensor_of(file, name))
        try:
            out = rule.convert(self.first, model=self.model, config=self.model.config)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise self._error(str(error).partition("\n")[0] or type(error).__name__) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in out.items()}

    def _error(self, why: str) -> CheckpointError:
        steps = ", ".join(type(step).__name__ for step in self.rule.operations)
        names = ", ".join(name for _, name, _ in self.sources[:2]) + (", ..." if len(self.sources) > 2 else "")
        return CheckpointError(
            f"{self.path}: {self.first} is made by transformers of {len(self.sources)} tensors "
            f"({names}) by {steps}, which fails here: {why}. Where from_pretrained() loads it, give "
            "that model to vbrt.wrap"
        )


def _outline(file: TensorSource, name: str) -> torch.Tensor:
    return torch.empty(file.tensors[name].shape, dtype=file.tensors[name].dtype, device="meta")


def _value(file: TensorSource, name: str) -> torch.Tensor:
    return file.read(name)


def merges_experts(operations: Sequence[Any]) -> bool:
    """True if transformers' operations stack expert matrices and then treat each matrix independently."""
    first, *others = operations or [None]
    return (type(first).__name__, getattr(first, "dim", None)) == _STACKED[0] and all(map(_keeps_apart, others))


def _keeps_apart(operation: Any) -> bool:
    if type(operation).__name__ == "Concatenate":
        return operation.dim > 0
    return type(operation).__name__ == "Transpose" and 0 not in (operation.dim0, operation.dim1)


def _converted(path: Path, model: nn.Module, found: Mapping[str, TensorSource], rules: _Rules) -> dict[str, Entry]:
    groups: dict[str, _Group] = {}
    as_built = _AsBuilt(model)
    origin: dict[str, str] = {}
    out: dict[str, Entry] = {}
    for name in sorted(found, key=rules.order):  # natural sort: experts in numeric order
        new, pattern = rules.rename(name)
        if pattern is not None:
            group = groups.setdefault(new, _Group(path, as_built, new, rules.converters[pattern]))
            group.sources.append((pattern, name, found[name]))
            continue
        _check_new(path, origin, new, name)
        out[new] = _plain(found[name], name)
    for group in groups.values():
        for new, entry in group.entries().items():
            _check_new(path, origin, new, group.sources[0][1])
            out[new] = entry
    return out


def _check_new(path: Path, origin: dict[str, str], new: str, name: str) -> None:
    if new in origin:
        raise CheckpointError(f"{path}: {origin[new]} and {name} are both {new} for this model; expected one of them")
    origin[new] = name


def own_dtypes(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return parameters that a transformers model keeps in a dtype other than that of most weights, by name.

    Args:
        model: as built, before it takes any dtype from files.
        dtype: of most weights in the files.
    """
    if not transformers_api.is_pretrained(model):
        return {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    sizes: dict[torch.dtype, int] = {}
    for parameter in parameters.values():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    usual = max(sizes, key=lambda held: sizes[held], default=dtype)
    own = transformers_api.own_dtypes_of(model, dtype)
    found = {name: p.dtype for name, p in parameters.items() if p.dtype is not usual and p.dtype.is_floating_point}
    return found | {name: wanted for name in parameters if (wanted := own(name)) is not None}
