"""Deferred registration with libraries once they are imported; imports no library, no torch, and little of vbrt."""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from vbrt.wrapper.registered_kinds import register_holder

__all__ = ["Deferred", "register_all", "when_imported"]


class Deferred:
    """Proxy of a class that imports its module when called or asked for an attribute."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def _get(self) -> Any:
        return getattr(importlib.import_module(self._module), self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._get()(*args, **kwargs)

    def __instancecheck__(self, instance: object) -> bool:
        module = sys.modules.get(self._module)  # without the module there are no instances
        return module is not None and isinstance(instance, getattr(module, self._name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._get(), name)


class _Watch:
    """Meta-path hook: calls an action with a module after its import."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name, self.action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec, with a loader that calls the action afterwards; None for any other module."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load, act = spec.loader.exec_module, self.action

            def exec_module(module: ModuleType) -> None:
                load(module)
                act(module)

            spec.loader.exec_module = exec_module
        return spec


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action` with a module: now if it is imported already, else after its import."""
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, _Watch(name, action))
    else:
        action(module)


def register_all() -> None:
    """Register vbrt's quantizers with transformers and diffusers, and the pipeline classes that `wrap` takes."""
    when_imported("transformers.quantizers.auto", _with_transformers)
    when_imported("diffusers.quantizers.auto", _with_diffusers)
    kinds = "vbrt.integrations.pipelines"
    register_holder("diffusers", "DiffusionPipeline", Deferred(kinds, "DIFFUSERS"))
    register_holder("transformers", "Pipeline", Deferred(kinds, "TRANSFORMERS"))


def _with_transformers(auto: ModuleType) -> None:
    here = "vbrt.integrations.transformers_quantizer"
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault("vbrt", Deferred(here, "QuantizationConfig"))
    auto.AUTO_QUANTIZER_MAPPING.setdefault("vbrt", Deferred(here, "VBQuantizer"))


def _with_diffusers(auto: ModuleType) -> None:
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(
        "vbrt", Deferred("vbrt.integrations.transformers_quantizer", "QuantizationConfig")
    )
    auto.AUTO_QUANTIZER_MAPPING.setdefault(
        "vbrt", Deferred("vbrt.integrations.diffusers_quantizer", "VBDiffusersQuantizer")
    )
