"""Types of overrides: the same keys as the schema, and the same literals."""

import inspect
import typing
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from vbrt.config import VBConfig, overrides, preset_names, schema
from vbrt.config.tier_records import TIERS
from vbrt.residency.user_policy import Overrides
from vbrt.wrapper.wrap import WrapOverrides

TABLES = {
    overrides.WeightsOverrides: schema.WeightsConfig,
    overrides.GpuOverrides: schema.GpuTier,
    overrides.PeerOverrides: schema.PeerTier,
    overrides.CpuOverrides: schema.CpuTier,
    overrides.SsdOverrides: schema.SsdTier,
    overrides.TiersOverrides: schema.TiersConfig,
    overrides.PolicyOverrides: schema.PolicyConfig,
    overrides.ExpertsOverrides: schema.ExpertsConfig,
    overrides.SeparationOverrides: schema.SeparationConfig,
    overrides.TrainingOverrides: schema.TrainingConfig,
    overrides.ComputeOverrides: schema.ComputeConfig,
    overrides.SectionOverrides: schema.VBConfig,
}


def keys(section: type) -> set[str]:
    return {f.name for f in fields(section) if f.metadata}


def literals(kind: Any) -> set[Any]:
    """The values of all Literals in a type."""
    if get_origin(kind) is Literal:
        return set(get_args(kind))
    return set().union(*map(literals, get_args(kind)))


@pytest.mark.parametrize(("table", "section"), TABLES.items(), ids=lambda kind: kind.__name__)
def test_a_table_has_the_keys_and_literals_of_its_section(table, section):
    hints, own = get_type_hints(table), get_type_hints(section)
    assert set(hints) == keys(section)
    assert {key: literals(hints[key]) for key in hints} == {key: literals(own[key]) for key in hints}


def test_every_table_is_compared():
    made = {kind for _, kind in inspect.getmembers(overrides, typing.is_typeddict)}
    assert made - set(TABLES) == {overrides.OtherSections}  # a part of SectionOverrides


def test_overrides_of_entry_points_are_the_sections_and_an_optimizer():
    assert set(get_type_hints(Overrides)) == keys(VBConfig)
    assert set(get_type_hints(WrapOverrides)) == keys(VBConfig) | {"optimizer"}


def test_named_tiers_and_presets_are_those_that_there_are():
    assert get_args(overrides.TierName) == tuple(TIERS)
    assert get_args(overrides.Preset) == preset_names()
