"""Mutation watch: detects callbacks of a `generate` call that change the model between two steps.

Captured steps are valid for the model at the start of decoding; a full fingerprint before each step would take as long
as some steps. So only calls that run foreign code between steps (logits processors, stopping criteria, streamers) are
watched, by dict comparisons in C: attributes, hooks, submodules, configs, and addresses of parameters. Functions of
Python modules are not compared.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from vbrt.layers.experts import VBExperts
from vbrt.layers.experts.gates import kept_gate
from vbrt.libraries import transformers_api
from vbrt.model.pass_hooks import ShellsHook
from vbrt.training import StreamedParameter

__all__ = ["Watch", "calls_others"]

_CONTAINERS = (dict, list)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_KNOWN = ("transformers", "vbrt")  # their callbacks do not change models
#: config attributes that transformers itself changes between prompt and first step, on devices other than CPUs
_OF_STEPS = transformers_api.CHANGED_BY_STEPS


def calls_others(args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if a `generate` call's arguments include foreign callbacks, which may change the model."""
    given = [kwargs.get("streamer"), *_called(args), *_called(kwargs.values())]
    return any(_package(one) not in _KNOWN for one in given if one is not None)


def _package(of: Any) -> str:
    return str(getattr(of, "__module__", None) or type(of).__module__).partition(".")[0]


def _called(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        for one in value if isinstance(value, list) else (value,):
            if callable(one) and not isinstance(one, (Tensor, nn.Module, type)):
                yield one


class Watch:
    """Snapshot of a model's Python state for one call."""

    def __init__(self, model: nn.Module) -> None:
        modules = [module for module in model.modules() if module is not model]
        for module in modules:
            if isinstance(module, VBExperts):
                kept_gate(module)  # the first step would set it, and look like a change
        everything = [model, *modules]
        configs = (vars(of).get("config") for of in everything)
        of_configs = {id(config): vars(config) for config in configs if hasattr(config, "__dict__")}
        self._model, self._dicts = model, [*map(vars, modules), *of_configs.values()]
        self._before, self._own = [_copies(of) for of in self._dicts], _copies(_own(model))
        self._held = [held for of in everything for held in (of._parameters, of._buffers) if held]
        self._places = self._places_now()

    def begin_steps(self) -> None:
        """Accept the changes that transformers makes before the first step."""
        for now, before in zip(self._dicts, self._before, strict=True):
            before.update((name, now[name]) for name in _OF_STEPS if name in now and name in before)

    def sees_changes(self) -> bool:
        """True if the model differs from the snapshot."""
        try:
            same = self._dicts == self._before and _own(self._model) == self._own
        except (RuntimeError, ValueError, TypeError):  # tensors and arrays: == has no truth value, so they differ
            return True
        return not same or self._places != self._places_now()

    def _places_now(self) -> list[tuple[int, int, bool]]:
        held = [t for held in self._held for t in held.values() if t is not None]
        return [(id(t), 0 if isinstance(t, StreamedParameter) else t.data_ptr(), t.requires_grad) for t in held]


def _own(model: nn.Module) -> dict[str, Any]:
    """A model's attributes, without the session's forward and the hook that waits for the end of a pass."""
    own = {name: value for name, value in vars(model).items() if name != "forward"}
    hooks = own["_forward_hooks"]
    return {**own, "_forward_hooks": {key: hook for key, hook in hooks.items() if not isinstance(hook, ShellsHook)}}


def _copies(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes, with shallow copies of mutable containers."""
    return {
        name: value.copy() if type(value) in _CONTAINERS or name in _HOOKS else value
        for name, value in attributes.items()
    }
