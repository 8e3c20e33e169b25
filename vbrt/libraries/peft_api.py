"""PEFT: the adapters that it leaves on a model, and how a model gets some.

| feature | without it |
| --- | --- |
| `ADAPTERS` | `vbrt.estimate(lora=...)` is refused; adapters that the user makes work as their PEFT does |
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from vbrt.errors import LibraryError
from vbrt.libraries.probe import Feature, find

__all__ = ["ADAPTERS", "FEATURES", "has_adapters", "lora_on", "targeted_parameters"]

ADAPTERS = Feature(
    "peft",
    (":get_peft_model(model, peft_config, low_cpu_mem_usage)", ":LoraConfig(r, target_modules, task_type)"),
    without="the memory of LoRA training cannot be estimated; pip install -U peft",
)
FEATURES = (ADAPTERS,)

_CONFIGS = "peft_config"  # where PEFT leaves its configs on a model, by adapter


def has_adapters(model: nn.Module) -> bool:
    """True if adapters have been put on a model itself."""
    return _CONFIGS in model.__dict__


def targeted_parameters(model: nn.Module) -> set[str]:
    """The `target_parameters` of all adapters of a model."""
    configs: Any = model.__dict__.get(_CONFIGS)
    if not isinstance(configs, Mapping):
        return set()
    return {target for config in configs.values() for target in getattr(config, "target_parameters", None) or ()}


def lora_on(model: nn.Module, rank: int, *, meta: bool) -> nn.Module:
    """A model with LoRA of a rank on all linear layers but the head; `meta`: whose adapters hold no memory.

    Raises:
        LibraryError: PEFT is not installed, or not as it is asked for.
        ValueError: it finds nothing to adapt.
    """
    if refusal := ADAPTERS.refusal():
        raise LibraryError(f"{refusal}: {ADAPTERS.without}")
    how = find("peft", ":LoraConfig")(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return find("peft", ":get_peft_model")(model, how, low_cpu_mem_usage=meta)
