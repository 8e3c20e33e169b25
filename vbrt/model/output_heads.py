"""Detection of a model's output heads, which `weights.keep_head` leaves dense.

A head is small, its errors go straight into the results, and fine-tuning starts with a fresh one that must train.
Heads are found by the model's own declarations: transformers' output embeddings; in task models, layers outside
`base_model` or with `config.num_labels` outputs; timm's classifier. Names decide only as a fallback.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from vbrt.layers import kind_of

__all__ = ["find_heads"]

_NAMES = {"lm_head", "score", "classifier", "qa_outputs", "v_head", "value_head", "reward_head"}
_TASKS = re.compile(
    r"For\w*(Classification|Classifier|QuestionAnswering|MultipleChoice|NextSentencePrediction|"
    r"Reward|Detection|XVector|Retrieval|Scor)|(Reward|Value|Score|CrossEncoder)\w*$"
)
_LARGEST_SHARE = 0.1  # of a model's parameters: a larger share outside its base is no head


def find_heads(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return the output heads by id, with reasons. `modules`: of a model, by full name, the root included."""
    layers = {id(module): name for name, module in modules.items() if _is_product(module)}
    heads: dict[int, str] = {}
    for name, module in modules.items():
        for head, reason in (*_output_embeddings(module, name), *_task_heads(module, layers), *_classifiers(module)):
            if id(head) in layers:
                heads.setdefault(id(head), reason)
    for key, name in layers.items():
        parts = name.split(".")
        if parts[-1] in _NAMES and not any(map(str.isdigit, parts)):
            heads.setdefault(key, "by its name")
    return heads


def _output_embeddings(module: nn.Module, name: str) -> Iterator[tuple[nn.Module, str]]:
    """Yield the output embeddings of transformers' models."""
    head = _ask(module, "get_output_embeddings") if hasattr(module, "config") else None
    if head is not None:
        yield head, f"{'model' if name == '(root)' else name}.get_output_embeddings()"


def _classifiers(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the classifiers of timm's models: one or several layers, or a module around one."""
    found = _ask(module, "get_classifier")
    for head in found if isinstance(found, list | tuple) else (found,):
        if isinstance(head, nn.Module):
            yield from ((layer, f"{type(module).__name__}.get_classifier()") for layer in head.modules())


def _ask(module: nn.Module, getter: str) -> Any:
    """Call a getter; None where it raises, as base classes' getters do without a head."""
    ask = getattr(type(module), getter, None)
    try:
        return getattr(module, getter)() if callable(ask) else None
    except (AttributeError, NotImplementedError):
        return None


def _task_heads(model: nn.Module, layers: Mapping[int, str]) -> Iterator[tuple[nn.Module, str]]:
    """Yield heads of transformers' models: layers outside the base model with few outputs; in task models, by name,
    all layers there, unless they are too large for a head."""
    config = getattr(model, "config", None)
    if not isinstance(getattr(type(model), "base_model_prefix", None), str) or not hasattr(config, "num_labels"):
        return
    labels, kind = config.num_labels, type(model).__name__
    outside, where = _outside(model)
    last = [m for m in outside if _outputs(m) in (1, 2, labels, labels + 1)]
    is_task = _TASKS.search(kind) is not None
    found = outside if is_task and _is_small(outside, model) else last
    yield from ((layer, f"head of {kind}, {where}") for layer in found)
    if is_task:
        for layer in model.modules():
            if _is_product(layer) and _outputs(layer) == labels and not re.search(r"\.\d+\.", f".{layers[id(layer)]}."):
                yield layer, f"head of {kind}: one output for each of its {labels} labels"


def _outside(model: nn.Module) -> tuple[list[nn.Module], str]:
    """Return the layers outside a model's base model; without a base model, the layers that it holds directly."""
    base = model.base_model
    if base is model:
        return [child for child in model.children() if _is_product(child)], "which holds it itself"
    inside = {id(module) for module in base.modules()}
    return (
        [module for module in model.modules() if _is_product(module) and id(module) not in inside],
        f"outside its base model ({model.base_model_prefix})",
    )


def _is_product(module: nn.Module) -> bool:
    """True for matrix products of a known layer kind; a lookup table is no head."""
    kind = kind_of(module)
    return kind is not None and not kind.by_rows


def _outputs(layer: nn.Module) -> int:
    return kind_of(layer).outputs(layer)


def _is_small(layers: list[nn.Module], model: nn.Module) -> bool:
    size = sum(math.prod(layer.weight.shape) for layer in layers)
    return size <= _LARGEST_SHARE * sum(
        math.prod(parameter.shape)
        for parameter in model.parameters()
        if not isinstance(parameter, nn.parameter.UninitializedTensorMixin)
    )
