"""scripts/full_bench.py on a tiny model of the CPU: what it runs, and what becomes of its figures."""

import argparse
import json

import pytest
import torch

from scripts import full_runs
from scripts.full_profile import Ran, summary
from scripts.full_tables import full_tables

pytest.importorskip("transformers")
GIVEN = {"shape": "tiny", "tokens": 64, "steps": 1, "parts": 1, "limit": None, "activations": "recompute"}
GIVEN |= {"profile": False, "seconds": 60}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(full_runs, "CONTEXT", 32)
    yield
    torch.use_deterministic_algorithms(False)


def run(name, capsys, **given) -> dict:
    full_runs.RUNS[name](argparse.Namespace(**{**GIVEN, "training": {}, **given}))
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_its_figures_make_a_table(tmp_path, capsys):
    large = run("large", capsys, sizes=[32, 64], at_once=32)
    for row in large["rows"]:
        row["peak_bytes"] = 3_000_000_000  # of a GPU
    bits = run("bits", capsys, steps=2)
    assert bits["equal"]
    where = {"gpu": "NVIDIA H200", "versions": {"torch": "2"}, "python": "3.12", "commit": "abc"}
    rows = [{"way": "resident", "tokens_per_s": 200.0, "tokens": 256, "peak_bytes": 2e9, "ready_s": 1.0}]
    rows += [{"way": "other", "failed": "not installed"}]
    path = tmp_path / "full.json"
    path.write_text(json.dumps({"machine": where, "peers": rows, "large": large | {"limit_gb": 24.0}, "bits": bits}))
    text = "\n".join(full_tables(path))
    assert "| resident | 200 | 1.00 | 2.0 | – | 1 |" in text
    assert "| other | not installed |" in text
    assert "| 64 | 2 |" in text
    assert "2 steps: losses and all weights have the same bits" in text


def test_a_profile_tells_gaps_in_computing_from_copies_beside_it():
    ms = 1_000_000
    found = summary(
        [
            Ran("Memcpy HtoD (Pinned -> Device)", 0, 5 * ms),
            Ran("sm90_xmma_gemm_bf16", ms, 3 * ms),
            Ran("vectorized_elementwise_kernel", 3 * ms + 50_000, 4 * ms),
            Ran("flash_fwd_kernel", 6 * ms, 7 * ms),
        ]
    )
    assert found["seconds"] == 0.007 and found["gaps"] == 2
    assert found["kinds"]["copies in"] == 0.005 and found["kinds"]["products"] == 0.002
    assert found["largest"][0] == (0.004, 0.002, "vectorized_elementwise_kernel", "flash_fwd_kernel")
