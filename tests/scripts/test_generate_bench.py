"""The benchmark of generate: rows of a tiny model, a case that fails, the table and the plot."""

import argparse
import json

import pytest
import torch

pytest.importorskip("transformers")

from scripts import generate_bench, generate_cold
from scripts.generate_bench import Bench, wrapped_row
from scripts.generate_tables import curves, generate_table
from tests import models
from tests.generation.families import tiny
from tests.generation.fusion.tape_cases import TapeRecorder
from vbrt.kernels.cuda import compiling

MACHINE = {"gpu": "a GPU", "versions": {"torch": "2"}, "python": "3", "commit": "abc"}


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(generate_bench, "PROMPT", 6)
    for name, value in (("synchronize", None), ("reset_peak_memory_stats", None), ("max_memory_allocated", 5)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(generate_bench, "prompt", lambda batch: torch.full((batch, 6), 7))


def test_a_tiny_model_has_rows(without_gpu, monkeypatch):
    monkeypatch.setattr("vbrt.generation.generate.recorder_for", lambda device: TapeRecorder())
    row = wrapped_row(models.wrap(tiny("llama"), compute=models.ROUNDED), 2, 5)
    assert row["captured"] == 2 * 4 and row["eager"] == 0
    assert row["ms"] > 0 and row["replay_ms"] > 0 and row["first_call_longest_ms"] > 0


def test_a_case_that_fails_leaves_its_error_and_the_others_run(capsys):
    bench = Bench(argparse.Namespace())
    bench.row("bad", 1, lambda: {}["ms"])
    bench.row("good", 1, lambda: {"ms": 2.0})
    assert [row.get("error", row.get("ms")) for row in bench.rows] == ["KeyError: 'ms'", 2.0]
    assert '"case": "good"' in capsys.readouterr().out


def test_the_table_has_every_case_and_the_plot_every_share(tmp_path):
    rows = [
        {"case": "fp4", "batch": 1, "ms": 2.5, "replay_ms": 2.0, "captured": 127, "eager": 0, "record_ms": 300.0},
        {
            "case": "fp4, 50 %",
            "batch": 1,
            "ms": 40.6,
            "share": 50,
            "limit_ms": 36.0,
            "held": "fp4",
            "moved_ms": 37.0,
            "new": 32,
        },
        {"case": "cold: fp4", "first_ms": 950.0, "compiled_first": 4, "compiled_first_ms": 300.0, "compiled_later": 9},
        {"case": "failed", "batch": 1, "error": "x"},
    ]
    path = tmp_path / "generate-gpu.json"
    path.write_text(json.dumps({"machine": MACHINE, "layers": 32, "rows": rows}))
    pytest.importorskip("matplotlib")
    lines = generate_table(path, tmp_path / "docs.md")
    assert "| fp4 | 1 | 2.50 | 2.00 | – | 300 | 127 of 127 | – |" in lines
    assert "failed" not in "".join(lines)
    assert (tmp_path / "generate-gpu.svg").exists()
    assert "| fp4 | 50 | 40.6 | 36.0 | 37.0 | 1.00 | 0.97 |" in lines and "| fp4 | 950 | 4 | 300 | 9 |" in lines
    assert curves(rows)["fp4"] == {50: 40.6}


def test_each_first_launch_is_told_with_what_it_waited_for():
    launch = {"name": "wgmma_kernel", "how": "waited", "at_ms": 1900.0, "wait_ms": 1700.0, "compile_ms": 1800.0}
    row = {"case": "cold: fp4", "first_ms": 2100.0, "later_ms": [900.0, 80.0], "load_s": 9.0, "launches": [launch]}
    head, line, hows, row_again = generate_cold.told(row)
    assert head == "cold: fp4: tokens after 2100 900 80 ms, loaded in 9.0 s" and json.loads(hows) == {"waited": 1}
    assert line.split() == (
        "wgmma_kernel launched at 1900 ms, waited compiling took 1800 ms, the launch waited 1700 ms".split()
    )
    assert json.loads(row_again) == row
    assert generate_cold.told({"case": "cold: fp4", "error": "exit 1"}) == ["cold: fp4: exit 1"]


def test_launches_are_those_behind_the_moment(monkeypatch):
    both = [compiling.FirstLaunch("norm_kernel", "ready", 20, 90_000, at) for at in (1_000_000_000, 3_000_000_000)]
    monkeypatch.setattr(compiling, "FIRST", both)
    (launch,) = generate_cold.launches(2.5)
    assert launch == {"name": "norm_kernel", "how": "ready", "at_ms": 500.0, "wait_ms": 0.02, "compile_ms": 90.0}
