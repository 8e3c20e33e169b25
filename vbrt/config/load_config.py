"""Config loading from a preset, a file, a dict, keyword overrides or `--set`."""

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from vbrt.config.overrides import Config, SectionOverrides
from vbrt.config.presets import DEFAULT_PRESET, preset_names, preset_path, read_toml
from vbrt.config.schema import VBConfig, plain
from vbrt.config.value_checks import shown
from vbrt.errors import ConfigError

__all__ = ["OVERRIDDEN", "assign", "load_config", "names_format"]

OVERRIDDEN = " with overrides"  # after the source of a config, for messages


def load_config(config: Config = None, **overrides: Unpack[SectionOverrides]) -> VBConfig:
    """Make a config from any accepted source, with `overrides` merged in key by key.

    config: None (the preset "fp4"), a preset name, the path of a TOML file, a nested dict, or a VBConfig.
    overrides: one nested dict (or config section) per section, e.g. `weights={"format": "nf4"}`,
    `tiers={"ssd": {"enabled": True, "path": "/nvme"}}`; and single keys: `gpu_memory="12GB"`, `budget="6GiB"`. Of
    these two and tiers.gpu.budget, an override replaces what the config has.
    Raises ConfigError; the config alone must be valid, and so must the result.
    """
    base = _load(config)
    if not overrides:
        return base
    merged = _merged_config(base.to_dict(), plain(overrides))
    return VBConfig.from_dict(merged, source=f"{base.source.removesuffix(OVERRIDDEN)}{OVERRIDDEN}")


def names_format(config: Config) -> bool:
    """Return whether a config, or overrides, say in which format all weights are held; a VBConfig always does.

    Raises ConfigError: a file that cannot be read, or an unknown preset.
    """
    if isinstance(config, VBConfig):
        return True
    tables = read_toml(*_file_of(config)) if isinstance(config, str | os.PathLike) else config
    weights = plain(tables.get("weights")) if isinstance(tables, Mapping) else None
    return isinstance(weights, Mapping) and ("format" in weights or "fine" in weights)


def assign(config: VBConfig, assignments: Iterable[str], options: Mapping[str, Any] | None = None) -> VBConfig:
    """Return a config with `--set` assignments applied: "tiers.gpu.budget=8GiB", "weights.exclude=['*.mlp.*']".

    A value is parsed as TOML if it is a number, true, false, a quoted string, a list or a table, else taken as string.
    Later ones win. `options`: single keys that have an option of their own: {"budget": "6GiB"} for --budget 6GiB.
    Raises ConfigError, naming the settings, for anything invalid in a file.
    """
    over: Any = dict(options or {})
    said = [f"--{key.replace('_', '-')} {value}" for key, value in over.items()]
    for text in assignments:
        said.append(f"--set {text}")
        key, equals, value = text.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not equals or not all(parts):
            raise ConfigError(f"--set {text}: expected key=value with a dotted key, e.g. tiers.gpu.budget=8GiB")
        nested: Any = _assigned(value.strip())
        for part in reversed(parts):
            nested = {part: nested}
        over = _merged(over, nested)
    if not said:
        return config
    return VBConfig.from_dict(_merged_config(config.to_dict(), over), source=f"{config.source} with {' '.join(said)}")


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
    if isinstance(config, str | os.PathLike):
        path, source = _file_of(config)
        return replace(VBConfig.from_toml(path), source=source)
    raise ConfigError(
        f"config = {shown(config)}; expected a preset name, the path of a TOML file, a dict or a VBConfig"
    )


def _file_of(config: str | os.PathLike[str]) -> tuple[Path, str]:
    """(TOML file, name for messages) of a preset's name or a path."""
    name = os.fsdecode(config)
    is_path = not isinstance(config, str) or name.endswith(".toml") or "/" in name or os.sep in name
    if name not in preset_names() and (is_path or os.path.isfile(name)):
        return Path(os.path.expanduser(name)), name
    return preset_path(name), f'preset "{name}"'


def _merged_config(base: Mapping[str, Any], over: Mapping[str, Any]) -> Any:
    """Merge overrides into a config; one that decides the GPU's budget replaces what decided it before."""
    given = {key for key in ("gpu_memory", "budget") if over.get(key) is not None}
    gpu = over.get("tiers", {}).get("gpu") if isinstance(over.get("tiers", {}), Mapping) else None
    if isinstance(gpu, Mapping) and "budget" in gpu:
        given.add("tiers.gpu.budget")
    if given:
        before = {"gpu_memory": None, "budget": None}
        before |= {} if "gpu_memory" in given else {"context": None}
        base = _merged({**base, **before}, {"tiers": {"gpu": {"budget": "auto"}}})
    return _merged(base, over)


def _merged(base: Any, over: Any) -> Any:
    if not (isinstance(base, Mapping) and isinstance(over, Mapping)):
        return over
    return {**base, **{key: _merged(base.get(key), value) for key, value in over.items()}}
