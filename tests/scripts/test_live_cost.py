"""What watching costs, on a model that is too small to tell."""

import json
import sys

import pytest

from scripts import live_cost
from tests.models import llama


@pytest.mark.skipif(live_cost.torch.cuda.is_available(), reason="measures an 8B model there")
def test_all_cases_are_measured_in_turns_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(live_cost, "small", llama)
    monkeypatch.setattr(live_cost, "share_of_a_core", lambda vb: dict.fromkeys(live_cost.CASES, 0.1))
    out = tmp_path / "cost.json"
    monkeypatch.setattr(sys, "argv", ["live_cost.py", "--rounds", "1", "--new", "3", "--out", str(out)])
    monkeypatch.setitem(
        live_cost.CASES, "vbrt top", live_cost.CASES["nobody looks"]
    )  # a process of its own takes seconds
    live_cost.main()
    figures = json.loads(out.read_text())["figures"]
    assert set(figures["resident"]) == set(live_cost.CASES) and figures["resident"]["nobody looks"]["more_percent"] == 0
    assert figures["recorded meanwhile"]["samples"] > 0 and not figures["recorded meanwhile"]["errors"]
    assert figures["sample_us"] > 0 and "resident, vb.live(): " in capsys.readouterr().out
