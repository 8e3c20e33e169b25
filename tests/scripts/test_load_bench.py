"""scripts/load_bench.py: from a drive to a first token, on checkpoints that are tiny here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import load_bench, load_files

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]


def test_a_checkpoint_that_was_read_is_cached_and_its_rate_known(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(3 << 20))
    load_files.drop(tmp_path)
    file.read_bytes()
    assert load_files.cached_share(tmp_path) == 1.0
    assert load_files.read_rate([file], 2) > 0


def test_what_a_part_raises_is_its_result(monkeypatch):
    def fail(args):
        raise RuntimeError("no drive")

    monkeypatch.setitem(load_bench.PARTS, "drive", fail)
    assert "RuntimeError: no drive" in load_bench.alone("drive", load_bench.argparse.Namespace())["error"]


@pytest.mark.exhaustive
def test_both_checkpoints_are_made_loaded_and_told_apart(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, "-W", "ignore", "scripts/load_bench.py", "--size", "tiny", "--layers", "2", "2"]
    done = subprocess.run(
        [*command, "--directory", str(tmp_path), "--out", str(out)],
        cwd=ROOT, timeout=300, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    for kind in load_bench.KINDS:
        assert found["drive"][f"{kind}_seconds"] > 0
        assert found[f"{kind}_load"]["token"] == found[f"{kind}_unread"]["token"] == found[f"{kind}_first"]["token"]
        assert f"{kind:6s}load" in done.stdout
    assert found["bf16_load"]["token"] == found["nvfp4_load"]["token"]  # the same planes
