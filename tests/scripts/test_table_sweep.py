"""Launches that `scripts/table_sweep.py` tries, and its rows; the timings themselves need a GPU."""

import json
from types import SimpleNamespace

import pytest
import torch

from scripts import gpu_timing, table_sweep
from vbrt.kernels.cuda import tuned_configs
from vbrt.kernels.cuda.table import linear as table_linear


def test_a_row_per_launch_which_the_kernel_is_given_or_the_reason_for_none(monkeypatch):
    def linear(x, planes):
        met.append(None if (launch := tuned_configs.found()) is None else launch[:2])
        if met[-1] == (4, 16):
            raise RuntimeError("out of resources")
        wrong = met[-1] == (2, 4)
        return exact(x, planes) + wrong

    for place in (table_sweep, gpu_timing):
        monkeypatch.setattr(place, "CUDA", torch.device("cpu"))
    met, exact = [], table_linear.linear
    monkeypatch.setattr(tuned_configs, "found", lambda *_: None)
    monkeypatch.setattr(table_linear, "linear", linear)
    monkeypatch.setattr(table_sweep, "resolve", lambda *_: SimpleNamespace(run=linear))
    monkeypatch.setattr(table_sweep, "side_by_side", lambda *sets: [10.0 * (1 + i) for i in range(len(sets))])
    rows = list(table_sweep.rows("superblock32", 256, 16, 2, ((2, 8), (4, 16), (2, 4))))
    assert met == [None, (2, 8), (4, 16), (2, 4)]
    assert {row["launch"]: row["us"] for row in rows if "us" in row} == {"own": 20.0, "2x8": 30.0}
    failed = {row["launch"]: row["failed"] for row in rows if "failed" in row}
    assert failed["4x16"] == "RuntimeError: out of resources" and "relative error" in failed["2x4"]


def test_the_table_has_a_line_per_weight_and_shape_and_its_own_launches(tmp_path):
    row = {"format": "superblock32", "k": 4096, "n": 64, "launch": "own", "us": 10.0, "tb_s": 2.5, "of_nvfp4": 0.8}
    rows = [row | {"m": 1}, row | {"m": 16, "us": 20.0}, row | {"m": 1, "launch": "1x4", "us": 99.0}]
    rows.append(row | {"m": 2048, "us": 340.0, "of_bf16": 0.89})
    where = {"gpu": "NVIDIA H200", "python": "3.12.0", "commit": "abc", "copy_tb_s": 4.2, "versions": {"torch": "2.11"}}
    path = tmp_path / "published-nvidia-h200.json"
    path.write_text(json.dumps(where | {"rows": rows}))
    lines = table_sweep.published_table(path)
    assert "| Q4_K | `superblock32` | 4096→64 | 10.0, 2.50, 0.80 | 20.0, 2.50, 0.80 | 340, 0.89 |" in lines
    assert not any("99" in line for line in lines) and "NVIDIA H200, torch 2.11, Python 3.12.0, commit abc." in lines


@pytest.mark.parametrize(
    ("option", "value"), [("--launches", "3x8"), ("--launches", "2x1"), ("--tokens", "0"), ("--formats", "nvfp4")]
)
def test_launches_that_the_kernel_does_not_have_are_refused(option, value, capsys):
    with pytest.raises(SystemExit):
        table_sweep.parsed([option, value])
    assert "expected" in (said := capsys.readouterr().err) or "takes" in said
    assert table_sweep.parsed(["--launches", "2x8,4x4"]).launches == ((2, 8), (4, 4))
