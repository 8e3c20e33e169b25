"""`vbrt advise`: the table, the command, the TOML."""

import json
from pathlib import Path

import pytest

import vbrt
from vbrt.cli import main as cli
from vbrt.config import load_config

pytest.importorskip("transformers")


@pytest.fixture
def config_json(config_json):
    """The same with three layers: each candidate plans and traces all of them."""
    fewer = {"num_hidden_layers": 3, "vocab_size": 32000}
    config_json.write_text(json.dumps(json.loads(config_json.read_text()) | fewer))
    return config_json


H200 = Path(vbrt.__file__).parent / "estimation" / "advice" / "cost_models" / "h200.toml"


def test_the_command_says_what_to_do_and_writes_it(config_json, tmp_path, capsys):
    arguments = ["advise", str(config_json), "--gpu-memory", "1014MiB", "--ram", "16GiB", "--gpu", "RTX 4090"]
    file = tmp_path / "my.toml"
    assert cli.main([*arguments, "--goal", "exact", "--context", "512", "--explain", "--write", str(file)]) == 0
    out = capsys.readouterr().out
    assert "unwrapped" in out and "the gpu lacks" in out and "This is it." in out
    assert f"vbrt run {config_json} --config dense --set tiers.gpu.budget=" in out
    written = load_config(file)
    assert written.weights.format == "dense" and f"tiers.gpu.budget={written.tiers.gpu.budget}" in out


def test_nothing_that_fits_is_said_with_what_would_do(config_json, capsys):
    arguments = ["advise", str(config_json), "--gpu-memory", "714MiB", "--ram", "200MiB", "--gpu", "H200", "--json"]
    assert cli.main(arguments) == 1
    told = capsys.readouterr()
    assert not any(choice["fits"] for choice in json.loads(told.out)["choices"])
    assert "nothing fits" in told.err and "would do" in told.err
    assert cli.main([*arguments[:-3], "--gpu", "Voodoo 2"]) == 2
    assert "no data sheet of a GPU 'Voodoo 2'" in capsys.readouterr().err


def test_a_cost_model_of_another_machine_is_a_file(config_json, tmp_path, capsys):
    arguments = ["advise", str(config_json), "--gpu-memory", "2114MiB", "--ram", "16GiB", "--gpu", "RTX 4090"]
    file = tmp_path / "own.toml"
    file.write_text(H200.read_text().replace("NVIDIA H200", "RTX 4090"))
    assert cli.main([*arguments, "--cost-model", str(file)]) == 0
    assert "times by the cost model of RTX 4090, 2026-11-29" in capsys.readouterr().out
    file.write_text("")
    assert cli.main([*arguments, "--cost-model", str(file)]) == 2
    assert f"{file}: computes_on" in capsys.readouterr().err
