"""Launches that `scripts/table_sweep.py` tries, and its rows; the timings themselves need a GPU."""

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
    monkeypatch.setattr(table_sweep, "side_by_side", lambda *sets: [10.0 * (1 + i) for i in range(len(sets))])
    rows = list(table_sweep.rows("superblock32", 256, 16, 2, ((2, 8), (4, 16), (2, 4))))
    assert met == [None, (2, 8), (4, 16), (2, 4)]
    assert {row["launch"]: row["us"] for row in rows if "us" in row} == {"own": 20.0, "2x8": 30.0}
    failed = {row["launch"]: row["failed"] for row in rows if "failed" in row}
    assert failed["4x16"] == "RuntimeError: out of resources" and "relative error" in failed["2x4"]


@pytest.mark.parametrize(
    ("option", "value"), [("--launches", "3x8"), ("--launches", "2x1"), ("--tokens", "33"), ("--formats", "nvfp4")]
)
def test_launches_that_the_kernel_does_not_have_are_refused(option, value, capsys):
    with pytest.raises(SystemExit):
        table_sweep.parsed([option, value])
    assert "expected" in (said := capsys.readouterr().err) or "takes" in said
    assert table_sweep.parsed(["--launches", "2x8,4x4"]).launches == ((2, 8), (4, 4))
