"""What the tensors of a GGUF file are to a model of transformers: names, and what was done to values and rows.

llama.cpp has names of its own, and its converter does things to weights that a loader must undo: rows of Llama's query
and key projections are in another order, norms of Gemma are one larger, an expert's gate and up projections lie in two
tensors. Names and operations are transformers' own, those of `from_pretrained(gguf_file=...)`: `Recipe.run` applies
them to values. What they do to rows is found by giving them numbered rows (`rows_of`): where rows come out whole, in
any order, the bytes of quantized rows can be moved in the same way, without decoding them.
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

_COLUMNS = 3  # of numbered rows, at least: enough to tell a row from a column
_NUMBERS, _MAX_NUMBERS = 1 << 24, 1 << 26  # in numbered rows, as a rule and where nothing less serves
#: what operations end in that cannot be done to numbered rows, or to odd values
_ODD = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class Recipe:
    """How a tensor of a model is made of tensors of a file.

    Attributes:
        name: the model's.
        sources: names in the file.
        run: makes the value of the sources' values, which have their shapes in the file.
    """

    name: str
    sources: tuple[str, ...]
    run: Callable[[Mapping[str, Tensor]], Tensor]


def recipes_for(path: Path, architecture: str, model: nn.Module, names: Iterable[str]) -> dict[str, Recipe]:
    """Return how the tensors of a model are made of those of a file, by the model's names.

    Args:
        path: for errors.
        architecture: `general.architecture` of the file.
        model: of transformers; it may be on the meta device.
        names: of the file's tensors; those that nothing is made of are in no recipe.

    Raises:
        CheckpointError: no model of transformers, or an architecture that transformers does not know from GGUF.
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


# -- architectures whose conversions transformers has as rules --------------------------------------------------------


def _newer_rules(architecture: str, model: nn.Module) -> list[Any] | None:
    """Return the rules of an architecture; None where this version of transformers has none for it."""
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


# -- all others -------------------------------------------------------------------------------------------------------


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
    """Return the model's name; of parameters that are no layer's weight, transformers has the file's without ending."""
    return names_of.get(name, names_of.get(name.removesuffix(".weight")))


class _Named:
    """What transformers' translation of names asks a model for. It goes through all modules and takes long for each,
    but finds no names beyond those of the model and of its children, which are a base model and a head."""

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


# -- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowOrder:
    """Where the rows of a matrix come from, or those of a stack of matrices.

    Attributes:
        numbers: int64 [N] or [E, N]: for each row, the number of a row of the sources, counted through all of them.
        transposed: True if the model has the rows as columns.
    """

    numbers: Tensor
    transposed: bool = False


def rows_of(recipe: Recipe, shapes: Mapping[str, tuple[int, ...]]) -> RowOrder | None:
    """Return what a recipe does to rows; None where it does anything else than to move them.

    Args:
        shapes: of the sources' weights, which must have two dimensions or more and rows of one length.
    """
    lengths = {shapes[name][-1] for name in recipe.sources}
    if len(lengths) != 1 or any(len(shapes[name]) < 2 for name in recipe.sources):
        return None
    (length,) = lengths
    count = sum(prod(shapes[name][:-1]) for name in recipe.sources)
    columns = min(length, max(_COLUMNS, _NUMBERS // count))
    found = _numbered(recipe, shapes, columns)
    if found is None and columns < length and count * length <= _MAX_NUMBERS:  # it may know how long rows are
        found = _numbered(recipe, shapes, length)
    return found


def _numbered(recipe: Recipe, shapes: Mapping[str, tuple[int, ...]], columns: int) -> RowOrder | None:
    """Apply a recipe to numbered rows of so many columns."""
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
    """Return the order of numbered rows, if they all came out whole."""
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
