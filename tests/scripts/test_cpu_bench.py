"""The comparison on a CPU with llama.cpp and torch: tiny models, results that join, and their tables."""

import json

import pytest

pytest.importorskip("transformers")

from scripts import cpu_bench
from scripts.cpu_contenders import CONTENDERS, absent, made
from scripts.cpu_tables import peers_table


@pytest.mark.parametrize("name", ["torch bf16", "vbrt fp4, bf16", "llama.cpp Q4_0", "llama.cpp NVFP4"])
@pytest.mark.filterwarnings("ignore:vbrt:UserWarning")
def test_a_contender_decodes_and_reads_a_prompt(name, tmp_path):
    one = CONTENDERS[name]
    if why := absent(one):
        pytest.skip(f"{name}: {why}")
    model = made(one, "tiny", tmp_path, {})
    spans = model.decode(prompt=4, new=3)
    assert len(spans["seconds"]) == 2 and spans["first"] > 0
    assert model.prefill(tokens=8) > 0


def test_a_matrix_of_a_random_gguf_type_has_bytes_that_its_library_reads():
    gguf, numpy = pytest.importorskip("gguf"), pytest.importorskip("numpy")
    from scripts.cpu_models import random_blocks

    for kind in ("Q4_0", "MXFP4", "NVFP4"):
        raw = random_blocks(numpy.random.default_rng(0), (2, 128), kind)
        weights = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
        assert weights.shape == (2, 128) and 0.005 < weights.std() < 0.05


def test_measurements_join_at_one_commit_and_give_way_at_another(tmp_path, monkeypatch):
    path = tmp_path / "cpu-peers.json"
    about = {"commit": "a", "versions": {}}
    monkeypatch.setattr(cpu_bench, "machine", lambda: json.loads(json.dumps(about)))
    for commit, expected in (("a", [1.0]), ("a", [1.0, 1.0]), ("b", [1.0])):
        about["commit"] = commit
        result = cpu_bench.merged(path, "decode", {"torch bf16": {"seconds": [1.0]}}, {})
        path.write_text(json.dumps(result))
        assert result["parts"]["decode"]["rows"]["torch bf16"]["seconds"] == expected


def test_tables_have_every_part_with_ratios_to_the_peers(tmp_path):
    path = tmp_path / "cpu-peers.json"
    rows = {"llama.cpp Q4_0": {"seconds": [0.02]}, "vbrt fp4, bf16": {"seconds": [0.04, 0.05, 0.04], "imports": [1.0]}}
    half = {"seconds": [0.2], "resident": [0.04], "drive": [1e9], "page_bytes": 400_000_000, "moved": 2e8}
    parts = {
        "decode": rows,
        "matvec": {"8x4, vbrt fp4, bf16": {"seconds": [1e-4]}},
        "ssd": {"vbrt fp4, bf16": half},
        "start": {"vbrt fp4, bf16": rows["vbrt fp4, bf16"]},
        "encode": {"wrap fp4": {"seconds": [2.0, 2.5, 2.0], "weights": 500_000_000}},
    }
    parts = {name: {"commit": "a", "rows": rows, "absent": {"x": "not installed"}} for name, rows in parts.items()}
    machine = {"cpu": "a CPU", "cores": 2, "python": "3", "versions": {"torch": "2"}}
    path.write_text(json.dumps({"machine": machine, "parts": parts}))
    lines = peers_table(path)
    assert "| vbrt fp4, bf16 | 40.0 | 25.0 | 0.50× |" in lines and "x: not installed." in lines
    assert "| vbrt fp4, bf16 | 0.100 |" in lines and "| wrap fp4 | 2.00 | 250 | 250 |" in lines
    assert "| vbrt fp4, bf16 | 400 | 200 | 1.00 | 200.0 | 40.0 | 200.0 | 1.00 |" in lines
