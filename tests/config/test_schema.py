"""Configs that are accepted: round trips, defaults, immutability."""

import copy
import os
import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vbrt.config import (
    BACKENDS,
    FINE_PLANES,
    IO_MODES,
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
    chosen_formats,
)
from vbrt.config.toml_text import toml_text

SINGLE = ("mode", "gpu_memory", "context", "budget")  # keys outside a section
budgets = st.sampled_from(["auto", "8GiB", "40%", "1.5 GB", 12345])
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
configs = st.builds(
    VBConfig,
    weights=st.builds(
        WeightsConfig,
        format=st.sampled_from(
            [name for name in chosen_formats() if name not in ("dense", "mxint8", "t3")]
        ),  # no fine plane
        fine=st.sampled_from(FINE_PLANES),
        include=st.lists(names, min_size=1, max_size=3).map(tuple),
        exclude=st.lists(names, max_size=3).map(tuple),
        min_parameters=st.integers(0, 2**40),
        keep_head=st.booleans(),
        embeddings=st.booleans(),
        formats=st.dictionaries(names, st.sampled_from([*chosen_formats(), "exact"]), max_size=3),
    ),
    tiers=st.builds(
        TiersConfig,
        gpu=st.builds(GpuTier, enabled=st.sampled_from(["auto", True]), budget=budgets),
        cpu=st.builds(CpuTier, enabled=st.booleans(), budget=budgets, pinned=st.booleans()),
        ssd=st.builds(
            SsdTier,
            enabled=st.booleans(),
            budget=budgets,
            path=st.sampled_from(["/pages", 'C:\\new "drive"\\\t\x7fé', "relative/päge"]),
            io=st.sampled_from(IO_MODES),
        )
        | st.just(SsdTier()),
    ),
    policy=st.builds(
        PolicyConfig,
        kind=st.sampled_from(POLICIES),
        prefetch=st.integers(0, 64) | st.just("auto"),
        scope=st.sampled_from(SCOPES),
    )
    | st.builds(PolicyConfig, kind=st.sampled_from(["auto", "experts"]), routing=st.sampled_from(["/a/b", 'ä "c"'])),
    separation=st.builds(SeparationConfig, levels=st.integers(2, 8), refresh_every=st.integers(1, 10**6)),
    compute=st.builds(ComputeConfig, backend=st.sampled_from(BACKENDS), fp8=st.booleans(), int8=st.booleans()),
)
configs |= configs.map(
    lambda c: replace(c, tiers=replace(c.tiers, gpu=replace(c.tiers.gpu, budget="auto")), gpu_memory="90%", context=9)
)
configs |= configs.map(
    lambda c: c if c.gpu_memory else replace(c, mode="train", weights=replace(c.weights, fine="none", formats=()))
)


@given(configs)
def test_a_config_survives_dicts_toml_copies_and_pickle(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "round-trip.toml"
    path.write_text(toml_text(config), "utf-8")
    assert VBConfig.from_dict(config.to_dict()) == config
    assert VBConfig.from_toml(path) == config
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(replace(config)) == hash(config)


def test_an_empty_dict_and_an_empty_file_are_the_defaults(tmp_path):
    empty = tmp_path / "empty.toml"
    empty.touch()
    assert VBConfig.from_dict({}) == VBConfig.from_toml(empty) == VBConfig()
    assert VBConfig.from_toml(empty).source == str(empty)
    assert VBConfig().source == "defaults"


def test_the_source_is_not_compared():
    assert VBConfig(source="a") == VBConfig(source="b")


def test_to_dict_is_plain_and_complete():
    d = VBConfig().to_dict()
    assert list(d) == ["weights", "tiers", "policy", "experts", "separation", "training", "compute", *SINGLE]
    assert d["weights"]["include"] == ["*"]
    assert d["tiers"]["ssd"] == {"enabled": False, "budget": "auto", "path": None, "io": "auto"}


def test_configs_are_frozen():
    with pytest.raises(FrozenInstanceError):
        VBConfig().weights.format = "nf4"


def test_a_bom_and_windows_line_ends_are_read(tmp_path):
    path = tmp_path / "bom.toml"
    path.write_bytes(b'\xef\xbb\xbf[weights]\r\nformat = "nf4"\r\n')
    assert VBConfig.from_toml(path).weights.format == "nf4"


def test_paths_may_start_with_a_tilde_and_be_path_objects(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert SsdTier(path="~/pages").path == os.path.join("/home/me", "pages")
    assert SsdTier(path=Path("/nvme") / "pages").path == str(Path("/nvme/pages"))
