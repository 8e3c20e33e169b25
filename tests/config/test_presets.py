"""TOML files, presets, overrides and `--set`."""

import os
import re
from dataclasses import replace

import pytest

from tests.config.words import BUDGET, refusal
from vbrt.config import CpuTier, PolicyConfig, TiersConfig, VBConfig, assign, load_config, preset_names, preset_path
from vbrt.config.toml_text import toml_text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[weights]\nformat = nf4\n", r"not valid TOML: .*\(at line 2, column 10\); expected lines such as"),
        (b'[weights]\nformat = "nf4"\n[tiers', r"not valid TOML: .*\(at line 3, the end of the file\)"),
        (b"[weights]\n\n[weights]\n", r"not valid TOML: .*\(at line 3, column 9\)"),
        (b"[weights]\nmin_parameters = " + b"9" * 5000, "not valid TOML: .*digits"),
        (b"# caf\xe9\n", r"not UTF-8 \(at line 1\); expected a TOML file in UTF-8"),
        (b"[weights]\nformat = 3\n", "weights.format = 3; expected"),
    ],
    ids=["value", "end", "twice", "digits", "latin-1", "type"],
)
def test_a_broken_file_is_refused_by_name_and_line(tmp_path, content, words):
    path = tmp_path / "my.toml"
    path.write_bytes(content)
    assert re.match(f"{re.escape(str(path))}: {words}", refusal(load_config, path))


def test_files_that_cannot_be_read_are_refused(tmp_path):
    missing = tmp_path / "my.toml"
    assert refusal(load_config, missing) == f"{missing}: no such file; expected a TOML file"
    assert refusal(load_config, "exact.toml").endswith('; for the preset write "exact"')
    assert re.search("cannot be read .*expected a TOML file", refusal(load_config, tmp_path))
    assert re.search("cannot be read .*expected a TOML file", refusal(load_config, "a\0b.toml"))


def test_the_presets_are_these():
    assert preset_names() == (
        *("cpu-ssd", "dense", "exact", "fp4", "fp8", "full", "lru", "mxfp4", "mxint8", "nf4", "quantile", "train"),
    )


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_says_what_it_is_for(name):
    config = load_config(name)
    assert config.source == f'preset "{name}"'
    assert VBConfig.from_dict(config.to_dict()) == config
    lines = preset_path(name).read_text("utf-8").splitlines()
    assert lines[0].startswith(f"# {name}: ")
    assert f'wrap(model, "{name}"' in "\n".join(lines)
    assert max(map(len, lines)) <= 120


def test_fp4_is_the_default_and_spells_out_every_default():
    assert load_config() == load_config("fp4") == VBConfig()
    text = preset_path("fp4").read_text("utf-8")
    for line in toml_text(VBConfig()).splitlines():
        assert line in text.splitlines() or not line


def test_the_presets_do_what_their_names_say():
    assert load_config("exact").weights.fine == "exact"
    assert load_config("dense").weights.format == "dense"
    assert load_config("lru").policy.kind == "lru"
    assert load_config("train").mode == "train" and load_config("fp4").mode == "infer"
    assert load_config("fp8").compute.fp8 and not load_config("fp4").compute.fp8
    assert {name: load_config(name).weights.format for name in ("nf4", "mxfp4", "mxint8", "quantile")} == {
        "nf4": "nf4",
        "mxfp4": "mxfp4",
        "mxint8": "mxint8",
        "quantile": "quantile",
    }
    tiers = load_config("cpu-ssd").tiers
    assert (tiers.gpu.enabled, tiers.cpu.enabled, tiers.ssd.enabled) == (False, True, True)
    assert tiers.ssd.path == os.path.expanduser("~/.cache/vbrt/pages")


def test_an_unknown_preset_is_refused_with_the_nearest_name():
    assert refusal(load_config, "exakt") == (
        '"exakt" is not a preset; did you mean "exact"?; expected "cpu-ssd", "dense", "exact", "fp4", "fp8", "full", '
        '"lru", "mxfp4", "mxint8", "nf4", "quantile" or "train", or the path of a TOML file'
    )


@pytest.mark.parametrize("config", [3, True, [], b"fp4"])
def test_what_is_no_config_is_refused(config):
    assert "expected a preset name, the path of a TOML file, a dict or a VBConfig" in refusal(load_config, config)


def test_load_config_takes_paths_dicts_and_configs(tmp_path, monkeypatch):
    path = tmp_path / "my.toml"
    path.write_text('[policy]\nkind = "lru"\n')
    lru = VBConfig(policy=PolicyConfig(kind="lru"))
    assert load_config(path) == load_config(str(path)) == load_config({"policy": {"kind": "lru"}}) == lru
    assert load_config(lru) is lru
    monkeypatch.chdir(tmp_path)
    path.rename("without-ending")
    assert load_config("without-ending") == lru


def test_overrides_merge_key_by_key(tmp_path):
    base = load_config("cpu-ssd", policy={"prefetch": 5})
    config = load_config(base, weights={"format": "nf4"}, tiers={"ssd": {"path": str(tmp_path)}})
    assert config.weights == replace(base.weights, format="nf4")
    assert config.tiers == replace(base.tiers, ssd=replace(base.tiers.ssd, path=str(tmp_path)))
    assert config.policy.prefetch == 5


def test_overrides_may_be_config_sections():
    assert load_config("lru", policy=PolicyConfig(prefetch=0)).policy == PolicyConfig("auto", 0)
    assert load_config(tiers={"cpu": CpuTier(budget="1GiB")}).tiers == TiersConfig(cpu=CpuTier(budget="1GiB"))


def test_wrong_overrides_are_refused_by_key():
    words = f'preset "fp4" with overrides: tiers.gpu.budget = "lots"; {BUDGET}'
    assert refusal(load_config, "fp4", tiers={"gpu": {"budget": "lots"}}) == words
    assert "wights is not a known section" in refusal(load_config, "fp4", wights={})
    assert "policy = 3; expected a table" in refusal(load_config, "fp4", policy=3)


@pytest.mark.parametrize(
    ("text", "sections"),
    [
        ("weights.format=nf4", {"weights": {"format": "nf4"}}),
        ('weights.format = "nf4"', {"weights": {"format": "nf4"}}),
        ("weights.min_parameters=0", {"weights": {"min_parameters": 0}}),
        ("weights.keep_head=false", {"weights": {"keep_head": False}}),
        ("weights.exclude=['*.mlp.*', \"*.q\"]", {"weights": {"exclude": ["*.mlp.*", "*.q"]}}),
        ("tiers.gpu.budget=8GiB", {"tiers": {"gpu": {"budget": "8GiB"}}}),
        ("tiers.gpu.budget=40%", {"tiers": {"gpu": {"budget": "40%"}}}),
        ("tiers.gpu.budget=4096", {"tiers": {"gpu": {"budget": 4096}}}),
        ("tiers.ssd.path=/a=b#c", {"tiers": {"ssd": {"path": "/a=b#c"}}}),
        ("tiers.ssd.path=1979-05-27", {"tiers": {"ssd": {"path": "1979-05-27"}}}),
        ("tiers.ssd.path=1\nx = 2", {"tiers": {"ssd": {"path": "1\nx = 2"}}}),
    ],
)
def test_an_assignment_is_an_override(text, sections):
    base = load_config("exact")
    wanted = load_config(base, **sections)
    assert assign(base, [text]) == wanted and wanted != base


def test_assignments_are_checked_together_and_the_last_one_wins():
    config = assign(load_config(None), ["tiers.ssd.enabled=true", "tiers.ssd.path=/a", "tiers.ssd.path=/b"])
    assert config.tiers.ssd.enabled and config.tiers.ssd.path == "/b"
    assert assign(config, []) is config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("weights.format=fp3", 'preset "fp4" with --set weights.format=fp3: weights.format = "fp3"; expected "nvfp4"'),
        ("weights.fromat=nf4", 'weights.fromat is not a known key; did you mean "format"?'),
        ("wights.format=nf4", 'wights is not a known section; did you mean "weights"?'),
        ("tiers.gpu.budget=8Gigs", 'tiers.gpu.budget = "8Gigs"; expected "auto", bytes, "8GiB" or "40%"'),
        ("weights=nf4", 'weights = "nf4"; expected a table'),
        ("weights.keep_head=no", 'weights.keep_head = "no"; expected true or false'),
        ("weights.exclude=*.mlp.*", 'weights.exclude = "*.mlp.*"; expected a list of module name patterns'),
        ("tiers.ssd.enabled=true", "tiers.ssd.path is missing"),
        ("weights.min_parameters=" + "9" * 5000, "expected a whole number"),
        ("weights.format", "--set weights.format: expected key=value with a dotted key, e.g. tiers.gpu.budget=8GiB"),
        ("=nf4", "--set =nf4: expected key=value"),
        ("weights..format=nf4", "--set weights..format=nf4: expected key=value"),
    ],
)
def test_a_wrong_assignment_is_refused_as_in_a_file_and_names_the_option(text, words):
    says = refusal(assign, load_config(None), [text])
    assert words in says and "--set" in says
