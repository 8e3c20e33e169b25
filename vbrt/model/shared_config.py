"""Config of a further model on a shared runtime: tiers and policy are the runtime's."""

from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any

from vbrt.config import VBConfig, load_config, parse_budget, with_tier_budget
from vbrt.config.value_checks import shown
from vbrt.errors import ArgumentError, ConfigError
from vbrt.model.runtime import Runtime

__all__ = ["shared_config"]

_SHARED = ("tiers", "policy")


def shared_config(asked: VBConfig, runtime: Runtime, *given: Any) -> VBConfig:
    """Return `asked` with the tiers and the policy of a runtime.

    Args:
        given: sources of `asked`. A mapping sets the keys that it has; a preset, a file, a VBConfig or a section of
            one sets the keys that differ from the defaults.

    Raises:
        ArgumentError: not a runtime.
        ConfigError: a key of tiers or policy conflicts with the runtime, or the mode trains or differs.
    """
    if not isinstance(runtime, Runtime):
        raise ArgumentError(f"runtime = {type(runtime).__name__}; expected `vb.runtime` of a wrapped model")
    settings = runtime.settings
    if asked.mode != settings.mode or asked.mode in ("train", "full"):
        raise ConfigError(
            f'{asked.source}: mode = "{asked.mode}" on a runtime with mode = "{settings.mode}": a runtime is shared by '
            "models that infer; weights that train are in no tier"
        )
    if asked.gpu_memory is not None:
        raise ConfigError(
            f"{asked.source}: gpu_memory = {shown(asked.gpu_memory)}; models on one runtime share its budget: leave it "
            "out, or change the budget with set_budget()"
        )
    tier = next(iter(runtime.budgets))
    given = (*given, *([{"tiers": {tier: {"budget": asked.budget}}}] if asked.budget is not None else []))
    asked = with_tier_budget(asked, tier)
    here, there = _flat(settings.to_dict()), _flat(asked.to_dict())
    kind = runtime.stack.levels[0].policy.kind
    here["policy.kind"] = kind  # "auto", resolved
    there["policy.kind"] = kind if there["policy.kind"] == "auto" else there["policy.kind"]
    for key in dict.fromkeys(key for part in given for key in _said(part)):
        if _same_spelling(key, there[key]) != _same_spelling(key, here[key]):
            raise ConfigError(
                f"{asked.source}: {key} = {there[key]!r}, and the runtime has {here[key]!r}: models on one runtime "
                "share its tiers and its policy; leave the key out, change the budget with set_budget(), or wrap "
                "without runtime="
            )
    return replace(asked, tiers=settings.tiers, policy=settings.policy)


def _said(given: Any) -> list[str]:
    """Return the dotted keys of shared sections that a user's config sets."""
    if given is None:
        return []
    if isinstance(given, Mapping):
        sections = {name: value for name, value in given.items() if not is_dataclass(value)}
        objects = {name: value for name, value in given.items() if is_dataclass(value)}
        return [*_flat(sections), *(_said(load_config(**objects)) if objects else ())]
    usual = _flat(VBConfig().to_dict())
    return [key for key, value in _flat(load_config(given).to_dict()).items() if value != usual[key]]


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the shared sections by dotted key."""
    found: dict[str, Any] = {}
    left = [(name, config[name]) for name in _SHARED if name in config]
    while left:
        key, value = left.pop()
        if isinstance(value, Mapping):
            left += [(f"{key}.{name}", item) for name, item in value.items()]
        else:
            found[key] = value
    return found


def _same_spelling(key: str, value: Any) -> Any:
    """Return a canonical value, equal for all spellings of a budget."""
    return parse_budget(value, where=key) if key.endswith(".budget") else value
