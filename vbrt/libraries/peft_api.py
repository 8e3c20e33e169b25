"""PEFT: adapters on a model, creation of LoRA adapters, and adapters on parameters that are not there.

| feature | without it |
| --- | --- |
| `ADAPTERS` | `vbrt.estimate(lora=...)` raises; adapters made by the user work as usual |
| `PARAMETERS` | `target_parameters` that name experts in the tiers are refused at the next pass |

PEFT's `ParamWrapper` parametrizes a parameter for the time of a forward. Of a module whose parameter lives elsewhere
(`AdaptedModule`) it reads a stand-in's shape, and hands over the factors instead.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vbrt.errors import LibraryError
from vbrt.libraries.probe import Feature, find, loaded

__all__ = [
    "ADAPTERS",
    "FEATURES",
    "PARAMETERS",
    "AdaptedModule",
    "Factors",
    "adapted_parameters",
    "adapters_of",
    "asks_for_parameters",
    "lora_on",
    "saved_blocks",
    "serve_parameters",
    "targeted_parameters",
]

ADAPTERS = Feature(
    "peft",
    (":get_peft_model(model, peft_config, low_cpu_mem_usage)", ":LoraConfig(r, target_modules, task_type)"),
    without="the memory of LoRA training cannot be estimated; pip install -U peft",
)
_LAYER = "tuners.lora.layer"
PARAMETERS = Feature(
    "peft",
    (
        "tuners.tuners_utils:BaseTuner._inject_parameters(peft_config, model, adapter_name)",
        f"{_LAYER}:ParamWrapper._activate_lora(active_adapters)",
        f"{_LAYER}:ParamWrapper.get_delta_factors(adapter_name)",
        f"{_LAYER}:ParamWrapper.get_param",
        f"{_LAYER}:ParamWrapper.merge(safe_merge, adapter_names)",
        f"{_LAYER}:ParamWrapper.unmerge",
    ),
    without="PEFT's target_parameters on experts in the tiers are refused; pip install -U peft",
)
FEATURES = (ADAPTERS, PARAMETERS)

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


# -- adapters on parameters that live elsewhere -----------------------------------------------------------------------


class Factors(NamedTuple):
    """Low-rank term of a stack of weights [E, a, b]: scale * left [E, a, r] @ right [E, r, b]."""

    left: Tensor
    right: Tensor
    scale: float


@runtime_checkable
class AdaptedModule(Protocol):
    """Module whose adapted parameters are no parameters."""

    def stand_in(self, name: str) -> Tensor:
        """Return a tensor of the parameter's shape, dtype and device, without its memory."""

    def adapting(self, name: str, factors: Sequence[Factors]) -> contextlib.AbstractContextManager[None]:
        """Context in which this thread's forwards add these terms to the parameter."""


def asks_for_parameters() -> bool:
    """True if the caller's caller is PEFT, on its search for `target_parameters`, and can be served."""
    asking = sys._getframe(2).f_globals.get("__name__", "")
    return asking.startswith("peft.tuners.") and serve_parameters()


def serve_parameters() -> bool:
    """Have PEFT adapt parameters of an `AdaptedModule`; False if it is not imported, or lacks a part."""
    if loaded("peft") is None or PARAMETERS.refusal():
        return False
    _serve(find("peft", f"{_LAYER}:ParamWrapper"))
    return True


@functools.cache
def _serve(wrapper: type) -> None:
    """Replace methods of `ParamWrapper`, for such modules alone."""
    plain = {name: getattr(wrapper, name) for name in ("_activate_lora", "get_param", "merge", "unmerge")}

    def get_param(self: Any) -> Tensor:
        base = self.get_base_layer()
        return base.stand_in(self.parameter_name) if isinstance(base, AdaptedModule) else plain["get_param"](self)

    @contextlib.contextmanager
    def activate_lora(self: Any, active_adapters: Sequence[str]) -> Iterator[None]:
        base = self.get_base_layer()
        if not isinstance(base, AdaptedModule):
            with plain["_activate_lora"](self, active_adapters):
                yield
            return
        factors = [Factors(*self.get_delta_factors(name)) for name in active_adapters if name in self.lora_A]
        with base.adapting(self.parameter_name, factors) if factors else contextlib.nullcontext():
            yield

    def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        with _dense(self):
            plain["merge"](self, safe_merge=safe_merge, adapter_names=adapter_names)

    def unmerge(self: Any) -> None:
        with _dense(self):
            plain["unmerge"](self)

    wrapper.get_param, wrapper._activate_lora, wrapper.merge, wrapper.unmerge = get_param, activate_lora, merge, unmerge


@contextlib.contextmanager
def _dense(wrapper: Any) -> Iterator[None]:
    """Context in which the adapted parameter is a dense one, which may be changed in place."""
    base, name = wrapper.get_base_layer(), wrapper.parameter_name
    if isinstance(base, AdaptedModule):
        with torch.no_grad():
            setattr(base, name, nn.Parameter(getattr(base, name).detach().clone(), requires_grad=False))
    yield


def adapted_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield modules and the names of their parameters that PEFT adapts."""
    wrapper = find("peft", f"{_LAYER}:ParamWrapper") if loaded("peft") is not None else None
    for module in model.modules() if wrapper is not None else ():
        if isinstance(module, wrapper):
            yield module.get_base_layer(), module.parameter_name
