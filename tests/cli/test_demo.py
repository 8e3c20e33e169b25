"""The demo: what it measures is right, it argues with that, and it says so when a result has changed."""

import json
import subprocess

import pytest

pytest.importorskip("transformers")

from vbrt.cli import demo
from vbrt.cli import main as cli
from vbrt.errors import VBError
from vbrt.integrations import showcase


@pytest.fixture
def inside(monkeypatch):
    """The demo in this process, with a tiny model; what processes say goes through JSON."""
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(showcase.SIZES, "cpu", tiny)
    monkeypatch.setattr("vbrt.host.accelerator.is_available", lambda: False)
    monkeypatch.setattr(demo, "_ask", lambda asked: json.loads(json.dumps(showcase.run(json.loads(json.dumps(asked))))))


SMALL = ["demo", "--gb", "0.002", "--tokens", "3"]


def test_the_demo_gives_the_whole_models_bits_beside_accelerate_and_keeps_the_stats(inside, capsys):
    pytest.importorskip("accelerate")
    assert cli.main(SMALL) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if "the same bits" in line]
    assert [row.split(",")[0].strip() for row in rows[:2]] == ["accelerate", "vbrt"]
    assert "the same answer bit for bit" in out and "accelerate takes" in out
    assert "tier ssd: " in out and "link ssd>cpu: " in out
    assert cli.main(["stats", "--json"]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert kept["tiers"]["cpu"]["peak_bytes"] <= 2e6 / 4 < kept["tiers"]["ssd"]["held_bytes"]


def test_other_bits_under_a_lossless_preset_are_said_and_exit_with_1(inside, monkeypatch, capsys):
    ask = demo._ask

    def otherwise(asked):
        if asked["run"] == "accelerate":
            raise VBError("the process for 'accelerate' ended: as it may")
        return ask(asked) | ({"digest": "0" * 64} if asked["run"] == "whole" else {})

    monkeypatch.setattr(demo, "_ask", otherwise)
    assert cli.main(SMALL) == 1
    out = capsys.readouterr().out
    assert "other bits, the first 3 of 3 tokens the same" in out
    assert "the process for 'accelerate' ended: as it may" in out and "accelerate takes" not in out


def test_each_run_has_a_process_of_its_own_and_its_memory_is_measured_there(tmp_path):
    size = showcase.make(tmp_path, "cpu", 0.05)["bytes"]
    found = demo._ask({"run": "whole", "device": "cpu", "directory": str(tmp_path), "tokens": 2})
    assert len(found["tokens"]) == 2 and size < found["peak"]["resident"] < 3 * size


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise SystemExit('no such thing')", "no such thing"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9; the system was out of memory, it seems"),
    ],
)
def test_a_process_that_ends_without_an_answer_says_why(code, why, monkeypatch):
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **given: run([command[0], "-c", code], **given))
    with pytest.raises(VBError, match=f"^the process for 'whole' ended: {why}$"):
        demo._ask({"run": "whole"})


def test_what_the_demo_lacks_is_named(inside, tmp_path, capsys):
    assert cli.main(["demo", "--gb", "9999", "--directory", str(tmp_path)]) == 2
    assert "the demo needs 20.0 TiB; name another --directory" in capsys.readouterr().err
    assert cli.main(["demo", "--directory", str(tmp_path / "none")]) == 2
    assert "No such file or directory; name another --directory" in capsys.readouterr().err
