"""Config loading from a preset, a file, a dict, keyword overrides or `--set`."""

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Unpack

from vbrt.config.overrides import Config, SectionOverrides
from vbrt.config.presets import DEFAULT_PRESET, preset_names, preset_path
from vbrt.config.schema import VBConfig, plain
from vbrt.config.value_checks import shown
from vbrt.errors import ConfigError

__all__ = ["assign", "load_config"]

_OVERRIDDEN = " with overrides"


def load_config(config: Config = None, **overrides: Unpack[SectionOverrides]) -> VBConfig:
    """Make a config from any accepted source, with `overrides` merged in key by key.

    config: None (the preset "fp4"), a preset name, the path of a TOML file, a nested dict, or a VBConfig.
    overrides: one nested dict (or config section) per section, e.g. `weights={"format": "nf4"}`,
    `tiers={"ssd": {"enabled": True, "path": "/nvme"}}`.
    Raises ConfigError; the config alone must be valid, and so must the result.
    """
    base = _load(config)
    if not overrides:
        return base
    merged = _merged(base.to_dict(), plain(overrides))
    return VBConfig.from_dict(merged, source=f"{base.source.removesuffix(_OVERRIDDEN)}{_OVERRIDDEN}")


def assign(config: VBConfig, assignments: Iterable[str]) -> VBConfig:
    """Return a config with `--set` assignments applied: "tiers.gpu.budget=8GiB", "weights.exclude=['*.mlp.*']".

    A value is parsed as TOML if it is a number, true, false, a quoted string, a list or a table, else taken as string.
    Later ones win. Raises ConfigError, naming the settings, for anything invalid in a file.
    """
    assignments = tuple(assignments)
    if not assignments:
        return config
    merged = config.to_dict()
    for text in assignments:
        key, equals, value = text.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not equals or not all(parts):
            raise ConfigError(f"--set {text}: expected key=value with a dotted key, e.g. tiers.gpu.budget=8GiB")
        nested: Any = _assigned(value.strip())
        for part in reversed(parts):
            nested = {part: nested}
        merged = _merged(merged, nested)
    return VBConfig.from_dict(merged, source=f"{config.source} with {' '.join(f'--set {a}' for a in assignments)}")


def _assigned(text: str) -> Any:
    try:
        values = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    is_one = len(values) == 1 and isinstance(values["value"], bool | int | float | str | list | dict)
    return values["value"] if is_one else text  # TOML also has dates, no key takes one


def _load(config: object) -> VBConfig:
    if isinstance(config, VBConfig):
        return config
    if config is None:
        config = DEFAULT_PRESET
    if isinstance(config, Mapping):
        return VBConfig.from_dict(config)
    if isinstance(config, str):
        names_a_file = config.endswith(".toml") or "/" in config or os.sep in config or os.path.isfile(config)
        if names_a_file and config not in preset_names():
            return VBConfig.from_toml(config)
        return replace(VBConfig.from_toml(preset_path(config)), source=f'preset "{config}"')
    if isinstance(config, os.PathLike):
        return VBConfig.from_toml(config)
    raise ConfigError(
        f"config = {shown(config)}; expected a preset name, the path of a TOML file, a dict or a VBConfig"
    )


def _merged(base: Any, over: Any) -> Any:
    if not (isinstance(base, Mapping) and isinstance(over, Mapping)):
        return over
    return {**base, **{key: _merged(base.get(key), value) for key, value in over.items()}}
