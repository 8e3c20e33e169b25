"""PEFT: adapters on a model, and creation of LoRA adapters.

| feature | without it |
| --- | --- |
| `ADAPTERS` | `vbrt.estimate(lora=...)` raises; adapters made by the user work as usual |
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

_CONFIGS = "peft_config"  # attribute of a model with PEFT's configs by adapter


def adapters_of(model: nn.Module) -> tuple[str, ...]:
    """Names of the adapters on the model itself."""
    return tuple(_configs_of(model))


def _configs_of(model: nn.Module) -> Mapping[str, Any]:
    configs: Any = model.__dict__.get(_CONFIGS)
    return configs if isinstance(configs, Mapping) else {}


def targeted_parameters(model: nn.Module) -> set[str]:
    """`target_parameters` of all the model's adapters."""
    configs = _configs_of(model).values()
    return {target for config in configs for target in getattr(config, "target_parameters", None) or ()}


def saved_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the module copies that PEFT trains and saves as a whole (`modules_to_save`), by module name."""
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
    """Return a model with LoRA of this rank on all linear layers except the head; `meta`: adapters on the meta device.

    Raises:
        LibraryError: PEFT is missing, or lacks a part.
        ValueError: PEFT finds nothing to adapt.
    """
    if refusal := ADAPTERS.refusal():
        raise LibraryError(f"{refusal}: {ADAPTERS.without}")
    how = find("peft", ":LoraConfig")(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return find("peft", ":get_peft_model")(model, how, low_cpu_mem_usage=meta)
