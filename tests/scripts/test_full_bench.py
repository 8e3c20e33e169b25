"""scripts/full_bench.py on a tiny model of the CPU: what it runs, and what becomes of its figures."""

import argparse
import inspect
import json
import re
from typing import ClassVar

import pytest
import torch

from scripts import full_bench, full_runs
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


@pytest.mark.exhaustive
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


class _Process:
    """Stands for a part's process: prints one row, and keeps what it was asked."""

    asked: ClassVar[list[dict]] = []

    def __init__(self, command, **_) -> None:
        self.asked.append(json.loads(command[-1]))
        self.stdout = ['{"done": true}\n']

    def wait(self, _: float) -> int:
        """It ends at once."""
        return 0


@pytest.mark.parametrize("part", full_bench.PARTS)
def test_every_part_reaches_its_process_with_all_that_its_run_reads(part, monkeypatch):
    monkeypatch.setattr(_Process, "asked", [])
    monkeypatch.setattr(full_bench.subprocess, "Popen", _Process)
    found = full_bench.PARTS[part](full_bench.arguments().parse_args([]))
    assert all(row["done"] and "failed" not in row for row in (found if isinstance(found, list) else [found]))
    for asked in _Process.asked:
        read = set(re.findall(r"options\.(\w+)", inspect.getsource(full_bench.ALL[asked["run"]])))
        assert read - set(asked) == set()


def test_rows_are_shown_while_the_process_runs(tmp_path, monkeypatch):
    seen, child = tmp_path / "seen", tmp_path / "child.py"
    child.write_text(
        f"import os, time\nprint('{{\"step\": 1}}', flush=True)\nwhile not os.path.exists({str(seen)!r}):\n"
        "    time.sleep(0.01)\nraise SystemExit('no memory')\n"
    )
    monkeypatch.setattr(full_bench, "__file__", str(child))
    monkeypatch.setattr(full_bench, "shown", lambda _: seen.touch())
    row = full_bench.in_process("largest", 30)
    assert (row["step"], row["failed"]) == (1, "no memory")
