"""Configs: what is accepted, what is refused and in which words, presets, budgets."""

import copy
import os
import pickle
import re
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vbrt.config import (
    BACKENDS,
    FINE_PLANES,
    FORMATS,
    IO_MODES,
    POLICIES,
    Budget,
    ComputeConfig,
    CpuTier,
    GpuTier,
    Machine,
    PolicyConfig,
    SeparationConfig,
    SsdTier,
    TiersConfig,
    VBConfig,
    WeightsConfig,
    assign,
    load_config,
    parse_budget,
    preset_names,
    preset_path,
    resolve_budgets,
)
from vbrt.errors import ConfigError, VBError

GIB = 2**30
MACHINE = Machine(
    gpu_total_bytes=80 * GIB,
    gpu_free_bytes=70 * GIB,
    cpu_total_bytes=100 * GIB,
    cpu_available_bytes=50 * GIB,
    ssd_free_bytes=1000 * GIB,
)


def refusal(function, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def refused(**sections) -> str:
    return refusal(VBConfig.from_dict, sections, source="my.toml")


# ---------------------------------------------------------------------------------------------------------------------
# round trips


budgets = st.sampled_from(["auto", "8GiB", "40%", "1.5 GB", 12345])
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
configs = st.builds(
    VBConfig,
    weights=st.builds(
        WeightsConfig,
        format=st.sampled_from([name for name in FORMATS if name != "dense"]),
        fine=st.sampled_from(FINE_PLANES),
        include=st.lists(names, min_size=1, max_size=3).map(tuple),
        exclude=st.lists(names, max_size=3).map(tuple),
        min_parameters=st.integers(0, 2**40),
        keep_head=st.booleans(),
        embeddings=st.booleans(),
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
    policy=st.builds(PolicyConfig, kind=st.sampled_from(POLICIES), prefetch=st.integers(0, 64) | st.just("auto")),
    separation=st.builds(SeparationConfig, levels=st.integers(2, 8), refresh_every=st.integers(1, 10**6)),
    compute=st.builds(ComputeConfig, backend=st.sampled_from(BACKENDS), fp8=st.booleans(), fp4=st.booleans()),
)
configs |= configs.map(lambda c: replace(c, mode="train", weights=replace(c.weights, fine="none")))


@given(configs)
def test_a_config_survives_dicts_toml_copies_and_pickle(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "round-trip.toml"
    path.write_text(config.to_toml(), "utf-8")
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
    assert list(d) == ["weights", "tiers", "policy", "separation", "compute", "mode"]
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


# ---------------------------------------------------------------------------------------------------------------------
# refusals: (section, key, value) -> exact words


BUDGET = 'expected "auto", bytes, "8GiB" or "40%"'
OFF = f"{BUDGET}; to switch a tier off set enabled = false"
PATTERNS = 'expected a list of module name patterns, e.g. ["model.layers.*", "*.mlp.*"]'
DIRECTORY = 'expected a directory, e.g. "~/.cache/vbrt/pages"'

WRONG_VALUES = [
    ("weights.format", "fp4", '"fp4"; expected "nvfp4", "mxfp4", "nf4", "quantile" or "dense"; did you mean "nvfp4"?'),
    ("weights.format", 4, '4; expected "nvfp4", "mxfp4", "nf4", "quantile" or "dense"'),
    ("weights.fine", True, 'true; expected "none" or "exact"'),
    ("weights.include", "*.mlp.*", f'"*.mlp.*"; {PATTERNS}'),
    ("weights.include", [], '[]; expected at least one pattern; ["*"] takes every layer'),
    ("weights.exclude", ["a", 3], f"['a', 3]; {PATTERNS}, not 3 in it"),
    ("weights.exclude", [""], f"['']; {PATTERNS}, not \"\" in it"),
    ("weights.min_parameters", -1, "-1; expected a whole number, 0 or more"),
    ("weights.min_parameters", True, "true; expected a whole number, 0 or more"),
    ("weights.min_parameters", 1e3, "1000.0; expected a whole number, 0 or more"),
    ("weights.min_parameters", float("nan"), "nan; expected a whole number, 0 or more"),
    ("weights.min_parameters", 10**5000, "a number of 16610 bits; expected a whole number, 0 or more"),
    ("weights.keep_head", 1, "1; expected true or false"),
    ("weights.keep_head", "true", '"true"; expected true or false'),
    ("weights.keep_head", None, "None; expected true or false"),
    ("weights.embeddings", "yes", '"yes"; expected true or false'),
    ("tiers.gpu.enabled", "no", '"no"; expected true or false, or "auto"'),
    ("tiers.gpu.budget", "8 Gigs", f'"8 Gigs"; {BUDGET}'),
    ("tiers.gpu.budget", "8G", f'"8G"; {BUDGET}'),
    ("tiers.gpu.budget", "", f'""; {BUDGET}'),
    ("tiers.gpu.budget", "-8GiB", f'"-8GiB"; {BUDGET}'),
    ("tiers.gpu.budget", "nan%", f'"nan%"; {BUDGET}'),
    ("tiers.gpu.budget", "٤٠%", f'"٤٠%"; {BUDGET}'),
    ("tiers.gpu.budget", True, f"true; {BUDGET}"),
    ("tiers.gpu.budget", 0.4, f"0.4; {BUDGET}"),
    ("tiers.gpu.budget", float("nan"), f"nan; {BUDGET}"),
    ("tiers.gpu.budget", None, f"None; {BUDGET}"),
    ("tiers.gpu.budget", ["8GiB"], f"['8GiB']; {BUDGET}"),
    ("tiers.gpu.budget", 0, f"0; {OFF}"),
    ("tiers.gpu.budget", -1, f"-1; {OFF}"),
    ("tiers.gpu.budget", "0.2 B", f'"0.2 B"; {OFF}'),
    ("tiers.gpu.budget", 2**63, f"{2**63}; {BUDGET}, and no more than the machine has"),
    ("tiers.gpu.budget", "9999999999TiB", f'"9999999999TiB"; {BUDGET}, and no more than the machine has'),
    ("tiers.gpu.budget", "0%", '"0%"; expected more than 0% and at most 100%'),
    ("tiers.gpu.budget", "100.1%", '"100.1%"; expected more than 0% and at most 100%'),
    ("tiers.cpu.pinned", 0, "0; expected true or false"),
    ("tiers.ssd.path", 3, f"3; {DIRECTORY}"),
    ("tiers.ssd.path", " ", f'" "; {DIRECTORY}'),
    ("tiers.ssd.path", "a\0b", f'"a\\u0000b"; {DIRECTORY}'),
    ("tiers.ssd.path", "~nobody-9/x", '"~nobody-9/x"; expected a directory whose "~" names a user of this machine'),
    ("tiers.ssd.io", "Direct", '"Direct"; expected "auto", "direct" or "buffered"; did you mean "direct"?'),
    ("policy.kind", "fifo", '"fifo"; expected "scheduled" or "lru"'),
    ("policy.prefetch", -1, '-1; expected a whole number from 0 to 64, or "auto"'),
    ("policy.prefetch", 65, '65; expected a whole number from 0 to 64, or "auto"'),
    ("separation.levels", 1, "1; expected a whole number from 2 to 8"),
    ("separation.levels", 16, "16; expected a whole number from 2 to 8"),
    ("separation.refresh_every", 0, "0; expected a whole number, 1 or more"),
    ("compute.backend", "cuda", '"cuda"; expected "auto", "reference", "compiled" or "triton"'),
    ("mode", "training", '"training"; expected "infer" or "train"; did you mean "train"?'),
    ("mode", True, 'true; expected "infer" or "train"'),
    ("compute.fp8", "e4m3", '"e4m3"; expected true or false'),
    ("compute.fp4", 1, "1; expected true or false"),
]


def nested(dotted: str, value: object) -> dict:
    for name in reversed(dotted.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize(("key", "value", "words"), WRONG_VALUES, ids=[key for key, _, _ in WRONG_VALUES])
def test_a_wrong_value_is_refused_by_file_key_value_and_remedy(key, value, words):
    assert refused(**nested(key, value)) == f"my.toml: {key} = {words}"


def test_every_key_has_a_refusal_in_the_table():
    def keys(table, prefix=""):
        for name, value in table.items():
            yield from keys(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]

    tested = {key for key, _, _ in WRONG_VALUES}
    same_check = {"tiers.cpu.enabled", "tiers.ssd.enabled", "tiers.cpu.budget", "tiers.ssd.budget"}
    assert set(keys(VBConfig().to_dict())) == tested | same_check


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"wieghts": {}},
            (
                'wieghts is not a known section; did you mean "weights"?; '
                "expected one of weights, tiers, policy, separation, compute, mode"
            ),
        ),
        (
            {"source": "x"},
            "source is not a known section; expected one of weights, tiers, policy, separation, compute, mode",
        ),
        ({"tiers": {"hdd": {}}}, "tiers.hdd is not a known section; expected one of gpu, cpu, ssd"),
        (
            {"tiers": {"gpu": {"bugdet": 1}}},
            'tiers.gpu.bugdet is not a known key; did you mean "budget"?; expected one of enabled, budget',
        ),
        (
            {"policy": {"PREFETCH": 1}},
            'policy.PREFETCH is not a known key; did you mean "prefetch"?; expected one of kind, prefetch',
        ),
        ({"policy": {3: 1}}, "policy.3 is not a known key; expected one of kind, prefetch"),
        ({"policy": "lru"}, 'policy = "lru"; expected a table with the keys kind, prefetch'),
        ({"tiers": [1]}, "tiers = [1]; expected a table with the keys gpu, cpu, ssd"),
        ({"tiers": {"gpu": True}}, "tiers.gpu = true; expected a table with the keys enabled, budget"),
        (
            {"tiers": {"ssd": {"enabled": True}}},
            (
                "tiers.ssd.path is missing, and tiers.ssd.enabled = true needs it; expected a "
                "directory on the drive to "
                'use, e.g. path = "~/.cache/vbrt/pages"'
            ),
        ),
        (
            {"weights": {"format": "dense", "fine": "exact"}},
            'weights.fine = "exact"; format "dense" is already exact: set fine = "none", or choose a 4-bit format',
        ),
        (
            {"mode": "train", "weights": {"fine": "exact"}},
            (
                'mode = "train" with weights.fine = "exact"; a weight that trains has no planes to '
                "be restored from: set "
                'weights.fine = "none" to train through 4 bits, or weights.format = "dense" to train the exact weights'
            ),
        ),
        (
            {"tiers": {"gpu": {"enabled": False}, "cpu": {"enabled": False}}},
            (
                "tiers.gpu.enabled = false and tiers.cpu.enabled = false; expected at least one of them true, "
                "the ssd tier cannot compute"
            ),
        ),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_wrong_shape_is_refused_by_file_key_and_remedy(sections, words):
    assert refused(**sections) == f"my.toml: {words}"


def test_a_config_that_is_no_table_is_refused():
    words = "my.toml = [1]; expected a table with the keys weights, tiers, policy, separation, compute, mode"
    assert refusal(VBConfig.from_dict, [1], source="my.toml") == words


def test_constructors_refuse_what_files_may_not_say():
    assert refusal(GpuTier, budget="8 Gigs") == f'GpuTier(...): tiers.gpu.budget = "8 Gigs"; {BUDGET}'
    assert refusal(SsdTier, enabled=True).startswith("SsdTier(...): tiers.ssd.path is missing")
    assert refusal(WeightsConfig, format="dense", fine="exact").startswith("WeightsConfig(...): weights.fine")
    assert refusal(replace, PolicyConfig(), prefetch=-1).startswith("PolicyConfig(...): policy.prefetch = -1")
    both_off = refusal(TiersConfig, gpu=GpuTier(enabled=False), cpu=CpuTier(enabled=False))
    assert both_off.startswith("TiersConfig(...): tiers.gpu.enabled = false")
    words = "VBConfig(...): weights = {}; expected a WeightsConfig; VBConfig.from_dict takes dicts"
    assert refusal(VBConfig, weights={}) == words


def test_a_config_error_is_a_vb_error_and_a_value_error():
    assert issubclass(ConfigError, VBError)
    assert issubclass(ConfigError, ValueError)


def test_a_long_value_is_cut_in_the_message():
    words = refused(policy={"kind": "x" * 1000})
    assert len(words) < 160
    assert "xxx...;" in words


# ---------------------------------------------------------------------------------------------------------------------
# files


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


# ---------------------------------------------------------------------------------------------------------------------
# presets, load_config


def test_the_presets_are_these():
    assert preset_names() == ("cpu-ssd", "dense", "exact", "fp4", "fp8", "lru", "mxfp4", "nf4", "quantile", "train")


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
    for line in VBConfig().to_toml().splitlines():
        assert line in text.splitlines() or not line


def test_the_presets_do_what_their_names_say():
    assert load_config("exact").weights.fine == "exact"
    assert load_config("dense").weights.format == "dense"
    assert load_config("lru").policy.kind == "lru"
    assert load_config("train").mode == "train" and load_config("fp4").mode == "infer"
    assert load_config("fp8").compute.fp8 and not load_config("fp4").compute.fp8
    assert not load_config("fp4").compute.fp4  # 4-bit weights; activations are another matter
    assert {name: load_config(name).weights.format for name in ("nf4", "mxfp4", "quantile")} == {
        "nf4": "nf4",
        "mxfp4": "mxfp4",
        "quantile": "quantile",
    }
    tiers = load_config("cpu-ssd").tiers
    assert (tiers.gpu.enabled, tiers.cpu.enabled, tiers.ssd.enabled) == (False, True, True)
    assert tiers.ssd.path == os.path.expanduser("~/.cache/vbrt/pages")


def test_an_unknown_preset_is_refused_with_the_nearest_name():
    assert refusal(load_config, "exakt") == (
        '"exakt" is not a preset; did you mean "exact"?; expected "cpu-ssd", "dense", "exact", "fp4", "fp8", "lru", '
        '"mxfp4", "nf4", "quantile" or "train", or the path of a TOML file'
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
    assert load_config("lru", policy=PolicyConfig(prefetch=0)).policy == PolicyConfig("scheduled", 0)
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


# ---------------------------------------------------------------------------------------------------------------------
# budgets


@pytest.mark.parametrize(
    ("value", "budget"),
    [
        ("auto", Budget("auto")),
        (1, Budget("bytes", 1)),
        ("12345", Budget("bytes", 12345)),
        ("8GiB", Budget("bytes", 8 * GIB)),
        ("8 GB", Budget("bytes", 8 * 10**9)),
        ("8gb", Budget("bytes", 8 * 10**9)),
        ("512MiB", Budget("bytes", 512 * 2**20)),
        ("1.5 KiB", Budget("bytes", 1536)),
        ("0.1 KB", Budget("bytes", 100)),
        ("2TiB", Budget("bytes", 2**41)),
        ("40%", Budget("fraction", 0.4)),
        ("12.5 %", Budget("fraction", 0.125)),
        ("100%", Budget("fraction", 1.0)),
    ],
)
def test_budgets_are_read(value, budget):
    assert parse_budget(value, where="x") == budget


def with_budgets(**tiers) -> VBConfig:
    return load_config({"tiers": tiers})


def test_auto_budgets_are_shares_of_what_is_free():
    config = with_budgets(ssd={"enabled": True, "path": "/pages"})
    budgets = {"gpu": 63 * GIB, "cpu": 40 * GIB, "ssd": 900 * GIB}
    assert resolve_budgets(config, MACHINE) == budgets
    assert list(resolve_budgets(config, MACHINE)) == ["gpu", "cpu", "ssd"]


def test_percentages_count_from_the_total_and_of_the_drive_from_what_is_free():
    config = with_budgets(
        gpu={"budget": "50%"}, cpu={"budget": "25%"}, ssd={"enabled": True, "path": "/pages", "budget": "10%"}
    )
    assert resolve_budgets(config, MACHINE) == {"gpu": 40 * GIB, "cpu": 25 * GIB, "ssd": 100 * GIB}


def test_bytes_are_taken_as_they_are_up_to_what_the_machine_has():
    config = with_budgets(gpu={"budget": "80GiB"}, cpu={"budget": 4096})
    assert resolve_budgets(config, MACHINE) == {"gpu": 80 * GIB, "cpu": 4096}


@pytest.mark.parametrize(
    ("tier", "words"),
    [
        ("gpu", "this machine has 80.00 GiB (85899345920 bytes);"),
        ("cpu", "this machine has 100.00 GiB (107374182400 bytes);"),
        ("ssd", "this machine has 1000.00 GiB (1073741824000 bytes) free;"),
    ],
)
def test_more_than_the_machine_has_is_refused(tier, words):
    extra = {"enabled": True, "path": "/pages"} if tier == "ssd" else {}
    config = VBConfig.from_dict({"tiers": {tier: {"budget": "1001GiB", **extra}}}, source="my.toml")
    assert refusal(resolve_budgets, config, MACHINE) == (
        f'my.toml: tiers.{tier}.budget = "1001GiB"; {words} expected no more than that, "auto" or a percentage'
    )


def test_without_a_gpu_the_gpu_tier_is_left_out():
    no_gpu = replace(MACHINE, gpu_total_bytes=None, gpu_free_bytes=None)
    assert resolve_budgets(with_budgets(gpu={"budget": "4000GiB"}), no_gpu) == {"cpu": 40 * GIB}


def test_disabled_tiers_are_left_out():
    assert list(resolve_budgets(with_budgets(gpu={"enabled": False}), MACHINE)) == ["cpu"]
    assert list(resolve_budgets(with_budgets(cpu={"enabled": False}), MACHINE)) == ["gpu"]


def test_a_machine_with_no_tier_to_compute_on_is_refused():
    no_gpu = replace(MACHINE, gpu_total_bytes=None, gpu_free_bytes=None)
    config = VBConfig.from_dict({"tiers": {"cpu": {"enabled": False}}}, source="my.toml")
    assert refusal(resolve_budgets, config, no_gpu) == (
        "my.toml: tiers.cpu.enabled = false, and this machine has no GPU; no tier is left to compute on, "
        "set tiers.cpu.enabled = true"
    )


def test_an_ssd_path_without_known_free_space_is_refused():
    config = VBConfig.from_dict({"tiers": {"ssd": {"enabled": True, "path": "/pages"}}}, source="my.toml")
    assert refusal(resolve_budgets, config, replace(MACHINE, ssd_free_bytes=None)) == (
        'my.toml: tiers.ssd.path = "/pages"; expected a directory on a drive whose free space is known'
    )


@given(
    st.sampled_from(["auto", "1%", "33.3%", "100%", 4096]), st.integers(4096, 2**50), st.floats(0, 1, exclude_max=True)
)
def test_a_budget_never_exceeds_what_the_machine_has(budget, total, free_share):
    machine = Machine(total, int(total * free_share), total, int(total * free_share))
    config = with_budgets(gpu={"budget": budget}, cpu={"budget": budget})
    assert all(0 <= nbytes <= total for nbytes in resolve_budgets(config, machine).values())
