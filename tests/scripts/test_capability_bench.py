"""scripts/capability_bench.py: the table of what was measured, and what it asks for."""

from pathlib import Path

import pytest
import torch

from scripts import bench_tables, capability_bench, mma_sweep
from scripts.capability_tables import capability_table, mma_table


def test_each_result_becomes_a_section_with_a_row_for_each_number_of_tokens_and_share():
    results = sorted(bench_tables.RESULTS.glob("capability-*.json"))
    assert results
    for path in results:
        lines = capability_table(path)
        assert sum(line.startswith(tuple(f"| {tokens} |" for tokens in capability_bench.TOKENS)) for line in lines) == 8
        assert sum(line.startswith(("| 50% |", "| 25% |")) for line in lines) == 2
        assert "\n".join(lines) in bench_tables.DOCS.read_text()


def test_each_sweep_becomes_a_section_with_a_row_for_each_number_of_tokens_and_layer():
    (path,) = bench_tables.RESULTS.glob("mma-*.json")
    lines = mma_table(path)
    assert sum(line.startswith(tuple(f"| {tokens} |" for tokens in mma_sweep.FORMAT_TOKENS)) for line in lines) == 7
    assert sum(line.startswith(tuple(f"| {layer.name} |" for layer in mma_sweep.LAYERS)) for line in lines) == 12
    assert "\n".join(lines) in bench_tables.DOCS.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_it_needs_a_gpu(monkeypatch):
    monkeypatch.setattr("sys.argv", ["capability_bench", "--out", str(Path("nowhere.json"))])
    with pytest.raises(SystemExit, match="torch finds no CUDA device"):
        capability_bench.main()
