"""GGUF name mapping and conversion rules, transformers' own from `from_pretrained(gguf_file=...)`.

llama.cpp has its own names, and its converter changes weights in ways that a loader must undo: it permutes rows of
Llama's query and key projections, adds one to Gemma's norms, and splits an expert's gate and up projections.
`Recipe.run` applies transformers' operations to values. Their effect on rows is found by probing with numbered rows
(`rows_of`): where rows come out whole, in any order, the bytes of quantized rows are permuted without decoding.
"""

import copy
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.errors import CheckpointError
from vbrt.libraries import transformers_api
from vbrt.libraries.probe import version_of
from vbrt.saves.published.gguf_experts import expert_sources

__all__ = ["Recipe", "RowOrder", "recipes_for", "rows_of"]

_COLUMNS = 3  # minimum for numbered rows: enough to tell a row from a column
_NUMBERS, _MAX_NUMBERS = 1 << 24, 1 << 26  # size of numbered rows: usual, and maximum where nothing less works
#: errors of operations that fail on numbered rows or unusual values
_ODD = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class Recipe:
    """How to make a model tensor of file tensors.

    Attributes:
        name: in the model.
        sources: names in the file.
        run: makes the value of the sources' values, which have their shapes in the file.
    """

    name: str
    sources: tuple[str, ...]
    run: Callable[[Mapping[str, Tensor]], Tensor]


def recipes_for(path: Path, architecture: str, model: nn.Module, names: Iterable[str]) -> dict[str, Recipe]:
    """Return recipes for the model's tensors, by model name.

    Args:
        path: for errors.
        architecture: `general.architecture` of the file.
        model: of transformers; it may be on the meta device.
        names: of the file's tensors; unused ones are in no recipe.

    Raises:
        CheckpointError: not a transformers model, or an architecture that transformers cannot read from GGUF.
    """
    if not transformers_api.is_pretrained(model):
        raise CheckpointError(
            f"{path}: GGUF has names of llama.cpp, which only transformers translates; expected one of its models, not "
            f"{type(model).__name__}"
        )
    names = list(names)
    try:
        rules = _newer_rules(architecture, model)
        found = _of_rules(rules, model, names) if rules else _of_processors(architecture, model, names)
        return found | {made[0]: Recipe(*made) for made in expert_sources(model, names)}
    except (NotImplementedError, *_ODD) as error:
        raise CheckpointError(
            f"{path}: transformers {version_of('transformers')} does not read GGUF files of architecture "
            f"{architecture!r} into a {type(model).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error


# -- architectures with conversion rules in transformers --------------------------------------------------------------


def _newer_rules(architecture: str, model: nn.Module) -> list[Any] | None:
    """Return an architecture's conversion rules; None if this version of transformers has none."""
    return transformers_api.newer_gguf_rules(architecture, model.config)


def _of_rules(rules: list[Any], model: nn.Module, names: Iterable[str]) -> dict[str, Recipe]:
    renamings, converters = transformers_api.rules_of(rules)
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    found: dict[str, list[tuple[str | None, str]]] = {}
    known = model.state_dict(keep_vars=True)
    for name in names:
        new, pattern = transformers_api.rename_source_key(name, renamings, converters)
        if new in known:
            found.setdefault(new, []).append((pattern, name))
    return {
        new: Recipe(new, tuple(name for _, name in sources), partial(_run_rule, by_pattern, model, new, sources))
        for new, sources in found.items()
    }


def _run_rule(
    by_pattern: Mapping[str, Any],
    model: nn.Module,
    new: str,
    sources: list[tuple[str | None, str]],
    values: Mapping[str, Tensor],
) -> Tensor:
    if sources[0][0] is None:
        return values[sources[0][1]]
    rule = copy.deepcopy(by_pattern[sources[0][0]])
    for pattern, name in sources:
        rule.add_tensor(new, name, pattern, values[name])
    made = rule.convert(new, model=model, config=model.config)[new]
    return made[0] if isinstance(made, list) else made


# -- architectures with tensor processors -----------------------------------------------------------------------------


def _of_processors(architecture: str, model: nn.Module, names: Iterable[str]) -> dict[str, Recipe]:
    known = transformers_api.GGUF_SUPPORTED_ARCHITECTURES
    if _plain(architecture) not in map(_plain, known):
        raise ValueError(f"it knows {', '.join(sorted(known))}")
    make = transformers_api.TENSOR_PROCESSORS.get(architecture, transformers_api.TensorProcessor)
    processor = make(config=model.config.to_dict())
    names_of = transformers_api.get_gguf_hf_weights_map(_Named(model), processor, model_type=architecture)
    found: dict[str, list[str]] = {}
    for name in names:
        new = _translated(names_of, name)
        if new is not None:
            found.setdefault(new, []).append(name)
    run = partial(_run_processor, processor, names_of)
    return {new: Recipe(new, tuple(sources), partial(run, new)) for new, sources in found.items()}


def _translated(names_of: Mapping[str, str], name: str) -> str | None:
    """Return the model's name; transformers keys parameters that are no layer's weight without the file's ending."""
    return names_of.get(name, names_of.get(name.removesuffix(".weight")))


class _Named:
    """Stand-in module for transformers' name mapping, which walks all modules slowly but finds no names beyond those of
    the model and its children (base model and head)."""

    def __init__(self, module: nn.Module, depth: int = 1) -> None:
        self._module, self._depth, self.config = module, depth, getattr(module, "config", None)

    def state_dict(self) -> dict[str, Tensor]:
        return self._module.state_dict(keep_vars=True)

    def named_children(self) -> list[tuple[str, "_Named"]]:
        return [(name, _Named(child, 0)) for name, child in self._module.named_children()] if self._depth else []


def _plain(architecture: str) -> str:
    return architecture.replace("-", "").replace("_", "").lower()


def _run_processor(processor: Any, names_of: Mapping[str, str], new: str, values: Mapping[str, Tensor]) -> Tensor:
    numpy: ModuleType = importlib.import_module("numpy")
    parsed: dict[str, dict[str, Any]] = {"tensors": {}}
    for name, value in values.items():
        with numpy.errstate(all="ignore"):
            made = processor.process(
                weights=value.numpy(), name=name, tensor_key_mapping=names_of, parsed_parameters=parsed
            )
        if made.name is not None and (known := _translated(names_of, made.name)) is not None:
            parsed["tensors"][known] = made.weights
    out = parsed["tensors"][new]
    return out if isinstance(out, Tensor) else torch.from_numpy(numpy.ascontiguousarray(out))


# -- row permutations -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowOrder:
    """Source rows of a matrix, or of a stack of matrices.

    Attributes:
        numbers: int64 [N] or [E, N]: for each row, the index of its source row, counted through all sources.
        transposed: True if the model has rows as columns.
    """

    numbers: Tensor
    transposed: bool = False


def rows_of(recipe: Recipe, shapes: Mapping[str, tuple[int, ...]]) -> RowOrder | None:
    """Return a recipe's row permutation; None if it does anything else.

    Args:
        shapes: of the sources' weights; there is a permutation only with two dimensions or more and rows of one length.
    """
    lengths = {shapes[name][-1] for name in recipe.sources}
    if len(lengths) != 1 or any(len(shapes[name]) < 2 for name in recipe.sources):
        return None
    (length,) = lengths
    count = sum(prod(shapes[name][:-1]) for name in recipe.sources)
    columns = min(length, max(_COLUMNS, _NUMBERS // count))
    found = _numbered(recipe, shapes, columns)
    if found is None and columns < length and count * length <= _MAX_NUMBERS:  # operations may need it
        found = _numbered(recipe, shapes, length)
    return found


def _numbered(recipe: Recipe, shapes: Mapping[str, tuple[int, ...]], columns: int) -> RowOrder | None:
    """Run a recipe on numbered rows of so many columns."""
    begin, probes = 0, {}
    for name in recipe.sources:
        lead = shapes[name][:-1]
        numbers = torch.arange(begin * columns, (begin + prod(lead)) * columns, dtype=torch.int32, device="cpu")
        probes[name] = numbers.view(*lead, columns)
        begin += prod(lead)
    try:
        out = recipe.run(probes)
    except _ODD:
        return None
    turns = (_order(out, (begin, columns), transposed) for transposed in (False, True))
    return next(filter(None, turns), None)


def _order(out: Tensor, rows_columns: tuple[int, int], transposed: bool) -> RowOrder | None:
    """Return the order of numbered rows, if all came out whole."""
    count, width = rows_columns
    if out.dtype != torch.int32 or out.ndim not in (2, 3) or out.numel() != count * width:
        return None
    rows = out.transpose(-1, -2) if transposed else out
    if rows.shape[-1] != width:
        return None
    numbers = rows[..., 0] // width
    columns = torch.arange(width, dtype=torch.int32, device="cpu")
    whole = torch.equal(rows - columns, (numbers * width).unsqueeze(-1).expand(rows.shape))
    each = torch.equal(numbers.flatten().sort().values, torch.arange(count, dtype=torch.int32, device="cpu"))
    return RowOrder(numbers.long(), transposed) if whole and each else None
