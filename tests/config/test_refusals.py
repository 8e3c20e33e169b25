"""Configs that are refused, and in which words: file, key, value, remedy."""

from dataclasses import replace

import pytest

from tests.config.words import BUDGET, refusal, refused
from vbrt.config import CpuTier, GpuTier, PolicyConfig, SsdTier, TiersConfig, VBConfig, WeightsConfig
from vbrt.errors import ConfigError, VBError

OFF = f"{BUDGET}; to switch a tier off set enabled = false"
PATTERNS = 'expected a list of module name patterns, e.g. ["model.layers.*", "*.mlp.*"]'
POLICY_KEYS = "expected one of kind, prefetch, scope, routing"
GPUS = "expected a list of different GPUs by their numbers, e.g. [0, 1]"
SECTIONS = "weights, tiers, policy, experts, separation, training, compute, mode, gpu_memory, context, budget"
DIRECTORY = 'expected a directory, e.g. "~/.cache/vbrt/pages"'

WRONG_VALUES = [
    (
        "weights.format",
        "fp4",
        '"fp4"; expected "nvfp4", "mxfp4", "nf4", "quantile", "mxint8", "t3", "dense" or "auto"; did you mean "nvfp4"?',
    ),
    ("weights.format", 4, '4; expected "nvfp4", "mxfp4", "nf4", "quantile", "mxint8", "t3", "dense" or "auto"'),
    ("weights.fine", True, 'true; expected "none" or "exact"'),
    ("weights.fine_coding", True, 'true; expected "auto", "plain" or "coded"'),
    ("weights.include", "*.mlp.*", f'"*.mlp.*"; {PATTERNS}'),
    ("weights.include", [], '[]; expected at least one pattern; ["*"] takes every layer'),
    ("weights.exclude", ["a", 3], f"['a', 3]; {PATTERNS}, not 3 in it"),
    ("weights.exclude", [""], f"['']; {PATTERNS}, not \"\" in it"),
    ("weights.min_parameters", -1, "-1; expected a whole number, 0 or more"),
    ("weights.min_parameters", True, "true; expected a whole number, 0 or more"),
    ("weights.min_parameters", 1e3, "1000.0; expected a whole number, 0 or more"),
    ("weights.min_parameters", float("nan"), "nan; expected a whole number, 0 or more"),
    ("weights.min_parameters", 10**5000, "a number of 16610 bits; expected a whole number, 0 or more"),
    ("weights.keep_head", 1, '1; expected true or false, or "auto"'),
    ("weights.keep_head", "true", '"true"; expected true or false, or "auto"'),
    ("weights.keep_head", None, 'None; expected true or false, or "auto"'),
    ("weights.embeddings", "yes", '"yes"; expected true or false, or "auto"'),
    ("weights.formats", ["*"], '[\'*\']; expected a table of module name patterns, e.g. {"*.mlp.*" = "nvfp4"}'),
    ("weights.budget", "5 bit/s", '"5 bit/s"; expected bits a weight, e.g. "5 bits", or bytes, e.g. "2GiB"'),
    ("weights.budget", "5 bits", '"5 bits"; is read with format = "auto" only'),
    ("weights.calibrate", True, 'true; expected a file of text or token ids, e.g. "notes.txt", or "samples"'),
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
    ("tiers.gpu.links", "all", '"all"; expected "own" or "auto"'),
    ("tiers.peer.budget", "much", f'"much"; {BUDGET}'),
    ("tiers.gpu.devices", "auto", '"auto"; expected "current"'),
    ("tiers.gpu.links", [0, 0], f"[0, 0]; {GPUS}"),
    ("tiers.peer.enabled", 1, '1; expected true or false, or "auto"'),
    ("tiers.peer.devices", [], f'[]; {GPUS}, or "auto"'),
    ("tiers.peer.devices", ["cuda:1"], f"['cuda:1']; {GPUS}, or \"auto\""),
    ("tiers.cpu.pinned", 0, "0; expected true or false"),
    ("tiers.cpu.shared", "yes", '"yes"; expected true or false'),
    ("tiers.cpu.path", " ", f'" "; {DIRECTORY}'),
    ("tiers.ssd.path", 3, f"3; {DIRECTORY}"),
    ("tiers.ssd.path", " ", f'" "; {DIRECTORY}'),
    ("tiers.ssd.path", "a\0b", f'"a\\u0000b"; {DIRECTORY}'),
    ("tiers.ssd.path", "~nobody-9/x", '"~nobody-9/x"; expected a directory whose "~" names a user of this machine'),
    ("tiers.ssd.io", "Direct", '"Direct"; expected "auto", "direct" or "buffered"; did you mean "direct"?'),
    ("policy.kind", "fifo", '"fifo"; expected "auto", "scheduled", "lru" or "experts"'),
    ("policy.scope", "page", '"page"; expected "auto", "layer" or "model"'),
    ("policy.routing", 3, '3; expected a file, e.g. "~/qwen.routing"'),
    ("policy.routing", "~nobody-9/x", '"~nobody-9/x"; expected a file whose "~" names a user of this machine'),
    ("policy.prefetch", -1, '-1; expected a whole number from 0 to 64, or "auto"'),
    ("policy.prefetch", 65, '65; expected a whole number from 0 to 64, or "auto"'),
    ("experts.miss", "cpu", '"cpu"; expected "fetch", "compute" or "auto"; did you mean "compute"?'),
    ("experts.drive_wait_s", 0, "0; expected a whole number from 1 to 1800"),
    ("separation.levels", 1, "1; expected a whole number from 2 to 8"),
    ("separation.levels", 16, "16; expected a whole number from 2 to 8"),
    (
        "training.activations",
        "some",
        '"some"; expected "keep", "recompute", "offload" or bytes of device memory, e.g. "6GiB"',
    ),
    ("training.moments", "fp16", '"fp16"; expected "fp32" or "8bit"'),
    ("training.activations_host", "much", '"much"; expected "auto", bytes, "8GiB" or "40%"'),
    ("training.ahead", False, 'false; expected "auto", bytes, "8GiB" or "40%", or 0 for none'),
    ("separation.refresh_every", 0, "0; expected a whole number, 1 or more"),
    ("compute.backend", "cuda", '"cuda"; expected "auto", "reference", "compiled" or "triton"'),
    ("gpu_memory", "auto", '"auto"; expected bytes, e.g. "12GB", or a share of the GPU, e.g. "90%"'),
    ("gpu_memory", "12Gb", '"12Gb"; "b" is for bits; expected bytes: "12GB"'),
    ("gpu_memory", True, f"true; {BUDGET}"),
    ("context", 0, "0; expected a whole number, 1 or more"),
    ("context", 8192, "8192; is read with gpu_memory only"),
    ("budget", "8 Gib", '"8 Gib"; "b" is for bits; expected bytes: "8GiB"'),
    ("budget", "8 Gigs", f'"8 Gigs"; {BUDGET}'),
    ("mode", "training", '"training"; expected "infer", "train" or "full"; did you mean "train"?'),
    ("mode", True, 'true; expected "infer", "train" or "full"'),
    ("compute.fp8", "e4m3", '"e4m3"; expected true or false'),
    ("compute.int8", 8, "8; expected true or false"),
    ("compute.captures", 2, "2; expected true or false"),
    ("compute.exactness", "exact", '"exact"; expected "bits" or "rounded"'),
    ("compute.where", "cpu", '"cpu"; expected "auto" or "device"'),
    ("compute.joins", "no", '"no"; expected true or false'),
]


def test_a_routing_that_nobody_would_read_is_refused():
    assert refused(policy={"routing": "t", "kind": "lru"}) == (
        'my.toml: policy.routing = "t"; is read with kind = "auto" or kind = "experts", not "lru"'
    )
    assert refused(policy={"routing": "t", "scope": "model"}) == (
        'my.toml: policy.routing = "t"; is read with scope = "auto", not "model"'
    )
    assert VBConfig(policy=PolicyConfig("experts", routing="t")).policy.scope == "auto"


def test_formats_by_layer_and_auto_are_refused_where_they_cannot_hold():
    assert refused(weights={"formats": {"*.up": "fp8"}}).startswith(
        'my.toml: weights.formats."*.up" = "fp8"; expected "nv'
    )
    assert refused(weights={"format": "dense", "formats": {"a": "exact"}}) == (
        'my.toml: weights.formats.a = "exact"; set format to the 4-bit format of its coarse plane'
    )
    assert refused(mode="train", weights={"formats": {"a": "exact"}}).startswith(
        'my.toml: mode = "train" with weights.formats.a = "exact"'
    )
    assert refused(weights={"format": "auto"}).startswith('my.toml: weights.format = "auto"; set budget too: bits a')
    auto = {"format": "auto", "budget": "5 bits"}
    assert "weights.fine" in refused(weights={**auto, "fine": "exact"})
    assert refused(mode="train", weights=auto).startswith('my.toml: mode = "train" with weights.format = "auto"')


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
    # an empty table has no keys
    assert set(keys(VBConfig().to_dict())) | {"weights.formats"} == tested | same_check


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"wieghts": {}}, (f'wieghts is not a known section; did you mean "weights"?; expected one of {SECTIONS}')),
        ({"source": "x"}, (f"source is not a known section; expected one of {SECTIONS}")),
        ({"tiers": {"hdd": {}}}, "tiers.hdd is not a known section; expected one of gpu, peer, cpu, ssd"),
        (
            {"tiers": {"gpu": {"bugdet": 1}}},
            (
                'tiers.gpu.bugdet is not a known key; did you mean "budget"?; '
                "expected one of enabled, budget, links, devices"
            ),
        ),
        ({"policy": {"PREFETCH": 1}}, f'policy.PREFETCH is not a known key; did you mean "prefetch"?; {POLICY_KEYS}'),
        (
            {"compute": {"fp4": False}},
            (
                'compute.fp4 is not a known key; did you mean "fp8"?; expected one of '
                "backend, fp8, int8, captures, joins, exactness, where"
            ),
        ),
        ({"policy": {3: 1}}, f"policy.3 is not a known key; {POLICY_KEYS}"),
        ({"policy": "lru"}, 'policy = "lru"; expected a table with the keys kind, prefetch, scope, routing'),
        ({"tiers": [1]}, "tiers = [1]; expected a table with the keys gpu, peer, cpu, ssd"),
        ({"tiers": {"gpu": True}}, "tiers.gpu = true; expected a table with the keys enabled, budget, links, devices"),
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
            {"weights": {"format": "mxint8", "fine": "exact"}},
            'weights.fine = "exact"; the codes of "mxint8" have 8 bits, and a fine plane refines 4: choose a 4-bit one',
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
    words = f"my.toml = [1]; expected a table with the keys {SECTIONS}"
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


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"budget": "6GiB"}, "and budget is given, too: leave one of them out"),
        ({"tiers": {"gpu": {"budget": "6GiB"}}}, "and tiers.gpu.budget is given, too: leave one of them out"),
        ({"mode": "train"}, 'is for inference, and mode = "train" trains; vbrt.advise(model, "train", batch=...)'),
        ({"tiers": {"gpu": {"enabled": False}}}, 'and tiers.gpu.enabled = false; budget = "6GiB"'),
        ({"tiers": {"gpu": {"devices": [0, 1]}}}, "is of one GPU; with tiers.gpu.devices set tiers.gpu.budget"),
    ],
    ids=["budget", "tier", "training", "no gpu", "devices"],
)
def test_a_share_of_the_gpu_alone_decides_its_budget(sections, words):
    assert refused(gpu_memory="12GB", **sections).startswith(f'my.toml: gpu_memory = "12GB"; {words}')


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_memory", {0: "6GiB", "cpu": "30GiB"}, 'gpu_memory="6GiB", tiers={"cpu": {"budget": "30GiB"}}'),
        ("max_memory", "6GiB", 'gpu_memory="12GB", or budget="12GB" for the pages alone'),
        ("device_map", "auto", 'the tiers place weights, no map does: gpu_memory="12GB"'),
        ("offload_folder", "off", 'tiers={"ssd": {"enabled": True, "path": "off"}}'),
        ("load_in_4bit", True, 'vbrt.wrap(model, "nf4")'),
        ("load_in_8bit", True, 'vbrt.wrap(model, "mxint8")'),
        ("quantization_config", object(), 'quantization_config=vbrt.QuantizationConfig("nf4")'),
        ("n_gpu_layers", 20, 'gpu_memory="12GB", or budget="6GiB"'),
        ("gpu_layers", 20, 'gpu_memory="12GB", or budget="6GiB"'),
        ("n_ctx", 4096, 'context=4096, with gpu_memory="12GB"'),
    ],
    ids=lambda x: str(x)[:20],
)
def test_an_argument_of_another_library_is_answered_with_ours(name, value, words):
    says = refused(**{name: value})
    assert says.startswith(f"my.toml: {name} is an argument of ") and words in says


def test_a_config_error_is_a_vb_error_and_a_value_error():
    assert issubclass(ConfigError, VBError)
    assert issubclass(ConfigError, ValueError)


def test_a_long_value_is_cut_in_the_message():
    words = refused(policy={"kind": "x" * 1000})
    assert len(words) < 160
    assert "xxx...;" in words
