"""PEFT: the adapters that it leaves on a model, and how a model gets some.

| feature | without it |
| --- | --- |
| `ADAPTERS` | `vbrt.estimate(lora=...)` is refused; adapters that the user makes work as their PEFT does |
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from vbrt.errors import LibraryError
from vbrt.libraries.probe import Feature, find

__all__ = ["ADAPTERS", "FEATURES", "adapters_of", "lora_on", "saved_blocks", "targeted_parameters"]

ADAPTERS = Feature(
    "peft",
    (":get_peft_model(model, peft_config, low_cpu_mem_usage)", ":LoraConfig(r, target_modules, task_type)"),
    without="the memory of LoRA training cannot be estimated; pip install -U peft",
)
FEATURES = (ADAPTERS,)

_CONFIGS = "peft_config"  # where PEFT leaves its configs on a model, by adapter


def adapters_of(model: nn.Module) -> tuple[str, ...]:
    """The names of the adapters that have been put on a model itself."""
    return tuple(_configs_of(model))


def _configs_of(model: nn.Module) -> Mapping[str, Any]:
    configs: Any = model.__dict__.get(_CONFIGS)
    return configs if isinstance(configs, Mapping) else {}


def targeted_parameters(model: nn.Module) -> set[str]:
    """The `target_parameters` of all adapters of a model."""
    configs = _configs_of(model).values()
    return {target for config in configs for target in getattr(config, "target_parameters", None) or ()}


def saved_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The copies of modules that PEFT trains and saves as a whole (`modules_to_save`), under the modules' names."""
    trained = {
        adapter
        for adapter, config in _configs_of(model).items()
        if getattr(config, "modules_to_save", None) and not getattr(config, "inference_mode", False)
    }
    for name, module in model.named_modules() if trained else ():
        copies = getattr(module, "modules_to_save", None)
        for adapter, copied in copies.items() if isinstance(copies, nn.ModuleDict) else ():
            if adapter in trained:
                yield name, copied


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
