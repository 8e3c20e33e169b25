"""Configs: the schema, files and presets, budgets of a machine."""

from vbrt.config.budgets import Budget, Machine, compute_tier, parse_budget, resolve_budget, resolve_budgets
from vbrt.config.files import DEFAULT_PRESET, preset_names, preset_path
from vbrt.config.formats import FORMATS, FormatRecord, chosen_formats, formats_of
from vbrt.config.load import assign, load_config
from vbrt.config.schema import (
    BACKENDS,
    FINE_PLANES,
    IO_MODES,
    MODES,
    POLICIES,
    SCOPES,
    ComputeConfig,
    CpuTier,
    GpuTier,
    PolicyConfig,
    SeparationConfig,
    SsdTier,
    TiersConfig,
    VBConfig,
    WeightsConfig,
)

__all__ = [
    "BACKENDS",
    "DEFAULT_PRESET",
    "FINE_PLANES",
    "FORMATS",
    "IO_MODES",
    "MODES",
    "POLICIES",
    "SCOPES",
    "Budget",
    "ComputeConfig",
    "CpuTier",
    "FormatRecord",
    "GpuTier",
    "Machine",
    "PolicyConfig",
    "SeparationConfig",
    "SsdTier",
    "TiersConfig",
    "VBConfig",
    "WeightsConfig",
    "assign",
    "chosen_formats",
    "compute_tier",
    "formats_of",
    "load_config",
    "parse_budget",
    "preset_names",
    "preset_path",
    "resolve_budget",
    "resolve_budgets",
]
