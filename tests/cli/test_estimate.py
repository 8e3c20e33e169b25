"""`vbrt estimate`: where memory goes, from a config alone."""

import json

import pytest

from vbrt.cli import main as cli
from vbrt.cli.plots import bars
from vbrt.errors import VBError

pytest.importorskip("transformers")


def test_the_command_says_where_memory_goes_and_what_is_missing(config_json, capsys):
    arguments = ["estimate", str(config_json), "--gpu-memory", "1638MiB", "--ram", "16GiB"]
    assert cli.main([*arguments, "--config", "none"]) == 1
    out = capsys.readouterr().out
    assert "parameters" in out and "KV cache" in out and "DOES NOT FIT: the gpu lacks" in out
    assert max(map(len, out.splitlines())) <= 132
    assert cli.main([*arguments, "--set", "tiers.gpu.budget=270MiB"]) == 1
    assert "the first call of generate fits, for further ones the gpu lacks" in capsys.readouterr().out
    assert cli.main([*arguments, "--json", "--set", "tiers.gpu.budget=150MiB"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] and told["tiers"]["gpu"] == told["peak_bytes"] == sum(
        row["nbytes"] for row in told["rows"] if row["tier"] == "gpu"
    )
    assert {row["source"] for row in told["rows"]} == {"counted", "traced"}
    assert cli.main([*arguments, "--config", "none", "--task", "prefill", "--context", "8", "--ranks", "2"]) == 1
    assert "each of 2 ranks" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_where_memory_goes_is_a_picture(config_json, tmp_path):
    pytest.importorskip("matplotlib")
    arguments = [
        "estimate",
        str(config_json),
        "--gpu-memory",
        "1638MiB",
        "--ram",
        "16GiB",
        "--context",
        "64",
        "--options",
    ]
    assert cli.main([*arguments, "--set", "tiers.gpu.budget=200MiB", "--plot", str(tmp_path / "where.svg")]) == 0
    drawn = (tmp_path / "where.svg").read_text()
    for said in ("prompt", "KV cache", "not swapped", "flash attention: without"):
        assert f">{said}<" in drawn, said
    with pytest.raises(VBError, match="cannot be written"):
        bars(tmp_path / "no" / "where.svg", [("", {"a": {"b": 1.0}})], "GiB")
