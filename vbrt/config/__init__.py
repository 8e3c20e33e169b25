"""Configs: a frozen tree of settings, the presets, and the budgets of a machine. Pure Python, importable without torch.

Input: a preset name, TOML file or dict, and overrides. Output: a `VBConfig`, every key validated on construction
(`schema.py`, `value_checks.py`), and with a `Machine` the bytes of each tier's budget (`budgets.py`). Two tables of
records are here because plans need them without torch: `format_records.py` (number formats) and `tier_records.py`
(tiers).

`weights.formats` maps patterns on module names to a format or `"exact"`. The last match wins, so overrides, merged
after a file's entries, take precedence. `WeightsConfig.held_as` matches a weight by all its names; only the planner
calls it.
"""

from vbrt.config.budgets import Machine, compute_tier, resolve_budget, resolve_budgets, with_tier_budget
from vbrt.config.format_records import FORMATS, FormatRecord, chosen_formats, formats_of, known_formats
from vbrt.config.load_config import assign, load_config, names_format
from vbrt.config.parse_budgets import Budget, parse_budget, parse_weights_budget
from vbrt.config.presets import DEFAULT_PRESET, preset_names, preset_path
from vbrt.config.schema import (
    BACKENDS,
    FINE_PLANES,
    IO_MODES,
    MISSES,
    MODES,
    POLICIES,
    SAMPLES,
    SCOPES,
    ComputeConfig,
    CpuTier,
    ExpertsConfig,
    GpuTier,
    PeerTier,
    PolicyConfig,
    SeparationConfig,
    SsdTier,
    TiersConfig,
    TrainingConfig,
    VBConfig,
    WeightsConfig,
)

__all__ = [
    "BACKENDS",
    "DEFAULT_PRESET",
    "FINE_PLANES",
    "FORMATS",
    "IO_MODES",
    "MISSES",
    "MODES",
    "POLICIES",
    "SAMPLES",
    "SCOPES",
    "Budget",
    "ComputeConfig",
    "CpuTier",
    "ExpertsConfig",
    "FormatRecord",
    "GpuTier",
    "Machine",
    "PeerTier",
    "PolicyConfig",
    "SeparationConfig",
    "SsdTier",
    "TiersConfig",
    "TrainingConfig",
    "VBConfig",
    "WeightsConfig",
    "assign",
    "chosen_formats",
    "compute_tier",
    "formats_of",
    "known_formats",
    "load_config",
    "names_format",
    "parse_budget",
    "parse_weights_budget",
    "preset_names",
    "preset_path",
    "resolve_budget",
    "resolve_budgets",
    "with_tier_budget",
]
